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
import secrets
import signal
import socket
import sqlite3
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import threadpoolctl
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

import hub
import logs
import weights
from api import ALIAS, Api, encode_event, generation_defaults
from background import Registry
from chat import ChatTemplate
from engine import Engine
from front import Keys, make_app
from grammar import Grammars
from store import Limits, Store
from tokenizer import Tokenizer
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
DEVICES = ("auto", "cuda", "cpu")  # auto: cuda where it is built, else cpu
LEVELS = ("debug", "info", "warning", "error")


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
    "threads":             (None,                 {"type": positive, "help": "of BLAS (default: all cores)"}),
    "max-model-len":       (None,                 {"type": positive, "help": LENGTH}),
    "served-model-name":   (None,                 {"metavar": "NAME", "action": "append", "help": NAME}),
    "api-key":             (None,                 {"metavar": "KEY", "action": "append", "help": KEY}),
    "api-key-file":        (None,                 {"metavar": "FILE", "type": Path, "help": KEY_FILE}),
    "cors-origin":         (None,                 {"metavar": "URL", "action": "append", "help": ORIGIN}),
    "max-streams":         (1024,                 {"type": positive, "help": STREAMS}),
    "reader-timeout":      (60.0,                 {"type": float, "help": READER}),
    "no-done-line":        (False,                {"action": "store_true", "help": DONE_LINE}),
    "no-temporary":        (False,                {"action": "store_true", "help": TEMPORARY}),
    "store":               (IN_MEMORY,            {"metavar": "FILE", "help": STORE}),
    "store-max-responses": (Limits.max_responses, {"type": positive, "help": "keep the newest N"}),
    "store-max-bytes":     (Limits.max_bytes,     {"type": positive, "help": "and N bytes of them"}),
    "store-max-age":       (Limits.max_age_s,     {"type": float, "help": "each for N seconds"}),
    "secret":              (None,                 {"metavar": "TEXT", "help": SECRET}),
    "max-queued":          (256,                  {"type": positive, "help": "background runs that wait"}),
    "shutdown-grace":      (5.0,                  {"type": float, "help": "seconds to finish in at a stop"}),
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
        if args.device == "cuda":
            raise ValueError("--device cuda: the GPU engine is not built yet; use --device cpu")
        listener = bind(args.host, args.port)
        directory = hub.find(args.model)
        worker = load(directory, args.max_model_len)
        defaults = generation_defaults(worker.engine.config.generation)
        store = open_store(args)
        keys = Keys(read_keys(args))
    except (ValueError, OSError, MemoryError, sqlite3.Error) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    by_id = args.model and not Path(args.model).exists()
    names = args.served_model_name or [args.model if by_id else directory.name]
    asyncio.run(serve(args, keys, worker, defaults, store, names, listener))
    return 0


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


def load(directory: Path, max_model_len: int | None) -> LocalWorker:
    config = weights.read_config(directory)
    length = max_model_len or config.max_seq_len
    if not 2 <= length <= config.max_seq_len:
        limit = f"expected 2 to {config.max_seq_len}, the model's own limit"
        raise weights.UnsupportedModel(f"--max-model-len {length}: {limit}")
    vocabulary = directory / "tokenizer.json"
    template, tokenizer = ChatTemplate.load(directory), Tokenizer(vocabulary)
    grammars = Grammars(vocabulary, config.vocab_size, config.eos_token_ids)
    engine = Engine(config, weights.read_weights(directory, config), length)
    return LocalWorker(engine, tokenizer, template, grammars)


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
    worker: LocalWorker,
    defaults: dict[str, Any],
    store: Store,
    names: list[str],
    listener: socket.socket,
) -> None:
    registry = Registry(store, encode_event, max_queued=args.max_queued)
    api = Api(
        worker,
        registry,
        defaults,
        names,
        sealing_key(args.secret),
        done_line=not args.no_done_line,
        temporary=not args.no_temporary,
    )
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
    server, hurry, stopping = HttpServer(config), asyncio.Event(), list[asyncio.Task[None]]()

    def on_signal() -> None:
        """Ctrl-C or SIGTERM: stop accepting, let what runs finish; the second time: end it now."""
        if server.should_exit:
            hurry.set()
        else:
            notify("STOPPING=1")
            server.should_exit = True
            stopping.append(asyncio.create_task(stop(args, worker.engine, registry, hurry)))

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: loop.call_soon_threadsafe(on_signal))
    loop.call_soon(announce, args, worker, names, listener)
    await server.serve(sockets=[listener])
    await asyncio.gather(*stopping)
    store.close()


async def stop(args: argparse.Namespace, engine: Engine, registry: Registry, hurry: asyncio.Event) -> None:
    registry.hold()
    deadline = time.monotonic() + args.shutdown_grace
    while engine.busy() and not hurry.is_set() and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    await registry.close(persistent=args.store != IN_MEMORY)
    await asyncio.to_thread(engine.close)  # what still runs, in the foreground, fails


def notify(state: str) -> None:
    """Tell systemd, if it has started us: https://www.freedesktop.org/software/systemd/man/sd_notify.html"""
    if address := os.environ.get("NOTIFY_SOCKET"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
            systemd.sendto(state.encode(), address.replace("@", "\0", 1) if address[0] == "@" else address)


def sealing_key(secret: str | None) -> bytes:
    return hashlib.sha256(secret.encode()).digest() if secret else secrets.token_bytes(32)


def announce(
    args: argparse.Namespace, worker: LocalWorker, names: list[str], listener: socket.socket
) -> None:
    config = worker.engine.config
    host, port = listener.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    per_token = 2 * 4 * config.n_layers * config.n_kv_heads * config.head_dim  # k and v, float32
    blas = [lib["num_threads"] for lib in threadpoolctl.threadpool_info() if lib["user_api"] == "blas"]
    weights_mb = config.n_params * 4 / 1e6
    body = json.dumps({"model": names[0], "input": "What is the capital of France?"})
    for name, value in {
        "model": f"{names[0]} ({config.model_type}), {config.n_params / 1e6:.1f} M parameters",
        "memory": f"{weights_mb:.0f} MB of weights in float32, {per_token / 1e3:.0f} kB a token of context",
        "context": f"{worker.engine.max_seq_len} tokens",
        "device": f"cpu, {max(blas, default=1)} BLAS threads",
        "store": "in memory: responses are lost at exit" if args.store == IN_MEMORY else args.store,
        "listening": url,
    }.items():
        print(f"{name:10} {value}")
    notify("READY=1")
    print(f"\ncurl {url}/v1/responses -H 'Content-Type: application/json' -d '{body}'\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
