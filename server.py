"""The HTTP server: routes, headers, disconnects, errors to status codes, and the command line.

    body --params--> Request --worker--> outputs --responses | completions--> EventLog --Answer--> bytes

Authority: https://platform.openai.com/docs/api-reference (paths, bodies, errors).

Rules of this file:
1. One path: a producer fills an event log, and the answer reads it, as it grows or whole.
2. Before the first byte an error has its status code; after it only events follow, and the last one tells.
3. When the client leaves, the producer is cancelled, and with it the engine's sequence.
4. Everything ends: a worker that raises, a shutdown and a disconnect each close the log.

Not here: what a parameter may be (params.py), what an event looks like (responses.py, completions.py).
"""

import argparse
import asyncio
import contextlib
import hmac
import json
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import threadpoolctl
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import completions
import hub
import params
import responses
import sse
import weights
from background import EventLog
from channels import Finish, Output
from chat import BadInput, BadTemplate, ChatTemplate
from engine import Engine
from tokenizer import Tokenizer, TokenizerError
from worker import LocalWorker, Prompt

log = logging.getLogger("server")

MAX_BODY_BYTES = 32 * 2**20
KEEP_ALIVE_S = (
    15  # "every 15 seconds or so": html.spec.whatwg.org/multipage/server-sent-events.html#authoring-notes
)
ALIAS = "default"  # a name that any model answers to
GENERATION_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

SSE_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",  # github.com/open-metadata/OpenMetadata/pull/29532
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}

# --- errors -------------------------------------------------------------------------------------------------

# fmt: off
#  code of a BadInput             status     every other is 400
STATUS = {
    "model_not_found":            404,
    "response_not_found":         404,
    "body_too_large":             413,
    "unsupported_content_encoding": 415,
}

#  status   type
ERROR_TYPES = {
    401:    "authentication_error",
    500:    "server_error",
}
# fmt: on


def error_response(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> JSONResponse:
    """All four keys, always: openai-openapi, `Error`."""
    error_type = ERROR_TYPES.get(status, "invalid_request_error")
    return JSONResponse(
        {"error": {"message": message, "type": error_type, "param": param, "code": code}}, status
    )


async def on_bad_input(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, BadInput)
    return error_response(STATUS.get(error.code, 400), error.message, error.param, error.code)


async def on_http_error(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = error_response(
        error.status_code, f"{error.detail}: {http.method} {http.url.path}", code="unknown_url"
    )
    response.headers.update(error.headers or {})
    return response


async def on_disconnect(_: HttpRequest, error: Exception) -> Response:
    return Response(status_code=400)  # nobody reads it


async def on_exception(_: HttpRequest, error: Exception) -> Response:
    return error_response(
        500, f"{type(error).__name__} in the server; its log has the details.", code="server_error"
    )


# --- one answer ---------------------------------------------------------------------------------------------


async def read_json(http: HttpRequest) -> Any:
    """The body of a request; raises BadRequest."""
    encoding = http.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise params.BadRequest(
            f"Expected an identity body, got '{encoding}'.", None, "unsupported_content_encoding"
        )
    body = bytearray()
    async for chunk in http.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise params.BadRequest(
                f"Expected a body of at most {MAX_BODY_BYTES} bytes.", None, "body_too_large"
            )
    try:
        value = json.loads(body, parse_constant=_no_constant)
        json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair is no text
    except (ValueError, RecursionError) as error:
        raise params.BadRequest(f"Could not parse the body as JSON: {error}", None, "invalid_json") from error
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


Producer = asyncio.Future[None]


class Answer(Response):
    """Runs `producer` for as long as the client is there, and answers with the log that it fills.

    As a stream that ends in `done`, or as `whole(events)`, a status and a body, when the producer has ended.
    A producer that raises is a bug of ours: its client gets a 500 or, in a stream, a connection that breaks,
    never a clean end.
    """

    def __init__(
        self,
        events: EventLog,
        producer: Coroutine[Any, Any, None],
        stream: bool,
        whole: Callable[[list[dict[str, Any]]], tuple[int, dict[str, Any]]],
        done: bytes,
    ) -> None:
        self._events, self._producer, self._whole = events, producer, whole
        self._stream, self._done = stream, done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        producer = asyncio.ensure_future(self._producer)
        send_all = self._send_stream if self._stream else self._send_whole
        answer = asyncio.ensure_future(send_all(producer, scope, receive, send))
        gone = asyncio.ensure_future(disconnect(receive))
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            answered = answer.done()
            for task in (producer, answer, gone):
                task.cancel()
            await asyncio.gather(producer, answer, gone, return_exceptions=True)
        if answered:
            answer.result()  # raises what it raised

    async def _send_stream(self, producer: Producer, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(k.lower().encode(), v.encode()) for k, v in SSE_HEADERS.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async with aclosing(kept_alive(self._events.read())) as frames:
            # One write an event: the parser of openresponses loses an event that is cut.
            async for frame in frames:
                await send({"type": "http.response.body", "body": frame, "more_body": True})
        await producer
        await send({"type": "http.response.body", "body": self._done})

    async def _send_whole(self, producer: Producer, scope: Scope, receive: Receive, send: Send) -> None:
        await producer
        status, body = self._whole(self._events.events)
        await JSONResponse(body, status)(scope, receive, send)


async def disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def kept_alive(frames: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """The frames, and a comment whenever none came for a while: proxies close streams that are silent."""
    coming = asyncio.ensure_future(anext(frames, None))
    try:
        while True:
            done, _ = await asyncio.wait({coming}, timeout=KEEP_ALIVE_S)
            if not done:
                yield sse.comment("keep-alive")
            elif (frame := coming.result()) is None:
                return
            else:
                yield frame
                coming = asyncio.ensure_future(anext(frames, None))
    finally:
        coming.cancel()


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(24)}"


def now() -> int:
    return int(time.time())


def encode_event(number: int, event: dict[str, Any]) -> bytes:
    """A Responses event gets its number here, as it enters the log."""
    numbered = {"type": event["type"], "sequence_number": number} | event
    return sse.encode(sse.dumps(numbered), event["type"])


def encode_chunk(_: int, chunk: dict[str, Any]) -> bytes:
    return sse.encode(sse.dumps(chunk))


# --- the application ----------------------------------------------------------------------------------------


class Api:
    """The endpoints, over one worker."""

    def __init__(self, worker: LocalWorker, names: list[str], done_line: bool = True) -> None:
        self._worker = worker
        self._names = names
        self._created = now()
        generation = worker.engine.config.generation
        self._defaults = {k: generation[k] for k in GENERATION_DEFAULTS if generation.get(k) is not None}
        if generation.get("do_sample") is False:
            self._defaults["temperature"] = 0  # greedy, as generation_config.json says it
        self._done_line = sse.DONE if done_line else b""

    def routes(self) -> list[Route]:
        return [
            Route("/v1/responses", self.create_response, methods=["POST"]),
            Route("/v1/responses/{id}", self.stored_response, methods=["GET", "DELETE"]),
            Route("/v1/chat/completions", self.create_completion, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{id:path}", self.model),
            Route("/health", self.health),
        ]

    async def create_response(self, http: HttpRequest) -> Response:
        request = params.from_responses(await read_json(http), self._defaults)
        self._check_model(request.model)
        prompt = await asyncio.to_thread(self._worker.prepare, request)
        head = {
            "id": new_id("resp"),
            "object": "response",
            "created_at": now(),
            "model": request.model,
        } | request.echo
        events = EventLog(encode_event)
        producer = self._fill_response(events, prompt, responses.Builder(head, new_id))
        return Answer(
            events, producer, request.stream, lambda events: (200, responses.fold(events)), self._done_line
        )

    async def create_completion(self, http: HttpRequest) -> Response:
        request = params.from_chat(await read_json(http), self._defaults)
        self._check_model(request.model)
        prompt = await asyncio.to_thread(self._worker.prepare, request)
        fingerprint = f"fp_{self._created:x}"  # of "the backend configuration": this start of the server
        head = {
            "id": new_id("chatcmpl"),
            "created": now(),
            "model": request.model,
            "system_fingerprint": fingerprint,
        }
        events = EventLog(encode_chunk)
        producer = self._fill_completion(
            events, prompt, completions.Chunks(head, new_id, request.n, request.include_usage)
        )
        return Answer(events, producer, request.stream, whole_completion, sse.DONE)

    async def stored_response(self, http: HttpRequest) -> Response:
        raise params.BadRequest(
            f"Response with id '{http.path_params['id']}' not found.", None, "response_not_found"
        )

    async def models(self, _: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._describe(name) for name in self._names]})

    async def model(self, http: HttpRequest) -> Response:
        self._check_model(http.path_params["id"])
        return JSONResponse(self._describe(http.path_params["id"]))

    async def health(self, _: HttpRequest) -> Response:
        return JSONResponse({"status": "ok"} | self._worker.engine.counts())

    def _describe(self, name: str) -> dict[str, Any]:
        length = self._worker.engine.max_seq_len
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "local",
            "max_model_len": length,
        }

    def _check_model(self, name: str) -> None:
        if name not in (*self._names, ALIAS):
            there = ", ".join(map(repr, (*self._names, ALIAS)))
            raise params.BadRequest(
                f"The model '{name}' does not exist; there is {there}.", "model", "model_not_found"
            )

    async def _fill_response(self, events: EventLog, prompt: Prompt, builder: responses.Builder) -> None:
        with contextlib.closing(events):
            events.extend(builder.start())
            async with aclosing(self._outputs(prompt, 0)) as outputs:
                async for output in outputs:
                    made = (
                        builder.finish(output, now()) if isinstance(output, Finish) else builder.feed(output)
                    )
                    events.extend(made)

    async def _fill_completion(self, events: EventLog, prompt: Prompt, chunks: completions.Chunks) -> None:
        async def fill_choice(index: int) -> None:
            async with aclosing(self._outputs(prompt, index)) as outputs:
                async for output in outputs:
                    made = (
                        chunks.finish(index, output)
                        if isinstance(output, Finish)
                        else chunks.feed(index, output)
                    )
                    events.extend(made)

        with contextlib.closing(events):
            events.extend(chunks.start())
            async with asyncio.TaskGroup() as group:
                for index in range(prompt.request.n):
                    group.create_task(fill_choice(index))
            events.extend(chunks.end())

    async def _outputs(self, prompt: Prompt, choice: int) -> AsyncGenerator[Output | Finish]:
        """What the worker says, with exactly one Finish at the end, whatever happens to it."""
        started, finish = time.monotonic(), Finish("cancelled")
        try:
            async with aclosing(self._worker.run(prompt, choice)) as outputs:
                async for output in outputs:
                    if isinstance(output, Finish):
                        finish = output
                        break
                    yield output
            if finish.reason == "cancelled":
                finish = Finish("failed", message="The worker ended without finishing.")
        except Exception as error:
            log.exception("the worker failed")
            finish = Finish(
                "failed", message=f"{type(error).__name__} in the worker; the server's log has the details."
            )
        finally:
            log_finish(prompt, finish, time.monotonic() - started)
        yield finish


def log_finish(prompt: Prompt, finish: Finish, seconds: float) -> None:
    if finish.reason == "cancelled":
        log.info("the client left after %.2f s; its generation is aborted", seconds)
        return
    n_out = finish.usage.output_tokens if finish.usage else 0
    rate = n_out / max(seconds, 1e-9)
    log.info(
        "%s: %d tokens in, %d out, %.2f s, %.1f tok/s",
        finish.reason,
        len(prompt.token_ids),
        n_out,
        seconds,
        rate,
    )


def whole_completion(chunks: list[dict[str, Any]]) -> tuple[int, dict[str, Any]]:
    body = completions.fold(chunks)
    return (500 if "error" in body else 200), body


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
            refusal = error_response(
                401,
                "Incorrect or missing API key: send 'Authorization: Bearer KEY'.",
                None,
                "invalid_api_key",
            )
            await refusal(scope, receive, send_with_id)

    def _admits(self, scope: Scope) -> bool:
        if self._api_key is None or scope["path"] == "/health":
            return True
        sent = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(sent, f"Bearer {self._api_key}".encode())


def make_app(api: Api, api_key: str | None) -> ASGIApp:
    handlers = {
        BadInput: on_bad_input,
        HTTPException: on_http_error,
        ClientDisconnect: on_disconnect,
        Exception: on_exception,
    }
    return Front(Starlette(routes=api.routes(), exception_handlers=handlers), api_key)


# --- the command line ---------------------------------------------------------------------------------------


MODEL_HELP = (
    "a Hugging Face model directory, or an id on the Hub such as Qwen/Qwen3-0.6B; "
    "without it, SmolLM2-135M-Instruct is fetched once and served"
)
NAME_HELP = f"name in requests, repeatable (default: the directory's); '{ALIAS}' always works too"


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Serve a language model over OpenAI's Responses and Chat Completions APIs.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", metavar="DIR|ID", help=MODEL_HELP)
    add("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 for all interfaces")
    add("--port", type=int, default=8000, help="port to listen on; 0 for any free one")
    add(
        "--device",
        choices=("auto", "cuda", "cpu"),
        default="auto",
        help="where to compute; auto means cuda where it is built, else cpu",
    )
    add("--threads", type=int, help="BLAS threads of the CPU (default: as many as there are cores)")
    add(
        "--max-model-len",
        type=int,
        metavar="N",
        help="context in tokens, prompt and answer (default: the model's own)",
    )
    add("--served-model-name", action="append", metavar="NAME", help=NAME_HELP)
    add("--api-key", metavar="KEY", help="demand 'Authorization: Bearer KEY' on every route but /health")
    add("--no-done-line", action="store_true", help="end Responses streams without 'data: [DONE]'")
    add(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="how much to log, on stderr",
    )
    return parser


def load(directory: Path, max_model_len: int | None) -> LocalWorker:
    config = weights.read_config(directory)
    length = max_model_len or config.max_seq_len
    if not 2 <= length <= config.max_seq_len:
        raise weights.UnsupportedModel(
            f"--max-model-len {length}: expected 2 to {config.max_seq_len}, the model's own limit"
        )
    template, tokenizer = ChatTemplate.load(directory), Tokenizer(directory / "tokenizer.json")
    return LocalWorker(Engine(config, weights.read_weights(directory, config), length), tokenizer, template)


def bind(host: str, port: int) -> socket.socket:
    """Take the port before the model is loaded, so that a taken one is known at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    if os.name == "posix":  # a port in TIME_WAIT is free; elsewhere the option means something else
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    return listener


class HttpServer(uvicorn.Server):
    """uvicorn, with the signals left to us: the engine must end its sequences before connections are waited
    for.
    """

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(app: ASGIApp, engine: Engine, listener: socket.socket, ready: Callable[[], None]) -> None:
    config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", server_header=False)
    server, loop = HttpServer(config), asyncio.get_running_loop()

    def stop() -> None:
        server.force_exit = server.should_exit  # the second time: do not wait for connections
        server.should_exit = True
        loop.run_in_executor(None, engine.close)  # open streams get their last event

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: loop.call_soon_threadsafe(stop))
    loop.call_soon(ready)
    await server.serve(sockets=[listener])


def announce(worker: LocalWorker, names: list[str], listener: socket.socket) -> None:
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
        "listening": url,
    }.items():
        print(f"{name:10} {value}")
    print(f"\ncurl {url}/v1/responses -H 'Content-Type: application/json' -d '{body}'\n", flush=True)


def main() -> int:
    args = arguments().parse_args()
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    logging.basicConfig(
        level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    if args.device == "cuda":
        print("error: --device cuda: the GPU engine is not built yet; use --device cpu", file=sys.stderr)
        return 2
    if args.threads:
        threadpoolctl.threadpool_limits(args.threads, user_api="blas")
    try:
        listener = bind(args.host, args.port)
    except OSError as error:
        print(
            f"error: cannot listen on {args.host} port {args.port}: {error.strerror or error}",
            file=sys.stderr,
        )
        return 2
    try:
        directory = hub.find(args.model)
        worker = load(directory, args.max_model_len)
    except (
        hub.HubError,
        weights.UnsupportedModel,
        TokenizerError,
        BadTemplate,
        OSError,
        MemoryError,
    ) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    names = args.served_model_name or [
        args.model if args.model and not Path(args.model).exists() else directory.name
    ]
    app = make_app(Api(worker, names, not args.no_done_line), args.api_key)
    asyncio.run(serve(app, worker.engine, listener, lambda: announce(worker, names, listener)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
