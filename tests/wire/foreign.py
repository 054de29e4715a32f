"""A foreign server that misbehaves by script: ours does the work behind it, and one fault is put between.

A fault is data, and what of it is absent changes nothing:

    when      regular expression: the requests it is about, as "METHOD /path?query body"
    skip      so many of them are left alone
    ask       [old, new]: what ours is asked instead; a regular expression and its replacement, applied once
    was       only replies of this status
    status    the status that the client gets
    headers   headers that the client gets, "" for none
    reply     [old, new]: in the body; in each event of a stream, one by one
    as_whole  a stream is collected, changed as a whole, and written an event at a time
    joined    the same, written at once
    holds     a stream is kept open after its last event, until the client leaves
    said      only replies that say so, a regular expression

What passes between is kept: the same exchange can be had again in no time, with a fault in it.
"""

import contextlib
import http.client
import http.server
import re
import threading
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

Fault = dict[str, Any]
PASSED_ON = ("Authorization", "Content-Encoding", "Content-Type")
HOP_BY_HOP = {"transfer-encoding", "connection", "content-length"}
NO_FAULT: Fault = {"when": "$^"}
Answer = tuple[int, dict[str, str], Iterable[str]]  # status, headers and chunks as the client gets them


class Exchange(NamedTuple):
    line: str  # "METHOD /path?query body"
    status: int
    headers: dict[str, str]
    chunks: list[str]  # of a stream the events; else one. A byte is a character, as in ISO-8859-1


class Quiet(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def send_head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()


class Faulty(http.server.ThreadingHTTPServer):
    """Serves while its block runs, and counts the requests that its fault is about."""

    daemon_threads = True

    def __init__(self, handler: type[Quiet], fault: Fault) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        self.fault = fault
        self._n_seen = 0

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, args=(0.01,)).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def fault_of(self, line: str) -> Fault:
        is_it = is_about(self.fault, line)
        self._n_seen += is_it
        return self.fault if is_it and self._n_seen > self.fault.get("skip", 0) else {}


class Handler(Quiet):
    server: "Foreign"

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode("utf-8", "surrogateescape")
        line = f"{self.command} {self.path} {body}"
        fault = self.server.fault_of(line)
        line = edited(line, fault.get("ask"))
        with contextlib.suppress(ConnectionError):  # the client has left, and so do we
            if earlier := self.server.had(line):
                self.server.repeated.append(earlier)
                self.pass_on(earlier, earlier.chunks, fault)
            else:
                self.ask(line, fault)
        self.close_connection = True

    do_GET = do_POST = do_DELETE = answer

    def ask(self, line: str, fault: Fault) -> None:
        method, path, body = line.split(" ", 2)
        with contextlib.closing(http.client.HTTPConnection(self.server.behind)) as ours:
            headers = {name: self.headers[name] for name in PASSED_ON if name in self.headers}
            ours.request(method, path, body.encode("utf-8", "surrogateescape") or None, headers)
            reply = ours.getresponse()
            names = {name.lower(): value for name, value in reply.getheaders()}
            kept = {name: value for name, value in names.items() if name not in HOP_BY_HOP}
            exchange = Exchange(line, reply.status, kept, [])
            self.server.exchanges.append(exchange)
            self.pass_on(exchange, chunks_of(reply, exchange.chunks), fault)

    def pass_on(self, exchange: Exchange, chunks: Iterable[str], fault: Fault) -> None:
        status, headers, chunks = with_fault(exchange, chunks, fault)
        self.send_head(status, headers | {"transfer-encoding": "chunked"})
        for raw in (chunk.encode("latin-1") for chunk in chunks if chunk):
            self.wfile.write(b"%x\r\n%b\r\n" % (len(raw), raw))
        if "holds" in fault:
            self.rfile.read(1)
        self.wfile.write(b"0\r\n\r\n")


class Foreign(Faulty):
    """Does what the server at `ours` does, or did earlier, but for one fault."""

    def __init__(self, ours: str, fault: Fault, earlier: Iterable[Exchange] = ()) -> None:
        super().__init__(Handler, fault)
        self.behind = urlsplit(ours).netloc
        self.exchanges: list[Exchange] = []  # with ours
        self.repeated: list[Exchange] = []  # those that were had earlier
        self._earlier: dict[str, list[Exchange | None]] = {}  # by line, in their order
        for exchange in earlier:
            self._earlier.setdefault(exchange.line, []).append(exchange)

    def had(self, line: str) -> Exchange | None:
        """Return the next exchange of this line that was had earlier; the last one again and again."""
        exchanges = self._earlier.get(line, [None])
        return exchanges.pop(0) if len(exchanges) > 1 else exchanges[0]


# --- the fault ----------------------------------------------------------------------------------------------


def is_about(fault: Fault, line: str) -> bool:
    return bool(re.search(fault.get("when", ""), line))


def with_fault(exchange: Exchange, chunks: Iterable[str], fault: Fault) -> Answer:
    is_about_it = fault.get("was", exchange.status) == exchange.status
    if is_about_it and {"as_whole", "joined", "said"} & fault.keys():
        chunks = ["".join(chunks)]
        is_about_it = bool(re.search(fault.get("said", ""), chunks[0], re.DOTALL))
    if not is_about_it:
        return exchange.status, exchange.headers, chunks
    headers = exchange.headers | fault.get("headers", {})
    named = {name: value for name, value in headers.items() if value}
    changed = (edited(chunk, fault.get("reply")) for chunk in chunks)
    if "as_whole" in fault:
        changed = (frame for chunk in changed for frame in re.split(r"(?<=\n\n)", chunk))
    return fault.get("status", exchange.status), named, changed


def changes(fault: Fault, exchange: Exchange) -> bool:
    """Whether the fault makes another exchange of it."""
    if not is_about(fault, exchange.line):
        return False
    status, headers, chunks = with_fault(exchange, exchange.chunks, fault)
    is_same = (status, headers, list(chunks)) == (exchange.status, exchange.headers, exchange.chunks)
    return not is_same or "holds" in fault or edited(exchange.line, fault.get("ask")) != exchange.line


def edited(text: str, change: list[str] | None) -> str:
    if not change:
        return text
    old, new = change
    return re.sub(old, new, text, count=1, flags=re.DOTALL)


def chunks_of(reply: http.client.HTTPResponse, kept: list[str]) -> Iterator[str]:
    """Yield a stream an event at a time, though ours may write several at once; another body whole."""
    rest = b""
    while reply.chunked and (piece := reply.read1()):
        *events, rest = (rest + piece).split(b"\n\n")
        for event in events:
            kept.append(event.decode("latin-1") + "\n\n")
            yield kept[-1]
    kept.append((rest or reply.read()).decode("latin-1"))
    yield kept[-1]
