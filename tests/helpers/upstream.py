"""A scripted upstream, which does what a test says, byte by byte: a raw socket, without an HTTP library.

    with upstream(answer) as worker: worker.url --> what `python server.py --upstream` takes

`answer(exchange)` is called for each POST, in a thread of its own, and may send what it likes; when it
returns the connection is closed. A test may replace the answer between two requests.
"""

import contextlib
import http.client
import json
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from helpers.limits import PATIENCE_S

Json = dict[str, Any]


def head(content_type: str = "text/event-stream", status: str = "200 OK", *more: str) -> bytes:
    """The head of an answer that ends with its connection, unless a header in `more` says how it ends."""
    lines = [f"HTTP/1.1 {status}", f"Content-Type: {content_type}", *more]
    return "\r\n".join([*lines, "", ""]).encode()


def json_answer(body: Any, status: str = "200 OK", *more: str) -> bytes:
    raw = json.dumps(body).encode()
    return head("application/json", status, f"Content-Length: {len(raw)}", *more) + raw


CHUNKED = "Transfer-Encoding: chunked"  # whoever reads such an answer can see whether it was cut


def event(value: Any) -> bytes:
    data = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return b"data: " + data.encode("utf-8", "surrogatepass") + b"\n\n"


def delta(**delta: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": delta}]})


def finish(reason: str = "stop") -> bytes:
    return event({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})


USAGE = {"prompt_tokens": 14, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 3}}
USED = event({"choices": [], "usage": USAGE})
DONE = b"data: [DONE]\n\n"
CALL = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": ""}}

# A stream with reasoning, an answer and a call; small, because tests cut it at every byte.
FRAMES = [
    delta(role="assistant", content=""),
    delta(reasoning_content="so", reasoning="so"),
    delta(content="caf\u00e9"),
    delta(tool_calls=[CALL]),
    delta(tool_calls=[{"index": 0, "function": {"arguments": '{"x":1}'}}]),
    finish("tool_calls"),
    USED,
    DONE,
]
STREAM = b"".join(FRAMES)


@dataclass
class Exchange:
    """One request, and the connection for its answer."""

    connection: socket.socket
    headers: dict[str, str]  # names in lower case
    body: Json

    def send(self, data: bytes) -> None:
        self.connection.sendall(data)

    def reset(self) -> None:
        """End the connection with an error instead of an end."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    def wait_closed(self) -> bool:
        """Wait until the other side has closed the connection."""
        try:
            return self.connection.recv(1) == b""
        except ConnectionError:
            return True


Answer = Callable[[Exchange], None]


def says(data: bytes) -> Answer:
    return lambda exchange: exchange.send(data)


def says_and_hangs(data: bytes) -> Answer:
    def answer(exchange: Exchange) -> None:
        exchange.send(data)
        exchange.wait_closed()

    return answer


hangs = says_and_hangs(b"")
SAYS_STREAM = says(head() + STREAM)


class Upstream:
    """Listens until it is closed, and keeps the exchanges."""

    def __init__(self, answer: Answer, models: tuple[str, ...], port: int) -> None:
        self.answer = answer
        self.models: Json = {"object": "list", "data": [{"id": m, "object": "model"} for m in models]}
        self.exchanges: list[Exchange] = []
        self._listener = socket.create_server(("127.0.0.1", port), backlog=512)
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """From now on connections are refused."""
        with contextlib.suppress(OSError):  # it may be closed already
            self._listener.shutdown(socket.SHUT_RDWR)
            self._thread.join(PATIENCE_S)
            self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=[connection], daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(PATIENCE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(OSError), connection, connection.makefile("rb") as lines:
            if not (request_line := lines.readline()):
                return
            headers = {name.lower(): value for name, value in http.client.parse_headers(lines).items()}
            body = json.loads(lines.read(int(headers.get("content-length", 0))) or b"{}")
            exchange = Exchange(connection, headers, body)
            if request_line.startswith(b"GET /v1/models"):
                exchange.send(json_answer(self.models))
                return
            self.exchanges.append(exchange)
            self.answer(exchange)


def upstream(
    answer: Answer = SAYS_STREAM, *models: str, port: int = 0
) -> contextlib.AbstractContextManager[Upstream]:
    return contextlib.closing(Upstream(answer, models or ("m",), port))
