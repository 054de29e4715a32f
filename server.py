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
import secrets
import signal
import socket
import sqlite3
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import threadpoolctl
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import hub
import upstreams
import weights
from answers import STATUS, error_response, new_id
from api import ALIAS, Api, Worker, encode_event, generation_defaults
from background import Registry
from chat import BadInput, ChatTemplate
from engine import Engine
from grammar import Grammars
from metering import Counts, Prices
from relay import Refused
from remote import RemoteWorker
from store import Limits, Store
from tokenizer import Tokenizer
from worker import LocalWorker

IN_MEMORY = ":memory:"
STALLED_S = 2  # at a stop, what clients get to take their last event, after the grace

# --- the application ----------------------------------------------------------------------------------------


async def on_bad_input(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, BadInput)
    return error_response(STATUS.get(error.code, 400), error.message, error.param, error.code)


async def on_refused(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, Refused)
    response = error_response(error.status, error.message, error.param, error.code or None)
    response.headers.update({"Retry-After": error.retry_after} if error.retry_after else {})
    return response


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
        Refused: on_refused,
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
    "threads":             (None,                 {"type": positive, "help": "of BLAS (default: all cores)"}),
    "max-model-len":       (None,                 {"type": positive, "help": LENGTH}),
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
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    if args.threads:
        threadpoolctl.threadpool_limits(args.threads, user_api="blas")
    try:
        if args.device == "cuda":
            raise ValueError("--device cuda: the GPU engine is not built yet; use --device cpu")
        listener = bind(args.host, args.port)
        local, names, defaults = load_local(args)
        store = open_store(args)
    except (ValueError, OSError, MemoryError, sqlite3.Error) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    asyncio.run(serve(args, local, defaults, store, names, listener))
    return 0


def load_local(args: argparse.Namespace) -> tuple[LocalWorker | None, list[str], dict[str, Any]]:
    """The model on this machine, its names and the parameters it presets; nothing if upstreams are enough."""
    if args.upstream and not args.model:
        return None, [], {}
    directory = hub.find(args.model)
    worker = load(directory, args.max_model_len)
    by_id = args.model and not Path(args.model).exists()
    names = args.served_model_name or [args.model if by_id else directory.name]
    return worker, names, generation_defaults(worker.engine.config.generation)


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
    local: LocalWorker | None,
    defaults: dict[str, Any],
    store: Store,
    names: list[str],
    listener: socket.socket,
) -> None:
    registry = Registry(store, encode_event, max_queued=args.max_queued)
    remote = remote_worker(args)
    api = Api(
        local,
        remote,
        registry,
        defaults,
        names,
        sealing_key(args.secret),
        done_line=not args.no_done_line,
        temporary=not args.no_temporary,
    )
    if remote:
        await remote.upstreams.start()
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
    workers: list[Worker] = [worker for worker in (local, remote) if worker]
    server, hurry, stopping = HttpServer(config), asyncio.Event(), list[asyncio.Task[None]]()

    def on_signal() -> None:
        """Ctrl-C or SIGTERM: stop accepting, let what runs finish; the second time: end it now."""
        if server.should_exit:
            hurry.set()
        else:
            server.should_exit = True
            stopping.append(asyncio.create_task(stop(args, workers, registry, hurry)))

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: loop.call_soon_threadsafe(on_signal))
    loop.call_soon(announce, args, local, remote, names, listener)
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


def sealing_key(secret: str | None) -> bytes:
    return hashlib.sha256(secret.encode()).digest() if secret else secrets.token_bytes(32)


def announce(
    args: argparse.Namespace,
    local: LocalWorker | None,
    remote: RemoteWorker | None,
    names: list[str],
    listener: socket.socket,
) -> None:
    host, port = listener.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    elsewhere = list(remote.upstreams.models()) if remote else []
    body = json.dumps({"model": (names + elsewhere + [ALIAS])[0], "input": "What is the capital of France?"})
    facts = local_facts(names[0], local) if local else {}
    if remote:
        facts["upstreams"] = f"{', '.join(args.upstream)} with {', '.join(elsewhere) or 'no model yet'}"
    for name, value in {
        **facts,
        "store": "in memory: responses are lost at exit" if args.store == IN_MEMORY else args.store,
        "listening": url,
    }.items():
        print(f"{name:10} {value}")
    print(f"\ncurl {url}/v1/responses -H 'Content-Type: application/json' -d '{body}'\n", flush=True)


def local_facts(name: str, worker: LocalWorker) -> dict[str, str]:
    config = worker.engine.config
    per_token = 2 * 4 * config.n_layers * config.n_kv_heads * config.head_dim  # k and v, float32
    blas = [lib["num_threads"] for lib in threadpoolctl.threadpool_info() if lib["user_api"] == "blas"]
    weights_mb = config.n_params * 4 / 1e6
    return {
        "model": f"{name} ({config.model_type}), {config.n_params / 1e6:.1f} M parameters",
        "memory": f"{weights_mb:.0f} MB of weights in float32, {per_token / 1e3:.0f} kB a token of context",
        "context": f"{worker.engine.max_seq_len} tokens",
        "device": f"cpu, {max(blas, default=1)} BLAS threads",
    }


if __name__ == "__main__":
    sys.exit(main())
