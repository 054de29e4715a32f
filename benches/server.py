"""Streams held at once, beside the least that any server with an engine does.

    ours, least --started()--> processes --http.ask()--> events/s, latency, memory --rounds()--> table

`ours` is the whole server with an engine that only says a token. `least` is a small Starlette application: it
decodes each token in one task and frames it in another, without a parser, a state machine, or a log to resume
from.

Not here: what a model costs.
"""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import quantiles
from types import SimpleNamespace
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

import server
import sse
from benches.harness import Case, Figures, Running, report, started
from benches.http import Answer, Target, together
from checkpoint import hub
from checkpoint.config import read_config
from dialects.matchers import Grammars
from engine import SWITCH_INTERVAL_S, Feed, StepOutput
from request.template import ChatTemplate
from sampling import Choice
from scheduler import Sequence
from service import loading
from service.connections import bind
from tokenizer import Decoder, Tokenizer
from worker import LocalWorker

STREAMS = {1: 2000, 50: 100, 500: 20}  # streams: tokens of each when nothing paces them
TICK_MS = 1000  # of the paced engine: all streams get a token then, as the sequences of a batch do
N_TICKS = 5
N_WARM = 2  # of them, while streams are still being opened
PATH = "/v1/responses"

# --- what is served -----------------------------------------------------------------------------------------


async def tick(ms: int) -> None:
    """Wait for the next of the moments that all processes of this machine agree on; 0: do not wait."""
    await asyncio.sleep((ms - 1e3 * time.monotonic() % ms) / 1e3 if ms else 0)


def serve_ours(directory: Path, tokenizer: Tokenizer, token_id: int) -> None:
    """Serve an engine that says a token over and over: one a tick, whose milliseconds are the seed."""
    config = read_config(directory)
    said = StepOutput([Choice(token_id)])

    async def generate(sequence: Sequence, feed: Feed) -> None:
        for n_left in range(sequence.max_tokens - 1, -1, -1):
            await tick(sequence.sampling.seed)
            feed(said if n_left else said._replace(finish="length"))

    engine: Any = SimpleNamespace(config=config, max_seq_len=config.max_seq_len, generate=generate)
    grammars = Grammars(directory / "tokenizer.json", config.vocab_size, config.eos_token_ids)
    worker = LocalWorker(engine, tokenizer, ChatTemplate.load(directory), grammars)
    loading.load = lambda *_: worker
    loading.facts = lambda *_: {}  # of a model
    flags = ["--model", str(directory), "--port", "0", "--log-level", "warning"]
    sys.argv = ["server.py", *flags, "--max-streams", str(max(STREAMS) + 1)]
    server.main()


def serve_least(directory: Path, tokenizer: Tokenizer, token_id: int) -> None:
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
            place = '"item_id":"msg_0123456789abcdef","output_index":0,"content_index":0'
            for number in range(n_tokens):
                data = f'{{"sequence_number":{number},{place},"delta":{sse.dumps(await texts.get())}}}'
                yield f"event: response.output_text.delta\ndata: {data}\n\n".encode()
            await generating

        return StreamingResponse(frames(), media_type="text/event-stream")

    app = Starlette(routes=[Route(PATH, answer, methods=["POST"])])
    listener = bind("127.0.0.1", 0)
    server.tune_garbage_collector()
    print(f"listening http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off")
    uvicorn.Server(config).run(sockets=[listener])


SERVED = {"ours": serve_ours, "least": serve_least}

# --- what is measured ---------------------------------------------------------------------------------------


def hear(running: Running, n_streams: int, n_tokens: int, tick_ms: int) -> list[Answer]:
    return together(
        Target(running.url + PATH, "default"), n_streams, "hi", n_tokens, seed=tick_ms, store=True
    )


def speed(running: Running, n_streams: int) -> Figures:
    """Measure streams that have nothing to wait for."""
    began, (used_s, _) = time.perf_counter(), used(running)
    answers = hear(running, n_streams, STREAMS[n_streams], 0)
    n_events = sum(answer.n_events for answer in answers)
    return {
        f"{n_streams} streams, events/s": n_events / (time.perf_counter() - began),
        f"{n_streams} streams, CPU µs an event": 1e6 * (used(running)[0] - used_s) / n_events,
    }


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
        hear(running, 1, 2, 0)
        _, kb = used(running)
        pool.submit(hear, running, n_streams, N_TICKS, TICK_MS)
        time.sleep(N_WARM * TICK_MS / 1e3)
        return {f"{n_streams} streams, kB a stream": (used(running)[1] - kb) / n_streams}


def used(running: Running) -> tuple[float, float]:
    """Return the seconds of processors that the process has used, and the kB of memory that it has now."""
    fields = Path(f"/proc/{running.pid}/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK"), int(fields[21]) * os.sysconf("SC_PAGE_SIZE") / 1024


def run(args: argparse.Namespace) -> None:
    directory = hub.find(args.model)
    if args.serve:
        sys.setswitchinterval(SWITCH_INTERVAL_S)  # as an engine does
        tokenizer = Tokenizer(directory / "tokenizer.json")
        SERVED[args.serve](directory, tokenizer, tokenizer.encode(" a")[0])
        return
    words = ["bench.py", "server", "--model", str(directory), "--serve"]
    commands = {name: [*words, name] for name in SERVED}
    with ExitStack() as stack:
        servers = {name: stack.enter_context(started(*command)) for name, command in commands.items()}
        cases: list[Case] = []
        for n_streams in STREAMS:
            cases.append((servers, partial(speed, n_streams=n_streams)))
            cases.append((servers, partial(lateness, n_streams=n_streams)))
        cases.append((commands, partial(memory, n_streams=max(STREAMS))))
        report(args, "Streams with an engine that only says a token.", cases)


def options(add: argparse.ArgumentParser) -> None:
    add.add_argument("--model", metavar="DIR|ID", help="as of server.py; without it, the default model")
    add.add_argument("--serve", choices=SERVED, help="only serve this, on a port that is printed")
