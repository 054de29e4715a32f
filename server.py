"""The server: the application around the endpoints, the command line, start and stop.

    python server.py --model DIR    (README.md; --help explains the rest)

Rules of this file:
1. What cannot work is said in one line at the start, with exit status 2.
2. Every reply has a request id, every error the same body: https://platform.openai.com/docs/guides/error-codes
3. Everything ends: a stop lets what runs finish for a while, then gives every open stream its last event.

Not here: the endpoints (api.py), bodies and streams (answers.py).
"""

import argparse
import asyncio
import contextlib
import hashlib
import hmac
import json
import logging
import math
import os
import re
import secrets
import signal
import socket
import sqlite3
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import threadpoolctl
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import gpu
import hub
import kernels
import weights
from answers import STATUS, error_response, new_id
from api import ALIAS, Api, encode_event, generation_defaults
from background import Registry
from chat import BadInput, ChatTemplate
from engine import Engine, Ops
from grammar import Grammars
from model import PAGE, NumpyOps
from store import Limits, Store
from tokenizer import Tokenizer
from worker import LocalWorker

IN_MEMORY = ":memory:"
STALLED_S = 2  # at a stop, what clients get to take their last event, after the grace

# --- the application ----------------------------------------------------------------------------------------


async def on_bad_input(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, BadInput)
    return error_response(STATUS.get(error.code, 400), error.message, error.param, error.code)


async def on_http_error(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{error.detail}: {http.method} {http.url.path}"
    code = "method_not_allowed" if error.status_code == 405 else "unknown_url"
    response = error_response(error.status_code, message, code=code)
    response.headers.update(error.headers or {})
    return response


async def on_recursion(_: HttpRequest, error: Exception) -> Response:
    return error_response(400, "The body is nested too deeply.", code="invalid_json")


async def on_disconnect(_: HttpRequest, error: Exception) -> Response:
    return Response(status_code=400)  # nobody reads it


async def on_exception(_: HttpRequest, error: Exception) -> Response:
    message = f"{type(error).__name__} in the server; its log has the details."
    return error_response(500, message, code="server_error")


class Front:
    """Around every route: the API key, and a request id on each reply."""

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self._app = app
        self._api_key = api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", new_id("req").encode())]
            await send(message)

        if self._admits(scope):
            await self._app(scope, receive, send_with_id)
        else:
            message = "Incorrect or missing API key: send 'Authorization: Bearer KEY'."
            await error_response(401, message, None, "invalid_api_key")(scope, receive, send_with_id)

    def _admits(self, scope: Scope) -> bool:
        if self._api_key is None or scope["path"] == "/health":
            return True
        scheme, _, key = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._api_key.encode())


def make_app(api: Api, api_key: str | None) -> ASGIApp:
    handlers = {
        BadInput: on_bad_input,
        HTTPException: on_http_error,
        RecursionError: on_recursion,
        ClientDisconnect: on_disconnect,
        Exception: on_exception,
    }
    return Front(Starlette(routes=api.routes(), exception_handlers=handlers), api_key)


# --- the command line ---------------------------------------------------------------------------------------

MODEL = (
    "a Hugging Face model directory, or an id on the Hub such as Qwen/Qwen3-0.6B; "
    "without it, SmolLM2-135M-Instruct is fetched once and served"
)
NAME = f"name in requests, repeatable (default: the directory's); '{ALIAS}' always works too"
LENGTH = "context in tokens, prompt and answer (default: the model's own)"
KEY = "demand 'Authorization: Bearer KEY' on every route but /health"
DONE_LINE = "end Responses streams without 'data: [DONE]'"
TEMPORARY = "refuse background with store=false, as OpenAI did at first, not keep it for 10 minutes"
STORE = "SQLite file that keeps responses; in memory they are lost at exit"
SECRET = "key of what clients keep for us: reasoning, compactions (default: another at each start)"
KV_MEMORY = "memory for keys and values, such as 2G (default: a quarter of what is free)"
SPECULATE = "tokens to draft from what was said before; 0: none"
DEVICES = ("auto", "cuda", "cpu")  # auto: cuda where it is built, else cpu
LEVELS = ("debug", "info", "warning", "error")


SUFFIXES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def size(text: str) -> int:
    """Bytes, with a suffix: 512M, 1.5G"""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", text, re.ASCII | re.IGNORECASE)
    if not found or not (n_bytes := int(float(found[1]) * SUFFIXES[found[2].upper()])):
        raise argparse.ArgumentTypeError(f"expected bytes such as 512M or 2G, got {text}")
    return n_bytes


def natural(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"expected 0 or more, got {text}")
    return int(text)


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
    "kv-memory":           (None,                 {"type": size, "metavar": "BYTES", "help": KV_MEMORY}),
    "max-batch":           (16,                   {"type": positive, "help": "sequences to run at once"}),
    "speculate":           (0,                    {"type": natural, "help": SPECULATE}),
    "served-model-name":   (None,                 {"metavar": "NAME", "action": "append", "help": NAME}),
    "api-key":             (None,                 {"metavar": "KEY", "help": KEY}),
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
    logging.basicConfig(
        level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    if args.threads:
        threadpoolctl.threadpool_limits(args.threads, user_api="blas")
    try:
        args.device = device(args.device)
        listener = bind(args.host, args.port)
        directory = hub.find(args.model)
        worker = load(directory, args)
        defaults = generation_defaults(worker.engine.config.generation)
        store = open_store(args)
    except (ValueError, OSError, MemoryError, sqlite3.Error) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    by_id = args.model and not Path(args.model).exists()
    names = args.served_model_name or [args.model if by_id else directory.name]
    asyncio.run(serve(args, worker, defaults, store, names, listener))
    return 0


def bind(host: str, port: int) -> socket.socket:
    """Take the port before the model is loaded, so that a taken one is known at once; early clients wait."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Only where TCP is named does asyncio turn Nagle's algorithm off: events would wait for their ACKs.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
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


def load(directory: Path, args: argparse.Namespace) -> LocalWorker:
    config = weights.read_config(directory)
    length = args.max_model_len or config.max_seq_len
    if not 2 <= length <= config.max_seq_len:
        limit = f"expected 2 to {config.max_seq_len}, the model's own limit"
        raise weights.UnsupportedModel(f"--max-model-len {length}: {limit}")
    vocabulary = directory / "tokenizer.json"
    template, tokenizer = ChatTemplate.load(directory), Tokenizer(vocabulary)
    grammars = Grammars(vocabulary, config.vocab_size, config.eos_token_ids)
    loaded = weights.read_weights(directory, config)
    kind: type[NumpyOps] | type[gpu.CudaOps] = NumpyOps
    room = free_memory() // 4  # no more is real than is used
    if args.device == "cuda":
        kernels.check_sizes(config)
        kind, room = gpu.CudaOps, gpu.room(config, length, args.max_batch)
    n_pages = pool(kind.page_bytes(config), length, args.max_batch, args.kv_memory, room)
    ops: Ops = kind(config, loaded, length, n_pages, args.max_batch)
    return LocalWorker(Engine(ops, args.speculate), tokenizer, template, grammars)


def device(wanted: str) -> str:
    """cpu or cuda, for auto what there is; raises ValueError where there is no GPU to compute on."""
    missing = None if wanted == "cpu" else gpu.missing()
    if wanted == "cuda" and missing:
        raise ValueError(f"--device cuda: {missing}")
    return "cpu" if wanted == "cpu" or missing else "cuda"


def pool(page_bytes: int, length: int, max_batch: int, kv_memory: int | None, room: int) -> int:
    """Pages for keys and values; by default what there is room for, as far as whole contexts of all that run
    at once can use it.
    """
    if kv_memory:
        if kv_memory < page_bytes:
            limit = f"expected {page_bytes} or more, for a page of {PAGE} tokens"
            raise ValueError(f"--kv-memory {kv_memory}: {limit}")
        return kv_memory // page_bytes
    whole = max_batch * -(-length // PAGE)
    return max(1, min(whole, room // page_bytes))


def free_memory() -> int:
    """Bytes, as far as the system says: what is available on Linux, what is there elsewhere."""
    lines = Path("/proc/meminfo"), Path("/sys/fs/cgroup/memory.max")
    found = [path.read_text(encoding="utf-8") if path.exists() else "" for path in lines]
    available = re.search(r"MemAvailable: +(\d+) kB", found[0])
    in_all = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4 * 2**30
    free = int(available[1]) * 1024 if available else in_all
    return min(free, int(found[1])) if found[1].strip().isdigit() else free


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


async def serve(
    args: argparse.Namespace,
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
        make_app(api, args.api_key),
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


def sealing_key(secret: str | None) -> bytes:
    return hashlib.sha256(secret.encode()).digest() if secret else secrets.token_bytes(32)


def announce(
    args: argparse.Namespace, worker: LocalWorker, names: list[str], listener: socket.socket
) -> None:
    config = worker.engine.config
    host, port = listener.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    dtype, size = ("bfloat16", 2) if args.device == "cuda" else ("float32", 4)
    per_token = 2 * size * config.n_layers * config.n_kv_heads * config.head_dim  # k and v
    blas = [lib["num_threads"] for lib in threadpoolctl.threadpool_info() if lib["user_api"] == "blas"]
    n_pages = worker.engine.counts()["pages"]
    weights_mb = config.n_params * size / 1e6
    body = json.dumps({"model": names[0], "input": "What is the capital of France?"})
    for name, value in {
        "model": f"{names[0]} ({config.model_type}), {config.n_params / 1e6:.1f} M parameters",
        "memory": f"{weights_mb:.0f} MB of weights in {dtype}, {per_token / 1e3:.0f} kB a token of context",
        "context": f"{worker.engine.max_seq_len} tokens",
        "pages": f"{n_pages} of {PAGE} tokens, at most {n_pages * PAGE * per_token / 1e6:.0f} MB",
        "device": "cuda" if args.device == "cuda" else f"cpu, {max(blas, default=1)} BLAS threads",
        "store": "in memory: responses are lost at exit" if args.store == IN_MEMORY else args.store,
        "listening": url,
    }.items():
        print(f"{name:10} {value}")
    print(f"\ncurl {url}/v1/responses -H 'Content-Type: application/json' -d '{body}'\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
