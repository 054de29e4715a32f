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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import threadpoolctl
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

import hub
import loading
import logs
import upstreams
from api import ALIAS, Api, Worker, encode_event
from background import Registry
from dialects import DIALECTS
from front import Keys, make_app
from metering import Counts, Prices
from remote import RemoteWorker
from responses import REASONING_EVENTS
from store import Limits, Store
from worker import LocalWorker

IN_MEMORY = ":memory:"
MAX_HEAD_BYTES = 64 * 1024  # of a request: its line and its headers; h11 answers 400 to more
SEND_BUFFER_BYTES = 128 * 1024  # of a connection; Linux takes twice as many
STALLED_S = 2  # at a stop, what clients get to take their last event, after the grace


# --- the command line ---------------------------------------------------------------------------------------

MODEL = (
    "a Hugging Face model directory, or an id on the Hub such as Qwen/Qwen3-0.6B; "
    "without it, SmolLM2-135M-Instruct is fetched once and served"
)
NAME = f"name in requests, repeatable (default: the directory's); '{ALIAS}' always works too"
LENGTH = "context in tokens, prompt and answer (default: the model's own)"
KEY = "demand 'Authorization: Bearer KEY', but for / and /health; repeatable: nobody sees another's responses"
KEY_FILE = "the same, a key a line: other users of this machine can read a command line"
ORIGIN = "let pages from there, such as https://example.org, call us; repeatable, '*': from anywhere"
STREAMS = "requests that are open at once; one more is refused with 503"
READER = "seconds until a client that reads nothing is dropped"
DONE_LINE = "end Responses streams without 'data: [DONE]'"
TEMPORARY = "refuse background with store=false, as OpenAI did at first, not keep it for 10 minutes"
STORE = "SQLite file that keeps responses; in memory they are lost at exit"
SECRET = "key of what clients keep for us: reasoning, compactions (default: another at each start)"
KV_MEMORY = "memory for keys and values, such as 2G (default: a quarter of what is free)"
MAX_DRAFTS = 16  # of a sequence in a step: a GPU verifies as many at the price of one
SPECULATE = f"tokens to draft from what was said before, up to {MAX_DRAFTS}; 0: none"
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


SUFFIXES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def size(text: str) -> int:
    """Bytes, with a suffix: 512M, 1.5G"""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", text, re.ASCII | re.IGNORECASE)
    if not found or not (n_bytes := int(float(found[1]) * SUFFIXES[found[2].upper()])):
        raise argparse.ArgumentTypeError(f"expected bytes such as 512M or 2G, got {text}")
    return n_bytes


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text}")
    return value


def natural(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 15:
        raise argparse.ArgumentTypeError(f"expected 0 or more, got {text}")
    return int(text)


def base_url(text: str) -> str:
    try:
        parts = urlsplit(text)
        _ = parts.port
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected http://HOST:PORT/v1 or the like, got {text}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise argparse.ArgumentTypeError(f"expected http://HOST:PORT/v1 or the like, got {text}")
    return text


def positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {text}")
    return int(text)


# fmt: off
#   option                default               what argparse needs to know besides
OPTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "model":               (None,                 {"metavar": "DIR|ID", "help": MODEL}),
    "host":                ("127.0.0.1",          {"help": "address to listen on; 0.0.0.0: all interfaces"}),
    "port":                (8000,                 {"type": int, "help": "to listen on; 0: any free one"}),
    "device":              ("auto",               {"choices": DEVICES, "help": "where to compute"}),
    "threads":             (None,                 {"type": positive, "help": "default: all cores"}),
    "max-model-len":       (None,                 {"type": positive, "help": LENGTH}),
    "kv-memory":           (None,                 {"type": size, "metavar": "BYTES", "help": KV_MEMORY}),
    "max-batch":           (16,                   {"type": positive, "help": "sequences to run at once"}),
    "speculate":           (0,                    {"type": int, "choices": range(MAX_DRAFTS + 1),
                                                   "metavar": "N", "help": SPECULATE}),
    "served-model-name":   (None,                 {"metavar": "NAME", "action": "append", "help": NAME}),
    "dialect":             (None,                 {"choices": tuple(DIALECTS), "help": DIALECT}),
    "api-key":             (None,                 {"metavar": "KEY", "action": "append", "help": KEY}),
    "api-key-file":        (None,                 {"metavar": "FILE", "type": Path, "help": KEY_FILE}),
    "cors-origin":         (None,                 {"metavar": "URL", "action": "append", "help": ORIGIN}),
    "max-streams":         (1024,                 {"type": positive, "help": STREAMS}),
    "reader-timeout":      (60.0,                 {"type": float, "help": READER}),
    "no-done-line":        (False,                {"action": "store_true", "help": DONE_LINE}),
    "reasoning-events":    ("openai",             {"choices": tuple(REASONING_EVENTS), "help": EVENTS}),
    "no-temporary":        (False,                {"action": "store_true", "help": TEMPORARY}),
    "store":               (IN_MEMORY,            {"metavar": "FILE", "help": STORE}),
    "store-max-responses": (Limits.max_responses, {"type": positive, "help": "keep the newest N"}),
    "store-max-bytes":     (Limits.max_bytes,     {"type": positive, "help": "and N bytes of them"}),
    "store-max-age":       (Limits.max_age_s,     {"type": float, "help": "each for N seconds"}),
    "secret":              (None,                 {"metavar": "TEXT", "help": SECRET}),
    "max-queued":          (256,                  {"type": positive, "help": "background runs that wait"}),
    "shutdown-grace":      (5.0,                  {"type": float, "help": "seconds to finish in at a stop"}),
    "upstream":            (None,                 {"type": base_url, "metavar": "URL", "action": "append",
                                                   "help": UPSTREAM}),
    "upstream-api-key":    (None,                 {"metavar": "KEY", "help": UPSTREAM_KEY}),
    "upstream-model":      (None,                 {"metavar": "NAME", "action": "append", "help": UNLISTED}),
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
    return parser


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
    except (OSError, OverflowError) as error:
        raise OSError(
            f"cannot listen on {host} port {port}: {getattr(error, 'strerror', None) or error}"
        ) from error
    return listener


def read_keys(args: argparse.Namespace) -> list[str]:
    lines = args.api_key_file.read_text(encoding="utf-8").splitlines() if args.api_key_file else []
    keys = [*(args.api_key or []), *filter(None, map(str.strip, lines))]
    if args.api_key_file and not keys:
        raise ValueError(f"--api-key-file {args.api_key_file}: expected a key a line, got none")
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


def protocol(reader_timeout: float) -> type[H11Protocol]:
    """HTTP/1.1, where a client that reads nothing for so many seconds is dropped.

    The transport asks to pause when 64 KiB wait behind a full socket, and to go on when most have left.
    """

    class Protocol(H11Protocol):
        deadline: asyncio.TimerHandle | None = None  # while writing is paused

        def pause_writing(self) -> None:
            super().pause_writing()
            self.deadline = self.loop.call_later(reader_timeout, self.drop)

        def resume_writing(self) -> None:
            super().resume_writing()
            self.relent()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self.relent()

        def relent(self) -> None:
            if self.deadline:
                self.deadline.cancel()

        def drop(self) -> None:
            linger_for_nothing = struct.pack("ii", 1, 0)  # what waits in the system goes too: man 7 socket
            connection = self.transport.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger_for_nothing)
            self.transport.abort()

    return Protocol


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
    patience = math.ceil(args.shutdown_grace) + STALLED_S
    config = uvicorn.Config(
        make_app(api, keys, args.max_streams, args.cors_origin or ()),
        http=protocol(args.reader_timeout),
        ws="none",
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=patience,  # for clients that neither read nor leave
    )
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
