"""What a server is asked and what it answers, in the words of neither API.

    Peer(url, "model").both(tools=(WEATHER,), tool_choice="none") --> Answer, plain, then streamed
    name of STREAMS --recorded()--> Reply        a rule on one stream --judged()--> its verdict

Authority: https://platform.openai.com/docs/api-reference for the bodies.

Rules of this file:
1. A server may refuse optional features (background, storage, tools, several choices) with a 4xx or 501: then
   their rules do not apply, and NotApplicable gives the reason.
2. A stream is asked for once, for any number of rules that judge it.
3. A rule for both APIs is one function over Answers. We do not judge the free choices of a model, only output
   that was forced, forbidden or already sent.
4. A rule has a budget of seconds, and start() begins one: without an answer within the budget it ends as
   NoReply.

Not here: the rules (answers.py, agents.py and so on), bytes (http.py), the contents of an answer (stream.py).
"""

import json
import re
import shlex
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from audit.events import TERMINAL
from audit.http import REFUSED, Connection, Reply
from audit.rules import NoReply, NotApplicable, Rule, presumed
from audit.schema import Json, Typed, object_in, shortened
from audit.stream import EVENTS, Answer, events_of, of_chunks, of_response, read

BUSY = {429, 503}
BUDGET_S = 120.0  # of a rule: a small model on a busy machine
CUT = 16  # tokens: the fewest that Open Responses allows
STORY = "Tell me a very long story about a fox."
# What is asked, or a part of it, by a word of capitals.
WORDS = r"""
CHAT_TOOL     {"type": "function", "function": {"name": "get_weather", SCHEMA}}
CHAT_TIME     {"type": "function", "function": {"name": "get_time", SCHEMA}}
MESSAGES_TOOL {"name": "get_weather", "input_schema": {"type": "object"}}
TOOL          {"type": "function", "name": "get_weather", SCHEMA}
TIME          {"type": "function", "name": "get_time", SCHEMA}
SCHEMA        "description": "Get it for a city", "parameters": CITY
CITY          {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
QUESTION      {"role": "user", "content": "What is the weather in Tokyo and in Paris?"}
TOKYO_CALL    {"type": "function_call", "call_id": "call_tokyo", "name": "get_weather", "arguments": TOKYO}
PARIS_CALL    {"type": "function_call", "call_id": "call_paris", "name": "get_weather", "arguments": PARIS}
CALL_0        {"type": "function_call", "call_id": "call_0", "name": "get_weather", "arguments": "{}"}
TOKYO_RESULT  {"type": "function_call_output", "call_id": "call_tokyo", "output": "It rains."}
PARIS_RESULT  {"type": "function_call_output", "call_id": "call_paris", "output": "The sun shines."}
SHORT_RESULT  {"type": "function_call_output", "call_id": "call_0", "output": "It rains."}
LONG_RESULT   {"type": "function_call_output", "call_id": "call_0", "output": "RAIN RAIN RAIN RAIN"}
SENTENCES     ADVICE ADVICE ADVICE ADVICE ADVICE ADVICE ADVICE ADVICE ADVICE ADVICE ADVICE ADVICE
ADVICE        Answer in a short sentence. Never mention the weather, the sea or the moon. Be brief.
RAIN          It rains, and it will rain tomorrow and the day after tomorrow.
TOKYO         "{\"city\": \"Tokyo\"}"
PARIS         "{\"city\": \"Paris\"}"
STORY         Tell me a very long story about a fox.
WEATHER       What is the weather in Tokyo?
COLOUR        {"type": "object", "properties": HUES, "required": ["colour", "n"], CLOSED}
ANIMALS       {"type": "object", "properties": {"animals": ONE_HERD}, "required": ["animals"], CLOSED}
ONE_HERD      {"type": "string", "enum": ["FACESFACESFACESFACESFACESFACESFACES"]}
FACES         \ud83e\udd8a\ud83e\udd8a\ud83e\udd8a\ud83e\udd8a
CLOSED        "additionalProperties": false
HUES          {"colour": {"type": "string", "enum": ["red", "green"]}, "n": {"type": "integer"}}
"""
N_FOXES = 200_000  # words: more than the context of any model that is audited


def written_out(text: str) -> str:
    """Put the meanings of WORDS into a text."""
    for word, meaning in re.findall(r"^(\w+) +(.*)", WORDS, re.MULTILINE):
        text = text.replace(word, meaning)
    return text.replace("FOXES", "fox " * N_FOXES)


#   stream           what is asked
STREAMS = json.loads(
    written_out(r"""{
    "text":          {},
    "echo":          {"instructions": "Be brief.\u2028\u0085\u2029"},
    "cut":           {"said": "STORY", "limit": 16},
    "logprobs":      {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    "background":    {"background": true},
    "call":          {"said": "WEATHER", "tools": [TOOL], "tool_choice": "required"},
    "chat":          {"api": "chat"},
    "chat-usage":    {"api": "chat", "stream_options": {"include_usage": true}},
    "chat-cut":      {"api": "chat", "said": "STORY", "limit": 16},
    "chat-two":      {"api": "chat", "n": 2, "temperature": 1, "seed": 1},
    "chat-logprobs": {"api": "chat", "logprobs": true, "top_logprobs": 2},
    "chat-call":     {"api": "chat", "said": "WEATHER", "tools": [CHAT_TOOL], "tool_choice": "required"}
}""")
)
# The same of requests that are asked plain too.
ASKED = STREAMS | json.loads(
    written_out("""{
    "tools":         {"said": "WEATHER", "tools": [TOOL, TIME]},
    "chat-tools":    {"said": "WEATHER", "tools": [CHAT_TOOL, CHAT_TIME]},
    "forced":        {"said": "WEATHER", "tools": [TOOL, TIME],
                      "tool_choice": {"type": "function", "name": "get_time"}},
    "chat-forced":   {"said": "WEATHER", "tools": [CHAT_TOOL, CHAT_TIME],
                      "tool_choice": {"type": "function", "function": {"name": "get_time"}}},
    "schema":        {"said": "Name a colour and a number.", "limit": 400, "text": {"format": {
                      "type": "json_schema", "name": "x", "schema": COLOUR, "strict": true}}},
    "chat-schema":   {"said": "Name a colour and a number.", "limit": 400, "response_format": {
                      "type": "json_schema", "json_schema": {"name": "x", "schema": COLOUR, "strict": true}}},
    "animals":       {"said": "Which animals?", "limit": 100, "text": {"format": {
                      "type": "json_schema", "name": "x", "schema": ANIMALS, "strict": true}}},
    "chat-animals":  {"said": "Which animals?", "limit": 100, "response_format": {"type": "json_schema",
                      "json_schema": {"name": "x", "schema": ANIMALS, "strict": true}}},
    "object":        {"said": "Say hello in JSON.", "limit": 100, "text": {
                      "format": {"type": "json_object"}}},
    "chat-object":   {"said": "Say hello in JSON.", "limit": 100, "response_format": {"type": "json_object"}}
}""")
)
# The layer that failed, by the error; the first that fits.
LAYERS = {socket.gaierror: "name", ssl.SSLError: "TLS", OSError: "connection", Exception: "HTTP"}
PATHS = {"responses": "/responses", "chat": "/chat/completions", "messages": "/messages"}


class Peer:
    """One server.

    `long`: members of a body that make its answer long, such as a bias against the end token.
    `budget`: seconds for each rule.
    """

    api = "responses"  # the one that a rule is about
    shown = ""  # the part of the last reply that shows the fault

    def __init__(self, base_url: str, model: str, api_key: str = "", budget: float = BUDGET_S) -> None:
        self.url = urlsplit(base_url.rstrip("/"))
        self.model = model
        self.long: Json = {}
        self.headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # To what several rules are about, each with its exchange.
        self.replies: dict[str, tuple[Reply | Exception, list[Connection]]] = {}
        self.exchanges: list[Connection] = []  # of the rule that is judged
        self._budget = budget
        self.start()

    def start(self, seconds: float = 0) -> None:
        """Begin the budget of a rule, or of the rest of one."""
        self._deadline = time.monotonic() + (seconds or self._budget)

    def seconds_left(self) -> float:
        """Return what is left of the budget; raises NoReply if nothing is."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise NoReply(f"the rule's budget of {self._budget:g} s is used up")
        return left

    # --- requests -------------------------------------------------------------------------------------------

    def request(
        self, said: object = "hi", limit: int = 64, stream: bool | None = False, api: str = "", **more: object
    ) -> tuple[str, Json]:
        """Return path and body.

        `said` is a text, or a list of items or messages.
        """
        api = api or self.api
        body: Json = {"model": self.model, "stream": stream}
        if api == "responses":
            body |= {"max_output_tokens": limit, "temperature": 0, "input": said}
        else:
            messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
            body |= {"messages": messages, "max_tokens": limit, "temperature": 0}
        body |= more
        return PATHS[api], {name: value for name, value in body.items() if value is not None}

    def asks(self, name: str) -> Json:
        """Return what ASKED has, for the API that a rule is about."""
        asked: Json = ASKED[f"chat-{name}" if self.api == "chat" else name]
        return asked

    @contextmanager
    def open(self, method: str, path: str, body: Json | bytes = b"", **headers: Any) -> Iterator[Reply]:
        """Yield the reply as it comes, on a connection of its own.

        A header that is "" is not sent; a path with // begins at the root of the server.
        """
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        if raw:
            headers["Content_Type"] = "application/json"
        named = {name.replace("_", "-"): value for name, value in (self.headers | headers).items() if value}
        target = path.removeprefix("/") if path.startswith("//") else self.url.path + path
        asked = shortened(f"{method} {path} {raw.decode('utf-8', 'replace')}", 300)
        kind = HTTPSConnection if self.url.scheme == "https" else HTTPConnection
        command = curl(method, f"{self.url.scheme}://{self.url.netloc}{target}", named, raw)
        try:
            with closing(kind(self.url.netloc, timeout=self.seconds_left())) as server:
                server.connect()
                connection = Connection(server.sock, self.seconds_left, command)
                self.show(connection)
                server.request(method, target, raw or None, named)
                yield connection.reply(asked)
        except (EOFError, ConnectionResetError) as error:
            raise AssertionError(f"expected a whole reply: {asked} -> {error}") from error
        except (OSError, HTTPException) as error:
            layer = next(layer for failure, layer in LAYERS.items() if isinstance(error, failure))
            raise NoReply(f"{layer}: {asked} -> {type(error).__name__}: {error}") from error

    def ask(self, method: str, path: str, body: Json | bytes = b"", **headers: Any) -> Reply:
        """Ask, and read the whole reply; raises NoReply, for a server that is busy too."""
        with self.open(method, path, body, **headers) as reply:
            reply.chunks  # noqa: B018 (it reads them)
        if reply.status in BUSY:
            raise NoReply(f"the server is busy: {reply}")
        return reply

    def reply(self, **asked: Any) -> Reply:
        return self.ask("POST", *self.request(**asked))

    def once(self, path: str, body: Json | bytes) -> Reply:
        """Ask once what several rules are about; a reply that breaks off is left to the rule whole-frames.

        The request has a budget of its own.
        """
        key = f"{path} {body!r}"
        if key not in self.replies:
            self.start()
            got: Reply | Exception
            try:
                got = self.ask("POST", path, body)
            except (NoReply, AssertionError) as error:  # a hang is waited for once
                got = error
            self.replies[key] = got, self.exchanges[-1:]
        reply, exchange = self.replies[key]
        self.show(*exchange)
        with presumed("whole-frames"):
            if isinstance(reply, Exception):
                raise reply
        return reply

    def show(self, *exchange: Connection) -> None:
        """Put an exchange last: it is the one that shows the fault, if the rule fails now."""
        others = [other for other in self.exchanges if other not in exchange]
        self.exchanges = [*others, *exchange]
        self.shown = ""

    def without_key(self) -> Json:
        """Return the headers of a request without the key."""
        if "Authorization" not in self.headers:
            raise NotApplicable("no key was given")
        return {"Authorization": ""}

    # --- streams --------------------------------------------------------------------------------------------

    @contextmanager
    def live(self, api: str = "responses", **asked: Any) -> Iterator[Iterator[Typed]]:
        """Yield the events of a stream as they come; leaving the block leaves the stream."""
        with self.open("POST", *self.request(stream=True, api=api, **asked)) as reply:
            yield (Typed(event, EVENTS[api]) for event in events_of(reply.if_stream().pieces))

    def stream(self, **asked: Any) -> Reply:
        return self.once(*self.request(stream=True, **asked)).if_stream()

    def recorded(self, name: str) -> Reply:
        """Return a stream of STREAMS."""
        return self.stream(**STREAMS[name])

    # --- answers --------------------------------------------------------------------------------------------

    def both(self, **asked: Any) -> Iterator[Answer]:
        """Yield the answer, plain and streamed; the arguments are those of request()."""
        yield self.plain(**asked)
        with suppress(NotApplicable):
            yield self.streamed(**asked)

    def plain(self, **asked: Any) -> Answer:
        """Return the answer to a request without stream, that may be refused."""
        reply = self.reply(**asked).if_there(REFUSED)
        assert reply.status == 200, "expected status 200"
        assert reply.json, "expected a JSON object"
        return self._answer([reply.json])

    def streamed(self, **asked: Any) -> Answer:
        reply = self.stream(**asked)
        return self._answer(reply.events if self.api == "chat" else [final(reply)])

    def _answer(self, objects: list[Json]) -> Answer:
        answer = of_chunks(objects) if self.api == "chat" else of_response(objects[0])
        self.shown = answer.text and json.dumps(answer.outline, ensure_ascii=False)
        return answer

    def same_answer(self, ask: Callable[[], Json], told: Json) -> None:
        """Expect two equal answers; raise NotApplicable if a server gives another answer when asked again."""
        said = ask()
        if said == told:
            return
        if ask() != said:
            raise NotApplicable("the server answers differently each time, at temperature 0")
        differing = {name: (said[name], told.get(name)) for name in said if said[name] != told.get(name)}
        self.shown = json.dumps(differing, ensure_ascii=False)
        raise AssertionError("expected the same answer, however it is asked for")


def final(reply: Reply) -> Json:
    """Return the response of a stream's terminal event; only the rule `terminal` reports a missing one."""
    with presumed("terminal"):
        return response_of(reply.events)


def response_of(events: list[Json]) -> Json:
    """Return the response of the terminal event that must be the last."""
    last = [{}, *events][-1]
    response = object_in(last, "response")
    is_terminal = response and last.get("type") in TERMINAL
    assert is_terminal, f"expected a terminal event in the end, got {shortened(last, 200)}"
    return response


def curl(method: str, url: str, headers: Json, body: bytes) -> str:
    """Write a request as a command for bash, in which $AUDIT_API_KEY is the key."""
    words = ["curl", "-isN", "--raw", "-X", method, url]
    for name, value in headers.items():
        words += ["-H", f"{name}: {value}"]
    command = shlex.join(words)
    if body:  # printf has no limit of length, and takes any byte in octal
        octal = "".join(map(r"\{:03o}".format, b"" if body.isascii() else body))
        text = f"'{octal}'" if octal else f"%s {shlex.quote(body.decode())}"
        command = f"printf {text} | {command} --data-binary @-"
    key = f"Authorization: {headers.get('Authorization')}"
    return command.replace(shlex.quote(key), '"Authorization: Bearer $AUDIT_API_KEY"')


# --- the rules of one stream, of a live server --------------------------------------------------------------


def judged(rule: Rule, peer: Peer) -> None:
    """Judge by the rule every stream of its kind that the server makes, and of which the end was seen."""
    n_judged = 0
    for name, asked in STREAMS.items():
        if asked.get("api", "responses") not in rule.profiles:
            continue
        peer.exchanges.clear()
        try:
            capture = read(peer.recorded(name).body)
        except (NotApplicable, NoReply) as error:
            reason = error  # why no stream came, if none comes
            if rule.name == "whole-frames" and isinstance(error.__cause__, AssertionError):
                raise error.__cause__ from None
            continue
        n_judged += 1
        for number, message in rule.check(capture):
            broken = b"".join(frame.raw for frame in capture.frames if frame.number == number)
            peer.shown = broken.decode("utf-8", "backslashreplace")
            raise AssertionError(f"{name}: event {number}: {message}")
    if not n_judged:
        raise reason
