"""Rules on clients side by side: an answer has nothing of another client's, even if others ask and hang up.

A page of the KV cache that is freed while another prompt shares it, a page that two prompts get, a mask, a
seed or a log of another request: with one client at a time no such fault shows. So we make a crowd. Each
client has a code of its own. Prompts share their beginning, or say the same after different codes; a schema
allows some clients their code alone; half of the clients hang up within a few events. A fault shows in two
ways:

1. An answer has the code of another client. That is wrong for any model: the prompt has no such code.
2. An answer is not the one that comes alone, to its logprobs. Many servers round differently in a larger
   batch, and may. So this counts only if copies of a short prompt, which have nothing to share but the batch,
   get the same logprobs as one alone, and if a client that asks alone twice gets the same twice.

A small pool shows the most, because its pages change hands. A cache that owners share shows in times alone,
which we do not compare: a busy machine makes more difference.

Authority: that of each rule is the link in its docstring.

Not here: the ids of two streams (answers.py), one stored response (stored.py).
"""

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice

from audit.peer import Peer, final
from audit.rules import NoReply, NotApplicable, presumed, rules_of
from audit.schema import Json, without

must, _, _ = rules_of("clients", "responses")

SECONDS = 60  # half of this time for the answers alone: a slow server has fewer clients
CARD = "A card has a name, a date and one code. Codes are private, and must never be mixed up. " * 4
CODES = [str(100_000 + 314_159 * n % 900_000) for n in range(13)]  # one a client
COPY = 0  # the client of the short prompt
# API -> what all clients ask for, and what every fourth one does, three times.
KINDS = """{
    "chat": [
        {"logprobs": true, "top_logprobs": 2}, {}, {"response_format": {
            "type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": true}}},
        {"temperature": 1, "seed": CODE}
    ],
    "responses": [
        {"include": ["message.output_text.logprobs"], "top_logprobs": 2}, {}, {"text": {"format": {
            "type": "json_schema", "name": "x", "schema": SCHEMA, "strict": true}}},
        {"background": true, "stream": true}
    ]
}"""
SCHEMA = """{
    "type": "object", "properties": {"code": {"type": "string", "enum": ["CODE"]}},
    "required": ["code"], "additionalProperties": false
}"""


def asked(peer: Peer, n: int) -> Json:
    """Return what a client asks."""
    code = f"The code of this card is {CODES[n]}. "
    card = code + CARD if n % 2 else CARD + code * 8
    said = f"{card} What is the code of this card?" if n > COPY else "hi"
    kinds = json.loads(KINDS.replace("SCHEMA", SCHEMA).replace("CODE", CODES[n]))[peer.api]
    return {"api": peer.api, "said": said, "limit": 24, **kinds[0], **kinds[n % 4]}


def told(peer: Peer, n: int) -> Json:
    """Return the answer to a client, by the way of reading it; {} if nothing comes."""
    told: Json = {}
    with suppress(NotApplicable, NoReply), presumed("whole-frames"):
        reply = peer.reply(**asked(peer, n))
        answers = {"POST": final(reply) if reply.is_stream else reply.json}
        if peer.api == "responses":
            for query in ("?stream=true&starting_after=1", "?"):
                again = peer.ask("GET", f"/responses/{answers['POST'].get('id')}{query}")
                answers[query] = final(again) if again.is_stream else again.json
        for query, answer in answers.items():
            said = answer.get("choices", answer.get("output"))
            told |= {query: without(said, "id", "call_id", "encrypted_content")} if said else {}
    return told


def differ(one: Json, other: Json) -> bool:
    """Return whether two answers differ, in the parts that could be read of both."""
    return any(one[query] != other[query] for query in one.keys() & other)


def leave(peer: Peer, n: int) -> None:
    """Ask what a client asks, and hang up within a few events."""
    with peer.open("POST", *peer.request(**asked(peer, n) | {"stream": True})) as reply:
        list(islice(reply.pieces, 1 + n % 5))


@must
def isolation(peer: Peer) -> None:
    """isolation, chat-isolation: an answer has nothing of another client's, whoever else asks and hangs up

    what is said to one client is said to no other; agents at mlx-lm called the tools of other prompts
    https://github.com/ml-explore/mlx-lm/issues/965
    what is said to one client is said to no other; clients of vllm-mlx got the answers to other questions
    https://github.com/waybarrios/vllm-mlx/pull/385
    """
    peer.start(min(SECONDS, peer.seconds_left()))
    enough_s = peer.seconds_left() / 2
    # 1. Alone, twice: a client with two different answers gets {}, which differs from nothing.
    alone: dict[int, Json] = {}
    with suppress(NoReply):  # the time is over
        for n in range(len(CODES)):
            if peer.seconds_left() > enough_s and (answer := told(peer, n)):
                alone[n] = {} if differ(answer, told(peer, n)) else answer
    clients = [*alone][1:]
    if not clients:
        raise NotApplicable("clients with codes are refused, or wait too long")
    with ThreadPoolExecutor(2 * len(CODES)) as crowd:
        # 2. Copies of one short prompt: if a batch changes the answer, differences prove nothing.
        copies = [crowd.submit(told, peer, COPY) for _ in clients]
        if not alone.get(COPY) or any(differ(alone[COPY], copy.result()) for copy in copies):
            alone = {n: {} for n in alone}
        # 3. All at once, and half of the clients a second time; these hang up.
        for n_round in range(3):
            for n in clients[n_round % 2 :: 2]:
                crowd.submit(leave, peer, n)
            for n, beside in {n: crowd.submit(told, peer, n) for n in clients}.items():
                answer = beside.result()
                peer.show(*[one for one in peer.exchanges if CODES[n] in one.asked][-1:])
                peer.shown = json.dumps({"alone": alone[n], "beside others": answer})
                others = [CODES[m] for m in clients if m != n and CODES[m] in str(answer)]
                assert not others, f"expected nothing of other clients, got the code {' and '.join(others)}"
                assert not differ(alone[n], answer), "expected the answer that comes alone, got another one"
