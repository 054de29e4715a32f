"""What a server is asked and what it answers, in the words of neither API.

    Asking(peer, "chat")(tools=(WEATHER,), tool_choice="none") --> Answer("plain"), Answer("streamed")
    name of STREAMS --recorded()--> Reply        a rule on one stream --judged()--> its verdict

Authority: https://platform.openai.com/docs/api-reference for the bodies.

Rules of this file:
1. What a server need not have (background, storage, tools, several choices) it may refuse with a 4xx or 501:
   then no rule is about it, and NotApplicable says why.
2. A stream is asked for once, whatever number of rules judges it.
3. A rule for both APIs is one function over Answers. What a model may do or leave is no rule: only what was
   forced, forbidden or already said is judged.

Not here: the rules (answers.py, agents.py and so on), HTTP (peer.py).
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from audit.events import TERMINAL, without
from audit.linter import violations
from audit.peer import REFUSED, Peer, Reply
from audit.rules import RULES, Check, Failed, NoReply, NotApplicable, expect, presumed
from audit.schema import Json, shortened
from audit.stream import STREAM_RULES, read

CUT = 16  # tokens: the fewest that Open Responses allows
STORY = "Tell me a very long story about a fox."
TOKYO = "What is the weather in Tokyo?"
PARAMETERS: Json = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Json = {"name": "get_weather", "description": "Get the weather of a city", "parameters": PARAMETERS}
TIME: Json = WEATHER | {"name": "get_time", "description": "Get the time in a city"}
CALLED: Json = {"said": TOKYO, "tools": (WEATHER,), "tool_choice": "required"}
LOGPROBS: dict[str, Json] = {
    "responses": {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    "chat": {"logprobs": True, "top_logprobs": 2},
}

# --- requests -----------------------------------------------------------------------------------------------


def request(
    api: str,
    said: object = "hi",
    limit: int = 64,
    tools: tuple[Json, ...] = (),
    tool_choice: object = None,
    schema: Json | None = None,
    **more: object,
) -> tuple[str, Json]:
    """Return path and body. `said` is a text or a list of items or messages; a tool_choice may be a name."""
    strict: Json = {"name": "x", "schema": schema, "strict": True}
    body: Json
    wire_schema: Json
    named: Json
    if api == "responses":
        path = "/responses"
        body = {"max_output_tokens": limit, "temperature": 0, "input": said}
        wire_tools = [{"type": "function", **tool} for tool in tools]
        named = {"type": "function", "name": tool_choice}
        wire_schema = {"text": {"format": {"type": "json_schema", **strict}}}
    else:
        path = "/chat/completions"
        messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
        body = {"messages": messages, "max_tokens": limit, "temperature": 0}
        wire_tools = [{"type": "function", "function": tool} for tool in tools]
        named = {"type": "function", "function": {"name": tool_choice}}
        wire_schema = {"response_format": {"type": "json_schema", "json_schema": strict}}
    if tools:
        body["tools"] = wire_tools
    if tool_choice:
        is_name = tool_choice in [tool["name"] for tool in tools]
        body["tool_choice"] = named if is_name else tool_choice
    if schema:
        body |= wire_schema
    return path, body | more


# fmt: off
#  stream             api          what is asked
STREAMS: dict[str, tuple[str, Json]] = {
    "text":          ("responses", {}),
    "echo":          ("responses", {"instructions": "Be brief.\u2028\u0085\u2029"}),
    "cut":           ("responses", {"said": STORY, "limit": CUT}),
    "call":          ("responses", CALLED),
    "logprobs":      ("responses", LOGPROBS["responses"]),
    "background":    ("responses", {"background": True}),
    "chat":          ("chat",      {}),
    "chat-usage":    ("chat",      {"stream_options": {"include_usage": True}}),
    "chat-cut":      ("chat",      {"said": STORY, "limit": CUT}),
    "chat-two":      ("chat",      {"n": 2, "temperature": 1, "seed": 1}),
    "chat-call":     ("chat",      CALLED),
    "chat-logprobs": ("chat",      LOGPROBS["chat"]),
}
# fmt: on
GOOD = dict(request(api, limit=CUT) for api in ("responses", "chat"))  # path -> a body that is taken


def stream(peer: Peer, name: str) -> Reply:
    """Return a stream of STREAMS."""
    api, asked = STREAMS[name]
    long = peer.long if name.endswith("cut") else {}
    return streamed(peer, *request(api, **asked, **long))


def streamed(peer: Peer, path: str, body: Json) -> Reply:
    """Return a stream; if none came (see the rule stream-comes) no other rule is about it."""
    reply = peer.shared(path, with_stream(peer, body))
    if not reply.is_stream:
        raise NotApplicable(f"no stream came: {reply.refusal}")
    return reply


def with_stream(peer: Peer, body: Json) -> Json:
    return {"model": peer.model, "stream": True} | body


def recorded(peer: Peer, name: str) -> Reply:
    """Return a stream of STREAMS; of one that breaks off the rule whole-frames alone says so."""
    with presumed("whole-frames"):
        return stream(peer, name)


def some_stream(peer: Peer) -> Reply:
    """Return a stream of an API that the server has."""
    try:
        return recorded(peer, "text")
    except NotApplicable:
        return recorded(peer, "chat")


# --- the rules of one stream, of a live server --------------------------------------------------------------


def judged(rule: str, peer: Peer) -> None:
    """Judge by the rule every stream of its kind that the server makes, and of which the end was seen."""
    kinds = STREAM_RULES[rule].profiles.split()
    names = [name for name, (api, _) in STREAMS.items() if api in kinds]
    get = stream if rule == "whole-frames" else recorded
    reasons: list[NotApplicable | NoReply] = []  # why streams did not come
    for name in names:
        try:
            reply = get(peer, name)
        except (NotApplicable, NoReply) as reason:
            reasons.append(reason)
        else:
            judge_stream(name, reply, rule)
    if len(reasons) == len(names):
        raise reasons[0]


def judge_stream(name: str, reply: Reply, rule: str) -> None:
    try:
        capture = read(reply.body)
    except ValueError as error:
        raise NotApplicable(f"no events came: {error}") from error
    if found := violations(capture, [rule]):
        first = found[0]
        frames = {f.number: f.raw.decode("utf-8", "backslashreplace").strip() for f in capture.frames}
        excerpt = frames.get(first.event, "(the end of the stream)")
        more = f", and {len(found) - 1} more" if len(found) > 1 else ""
        message = f"{name}: event {first.event}: {first.message}{more}"
        raise Failed(message, shortened(excerpt, 300))


for _name, _rule in STREAM_RULES.items():
    RULES[_name] = _rule._replace(check=partial(judged, _name))

# --- answers ------------------------------------------------------------------------------------------------


class Answer(NamedTuple):
    how: str  # it was asked for: plain or streamed
    end: str  # stop, length, tool_calls, failed, ...: as chat completions call it
    text: str
    calls: list[Json]  # with a name and arguments; of a response its items
    usage: Json
    tokens: str  # of the logprobs
    outline: Json  # what it says, without ids and times
    response: Json  # as it came; of a chat stream the last chunks

    @property
    def n_prompt(self) -> int:
        return self.usage.get("input_tokens") or self.usage.get("prompt_tokens") or 0

    @property
    def n_output(self) -> int:
        return self.usage.get("output_tokens") or self.usage.get("completion_tokens") or 0

    def items(self, type_: str) -> list[Json]:
        return [item for item in self.response.get("output") or () if item.get("type") == type_]

    def expect(self, holds: object, what: str) -> None:
        shown = self.outline if "output" in self.response else self.response
        expect(holds, f"{self.how}: expected {what}", {self.how: shown})


CALLS = ("function_call", "custom_tool_call")
ENDS = {"max_output_tokens": "length", "completed": "stop"}
# Members that differ from one time to the next, and those that items need not have.
VOLATILE = ("id", "call_id", "status", "encrypted_content", "logprobs")


def of_response(how: str, response: Json) -> Answer:
    items = response.get("output") or ()
    parts = [part for item in items if item.get("type") == "message" for part in item.get("content") or ()]
    calls = [item for item in items if item.get("type") in CALLS]
    reason = (response.get("incomplete_details") or {}).get("reason") or response.get("status")
    end = "tool_calls" if calls and reason == "completed" else ENDS.get(str(reason), str(reason))
    text = "".join(part.get("text") or "" for part in parts)
    tokens = "".join(str(entry.get("token")) for part in parts for entry in part.get("logprobs") or ())
    usage = response.get("usage") or {}
    return Answer(how, end, text, calls, usage, tokens, outline(response), response)


def outline(response: Json) -> Json:
    """Return what a response says, without ids and times."""
    said = {name: response.get(name) for name in ("status", "incomplete_details", "error")}
    said["output"] = without(response.get("output"), *VOLATILE)
    return said | {name: n for name, n in (response.get("usage") or {}).items() if isinstance(n, int)}


def of_chunks(how: str, chunks: list[Json]) -> Answer:
    """Add up the first choice of chunks; a completion is one chunk."""
    text = end = tokens = ""
    usage: Json = {}
    calls: dict[int, Json] = {}
    for chunk in chunks:
        usage = chunk.get("usage") or usage
        for choice in (chunk.get("choices") or ())[:1]:
            said = choice.get("delta") or choice.get("message") or {}
            text += said.get("content") or ""
            end = choice.get("finish_reason") or end
            entries = (choice.get("logprobs") or {}).get("content") or ()
            tokens += "".join(str(entry.get("token")) for entry in entries)
            for place, more in enumerate(said.get("tool_calls") or ()):
                call = calls.setdefault(more.get("index", place), {"name": "", "arguments": ""})
                for member in call:
                    call[member] += (more.get("function") or {}).get(member) or ""
    shown = {"end": end, "text": text, "calls": [*calls.values()]}
    return Answer(how, end, text, [*calls.values()], usage, tokens, shown, {"chunks": chunks[-3:]})


class Asking(NamedTuple):
    """One of the two APIs of a server."""

    peer: Peer
    api: str

    def __call__(self, **asked: Any) -> Iterator[Answer]:
        """Yield the answer, plain and streamed; the arguments are those of request()."""
        yield self.plain(**asked)
        with contextlib.suppress(NotApplicable):
            yield self.streamed(**asked)

    def reply(self, **asked: Any) -> Reply:
        return self.peer.post(*request(self.api, **asked))

    def plain(self, **asked: Any) -> Answer:
        """Return the answer to a request without stream, that may be refused."""
        reply = self.reply(**asked)
        if reply.status in REFUSED:
            raise NotApplicable(f"refused: {reply.refusal}")
        expect(reply.status == 200 and reply.json, "expected status 200 and a JSON object", reply)
        if self.api == "responses":
            return of_response("plain", reply.json)
        return of_chunks("plain", [reply.json])

    def streamed(self, **asked: Any) -> Answer:
        with presumed("whole-frames"):
            reply = streamed(self.peer, *request(self.api, **asked))
        if self.api == "responses":
            return of_response("streamed", final(reply))
        return of_chunks("streamed", reply.events)


def final(reply: Reply) -> Json:
    """Return the response of a stream's terminal event; if there is none, the rule terminal alone says so."""
    last = reply.events[-1] if reply.events else {}
    response = last.get("response")
    if last.get("type") not in TERMINAL or not isinstance(response, dict):
        raise NotApplicable("the stream does not end with a terminal event")
    return response


def asking(check: Check, profiles: str) -> Check:
    """Bind a function that takes an Asking to the API that the profiles begin with."""
    api = "chat" if profiles.startswith("chat") else "responses"
    return lambda peer: check(Asking(peer, api))


def same_answer(one: Json, other: Json, again: Callable[[], Json], names: str = "plain streamed") -> None:
    """Expect two answers to be one; no rule is about a server that answers differently if asked `again`."""
    if one == other:
        return
    if again() != one:
        raise NotApplicable("the server says something else each time, at temperature 0")
    differing = [member for member in one | other if one.get(member) != other.get(member)]
    shown = [
        f"{name}: {json.dumps({member: answer.get(member) for member in differing}, ensure_ascii=False)}"
        for name, answer in zip(names.split(), (one, other), strict=True)
    ]
    raise Failed("expected the same answer, however it is asked for", "\n".join(shown))
