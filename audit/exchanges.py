"""Rules that are exchanges: requests, and what must come back; and the rules on the form of a refusal.

    requests of a rule --exchanged()--> (what is expected, change, reply), ... --misses()--> what is wrong

Many rules need no program: they say what is sent, and what must come back. Such a rule is a text, after the
example of Hurl. A request is a line; indented lines go on with it:

    responses  {"temperature": 99}                      a good body with this change: it must be refused
    responses  {"store": true} -> object:=response      the same, and what must come back
    DELETE /responses/ID -> deleted:=true               ID is that of the response that was made before
    POST /a/path {"model": "MODEL"} -> any              another endpoint, and its whole body

In a change, null leaves a member out, a word of WORDS (peer.py) stands for its text, STORY asks for a long
answer, and what is not JSON is the body.
What must come back is one of these, or several with ", or " between them:

    refused         a 4xx, or a stream that begins with the error. A request without an arrow must be refused
                    so, plain and with stream
    404             this status
    status:text     a 200, and an object of this row of tables.py, or kind of rows; if it is refused, the rule
                    does not apply: no server needs the feature
    400 error:dict  this status, and such an object
    stream          an event stream with events
    a longer prompt (or one of PROMPTS)  the usage counts more tokens of input than in the reply before
    header N X      the header N, in which the regular expression X is found; an absent one is empty

Authority: https://hurl.dev for the form; https://platform.openai.com/docs/guides/error-codes, and the SDKs'
reading of a status, for refusals.

Not here: rules that compare answers (answers.py, agents.py, stored.py).
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from operator import eq, gt, lt

from audit.http import NOT_THERE, REFUSED, Reply
from audit.peer import CUT, PATHS, Peer, written_out
from audit.rules import RULES, NotApplicable, Rule, enter_rule, presumed, rules_of
from audit.schema import Json, expect_members, faults_in
from audit.stream import loads, of_response

must, should, _ = rules_of("refusals", "chat responses")

# Rules on what a server may serve after all, if it serves it each time.
ANY_WILL_DO = "unknown-model messages-unknown-model too-long"
PROMPTS = {"a longer prompt": gt, "a shorter prompt": lt, "a prompt of this length": eq}


def exchanged(peer: Peer, requests: list[str]) -> Iterator[tuple[str, Json, Reply]]:
    """Yield (what must come back, change, reply) for the requests to endpoints that the server has."""
    made: Json = {}  # the last response
    for request in requests:
        asked, _, expected = request.partition(" -> ")
        text = written_out(asked).replace("ID", f"{made.get('id')}").replace("MODEL", peer.model)
        place, text = text.split(maxsplit=1)
        if place not in PATHS:
            target, _, whole = text.partition(" ")
            yield expected, {}, peer.ask(place, target, whole.encode())
            continue
        change = loads(text)
        if "STORY" in asked:
            change |= peer.long
        for stream in (False,) if expected else (False, True):
            path, good = peer.request(api=place, limit=CUT, stream=stream)
            if peer.once(path, good).status in NOT_THERE:
                continue
            body: Json | bytes = text.encode()
            if change is not None:
                body = {name: value for name, value in (good | change).items() if value is not None}
            # A reply that breaks off refuses nothing, and accepts nothing.
            with suppress(NotApplicable), presumed("whole-frames"):
                reply = peer.ask("POST", path, body) if expected else peer.once(path, body)
                made = reply.json or made
                yield expected or "refused", change, reply


def expect_exchanges(peer: Peer, rule: Rule) -> None:
    """Judge by a rule that is its requests."""
    found = [*exchanged(peer, rule.requests)]
    if not found:
        raise NotApplicable("the server has no such endpoint")
    if rule.name in ANY_WILL_DO and {reply.status for *_, reply in found} == {200}:
        raise NotApplicable("whatever is asked for is served")
    n_before = 0  # tokens of the prompt before
    for expected, _, reply in found:
        peer.show(reply.connection)
        faults = [fault_of(reply, one, n_before) for one in expected.split(", or ")]
        assert "" in faults, f"expected {expected}: {'; '.join(faults)}"
        n_before = n_prompt_of(reply)


def fault_of(reply: Reply, expected: str, n_before: int) -> str:
    """Say what is wrong with a reply; "" if it is as expected."""
    if compare := PROMPTS.get(expected):
        n_prompt = n_prompt_of(reply.if_there(REFUSED))
        return "" if compare(n_prompt, n_before) else f"it has {n_prompt} tokens, after one of {n_before}"
    if expected == "refused":  # see the rule refused-by-status
        return "" if reply.is_refusal or begins_with_error(reply) else "it was not"
    if expected == "stream":
        return "" if reply.is_stream and reply.events else "none came"
    if header := re.fullmatch(r"header (\S+) (.*)", expected):
        value = reply.headers.get(header[1], "")
        return "" if re.search(header[2], value, re.IGNORECASE) else f"the header is {value or 'absent'}"
    status, row = re.findall(r"(\d*) *(.*)", expected)[0]
    if not status:
        reply.if_there(REFUSED)
    if reply.status != int(status or 200):
        return f"the status is {reply.status}"
    return "; ".join(faults_in(reply.json, row))


def n_prompt_of(reply: Reply) -> int:
    """Count the tokens of a prompt: an answer has them in its usage, a count in itself."""
    return of_response({"usage": reply.json} | reply.json).n_prompt


def begins_with_error(reply: Reply) -> bool:
    """True for a stream whose first event is the error."""
    first = [*reply.events, {}][0] if reply.is_stream else {}
    return "error" in first or first.get("type") in ("error", "response.failed")


def enter_texts(group: str, texts: str) -> None:
    """Enter rules that are texts: each begins with a line on its strength and its profiles."""
    heads = r"^(\w+) of ([\w ]+)(?:, after ([\w -]+))?\n(.*?)\n(?:\n\n|\Z)"
    for strength, profiles, after, text in re.findall(heads, texts, re.DOTALL | re.MULTILINE):
        enter_rule(text, group, profiles, strength, after, expect_exchanges)


# --- what must be refused -----------------------------------------------------------------------------------

REFUSALS = r"""
must of chat responses
bad-json: a body that is not JSON is refused

RFC 9110: what the client did wrong is a 4xx
B14 https://platform.openai.com/docs/api-reference/responses/create

responses  {"model":
chat       {"model":


advice of chat responses, after unknown-model
bad-model: a model that is missing, or not a string, is refused

openai/openai-openapi: a string; some servers have one model, and SDKs do not insist
https://platform.openai.com/docs/api-reference/responses/create

responses  {"model": null}
responses  {"model": 42}
chat       {"model": 42}


should of chat responses
unknown-model: a model that is not there is refused

an answer of another model than asked for is taken for the one asked for
https://platform.openai.com/docs/api-reference/responses/create

responses  {"model": "no-such-model"}
chat       {"model": "no-such-model"}


must of chat responses
bad-input: input or messages of another shape are refused

openai/openai-openapi: input and messages have this shape
B14 https://platform.openai.com/docs/api-reference/responses/create

responses  {"input": null}
responses  {"input": 42}
responses  {"input": [{"role": "none", "content": "hi"}]}
chat       {"messages": null}
chat       {"messages": "hi"}
chat       {"messages": [{"content": "hi"}]}


should of chat responses
out-of-range: a number out of its range is refused

openai/openai-openapi has these bounds
https://platform.openai.com/docs/api-reference/responses/create

responses  {"temperature": 99}
responses  {"top_p": -1}
chat       {"presence_penalty": 99}
chat       {"temperature": 99}
chat       {"n": 0}
chat       {"top_logprobs": 99, "logprobs": true}


should of chat responses
wrong-type: a parameter of another type is refused

openai/openai-openapi has these types
https://platform.openai.com/docs/api-reference/responses/create

responses  {"stream": "yes please"}
responses  {"tools": "none"}
responses  {"temperature": "hot"}
chat       {"stream": "yes please"}
chat       {"max_tokens": "many"}


should of chat
stream-options-alone: stream_options without stream are refused

the API reference: only set this when you set stream
B09 https://github.com/TelegramMessenger/cocoon/blob/b75d444766212b9b17ae2bfab1268a2e2e334b6f/runners/helpers/ValidateRequest.cpp

chat       {"stream": null, "stream_options": {"include_usage": true}}


should of responses agents
unknown-tool-choice: tool_choice with the name of an unknown tool is refused

OpenAI's own server; else a client waits for a call that cannot come
https://platform.openai.com/docs/api-reference/responses/create

responses  {"tools": [{"type": "function", "name": "get_time", "parameters": {"type": "object"}}],
             "tool_choice": {"type": "function", "name": "no_such_tool"}}


should of responses agents
bad-schema: a schema that is not valid is refused

the guide on structured outputs: schemas that are not supported are an error
https://platform.openai.com/docs/guides/structured-outputs

responses  {"text": {"format": {"type": "json_schema", "name": "x", "strict": true,
                                 "schema": {"type": "no such type"}}}}


should of responses agents, after results
orphan-result: a result without its call is refused

OpenAI's own server: No tool call found for function call output
https://platform.openai.com/docs/guides/function-calling

responses  {"input": [{"role": "user", "content": "hi"},
                       {"type": "function_call_output", "call_id": "call_nobody", "output": "It rains."}]}


should of responses agents, after encrypted-reasoning
forged-encrypted: encrypted_content that the server did not make is refused, or named in a Warning

OpenAI's own server: The encrypted content could not be verified; agents send it again with each turn
https://platform.openai.com/docs/guides/reasoning

responses  {"include": ["reasoning.encrypted_content"], "store": false,
             "input": [{"type": "reasoning", "id": "rs_1", "summary": [],
                        "encrypted_content": "Zm9yZ2Vk"}, {"role": "user", "content": "hi"}]}
             -> refused, or header warning encrypted


must of stateful
unknown-previous: an unknown previous_response_id is refused

a chain that is not continued answers without its context, and no client sees it
F14 https://github.com/EricLBuehler/mistral.rs/blob/9e922623f24b32d41f3892b74f0eed18707f4e6c/mistralrs-server-core/src/responses.rs

responses  {"previous_response_id": "resp_00000000000000000000000000000000"}


should of stateful, after background
background-refuses: a bad request is refused before it is accepted, in the background too

Azure's contract of behaviour: what is wrong is refused before it is accepted
F08 https://github.com/EricLBuehler/mistral.rs/blob/9e922623f24b32d41f3892b74f0eed18707f4e6c/mistralrs-server-core/src/background_tasks.rs

responses  {"background": true, "temperature": 99}
responses  {"background": true, "input": 42}


must of chat responses
too-long: a prompt that is longer than the context is refused, or read

the API reference on truncation: disabled, so a request that exceeds the context fails with a 400
https://platform.openai.com/docs/api-reference/responses/create

responses  {"input": "FOXES"}
chat       {"messages": [{"role": "user", "content": "FOXES"}]}


should of responses
truncation: with truncation auto the beginning of a prompt that is too long is dropped, or it is refused

the API reference on truncation: auto drops items from the beginning of the conversation
https://platform.openai.com/docs/api-reference/responses/create

responses  {"truncation": "auto", "input": [{"role": "user", "content": "FOXES"},
             {"role": "user", "content": "hi"}]} -> 200, or 400


should of responses
unknown-include: an include that is not there is refused

openai/openai-openapi has these values; else a client waits for what cannot come
https://platform.openai.com/docs/api-reference/responses/create

responses  {"include": ["no.such.thing"]}


should of stateful, after stored
unknown-item: a reference to an unknown item is refused

openai/openai-openapi: item_reference; an answer without the item is taken for one with it
https://platform.openai.com/docs/api-reference/responses/create

responses  {"input": [{"type": "item_reference", "id": "msg_00000000000000000000000000000000"},
                       {"role": "user", "content": "hi"}]}


should of stateful
unknown-conversation: an unknown conversation is refused

the guide on conversation state: an answer without its conversation is taken for one with it
https://platform.openai.com/docs/guides/conversation-state

responses  {"conversation": "conv_00000000000000000000000000000000"}


should of chat responses
bad-image: what is no image, and what is no file, is refused

the guide on images; else the model is asked of a picture that it has not seen
https://platform.openai.com/docs/guides/images-vision

responses  {"input": [{"role": "user", "content": [
                       {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}]}]}
responses  {"input": [{"role": "user", "content": [
                       {"type": "input_file", "filename": "a.pdf",
                        "file_data": "data:application/pdf;base64,AAAA"}]}]}
chat       {"messages": [{"role": "user", "content": [
                          {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}]}


should of chat responses
wrong-value: a newer parameter of another type or value is refused

openai/openai-openapi has these types and values
https://platform.openai.com/docs/api-reference/responses/create

responses  {"truncation": "sometimes"}
responses  {"max_tool_calls": "many"}
chat       {"max_completion_tokens": "many"}
chat       {"logit_bias": {"0": 999}}
chat       {"seed": "x"}
"""
enter_texts("refusals", REFUSALS)


# --- the form of a refusal ----------------------------------------------------------------------------------


def told(peer: Peer) -> Iterator[Reply]:
    """Yield the refusals of requests that no server may accept."""
    for rule in RULES.values():
        if rule.group == "refusals" and "chat" in rule.profiles:
            yield from (reply for *_, reply in exchanged(peer, rule.requests) if reply.is_refusal)


@must
def refused_by_status(peer: Peer) -> None:
    """refused-by-status: what is refused is refused by its status, with stream too

    SDKs raise by the status; retries and proxies look at nothing else
    B13 https://platform.openai.com/docs/guides/error-codes
    """
    # SDKs, retries and proxies take a refusal in the first frame of a stream for a success.
    for name in ("out-of-range", "wrong-type", "bad-input", "too-long"):
        for _, _, reply in exchanged(peer, RULES[name].requests):
            assert not begins_with_error(reply)


@should
def error_status(peer: Peer) -> None:
    """error-status: a refusal is a 400, or a 404 for what is not there

    SDKs map each status to an error class, and retry 408, 409, 429 and 5xx
    https://github.com/openai/openai-python/blob/main/src/openai/_base_client.py
    """
    for reply in told(peer):
        # Clients retry 409, and do not know 422.
        assert reply.status in (400, 404)


@must
def error_shape(peer: Peer) -> None:
    """error-shape: an error has message, type, param and code

    openai/openai-openapi: an error has message, type, param and code; SDKs show them
    H07 https://platform.openai.com/docs/guides/error-codes
    """
    for reply in told(peer):
        expect_members(reply.error, "refusal")


@should
def error_param(peer: Peer) -> None:
    """error-param: an error names the parameter that was out of its range

    the guide on error codes: param names what was wrong
    https://github.com/openai/openai-openapi
    """
    for _, change, reply in exchanged(peer, RULES["out-of-range"].requests):
        assert reply.error.get("param") in change or not reply.is_refusal
