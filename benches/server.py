"""What the server adds to an engine, or to an upstream: streams and requests by the hundred, a full store.

    ours, least --started()--> processes --http.together()--> events/s, latency, memory --report()--> table

`ours` is the whole server with an engine that only says a token. `least` is a small Starlette application: it
decodes each token in one task and frames it in another, without a parser, a state machine, or a log to resume
from. Columns with a number of rows are ours with so many responses in a store that keeps no more.

`bench.py relay` puts this server before a scripted upstream, and measures both by the rows of bench.py http.

Not here: what a model costs.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from statistics import quantiles
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

import server
import sse
from benches.harness import Case, Commands, Figures, Running, prose, report, started
from benches.http import RESPONSES, Answer, Client, Target, cases, together
from checkpoint import hub
from checkpoint.config import read_config
from dialects.matchers import Grammars
from engine import SWITCH_INTERVAL_S, Feed, StepOutput
from request.template import ChatTemplate
from sampling import Choice
from scheduler import Sequence
from service import loading
from service.connections import bind
from store import Retention, Row, Store
from tokenizer import Decoder, Tokenizer
from worker import LocalWorker

MAX_STREAMS = 500
STREAMS = [(1, 2000), (50, 100), (500, 20), (500, 1)]  # and the tokens of each, when nothing paces them
LATE_STREAMS = [1, 50, 500]
TICK_MS = 1000  # of the paced engine: all streams get a token then, as the sequences of a batch do
N_TICKS = 5
N_WARM = 2  # of them, while streams are still being opened
N_STORED = [0, 10_000, 100_000]
N_STORING = 400  # streams beside them
IDLE_S = 3
RELAYED = [1, 32]  # streams

PLACE = '"item_id":"msg_0123456789abcdef","output_index":0,"content_index":0'
CHUNK = b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"bench","choices":[%s]}\n\n'
TEXT = CHUNK % b'{"index":0,"delta":{"content":" token"}}'
END = CHUNK % b'{"index":0,"delta":{},"finish_reason":"stop"}'

# --- what is served -----------------------------------------------------------------------------------------


async def tick(ms: int) -> None:
    """Wait for the next of the moments that all processes of this machine agree on; 0: do not wait."""
    await asyncio.sleep((ms - 1e3 * time.monotonic() % ms) / 1e3 if ms else 0)


def serve_ours(directory: Path, tokenizer: Tokenizer, token_id: int, flags: list[str]) -> None:
    """Serve an engine that says a token over and over: one a tick, whose milliseconds are the seed."""
    config = read_config(directory)
    said = StepOutput([Choice(token_id)])

    async def generate(sequence: Sequence, feed: Feed) -> None:
        for n_left in range(sequence.max_tokens - 1, -1, -1):
            await tick(sequence.sampling.seed)
            feed(said if n_left else said._replace(finish="length"))

    engine: Any = SimpleNamespace(
        config=config, max_seq_len=config.max_seq_len, generate=generate, busy=bool, close=int
    )
    grammars = Grammars(directory / "tokenizer.json", config.vocab_size, config.eos_token_ids)
    worker = LocalWorker(engine, tokenizer, ChatTemplate.load(directory), grammars)
    loading.load = lambda *_: worker
    loading.facts = lambda *_: {}  # of a model
    flags += ["--model", str(directory), "--port", "0", "--log-level", "warning"]
    sys.argv = ["server.py", *flags, "--max-streams", str(MAX_STREAMS + 1)]
    server.main()


def serve(path: str, answer: Callable[[HttpRequest], Awaitable[Response]]) -> None:
    """Serve an application that answers in one way."""
    app = Starlette(routes=[Route(path, answer, methods=["GET", "POST"])])
    listener = bind("127.0.0.1", 0)
    server.tune_garbage_collector()
    print(f"listening http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", loop="asyncio")
    uvicorn.Server(config).run(sockets=[listener])


def serve_least(_: Path, tokenizer: Tokenizer, token_id: int, __: list[str]) -> None:
    async def answer(http: HttpRequest) -> Response:
        body = await http.json()
        n_tokens = body["max_output_tokens"]
        texts = asyncio.Queue[str]()

        async def generate() -> None:
            decoder = Decoder(tokenizer)
            for _ in range(n_tokens):
                await tick(body["seed"])
                for piece in decoder.feed(token_id):
                    texts.put_nowait(piece.text)

        async def frames() -> AsyncGenerator[bytes]:
            generating = asyncio.create_task(generate())
            for number in range(n_tokens):
                data = f'{{"sequence_number":{number},{PLACE},"delta":{sse.dumps(await texts.get())}}}'
                yield f"event: response.output_text.delta\ndata: {data}\n\n".encode()
            await generating

        return StreamingResponse(frames(), media_type="text/event-stream")

    serve(f"/v1{RESPONSES}", answer)


def serve_upstream(*_: Any) -> None:
    async def answer(http: HttpRequest) -> Response:
        if http.method == "GET":
            return JSONResponse({"object": "list", "data": [{"id": "bench"}]})
        n_tokens = (await http.json())["max_tokens"]

        async def frames() -> AsyncGenerator[bytes]:
            yield TEXT * n_tokens + END + sse.DONE

        return StreamingResponse(frames(), media_type="text/event-stream")

    serve("/v1/{path:path}", answer)


SERVED: dict[str, Callable[..., None]] = {
    "ours": serve_ours,
    "least": serve_least,
    "upstream": serve_upstream,
}

# --- what is measured ---------------------------------------------------------------------------------------


def hear(running: Running, n_streams: int, n_tokens: int, tick_ms: int = 0) -> list[Answer]:
    client = Client(["hi"], n_tokens, {"seed": tick_ms, "store": True})
    return together(Target(f"{running.url}/v1{RESPONSES}", "default"), [client] * n_streams)


def speed(running: Running, n_streams: int, n_tokens: int) -> Figures:
    """Measure streams that have nothing to wait for; with one token each it is the price of requests."""
    began, used_s = time.perf_counter(), running.used_s()
    n_events = sum(answer.n_events for answer in hear(running, n_streams, n_tokens))
    wall_s, cpu_s = time.perf_counter() - began, running.used_s() - used_s
    row = f"{n_streams} streams of {n_tokens}"
    return {
        f"{row}, events/s": n_events / wall_s,
        f"{row}, CPU µs an event": 1e6 * cpu_s / n_events,
        f"{row}, CPU ms a stream": 1e3 * cpu_s / n_streams,
    }


def idleness(running: Running) -> Figures:
    used_s = running.used_s()
    time.sleep(IDLE_S)
    return {"idle, % of a core": 100 * (running.used_s() - used_s) / IDLE_S}


def lateness(running: Running, n_streams: int) -> Figures:
    """Measure the time from the tick of all streams to the arrival of each delta."""
    late_ms: list[float] = []
    for answer in hear(running, n_streams, N_TICKS, TICK_MS):
        late_ms += [1e3 * at % TICK_MS for at in answer.text_times[N_WARM:]]
    percentiles = quantiles(late_ms, n=100)
    return {
        f"{n_streams} streams, median late, ms": percentiles[49],
        f"{n_streams} streams, p99 late, ms": percentiles[98],
    }


def memory(command: list[str], n_streams: int) -> Figures:
    """Measure what so many open streams take in a fresh process."""
    with started(*command) as running, ThreadPoolExecutor() as pool:
        hear(running, 1, 2)
        kb = running.memory_kb()
        pool.submit(hear, running, n_streams, N_TICKS, TICK_MS)
        time.sleep(N_WARM * TICK_MS / 1e3)
        return {f"{n_streams} streams, kB a stream": (running.memory_kb() - kb) / n_streams}


def filled(file: Path, n_rows: int) -> str:
    """Return what serves ours with a store that keeps n_rows responses, and has as many."""
    with closing(Store(str(file), Retention())) as store:
        row = Row("", "", time.time(), time.time(), True, False, False, "{}", "[]", "completed", prose(2000))
        for number in range(n_rows):
            store.write(row._replace(id=f"resp_{number}"))
    return f"ours --store {file} --store-max-bytes {2**40} --store-max-responses {n_rows or 10**9}"


def run_server(args: argparse.Namespace) -> None:
    directory = hub.find(args.model or None)
    if args.serve:
        sys.setswitchinterval(SWITCH_INTERVAL_S)  # as an engine does
        tokenizer = Tokenizer(directory / "tokenizer.json")
        name, *flags = args.serve.split()
        SERVED[name](directory, tokenizer, tokenizer.encode(" a")[0], flags)
        return
    words = ["bench.py", "server", "--model", str(directory), "--serve"]
    commands = {name: [*words, name] for name in ("ours", "least")}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        servers = {name: stack.enter_context(started(*command)) for name, command in commands.items()}
        cases: list[Case] = []
        for n_streams, n_tokens in STREAMS:
            cases.append((servers, partial(speed, n_streams=n_streams, n_tokens=n_tokens)))
        for n_streams in LATE_STREAMS:
            cases.append((servers, partial(lateness, n_streams=n_streams)))
        cases.append((commands, partial(memory, n_streams=MAX_STREAMS)))
        stores: dict[str, Running] = {}
        for n in N_STORED:
            stores[f"{n} rows"] = stack.enter_context(started(*words, filled(folder / str(n), n)))
        cases += [(stores, partial(speed, n_streams=N_STORING, n_tokens=1)), (stores, idleness)]
        report(args, "Streams with an engine that only says a token.", cases)


def run_relay(args: argparse.Namespace) -> None:
    with started("bench.py", "server", "--serve", "upstream") as direct:
        flags = ["--upstream", f"{direct.url}/v1", "--port", "0", "--log-level", "warning"]
        with started("server.py", *flags) as front:
            urls = {
                "direct": f"{direct.url}/v1",
                "chat": f"{front.url}/v1",
                "responses": f"{front.url}/v1{RESPONSES}",
            }
            found = cases(urls, RELAYED, args.new)
            report(args, "A scripted upstream, directly and through `server.py --upstream`.", found)


SERVE = ("", "only serve this, on a port that is printed")
COMMANDS: Commands = {
    "server": (run_server, {"--model": ("", "as of server.py"), "--serve": SERVE}),
    "relay": (run_relay, {"--new": (4000, "events of a stream")}),
}
