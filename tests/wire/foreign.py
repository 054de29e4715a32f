"""A foreign server that misbehaves by script: ours does the work behind it, and one fault is put between.

A fault is data, and what of it is absent changes nothing:

    when      regular expression: the requests it is about, as "METHOD /path?query body"
    skip      so many of them are left alone
    ask       [old, new]: what ours is asked instead; a regular expression and its replacement, applied once
    was       only replies of this status
    status    the status that the client gets
    headers   headers that the client gets, "" for none
    reply     [old, new]: in the body; in each event of a stream, one by one
    joined    a stream is collected, changed as a whole, and written at once
"""

import contextlib
import http.client
import http.server
import re
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

Fault = dict[str, Any]
PASSED_ON = ("Authorization", "Content-Encoding", "Content-Type")
HOP_BY_HOP = {"transfer-encoding", "connection", "content-length"}


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "Foreign"

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode("utf-8", "surrogateescape")
        line = f"{self.command} {self.path} {body}"
        fault = self.server.fault_of(line)
        method, path, body = edited(line, fault.get("ask")).split(" ", 2)
        with contextlib.closing(http.client.HTTPConnection(self.server.behind)) as ours:
            headers = {name: self.headers[name] for name in PASSED_ON if name in self.headers}
            ours.request(method, path, body.encode("utf-8", "surrogateescape") or None, headers)
            reply = ours.getresponse()
            if fault.get("was", reply.status) != reply.status:
                fault = {}
            with contextlib.suppress(ConnectionError):  # the client has left, and so do we
                self.pass_on(reply, fault)
        self.close_connection = True

    do_GET = do_POST = do_DELETE = answer

    def pass_on(self, reply: http.client.HTTPResponse, fault: Fault) -> None:
        chunks = chunks_of(reply) if reply.chunked else iter([reply.read()])
        if not reply.chunked or "joined" in fault:
            chunks = iter([b"".join(chunks)])
        headers = {
            name.lower(): value for name, value in reply.getheaders() if name.lower() not in HOP_BY_HOP
        }
        self.send_response_only(fault.get("status", reply.status))
        for name, value in (headers | fault.get("headers", {}) | {"transfer-encoding": "chunked"}).items():
            if value:
                self.send_header(name, value)
        self.end_headers()
        for chunk in chunks:
            changed = edited(chunk.decode("latin-1"), fault.get("reply")).encode("latin-1")
            if changed:
                self.wfile.write(b"%x\r\n%b\r\n" % (len(changed), changed))
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


class Foreign(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, ours: str, fault: Fault) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.behind = urlsplit(ours).netloc
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"
        self.n_seen = 0
        self._fault = fault

    def fault_of(self, line: str) -> Fault:
        if not re.search(self._fault.get("when", ""), line):
            return {}
        self.n_seen += 1
        return self._fault if self.n_seen > self._fault.get("skip", 0) else {}


@contextlib.contextmanager
def misbehaving(ours: str, fault: Fault) -> Iterator[str]:
    """The address of a server that does what the one at `ours` does, but for one fault."""
    with Foreign(ours, fault) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.url
        finally:
            server.shutdown()
            thread.join()


def edited(text: str, change: list[str] | None) -> str:
    if not change:
        return text
    old, new = change
    return re.sub(old, new, text, count=1, flags=re.DOTALL)


def chunks_of(reply: http.client.HTTPResponse) -> Iterator[bytes]:
    """A stream as ours writes it, an event at a time."""
    chunk = b""
    while piece := reply.read1():
        chunk += piece
        if chunk.endswith(b"\n\n"):
            yield chunk
            chunk = b""
    yield chunk
