"""What a server is asked, and how its answers are compared: the requests that several rules are about.

    name of STREAMS --recorded()--> Reply        body --whole()--> JSON object --outline()--> what it says

Authority: https://platform.openai.com/docs/api-reference for the bodies.

Rules of this file:
1. What a server need not have (background, storage, tools, several choices) it may refuse with a 4xx or 501:
   then no rule is about it, and NotApplicable says why.
2. A stream is asked for once, whatever number of rules judges it.

Not here: the rules (checks.py and the checks_*.py), HTTP (peer.py).
"""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from audit.peer import REFUSED, Failed, Json, NotApplicable, Peer, Reply, expect, presumed
from audit.rules import Strength
from audit.rules_events import TERMINAL

GITHUB = "https://github.com/"
OPENAI = "https://platform.openai.com/docs/api-reference/"
AZURE = GITHUB + "Azure/azure-sdk-for-net/tree/main/sdk/agentserver/Azure.AI.AgentServer.Responses/docs"
MISTRAL_RS = (
    GITHUB
    + "EricLBuehler/mistral.rs/blob/9e922623f24b32d41f3892b74f0eed18707f4e6c/mistralrs-server-core/src/"
)
COCOON = GITHUB + "TelegramMessenger/cocoon/blob/b75d444766212b9b17ae2bfab1268a2e2e334b6f/runners/helpers/"


class Check(NamedTuple):
    """A rule for a live server."""

    run: Callable[[Peer], None]  # raises Failed or NotApplicable
    profiles: str  # of PROFILES in checks.py, blanks between them
    strength: Strength
    bugs: str  # ids of tests/BUGS.md
    title: str
    source: str  # who wrote that behaviour down, or who relies on it
    link: str  # the rule's authority, or a report of what happens without it


CUT = 16  # tokens: the fewest that Open Responses allows
LIMITED: Json = {"max_output_tokens": 64, "temperature": 0}
HI: Json = LIMITED | {"input": "hi"}
STORY: Json = LIMITED | {"input": "Tell me a very long story about a fox.", "max_output_tokens": 400}
CHAT: Json = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 64, "temperature": 0}
CHAT_STORY: Json = CHAT | {"messages": [{"role": "user", "content": STORY["input"]}]}

PARAMETERS: Json = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Json = {"name": "get_weather", "description": "Get the weather of a city", "parameters": PARAMETERS}
TOOL: Json = {"tools": [{"type": "function", **WEATHER}], "tool_choice": "required"}
WITH_LOGPROBS: Json = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
TOKYO = "What is the weather in Tokyo?"
CHAT_TOOL: Json = {
    "tools": [{"type": "function", "function": WEATHER}],
    "tool_choice": "required",
    "messages": [{"role": "user", "content": TOKYO}],
}

# fmt: off
#  stream           path                 asked
STREAMS: dict[str, tuple[str, Json]] = {
    "text":         ("/responses",        HI),
    "echo":         ("/responses",        HI | {"instructions": "Be brief.\u2028\u0085\u2029"}),
    "cut":          ("/responses",        STORY | {"max_output_tokens": CUT}),
    "call":         ("/responses",        LIMITED | {"input": TOKYO} | TOOL),
    "logprobs":     ("/responses",        HI | WITH_LOGPROBS),
    "background":   ("/responses",        HI | {"background": True}),
    "chat":         ("/chat/completions", CHAT),
    "chat-usage":   ("/chat/completions", CHAT | {"stream_options": {"include_usage": True}}),
    "chat-cut":     ("/chat/completions", CHAT_STORY | {"max_tokens": CUT}),
    "chat-two":     ("/chat/completions", CHAT | {"n": 2, "temperature": 1, "seed": 1}),
    "chat-call":    ("/chat/completions", CHAT | CHAT_TOOL),
    "chat-logprobs": ("/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2}),
}
GOOD = {"/responses": HI | {"max_output_tokens": CUT}, "/chat/completions": CHAT | {"max_tokens": CUT}}
PATHS = {"responses": "/responses", "chat": "/chat/completions"}
# fmt: on


def with_stream(peer: Peer, body: Json) -> Json:
    return {"model": peer.model, "stream": True} | body


def streamed(peer: Peer, path: str, body: Json) -> Reply:
    """The reply to a request with stream; of one that breaks off the rule whole-frames alone says so."""
    with presumed("whole-frames"):
        return peer.ask("POST", path, with_stream(peer, body))


def recorded(peer: Peer, name: str) -> Reply:
    """A stream of STREAMS, as `streamed`."""
    with presumed("whole-frames"):
        return stream(peer, name)


def stream(peer: Peer, name: str) -> Reply:
    """A stream of STREAMS; where none came (see the rule stream-comes) no other rule is about it."""
    path, body = asked(peer, name)
    reply = peer.shared(path, with_stream(peer, body))
    if not reply.is_stream:
        raise NotApplicable(f"no stream came: {reply.refusal}")
    return reply


def asked(peer: Peer, name: str) -> tuple[str, Json]:
    path, body = STREAMS[name]
    return path, body | (peer.long if name.endswith("cut") else {})


def final(reply: Reply) -> Json:
    """The response of a stream's terminal event; where there is none, the rule terminal alone says so."""
    last = reply.events[-1] if reply.events else {}
    response = last.get("response")
    if last.get("type") not in TERMINAL or not isinstance(response, dict):
        raise NotApplicable("the stream does not end with a terminal event")
    return response


def whole(peer: Peer, path: str, body: Json) -> Json:
    """The answer to a request without stream, that may be refused."""
    reply = peer.post(path, body)
    if reply.status in REFUSED:
        raise NotApplicable(f"refused: {reply.refusal}")
    expect(reply.status == 200 and reply.json, "expected status 200 and a JSON object", reply)
    return reply.json


def some_stream(peer: Peer) -> Reply:
    """Of whichever API the server has."""
    try:
        return recorded(peer, "text")
    except NotApplicable:
        return recorded(peer, "chat")


# --- what an answer says


def outline(response: Json) -> Json:
    """What a Responses answer says, without ids and times."""
    items = []
    for item in response.get("output", ()):
        texts = [part.get("text") for part in item.get("content") or ()]
        status = item.get("status") or "completed"  # reasoning need not have one
        items.append([item.get("type"), status, item.get("name"), item.get("arguments"), *texts])
    end = {name: response.get(name) for name in ("status", "incomplete_details", "error")}
    counts = {name: n for name, n in (response.get("usage") or {}).items() if isinstance(n, int)}
    return end | {"items": items} | counts


def same_answer(
    plain: Json, other: Json, again: Callable[[], object], names: tuple[str, str] = ("plain", "streamed")
) -> None:
    """The other answer is the plain one; no rule is about a server whose plain answers differ `again`."""
    if plain != other:
        if again() != plain:
            raise NotApplicable("the server says something else each time, at temperature 0")
        members = [member for member in plain | other if plain.get(member) != other.get(member)]
        differing = [
            f"{name}: {json.dumps({member: answer.get(member) for member in members}, ensure_ascii=False)}"
            for name, answer in zip(names, (plain, other), strict=True)
        ]
        raise Failed("expected the same answer, however it is asked for", "\n".join(differing))


def chat_outline(chunks: list[Json]) -> dict[Any, Json]:
    """What chunks, or the choices of a completion, say: by choice, its content and finish_reason."""
    by_choice: dict[Any, Json] = {}
    for chunk in chunks:
        for choice in chunk.get("choices", ()):
            so_far = by_choice.setdefault(choice.get("index", -1), {"content": "", "finish_reason": None})
            message = choice.get("delta") or choice.get("message") or {}
            so_far["content"] += message.get("content") or ""
            so_far["finish_reason"] = choice.get("finish_reason") or so_far["finish_reason"]
    return by_choice
