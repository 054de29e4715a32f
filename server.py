"""The server: the command line, start and stop.

    python server.py --model DIR    (README.md; --help explains the rest)

Rules of this file:
1. What cannot work is said in one line at the start, with exit status 2.
2. Everything ends: a stop lets what runs finish for a while, then gives every open stream its last event.

Not here: the endpoints (api.py), what stands around them (front.py).
"""

import argparse
import asyncio
import contextlib
import hashlib
import json
import logging
import math
import os
import re
import secrets
import signal
import socket
import sqlite3
import struct
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import threadpoolctl
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

import hub
import loading
import logs
import upstreams
from answers import error_body, new_id
from api import ALIAS, Api, Worker, encode_event
from background import Registry
from dialects import DIALECTS
from front import Keys, make_app
from metering import Counts, Prices
from remote import RemoteWorker
from responses import REASONING_EVENTS
from store import Limits, Store
from worker import LocalWorker

log = logging.getLogger("server")
T = TypeVar("T", int, float)

IN_MEMORY = ":memory:"
KEY_VARIABLE = "LLMREF_API_KEY"
MAX_HEAD_BYTES = 64 * 1024  # of a request: its line and its headers; h11 answers 400 to more
MAX_HEAD_S = 60  # until it has come
KEEP_ALIVE_S = 75  # of an idle connection, as nginx has it: clients that reuse one drop it before we do
SEND_BUFFER_BYTES = 128 * 1024  # of a connection; Linux takes twice as many
STALLED_S = 2  # at a stop, what clients get to take their last event, after the grace


# --- the command line ---------------------------------------------------------------------------------------

MODEL = (
    "a Hugging Face model directory, or an id on the Hub such as Qwen/Qwen3-0.6B; "
    "without it, SmolLM2-135M-Instruct is fetched once and served"
)
HOST = "address to listen on; 0.0.0.0: all interfaces"
NAME = f"name in requests, repeatable (default: the directory's); '{ALIAS}' always works too"
LENGTH = "context in tokens, prompt and answer (default: the model's own)"
KEY = (
    "require 'Authorization: Bearer KEY' except for / and /health; repeatable; each key sees only its own "
    f"responses; {KEY_VARIABLE} in the environment is one more"
)
KEY_FILE = "the same, a key a line: other users of this machine can read a command line"
ORIGIN = "let pages from there, such as https://example.org, call us; repeatable, '*': from anywhere"
STREAMS = "requests that are open at once; one more is refused with 503"
READER = "seconds before a client that has stopped reading is dropped"
DONE_LINE = "end Responses streams without 'data: [DONE]'"
TEMPORARY = "refuse background with store=false, as OpenAI did at first, not keep it for 10 minutes"
GRACE = "seconds to finish in at a stop"
STORE = "SQLite file that keeps responses; in memory they are lost at exit"
SECRET = "key of what clients keep for us: reasoning, compactions (default: another at each start)"
KV_MEMORY = "memory for keys and values, such as 2G (default: a quarter of what is free)"
MAX_DRAFTS = 16  # of a sequence in a step: a GPU verifies as many at the price of one
SPECULATE = f"draft up to N tokens per step by prompt lookup, at most {MAX_DRAFTS}; 0 turns it off"
DIALECT = "how the model marks reasoning and calls (default: as its chat template says)"
EVENTS = "names of reasoning events: reasoning_text.* or, for Open Responses' own tests, reasoning.*"
UPSTREAM = (
    "an OpenAI-compatible server whose models are served too, repeatable, such as http://host:8000/v1; "
    "without --model only those"
)
UPSTREAM_KEY = "sent to the upstreams as 'Authorization: Bearer KEY'"
UNLISTED = "a model that the upstreams serve and do not list, repeatable"
PROBE = "seconds between two looks at an upstream's /v1/models"
PER_TOKEN = "give the usage of upstreams its cost: this much a token, an integer; without it, none"
WEIGHT = "weight of these tokens in the cost, in ten-thousandths"
COEFFICIENT = "weight of all tokens in the cost, in thousandths"
LIMITS = upstreams.DEFAULTS
DEVICES = ("auto", "cuda", "cpu")  # auto: cuda where it is built, else cpu
LEVELS = ("debug", "info", "warning", "error")
MAX_NUMBER = 10**15  # of any kind: SQLite, C and the event loop's clock hold it


SUFFIXES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def size(text: str) -> int:
    """Bytes, with a suffix: 512M, 1.5G"""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", text, re.ASCII | re.IGNORECASE)
    n_bytes = float(found[1]) * SUFFIXES[found[2].upper()] if found else 0
    if not 1 <= n_bytes <= MAX_NUMBER:
        raise argparse.ArgumentTypeError(f"expected bytes such as 512M or 2G, got {text}")
    return int(n_bytes)


def at_least(low: float, kind: Callable[[str], T]) -> Callable[[str], T]:
    """A number from `low` to MAX_NUMBER; NaN and infinity are none."""

    def number(text: str) -> T:
        try:
            value = kind(text)
            if low <= float(value) <= MAX_NUMBER:
                return value
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"expected {low} or more, at most {MAX_NUMBER:.0e}, got {text}")

    return number


def text(given: str, what: str = "a text") -> str:
    """Nothing is a mistake: most often a variable of the shell that is not set."""
    if not given.strip():
        raise argparse.ArgumentTypeError(f"expected {what}, got nothing")
    return given.strip()


def key(given: str) -> str:
    key = text(given, "a key")
    if not (key.isascii() and key.isprintable()):
        raise argparse.ArgumentTypeError("expected a key of printable ASCII, for it travels in a header")
    return key


def origin(text: str) -> str:
    if not re.fullmatch(r"\*|[a-z][a-z0-9+.-]*://[^/?#@\s]+", text):
        raise argparse.ArgumentTypeError(f"expected https://HOST, https://HOST:PORT or '*', got {text}")
    return text


def base_url(text: str) -> str:
    try:
        parts = urlsplit(text)
        _ = parts.port
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected http://HOST:PORT/v1 or the like, got {text}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise argparse.ArgumentTypeError(f"expected http://HOST:PORT/v1 or the like, got {text}")
    return text


natural, positive = at_least(0, int), at_least(1, int)
seconds = at_least(0.001, float)

# fmt: off
#   option                default               what argparse needs to know besides
OPTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "model":               (None,                 {"type": text, "metavar": "DIR|ID", "help": MODEL}),
    "host":                ("127.0.0.1",          {"type": text, "metavar": "HOST", "help": HOST}),
    "port":                (8000,                 {"type": natural, "help": "to listen on; 0: any free one"}),
    "device":              ("auto",               {"choices": DEVICES, "help": "where to compute"}),
    "threads":             (None,                 {"type": positive, "help": "default: all cores"}),
    "max-model-len":       (None,                 {"type": positive, "help": LENGTH}),
    "kv-memory":           (None,                 {"type": size, "metavar": "BYTES", "help": KV_MEMORY}),
    "max-batch":           (16,                   {"type": positive, "help": "sequences to run at once"}),
    "speculate":           (0,                    {"type": natural, "choices": range(MAX_DRAFTS + 1),
                                                   "metavar": "N", "help": SPECULATE}),
    "served-model-name":   (None,                 {"type": text, "metavar": "NAME", "action": "append",
                                                   "help": NAME}),
    "dialect":             (None,                 {"choices": tuple(DIALECTS), "help": DIALECT}),
    "api-key":             (None,                 {"type": key, "metavar": "KEY", "action": "append",
                                                   "help": KEY}),
    "api-key-file":        (None,                 {"metavar": "FILE", "type": Path, "help": KEY_FILE}),
    "cors-origin":         (None,                 {"type": origin, "metavar": "URL", "action": "append",
                                                   "help": ORIGIN}),
    "max-streams":         (1024,                 {"type": positive, "help": STREAMS}),
    "reader-timeout":      (60.0,                 {"type": seconds, "help": READER}),
    "no-done-line":        (False,                {"action": "store_true", "help": DONE_LINE}),
    "reasoning-events":    ("openai",             {"choices": tuple(REASONING_EVENTS), "help": EVENTS}),
    "no-temporary":        (False,                {"action": "store_true", "help": TEMPORARY}),
    "store":               (IN_MEMORY,            {"type": text, "metavar": "FILE", "help": STORE}),
    "store-max-responses": (Limits.max_responses, {"type": positive, "help": "keep the newest N"}),
    "store-max-bytes":     (Limits.max_bytes,     {"type": positive, "help": "and N bytes of them"}),
    "store-max-age":       (Limits.max_age_s,     {"type": seconds, "help": "each for N seconds"}),
    "secret":              (None,                 {"type": text, "metavar": "TEXT", "help": SECRET}),
    "max-queued":          (256,                  {"type": positive, "help": "background runs that wait"}),
    "shutdown-grace":      (5.0,                  {"type": at_least(0, float), "help": GRACE}),
    "upstream":            (None,                 {"type": base_url, "metavar": "URL", "action": "append",
                                                   "help": UPSTREAM}),
    "upstream-api-key":    (None,                 {"type": key, "metavar": "KEY", "help": UPSTREAM_KEY}),
    "upstream-model":      (None,                 {"type": text, "metavar": "NAME", "action": "append",
                                                   "help": UNLISTED}),
    "upstream-connect":    (LIMITS.connect_s,     {"type": seconds, "help": "seconds to connect in"}),
    "upstream-first-byte": (LIMITS.first_byte_s,  {"type": seconds, "help": "seconds until it answers"}),
    "upstream-idle":       (LIMITS.idle_s,        {"type": seconds, "help": "seconds of silence in one"}),
    "upstream-probe":      (LIMITS.probe_s,       {"type": seconds, "help": PROBE}),
    "price-per-token":     (None,                 {"type": natural, "help": PER_TOKEN}),
    "price-prompt":        (10_000,               {"type": natural, "help": WEIGHT}),
    "price-cached":        (10_000,               {"type": natural, "help": WEIGHT}),
    "price-completion":    (10_000,               {"type": natural, "help": WEIGHT}),
    "price-reasoning":     (10_000,               {"type": natural, "help": WEIGHT}),
    "price-coefficient":   (1000,                 {"type": natural, "help": COEFFICIENT}),
    "log-level":           ("info",               {"choices": LEVELS, "help": "how much to log, on stderr"}),
    "log-format":          ("text",               {"choices": (*logs.FORMATS,), "help": "of its lines"}),
}
# fmt: on


def arguments() -> argparse.ArgumentParser:
    about = "Serve a language model over OpenAI's Responses and Chat Completions APIs."
    parser = argparse.ArgumentParser(description=about)
    for name, (default, settings) in OPTIONS.items():
        shown = f"{settings['help']} (default: {default})" if default else settings["help"]
        metavar = {"metavar": "N"} if "type" in settings else {}
        parser.add_argument(f"--{name}", default=default, **metavar | settings | {"help": shown})
    parser.add_argument("--version", action="version", version=version())
    return parser


def version() -> str:
    project = tomllib.loads(Path(__file__).with_name("pyproject.toml").read_text(encoding="utf-8"))["project"]
    return f"{project['name']} {project['version']}"


def main() -> int:
    args = arguments().parse_args()
    logs.start(args.log_level, args.log_format)
    if args.threads:
        threadpoolctl.threadpool_limits(args.threads, user_api="blas")
    try:
        args.device = loading.device(args.device)
        listener = bind(args.host, args.port)
        local = None if args.upstream and not args.model else loading.load(hub.find(args.model), args)
        store = open_store(args)
        keys = Keys(read_keys(args))
    except (ValueError, OSError, MemoryError, sqlite3.Error) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    asyncio.run(serve(args, keys, local, store, listener))
    return 0


def remote_worker(args: argparse.Namespace) -> RemoteWorker | None:
    if not args.upstream:
        return None
    limits = upstreams.Limits(
        args.upstream_connect, args.upstream_first_byte, args.upstream_idle, args.upstream_probe
    )
    prices = None
    if args.price_per_token is not None:
        weighed = Counts(args.price_prompt, args.price_cached, args.price_completion, args.price_reasoning)
        prices = Prices(args.price_per_token, weighed, args.price_coefficient)
    unlisted = args.upstream_model or []
    return RemoteWorker(upstreams.Upstreams(args.upstream, args.upstream_api_key, limits, unlisted), prices)


def bind(host: str, port: int) -> socket.socket:
    """Take the port before the model is loaded, so that a taken one is known at once; early clients wait."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Only where TCP is named does asyncio turn Nagle's algorithm off: events would wait for their ACKs.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    # Else the system keeps up to 4 MB, by and by, for a client that reads nothing, and we would not notice.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    if os.name == "posix":  # a port in TIME_WAIT is free; elsewhere the option means something else
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()  # bound only, it could be bound again
    except (OSError, OverflowError, UnicodeError) as error:
        raise OSError(
            f"cannot listen on {host} port {port}: {getattr(error, 'strerror', None) or error}"
        ) from error
    return listener


def read_keys(args: argparse.Namespace) -> list[str]:
    """Those of the command line, the file and the environment; a source without one raises ValueError."""
    keys, sources = list[str](args.api_key or ()), dict[str, list[str]]()
    if args.api_key_file:
        lines = args.api_key_file.read_text(encoding="utf-8").splitlines()
        sources[f"--api-key-file {args.api_key_file}"] = list(filter(str.strip, lines)) or [""]
    if KEY_VARIABLE in os.environ:
        sources[KEY_VARIABLE] = [os.environ[KEY_VARIABLE]]
    for source, texts in sources.items():
        try:
            keys += map(key, texts)
        except argparse.ArgumentTypeError as error:
            raise ValueError(f"{source}: {error}") from error
    return keys


def open_store(args: argparse.Namespace) -> Store:
    try:
        return Store(args.store, Limits(args.store_max_responses, args.store_max_bytes, args.store_max_age))
    except sqlite3.Error as error:
        raise sqlite3.Error(f"--store {args.store}: {error}") from error


# --- start and stop -----------------------------------------------------------------------------------------


class HttpServer(uvicorn.Server):
    """uvicorn, with the signals left to us: open streams need their last event before they are waited for."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


NO_HTTP = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"
    b"x-request-id: %s\r\nConnection: close\r\n\r\n%s"
)


class Protocol(H11Protocol):
    """HTTP/1.1, without clients that never say what they want, or that do not read what they get.

    The transport asks to pause when 64 KiB wait behind a full socket, and to go on when most have left.
    """

    reader_timeout: float  # seconds
    deadline: asyncio.TimerHandle | None = None  # while writing is paused
    head_due: asyncio.TimerHandle  # runs while what comes belongs to no request that is being answered

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.head_due = self.loop.call_later(MAX_HEAD_S, self.drop)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle and not self.cycle.response_complete:
            self.head_due.cancel()
        elif self.head_due.cancelled():  # the next head begins, or a body goes on that nobody wants
            self.head_due = self.loop.call_later(MAX_HEAD_S, self.drop)

    def send_400_response(self, msg: str) -> None:
        """An error like any other, to what is no HTTP; an answer that has begun breaks off."""
        id_ = new_id("req")
        token = logs.REQUEST_ID.set(id_)
        log.info("400: %s", msg)
        logs.REQUEST_ID.reset(token)
        if self.cycle and not self.cycle.response_complete:
            self.cycle.disconnected = True  # nobody answers it once more
            self.cycle.message_event.set()
            if self.cycle.response_started:
                self.transport.abort()
                return
        body = json.dumps(error_body(400, msg, code="invalid_http")).encode()
        self.transport.write(NO_HTTP % (len(body), id_.encode(), body))
        self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.deadline = self.loop.call_later(self.reader_timeout, self.drop)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.relent()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.head_due.cancel()
        self.relent()

    def relent(self) -> None:
        if self.deadline:
            self.deadline.cancel()

    def drop(self) -> None:
        linger_for_nothing = struct.pack("ii", 1, 0)  # what waits in the system goes too: man 7 socket
        connection = self.transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger_for_nothing)
        self.transport.abort()


def protocol(seconds: float) -> type[H11Protocol]:
    class Timed(Protocol):
        reader_timeout = seconds

    return Timed


def http_config(app: ASGIApp, args: argparse.Namespace) -> uvicorn.Config:
    patience = math.ceil(args.shutdown_grace) + STALLED_S
    return uvicorn.Config(
        app,
        http=protocol(args.reader_timeout),
        ws="none",
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=patience,  # for clients that neither read nor leave
    )


async def serve(
    args: argparse.Namespace,
    keys: Keys,
    local: LocalWorker | None,
    store: Store,
    listener: socket.socket,
) -> None:
    registry = Registry(store, encode_event, max_queued=args.max_queued)
    remote = remote_worker(args)
    api = Api(
        local,
        remote,
        registry,
        sealing_key(args.secret),
        done_line=not args.no_done_line,
        temporary=not args.no_temporary,
        reasoning_events=args.reasoning_events,
    )
    if remote:
        await remote.upstreams.start()
    await api.take_over()
    config = http_config(make_app(api, keys, args.max_streams, args.cors_origin or ()), args)
    workers: list[Worker] = [worker for worker in (local, remote) if worker]
    server, hurry, stopping = HttpServer(config), asyncio.Event(), list[asyncio.Task[None]]()

    def on_signal() -> None:
        """Ctrl-C or SIGTERM: stop accepting, let what runs finish; the second time: end it now."""
        if server.should_exit:
            hurry.set()
        else:
            notify("STOPPING=1")
            server.should_exit = True
            stopping.append(asyncio.create_task(stop(args, workers, registry, hurry)))

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: loop.call_soon_threadsafe(on_signal))
    loop.call_soon(announce, args, local, remote, listener)
    await server.serve(sockets=[listener])
    await asyncio.gather(*stopping)
    store.close()


async def stop(
    args: argparse.Namespace, workers: Sequence[Worker], registry: Registry, hurry: asyncio.Event
) -> None:
    registry.hold()
    deadline = time.monotonic() + args.shutdown_grace
    while any(worker.busy() for worker in workers) and not hurry.is_set() and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    await registry.close(persistent=args.store != IN_MEMORY)
    for worker in workers:
        await worker.close()  # what still runs, in the foreground, fails


def notify(state: str) -> None:
    """Tell systemd, if it has started us: https://www.freedesktop.org/software/systemd/man/sd_notify.html"""
    if address := os.environ.get("NOTIFY_SOCKET"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
            systemd.sendto(state.encode(), address.replace("@", "\0", 1) if address[0] == "@" else address)


def sealing_key(secret: str | None) -> bytes:
    return hashlib.sha256(secret.encode()).digest() if secret else secrets.token_bytes(32)


def announce(
    args: argparse.Namespace,
    local: LocalWorker | None,
    remote: RemoteWorker | None,
    listener: socket.socket,
) -> None:
    host, port = listener.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    elsewhere = list(remote.upstreams.models()) if remote else []
    # A small model rambles when it is sampled, one time in four until its context is full.
    asked = {"input": "What is the capital of France?", "temperature": 0}
    names = [*(local.names if local else ()), *elsewhere, ALIAS]
    body = json.dumps({"model": names[0]} | asked)
    facts = loading.facts(args, local) if local else {}
    if remote:
        facts["upstreams"] = f"{', '.join(args.upstream)} with {', '.join(elsewhere) or 'no model yet'}"
    for name, value in {
        **facts,
        "store": "in memory: responses are lost at exit" if args.store == IN_MEMORY else args.store,
        "listening": url,
    }.items():
        print(f"{name:10} {value}")
    notify("READY=1")
    print(f"\ncurl {url}/v1/responses -H 'Content-Type: application/json' -d '{body}'\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
