"""A minimal correct server, written from the API reference alone: no model, no storage, no tools.

It says WORDS, a word a token, over and over as far as it may. What it does not have it refuses. No rule may
accuse it: what a rule finds here is the rule's own fault.
"""

import http.server
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count, cycle, islice
from typing import Any

Json = dict[str, Any]
WORDS = ["Foxes ", "sleep ", "by ", "day. "]
N_WORDS = 40  # of an answer that is not cut
USAGE = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
#  parameter -> (type, least, most)
NUMBERS: dict[str, tuple[type, float, float]] = {
    "temperature": (float, 0, 2),
    "top_p": (float, 0, 1),
    "presence_penalty": (float, -2, 2),
    "n": (int, 1, 8),
    "top_logprobs": (int, 0, 20),
    "max_tokens": (int, 1, 10**6),
    "max_output_tokens": (int, 16, 10**6),
}
REFUSED = ("tools", "background", "response_format", "text", "reasoning", "include", "logprobs")
STRINGS = ("message", "type", "param", "code")


IDS = count()


class Refusal(Exception):
    """What the client gets instead of an answer."""

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.status = status
        self.error = dict(zip(STRINGS, (message, "invalid_request_error", param, None), strict=True))


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.handle_request(self.get)

    def do_POST(self) -> None:
        self.handle_request(self.post)

    def do_DELETE(self) -> None:
        self.handle_request(self.get)

    def handle_request(self, answer: Any) -> None:
        try:
            answer()
        except Refusal as refusal:
            self.send_json(refusal.status, {"error": refusal.error})
        except ConnectionError:
            pass  # the client has left

    def get(self) -> None:
        if self.path != "/v1/models":
            raise Refusal("There is nothing here.", None, 404)
        model = {"id": "minimal", "object": "model", "created": 1, "owned_by": "tests"}
        self.send_json(200, {"object": "list", "data": [model]})

    def post(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Content-Encoding"):
            raise Refusal("Send it without an encoding.", None, 415)
        makers = {"/v1/responses": responses, "/v1/chat/completions": chat}
        if self.path not in makers:
            raise Refusal("There is nothing here.", None, 404)
        body = checked(raw)
        events, answer = makers[self.path](body)
        if not body.get("stream"):
            self.send_json(200, answer)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-cache")
        self.send_header("x-request-id", "req_1")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for frame in events:
            self.wfile.write(b"%x\r\n%b\r\n" % (len(frame), frame))
            time.sleep(0.001)
        self.wfile.write(b"0\r\n\r\n")

    def send_json(self, status: int, body: Json) -> None:
        raw = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.send_header("x-request-id", "req_1")
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def checked(raw: bytes) -> Json:
    """The body; raises Refusal."""
    try:
        body = json.loads(raw)
    except ValueError as error:
        raise Refusal("This is no JSON.") from error
    if not isinstance(body.get("model"), str):
        raise Refusal("model: expected a string.", "model")
    if body["model"] != "minimal":
        raise Refusal("There is no such model.", "model", 404)
    if not isinstance(body.get("stream", False), bool):
        raise Refusal("stream: expected a boolean.", "stream")
    for name, (type_, least, most) in NUMBERS.items():
        value = body.get(name, least)
        is_number = isinstance(value, int | type_) and not isinstance(value, bool)
        if not is_number or not least <= float(value) <= most:
            raise Refusal(f"{name}: expected a number from {least} to {most}.", name)
    for name in REFUSED:
        if body.get(name):
            raise Refusal(f"{name}: not here.", name)
    if body.get("previous_response_id"):
        raise Refusal("Nothing is stored here.", "previous_response_id", 404)
    if body.get("stream_options") and not body.get("stream"):
        raise Refusal("stream_options: only with stream.", "stream_options")
    return dict(body)


def said(limit: int | None, stop: Any) -> tuple[list[str], str]:
    """The words, and why they end."""
    words = list(islice(cycle(WORDS), min(limit or N_WORDS, N_WORDS)))
    reason = "length" if limit and limit <= len(words) else "stop"
    stops = [stop] if isinstance(stop, str) else stop or []
    text = "".join(words)
    places = [text.index(each) for each in stops if each in text]
    if places:
        return [text[: min(places)]], "stop"
    return words, reason


# --- the Responses API --------------------------------------------------------------------------------------


def responses(body: Json) -> tuple[Iterator[bytes], Json]:
    check_input(body.get("input"))
    limit = body.get("max_output_tokens")
    words, reason = said(limit, None)
    text = "".join(words)
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    status = "completed" if reason == "stop" else "incomplete"
    item: Json = {"id": "msg_1", "type": "message", "role": "assistant", "status": status, "content": [part]}
    usage = {"input_tokens": 3, "output_tokens": len(words), "total_tokens": 3 + len(words)} | USAGE
    head = {
        "id": f"resp_{next(IDS)}",
        "object": "response",
        "created_at": 1,
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata", {}),
        "model": "minimal",
        "parallel_tool_calls": True,
        "temperature": 1.0,
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0,
        "background": False,
    }
    end: Json = {"status": status, "output": [item], "usage": usage}
    if status == "incomplete":
        end["incomplete_details"] = {"reason": "max_output_tokens"}
    begun = head | {"status": "in_progress", "output": [], "usage": None}
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
        (status, {"response": head | end}),
    ]
    return map(event_frame, events, range(len(events))), head | end


def event_frame(event: tuple[str, Json], number: int) -> bytes:
    type_ = f"response.{event[0]}"
    data = {"type": type_, "sequence_number": number} | event[1]
    return f"event: {type_}\ndata: {json.dumps(data)}\n\n".encode()


def check_input(value: Any) -> None:
    if isinstance(value, str):
        return
    if not isinstance(value, list) or not value:
        raise Refusal("input: expected a string or items.", "input")
    for item in value:
        if not isinstance(item, dict) or item.get("type", "message") != "message":
            raise Refusal("input: expected messages.", "input")
        if item.get("role") not in ("user", "system", "developer", "assistant"):
            raise Refusal("input: expected another role.", "input")


# --- chat completions ---------------------------------------------------------------------------------------


def chat(body: Json) -> tuple[Iterator[bytes], Json]:
    check_messages(body.get("messages"))
    n = body.get("n", 1)
    words, reason = said(body.get("max_tokens"), body.get("stop"))
    head = {"id": "chatcmpl-1", "created": 1, "model": "minimal"}
    usage = {"prompt_tokens": 3, "completion_tokens": n * len(words), "total_tokens": 3 + n * len(words)}
    message = {"role": "assistant", "content": "".join(words), "refusal": None}
    choices = [{"index": i, "message": message, "finish_reason": reason, "logprobs": None} for i in range(n)]
    answer = head | {"object": "chat.completion", "choices": choices, "usage": usage}
    deltas: list[tuple[Json, str | None]] = [
        ({"role": "assistant", "content": ""}, None),
        *(({"content": word}, None) for word in words),
        ({}, reason),
    ]
    with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
    nothing_yet = {"usage": None} if with_usage else {}
    chunks: list[Json] = [
        {"choices": [{"index": i, "delta": delta, "finish_reason": end, "logprobs": None}]} | nothing_yet
        for delta, end in deltas
        for i in range(n)
    ]
    if with_usage:
        chunks.append({"choices": [], "usage": usage})
    frames = [json.dumps(head | {"object": "chat.completion.chunk"} | chunk) for chunk in chunks]
    return (f"data: {frame}\n\n".encode() for frame in [*frames, "[DONE]"]), answer


def check_messages(value: Any) -> None:
    if not isinstance(value, list) or not value:
        raise Refusal("messages: expected a list.", "messages")
    if any(not isinstance(each, dict) or "role" not in each for each in value):
        raise Refusal("messages: expected a role in each.", "messages")


@contextmanager
def minimal() -> Iterator[str]:
    """The base URL of such a server."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
