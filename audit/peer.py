"""What a server is asked and what it answers, in the words of neither API.

    Peer(url, "model").both(tools=(WEATHER,), tool_choice="none") --> Answer, plain, then streamed
    name of STREAMS --recorded()--> Reply        a rule on one stream --judged()--> its verdict

Authority: https://platform.openai.com/docs/api-reference for the bodies.

Rules of this file:
1. What a server need not have (background, storage, tools, several choices) it may refuse with a 4xx or 501:
   then no rule is about it, and NotApplicable says why.
2. A stream is asked for once, whatever number of rules judges it.
3. A rule for both APIs is one function over Answers. What a model may do or leave is no rule: only what was
   forced, forbidden or already said is judged.

Not here: the rules (answers.py, agents.py and so on), HTTP (http.py).
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from audit.events import TERMINAL, without
from audit.http import REFUSED, Http, Reply
from audit.linter import violations
from audit.rules import RULES, NoReply, NotApplicable
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
    is_chat = api == "chat"
    path = "/chat/completions" if is_chat else "/responses"
    body: Json = {"max_output_tokens": limit, "temperature": 0, "input": said}
    if is_chat:
        messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
        body = {"messages": messages, "max_tokens": limit, "temperature": 0}

    def typed(type_: str, members: Json) -> Json:
        """Chat completions nest the members in one that is called as the type is."""
        return {"type": type_} | ({type_: members} if is_chat else members)

    if tools:
        body["tools"] = [typed("function", tool) for tool in tools]
    if tool_choice:
        is_name = tool_choice in [tool["name"] for tool in tools]
        body["tool_choice"] = typed("function", {"name": tool_choice}) if is_name else tool_choice
    if schema:
        wire_schema = typed("json_schema", {"name": "x", "schema": schema, "strict": True})
        body |= {"response_format": wire_schema} if is_chat else {"text": {"format": wire_schema}}
    return path, body | more


# fmt: off
#  stream          what is asked of the Responses API; "chat", "chat-...": of chat completions
STREAMS: dict[str, Json] = {
    "text":          {},
    "echo":          {"instructions": "Be brief.\u2028\u0085\u2029"},
    "cut":           {"said": STORY, "limit": CUT},
    "call":          CALLED,
    "logprobs":      LOGPROBS["responses"],
    "background":    {"background": True},
    "chat":          {},
    "chat-usage":    {"stream_options": {"include_usage": True}},
    "chat-cut":      {"said": STORY, "limit": CUT},
    "chat-two":      {"n": 2, "temperature": 1, "seed": 1},
    "chat-call":     CALLED,
    "chat-logprobs": LOGPROBS["chat"],
}
# fmt: on
GOOD = dict(request(api, limit=CUT) for api in ("responses", "chat"))  # path -> a body that is taken


def api_of(stream: str) -> str:
    return "chat" if stream.startswith("chat") else "responses"


# --- answers ------------------------------------------------------------------------------------------------


class Answer(NamedTuple):
    end: str  # stop, length, tool_calls, failed, ...: as chat completions call it
    text: str
    calls: list[Json]  # with a name and arguments; of a response its items
    usage: Json
    tokens: str  # of the logprobs
    outline: Json  # what it says, without ids and times
    response: Json  # as it came; of chat completions the last chunk

    @property
    def n_prompt(self) -> int:
        return self.usage.get("input_tokens") or self.usage.get("prompt_tokens") or 0

    @property
    def n_output(self) -> int:
        return self.usage.get("output_tokens") or self.usage.get("completion_tokens") or 0

    @property
    def names(self) -> list[str]:
        """Those of the tools that are called."""
        return [call["name"] for call in self.calls]

    def items(self, type_: str) -> list[Json]:
        return [item for item in self.response.get("output") or () if item.get("type") == type_]


CALLS = ("function_call", "custom_tool_call")
ENDS = {"max_output_tokens": "length", "completed": "stop"}
# Members that differ from one time to the next, and those that items need not have.
VOLATILE = ("id", "call_id", "status", "encrypted_content", "logprobs")


def of_response(response: Json) -> Answer:
    items = response.get("output") or ()
    parts = [part for item in items if item.get("type") == "message" for part in item.get("content") or ()]
    calls = [item for item in items if item.get("type") in CALLS]
    reason = (response.get("incomplete_details") or {}).get("reason") or response.get("status")
    end = "tool_calls" if calls and reason == "completed" else ENDS.get(str(reason), str(reason))
    text = "".join(part.get("text") or "" for part in parts)
    tokens = "".join(str(entry.get("token")) for part in parts for entry in part.get("logprobs") or ())
    return Answer(end, text, calls, response.get("usage") or {}, tokens, outline(response), response)


def outline(response: Json) -> Json:
    """Return what a response says, without ids and times."""
    said = {name: response.get(name) for name in ("status", "incomplete_details", "error")}
    said["output"] = without(response.get("output"), *VOLATILE)
    return said | {name: n for name, n in (response.get("usage") or {}).items() if isinstance(n, int)}


def of_chunks(chunks: list[Json]) -> Answer:
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
    called = [*calls.values()]
    said = {"end": end, "text": text, "calls": called}
    return Answer(end, text, called, usage, tokens, said, chunks[-1] if chunks else {})


def final(reply: Reply) -> Json:
    """Return the response of a stream's terminal event; if there is none, the rule terminal alone says so."""
    last = reply.events[-1] if reply.events else {}
    response = last.get("response")
    if last.get("type") not in TERMINAL or not isinstance(response, dict):
        raise NotApplicable("the stream does not end with a terminal event")
    return response


class Peer(Http):
    """A server, asked over the API that a rule is about."""

    api = "responses"

    def both(self, **asked: Any) -> Iterator[Answer]:
        """Yield the answer, plain and streamed; the arguments are those of request()."""
        yield self.plain(**asked)
        with contextlib.suppress(NotApplicable):
            yield self.streamed(**asked)

    def plain(self, **asked: Any) -> Answer:
        """Return the answer to a request without stream, that may be refused."""
        reply = self.reply(**asked).if_there(REFUSED)
        is_answer = reply.status == 200 and reply.json
        assert is_answer, "expected status 200 and a JSON object"
        return self._answer("plain", reply.json, [reply.json])

    def streamed(self, **asked: Any) -> Answer:
        reply = self.stream_of(*request(self.api, **asked))
        return self._answer("streamed", {} if self.api == "chat" else final(reply), reply.events)

    def _answer(self, how: str, response: Json, chunks: list[Json]) -> Answer:
        answer = of_chunks(chunks) if self.api == "chat" else of_response(response)
        self.shown = f"{how}: {json.dumps(answer.outline, ensure_ascii=False)}"
        return answer

    def reply(self, **asked: Any) -> Reply:
        return self.post(*request(self.api, **asked))

    def post(self, path: str, body: Json, stream: bool = False, **headers: str) -> Reply:
        """Ask the model."""
        return self.ask("POST", path, {"model": self.model, "stream": stream} | body, **headers)

    def stream_of(self, path: str, body: Json) -> Reply:
        """Return a whole stream; if none came (see the rule stream-comes) no other rule is about it."""
        reply = self.once(path, {"model": self.model, "stream": True} | body)
        if not reply.is_stream:
            raise NotApplicable(f"no stream came: {reply.refusal}")
        return reply

    def live(self, is_slow: bool = False, **asked: Any) -> contextlib.AbstractContextManager[Iterator[Json]]:
        """Yield the events of a stream as they come; leaving the block leaves the stream."""
        return self.stream(*request(self.api, **asked), is_slow=is_slow)

    def recorded(self, name: str) -> Reply:
        """Return a stream of STREAMS."""
        return self.stream_of(*self.asked(name))

    def asked(self, name: str) -> tuple[str, Json]:
        long = self.long if name.endswith("cut") else {}
        return request(api_of(name), **STREAMS[name], **long)

    def some_stream(self) -> Reply:
        """Return a stream of an API that the server has."""
        try:
            return self.recorded("text")
        except NotApplicable:
            return self.recorded("chat")

    def same_answer(
        self, one: Json, other: Json, again: Callable[[], Json], names: str = "plain streamed"
    ) -> None:
        """Expect two answers to be one; no rule is about a server that says another one if asked `again`."""
        if one == other:
            return
        if again() != one:
            raise NotApplicable("the server says something else each time, at temperature 0")
        differing = [member for member in one | other if one.get(member) != other.get(member)]
        self.shown = ""
        for name, answer in zip(names.split(), (one, other), strict=True):
            said = {member: answer.get(member) for member in differing}
            self.shown += f"{name}: {json.dumps(said, ensure_ascii=False)}\n"
        raise AssertionError("expected the same answer, however it is asked for")


# --- the rules of one stream, of a live server --------------------------------------------------------------


def judged(rule: str, peer: Peer) -> None:
    """Judge by the rule every stream of its kind that the server makes, and of which the end was seen."""
    kinds = STREAM_RULES[rule].profiles.split()
    names = [name for name in STREAMS if api_of(name) in kinds]
    reasons: list[NotApplicable | NoReply] = []  # why streams did not come
    for name in names:
        try:
            judge_stream(peer, name, rule)
        except (NotApplicable, NoReply) as reason:
            reasons.append(reason)
    if len(reasons) == len(names):
        raise reasons[0]


def judge_stream(peer: Peer, name: str, rule: str) -> None:
    if rule == "whole-frames":
        path, body = peer.asked(name)
        peer.shared(path, {"model": peer.model, "stream": True} | body)  # raises if it breaks off
    try:
        capture = read(peer.recorded(name).body)
    except ValueError as error:
        raise NotApplicable(f"no events came: {error}") from error
    found = violations(capture, [rule])
    if found:
        first = found[0]
        frames = {f.number: f.raw.decode("utf-8", "backslashreplace").strip() for f in capture.frames}
        peer.shown = shortened(frames.get(first.event, "(the end of the stream)"), 300)
        more = f", and {len(found) - 1} more" if found[1:] else ""
        raise AssertionError(f"{name}: event {first.event}: {first.message}{more}")


for _name, _rule in STREAM_RULES.items():
    RULES[_name] = _rule._replace(check=partial(judged, _name))
