"""The real server in a process of its own, and a client that hides nothing of what it sends.

    with serve("--api-key", "k") as server: server.post("/v1/responses", {...}) --> Reply

The `openai` package is the other client; this one is for what that would not send or show.
"""

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Set
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import openai
from websockets.sync.client import ClientConnection, connect

from helpers import forked
from helpers.limits import PATIENCE_S, SLOWNESS

ROOT = Path(__file__).parents[2]
TINY = ROOT / "tests" / "models" / "tiny"
SERVER = ("server.py",)  # with Numba, if it is installed: twice as long to start, half as long for a token
NUMPY = ("-m", "tests.helpers.faulty_server")  # with NumPy, and faults for those who ask for them: forked
START_S = 300 * SLOWNESS  # Numba may have to compile the kernels

Json = dict[str, Any]


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Server:
    """A server that is running."""

    def __init__(self, url: str, process: subprocess.Popen[str] | forked.Forked, log: Path) -> None:
        self.url = url
        self.process = process
        self.pid = process.pid or 0
        self._log = log

    def log(self) -> str:
        """What it has written to stderr so far."""
        return self._log.read_text(encoding="utf-8")

    def sdk(self, api_key: str = "any") -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url + "/v1", api_key=api_key, max_retries=0, timeout=PATIENCE_S)

    def request(self, method: str, path: str, body: bytes | None, **headers: str) -> Reply:
        host = urlsplit(self.url).netloc
        with contextlib.closing(http.client.HTTPConnection(host, timeout=PATIENCE_S)) as connection:
            connection.request(method, path, body, {k.replace("_", "-"): v for k, v in headers.items()})
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return Reply(response.status, found, response.read())

    def get(self, path: str, **headers: str) -> Reply:
        return self.request("GET", path, None, **headers)

    def post(self, path: str, body: Any, **headers: str) -> Reply:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.request("POST", path, raw, Content_Type="application/json", **headers)

    def health(self) -> Json:
        found: Json = self.get("/health").json
        return found

    @contextlib.contextmanager
    def connect(self, data: bytes) -> Iterator[socket.socket]:
        """A connection on which `data` was sent; leaving the block is leaving the server."""
        host, _, port = urlsplit(self.url).netloc.partition(":")
        with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
            try:
                connection.sendall(data)
                yield connection
            finally:  # close() would wait for a generator that still has a file of this connection
                socket.close(connection.detach())

    @contextlib.contextmanager
    def websocket(self, path: str = "/v1/responses", **settings: Any) -> Iterator[ClientConnection]:
        """A WebSocket that reads all the time: one that does not could not be closed."""
        url = self.url.replace("http", "ws", 1) + path
        limits: Json = {"open_timeout": PATIENCE_S, "max_size": None, "max_queue": None}
        with connect(url, **limits, **settings) as connection:
            assert isinstance(connection, ClientConnection)
            yield connection

    def interrupt(self, number: signal.Signals = signal.SIGINT) -> None:
        self.process.send_signal(number)

    def exit_status(self) -> int:
        return self.process.wait(PATIENCE_S)


def http_bytes(path: str, body: Any = None, method: str = "POST", **headers: str) -> bytes:
    """Encode a whole request, or only its head if there is no body; one that is not bytes becomes JSON."""
    raw = body if isinstance(body, bytes) else b""
    if body is not None:
        raw = raw or json.dumps(body).encode()
        headers = {"Content-Length": str(len(raw))} | headers
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n"
    head += "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return f"{head}\r\n".encode() + raw


def http_chunks(connection: socket.socket) -> Generator[bytes]:
    """The chunks of a reply with Transfer-Encoding: chunked, each as the server wrote it."""
    with connection.makefile("rb") as lines:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            line = lines.readline()
            assert line, f"expected the head of a reply, got the end of the connection behind {head!r}"
            head += line
        assert b"chunked" in head, f"expected a reply in chunks, got {head!r}"
        while size := int(lines.readline(), 16):
            yield lines.read(size)
            assert lines.readline() == b"\r\n"


def http_frames(connection: socket.socket) -> Generator[bytes]:
    """The frames of a stream; a chunk holds whole ones."""
    with contextlib.closing(http_chunks(connection)) as chunks:
        for chunk in chunks:
            *frames, rest = chunk.split(b"\n\n")
            assert rest == b"", f"expected whole frames, got {chunk!r}"
            yield from (frame + b"\n\n" for frame in frames)


def without(value: Any, names: Set[str]) -> Any:
    """Return a JSON value without the members of these names, however deep they stand."""
    match value:
        case dict():
            return {name: without(inner, names) for name, inner in value.items() if name not in names}
        case list():
            return [without(inner, names) for inner in value]
    return value


def until(holds: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
    """Wait for something that happens in another process: whoever asks too often takes its processor."""
    began_at = time.monotonic()
    while not holds():
        waited_s = time.monotonic() - began_at
        assert waited_s < patience_s, f"waited {patience_s} s until {what}"
        time.sleep(0.005 + waited_s / 20)


@contextlib.contextmanager
def serve(*flags: str, model: Path | None = TINY, script: tuple[str, ...] = NUMPY) -> Iterator[Server]:
    """Start a server, wait until it listens; in the end kill it, unless it has ended."""
    chosen = ["--model", str(model)] if model else []
    chosen += ["--port", "0", "--threads", "1", *flags]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file in ("said", "log"):
            (folder / file).touch()
        process = started(chosen, script, folder)
        try:
            yield Server(listening(process, folder), process, folder / "log")
        finally:
            process.kill()
            process.wait()


def started(flags: list[str], script: tuple[str, ...], folder: Path) -> subprocess.Popen[str] | forked.Forked:
    if script == NUMPY:
        return forked.started(flags, environment(), folder)
    with (folder / "said").open("w") as said, (folder / "log").open("w") as log:
        settings: Any = {"stdout": said, "stderr": log, "cwd": ROOT, "env": environment(), "text": True}
        return subprocess.Popen([sys.executable, *script, *flags], **settings)


def listening(process: subprocess.Popen[str] | forked.Forked, folder: Path) -> str:
    """Return the URL that the server announces."""

    def urls() -> list[str]:
        return re.findall(r"^listening +(\S+)\n", (folder / "said").read_text(), re.MULTILINE)

    until(lambda: bool(urls()) or process.poll() is not None, "it listens", START_S)
    assert urls(), f"it ended with {process.poll()}:\n{(folder / 'log').read_text(encoding='utf-8')}"
    return urls()[0]


def run(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run a command of Python to its end; `more` are settings of subprocess.run()."""
    settings: Any = {"cwd": ROOT, "env": environment(), "timeout": PATIENCE_S, "text": True} | more
    return subprocess.run([sys.executable, *arguments], capture_output=True, **settings)


def environment() -> dict[str, str]:
    """Without what would change what a process prints or demands, and without a network for the Hub."""
    ours = {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "100"}
    return {name: value for name, value in os.environ.items() if name != "LLMREF_API_KEY"} | ours
