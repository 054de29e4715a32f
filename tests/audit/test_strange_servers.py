"""Servers that are slow, busy, moody or hostile: by that none breaks a rule, and none holds the audit up."""

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

NEVER_DONE = {"id": "resp_1", "background": True, "status": "in_progress", "output": []}


class Moody(http.server.BaseHTTPRequestHandler):
    """Never ends a background response, is too busy to list its models, says something else each time."""

    count = itertools.count(1)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or b"{}")
        is_stream = body.get("stream", False)
        answers = chat(next(self.count), is_stream) if "messages" in body else [NEVER_DONE]
        self.send_response(503 if "models" in self.path else 200)
        self.send_header("Content-Type", "text/event-stream" if is_stream else "application/json")
        self.end_headers()
        text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in answers) + "data: [DONE]\n\n"
        self.wfile.write((text if is_stream else json.dumps(answers[0])).encode())

    do_GET = do_POST

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def chat(n_tokens: int, is_stream: bool) -> list[dict[str, Any]]:
    usage = {"prompt_tokens": 3, "completion_tokens": n_tokens, "total_tokens": 3 + n_tokens}
    said = {"role": "assistant", "content": f"I have been asked {n_tokens} times."}
    choices = [{"index": 0, "delta" if is_stream else "message": said, "finish_reason": "stop"}]
    if is_stream:
        return [{"choices": choices}, {"choices": [], "usage": usage}]
    return [{"object": "chat.completion", "choices": choices, "usage": usage}]


MOODS = [
    ("background-completes",  "error", "the rule's budget of 0.5 s is used up"),
    ("models",                "error", "the server is busy"),
    ("chat-usage",            "n/a",   "something else each time"),
    ("stop-string",           "n/a",   "something else each time"),
    ("chat-stream-is-answer", "n/a",   "something else each time"),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "verdict", "reason"), MOODS)
def test_a_slow_busy_or_moody_server_breaks_no_rule(rule: str, verdict: str, reason: str) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Moody) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        budget = 0.5 if rule == "background-completes" else 9
        result = judge(Peer(f"http://127.0.0.1:{server.server_port}/v1", "m", budget=budget), rule)
        server.shutdown()
    assert (result.verdict, reason in result.reason) == (verdict, True)


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
    assert (result.verdict, result.reason[:9]) == ("error", "NoReply: ")
