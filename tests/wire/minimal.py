"""A minimal correct server, written from the API reference alone: no model, no storage, no tools.

It says the words of tables/minimal.toml, a word a token, over and over as far as it may. What it does not
have it refuses. No rule may accuse it: what a rule finds here is the rule's own fault.

With a fault that `breaks_off`, a stream ends without its last chunk.
Its WebSocket can misbehave by script, as in foreign.py: `when` and `ask` see the text of a client's message,
`reply` sees a frame as "opcode payload", and makes none, or several with a blank line between them.
"""

import base64
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count, cycle, islice
from typing import Any

from websockets.frames import Frame, Opcode

from helpers.tables import table
from wire.foreign import NO_FAULT, Fault, Faulty, Quiet, edited

Json = dict[str, Any]
Maker = Callable[[Json], tuple[Sequence[Json | str], Json]]  # body -> events of its stream, answer
TABLES = table("minimal")
WORDS, N_WORDS, REFUSED, NUMBERS = (TABLES[name] for name in ("words", "n_words", "refused", "numbers"))
ROLES, KNOWN = TABLES["roles"], {*TABLES["known"], *REFUSED, *NUMBERS}
IDS = count()


class Refusal(Exception):
    """What the client gets instead of an answer."""

    def __init__(self, message: str, param: str = "", status: int = 400, code: str = "") -> None:
        self.status = status
        self.error = {"message": message, "type": "error", "param": param or None, "code": code or None}


class Handler(Quiet):
    server: "Minimal"

    def do_GET(self) -> None:
        try:
            (self.post if self.command == "POST" else self.get)()
        except Refusal as refusal:
            self.send_json(refusal.status, {"error": refusal.error})
        except ConnectionError:
            pass  # the client has left

    do_POST = do_DELETE = do_GET

    def get(self) -> None:
        if self.headers.get("Upgrade") == "websocket":
            self.upgrade()
            return
        expect(self.path == "/v1/models", "", "a path that is here", 404)
        model = {"id": "minimal", "object": "model", "created": 1, "owned_by": "tests"}
        self.send_json(200, {"object": "list", "data": [model]})

    def upgrade(self) -> None:
        if self.server.key and self.headers.get("Authorization") != f"Bearer {self.server.key}":
            raise Refusal("A key is missing.", "", self.server.fault.get("status", 401))
        key = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        accept = base64.b64encode(hashlib.sha1(key.encode(), usedforsecurity=False).digest()).decode()
        self.send_head(101, {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Accept": accept})
        self.close_connection = True
        Socket(self).run()

    def post(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        expect(not self.headers.get("Content-Encoding"), "", "no encoding", 415)
        path = self.path.removeprefix("/v1/")
        expect(path in MAKERS, "", "a path that is here", 404)
        body = checked(parsed(raw))
        events, answer = MAKERS[path](body)
        if not body.get("stream"):
            self.send_json(200, answer)
            return
        kind = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "x-request-id": "req_1"}
        self.send_head(200, kind | {"Transfer-Encoding": "chunked"})
        for frame in map(sse_frame, events):
            self.wfile.write(b"%x\r\n%b\r\n" % (len(frame), frame))
            time.sleep(0.001)
        self.close_connection = bool(self.server.fault.get("breaks_off"))
        if not self.close_connection:
            self.wfile.write(b"0\r\n\r\n")

    def send_json(self, status: int, body: Json) -> None:
        raw = json.dumps(body).encode()
        kind = {"Content-Type": "application/json", "x-request-id": "req_1"}
        self.send_head(status, kind | {"Content-Length": str(len(raw))})
        self.wfile.write(raw)


def parsed(raw: bytes) -> Json:
    try:
        return dict(json.loads(raw))
    except (ValueError, TypeError) as error:
        raise Refusal("This is not an object in JSON.") from error


def expect(holds: bool, name: str, expected: str, status: int = 400) -> None:
    if not holds:
        raise Refusal(f"{name}: expected {expected}.", name, status)


def checked(body: Json) -> Json:
    for name in body:
        expect(name in KNOWN and not (name in REFUSED and body[name]), name, "nothing of the kind")
    expect(isinstance(body.get("model"), str), "model", "a string")
    expect(body["model"] == "minimal", "model", "minimal", 404)
    expect(isinstance(body.get("stream", False), bool), "stream", "a boolean")
    for name, (least, most) in NUMBERS.items():
        value = body.get(name, least)
        is_number = isinstance(value, int | type(least)) and not isinstance(value, bool)
        expect(is_number and least <= float(value) <= most, name, f"a number from {least} to {most}")
    expect(not body.get("previous_response_id"), "previous_response_id", "none: nothing is stored here", 404)
    expect(bool(body.get("stream")) or not body.get("stream_options"), "stream_options", "stream too")
    return body


def said(limit: int | None) -> tuple[list[str], str]:
    """Return the words, and why they end."""
    words = list(islice(cycle(WORDS), min(limit or N_WORDS, N_WORDS)))
    return words, "length" if limit and limit <= len(words) else "stop"


# --- a WebSocket --------------------------------------------------------------------------------------------


class Socket:
    """A connection, and the length of the prompts that it remembers, in tokens, by the id of a response."""

    def __init__(self, handler: Handler) -> None:
        self._read = handler.rfile.read
        self._write = handler.wfile.write
        self._server = handler.server
        self._remembered: dict[str, int] = {}

    def run(self) -> None:
        opcode = 0
        while opcode != 8:
            opcode, payload = self.receive()
            if opcode == 1:
                text = payload.decode()
                fault = self._server.fault_of(text)
                for message in self.turn(edited(text, fault.get("ask"))):
                    self.send(f"1 {json.dumps(message)}", fault)
            else:  # a close, or a ping
                answer = opcode if opcode == 8 else 10
                self.send(f"{answer} {payload.decode('latin-1')}", self._server.fault)

    def turn(self, text: str) -> Iterator[Json]:
        previous = None
        try:
            body = parsed(text.encode())
            kind = body.pop("type", None)
            if kind == "response.steer":  # nothing runs that could be steered
                error = {"code": "response_not_found", "message": "It is not here."}
                yield {"type": "response.steer.failed", "sequence_number": 0, "error": error, "steer": body}
                return
            expect(kind == "response.create", "type", "response.create")
            previous = body.pop("previous_response_id", None)
            known = self._server.stored | self._remembered
            if previous not in (None, *known):
                raise Refusal("It is not here.", "previous_response_id", 400, "previous_response_not_found")
            events, response = responses(checked(body), known.get(previous, 0))
        except Refusal as refusal:
            self._remembered.pop(previous or "", None)
            yield {"type": "error", "status": refusal.status, "error": refusal.error}
            return
        memory = self._remembered if body.get("store") is False else self._server.stored
        memory[response["id"]] = response["usage"]["total_tokens"]
        yield from events

    def receive(self) -> tuple[int, bytes]:
        """Return opcode and payload of a frame; the mask of the audit changes nothing."""
        first, second = self._read(2) or b"\x88\x80"
        size = second & 127
        if size > 125:
            size = int.from_bytes(self._read(2 if size == 126 else 8), "big")
        assert self._read(4) in (bytes(4), b""), "a mask"
        return first & 15, self._read(size)

    def send(self, frame: str, fault: Fault) -> None:
        changed = edited(frame, fault.get("reply"))
        for one in changed.split("\n\n") if changed else ():
            opcode, payload = one.split(" ", 1)
            self._write(Frame(Opcode(int(opcode)), payload.encode("latin-1")).serialize(mask=False))


# --- the Responses API --------------------------------------------------------------------------------------


def responses(body: Json, n_earlier: int = 0) -> tuple[list[Json], Json]:
    """Return events and response, after a conversation of `n_earlier` tokens."""
    check_input(body.get("input"))
    words, reason = said(body.get("max_output_tokens"))
    n_earlier += len(body.get("instructions") or "")
    text = "".join(words)
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    status = "completed" if reason == "stop" else "incomplete"
    item: Json = {"id": "msg_1", "type": "message", "role": "assistant", "status": status, "content": [part]}
    told = {"instructions": body.get("instructions"), "metadata": body.get("metadata", {})}
    told |= {"temperature": 1.0, "top_p": 1.0, "tool_choice": "auto", "tools": []}
    told |= {"parallel_tool_calls": True, "background": False, "error": None, "incomplete_details": None}
    head = {"id": f"resp_{next(IDS)}", "object": "response", "created_at": 1, "model": "minimal"}
    begun = head | told | {"status": "in_progress", "output": [], "usage": None}
    if body.get("generate") is False:  # read the prompt, and make nothing
        ended = begun | {"status": "completed", "usage": usage_of(3 + n_earlier, 0)}
        return numbered([("created", {"response": begun}), ("completed", {"response": ended})]), ended
    ended = begun | {"status": status, "output": [item], "usage": usage_of(3 + n_earlier, len(words))}
    if status == "incomplete":
        ended["incomplete_details"] = {"reason": "max_output_tokens"}
    place = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
    opened = item | {"status": "in_progress", "content": []}
    deltas = [("output_text.delta", place | {"delta": word, "logprobs": []}) for word in words]
    events: list[tuple[str, Json]] = [
        ("created", {"response": begun}),
        ("in_progress", {"response": begun}),
        ("output_item.added", {"output_index": 0, "item": opened}),
        ("content_part.added", place | {"part": part | {"text": ""}}),
        *deltas,
        ("output_text.done", place | {"text": text, "logprobs": []}),
        ("content_part.done", place | {"part": part}),
        ("output_item.done", {"output_index": 0, "item": item}),
        (status, {"response": ended}),
    ]
    return numbered(events), ended


def usage_of(n_prompt: int, n_output: int) -> Json:
    details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    total = n_prompt + n_output
    return details | {"input_tokens": n_prompt, "output_tokens": n_output, "total_tokens": total}


def numbered(events: list[tuple[str, Json]]) -> list[Json]:
    return [{"type": f"response.{t}", "sequence_number": n} | more for n, (t, more) in enumerate(events)]


def sse_frame(event: Json | str) -> bytes:
    if isinstance(event, str):  # a frame of a chat, or its end
        return f"data: {event}\n\n".encode()
    return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode()


def compacted(body: Json) -> tuple[list[Json], Json]:
    check_input(body.get("input"))
    item = {"id": "cmp_1", "type": "compaction", "encrypted_content": "eA=="}
    answer = {"id": "resp_0", "object": "response.compaction", "created_at": 1, "output": [item]}
    return [], answer | {"usage": usage_of(3, 0)}


def check_input(value: Any) -> None:
    expect(isinstance(value, str | list) and bool(value), "input", "a string or items")
    expect("data:" not in str(value), "input", "no images and files")
    for item in value if isinstance(value, list) else ():
        expect(isinstance(item, dict), "input", "objects")
        kind = item.get("type", "message")
        is_message = kind == "message" and item.get("role") in ROLES
        expect(kind == "compaction" or is_message, "input", "messages")


# --- chat completions ---------------------------------------------------------------------------------------


def chat(body: Json) -> tuple[list[str], Json]:
    messages = body.get("messages")
    expect(isinstance(messages, list) and bool(messages), "messages", "a list")
    expect("data:" not in str(messages), "messages", "no images")
    expect(all(isinstance(each, dict) and "role" in each for each in messages or ()), "messages", "roles")
    words, reason = said(body.get("max_tokens"))
    head = {"id": "chatcmpl-1", "created": 1, "model": "minimal"}
    usage = {"prompt_tokens": 3, "completion_tokens": len(words), "total_tokens": 3 + len(words)}
    message = {"role": "assistant", "content": "".join(words), "refusal": None}
    choice = {"index": 0, "finish_reason": reason, "logprobs": None}
    answer = head | {"object": "chat.completion", "choices": [choice | {"message": message}], "usage": usage}
    deltas: list[Json] = [{"role": "assistant", "content": ""}, *({"content": word} for word in words), {}]
    with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
    chunk: Json = head | {"object": "chat.completion.chunk"} | ({"usage": None} if with_usage else {})
    choices = [choice | {"delta": delta, "finish_reason": None if delta else reason} for delta in deltas]
    chunks: list[Json] = [chunk | {"choices": [each]} for each in choices]
    if with_usage:
        chunks.append(chunk | {"choices": [], "usage": usage})
    return [*map(json.dumps, chunks), "[DONE]"], answer


MAKERS: dict[str, Maker] = {"responses": responses, "responses/compact": compacted, "chat/completions": chat}


class Minimal(Faulty):
    def __init__(self, fault: Fault = NO_FAULT, key: str = "") -> None:
        super().__init__(Handler, fault)
        self.key = key  # that a WebSocket needs
        self.stored: dict[str, int] = {}
