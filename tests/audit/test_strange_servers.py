"""Servers that are slow, moody or hostile: by that none breaks a rule, and none holds the audit up."""

import contextlib
import http.server
import itertools
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from audit.peer import Peer
from audit.session import judge

Json = dict[str, Any]


class NeverDone(http.server.BaseHTTPRequestHandler):
    """A background response that runs for ever."""

    def answer(self, body: Json) -> Json | list[Json]:
        return {"id": "resp_1", "background": True, "status": "in_progress", "output": []}

    def do_POST(self) -> None:
        answer = self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or b"{}"))
        raw = json.dumps(answer).encode()
        if isinstance(answer, list):
            raw = b"".join(b"data: %b\n\n" % json.dumps(chunk).encode() for chunk in answer)
            raw += b"data: [DONE]\n\n"
        self.send_response(200)
        kind = "text/event-stream" if isinstance(answer, list) else "application/json"
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(raw)

    do_GET = do_POST

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class Moody(NeverDone):
    """Says something else each time."""

    count = itertools.count(1)

    def answer(self, body: Json) -> Json | list[Json]:
        n_tokens = next(self.count)
        usage = {"prompt_tokens": 3, "completion_tokens": n_tokens, "total_tokens": 3 + n_tokens}
        text = f"I have been asked {n_tokens} times."
        if not body.get("stream"):
            choice = {"index": 0, "message": {"content": text}, "finish_reason": "stop"}
            return {"object": "chat.completion", "choices": [choice], "usage": usage}
        delta = {"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        return [{"choices": [delta]}, {"choices": [], "usage": usage}]


@contextlib.contextmanager
def served(handler: type[NeverDone]) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


def test_a_slow_background_run_breaks_no_rule() -> None:
    with served(NeverDone) as url:
        result = judge(Peer(url, "m", budget=0.3), "background-completes")
    assert (result.verdict, result.reason) == ("error", "NoReply: the rule's budget of 0.3 s is used up")


@pytest.mark.parametrize("rule", ["chat-usage", "stop-string", "chat-stream-is-answer"])
def test_a_moody_server_is_not_blamed_for_its_moods(rule: str) -> None:
    with served(Moody) as url:
        result = judge(Peer(url, "m"), rule)
    assert (result.verdict, "something else each time" in result.reason) == ("n/a", True)


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
#                     what it sends first, then again and again
HOSTILE = {
    "a body without end":        (HEAD + b"\r\n", b" " * 65536),
    "a chunk of a terabyte":     (HEAD + b"Transfer-Encoding: chunked\r\n\r\nffffffffff\r\n", b" " * 65536),
    "chunks without end":        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"5\r\nabcde\r\n"),
    "headers by the byte":       (b"HTTP/1.1 200 OK\r\nx: ", b"y"),
    "half a body":               (HEAD + b"Content-Length: -1\r\n\r\n", b""),
    "a body that never comes":   (HEAD + b"Content-Length: 9\r\n\r\n", b""),
}  # fmt: skip


@contextlib.contextmanager
def hostile(first: bytes, more: bytes) -> Iterator[str]:
    """A server that sends without end; it ends with its client."""

    def answer() -> None:
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            with connection:
                connection.recv(10_000)
                connection.sendall(first)
                while more:
                    connection.sendall(more)
                connection.recv(1)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    thread.join()


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_server_is_left_in_time(kind: str) -> None:
    with hostile(*HOSTILE[kind]) as url:
        result = judge(Peer(url, "m", budget=0.5), "models")
    assert result.verdict == "error"
    assert result.reason.startswith("NoReply: ")
