"""Streams held at once, beside the least that any server with an engine does.

    ours, least --started()--> processes --hear()--> events/s, latency, memory --rounds()--> table

`ours` is the whole server with an engine that only says a token. `least` is a small Starlette application: it
decodes each token in one task and frames it in another, without a parser, a state machine, or a log to resume
from. `--beside DIR` measures another checkout in the same rounds: a git worktree of the commit before.

Not here: what a model costs.
"""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple, cast

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

import server
import sse
from benches.harness import ROOT, Case, Figures, model_option, report
from benches.processes import Running, started, stream
from checkpoint import hub
from checkpoint.config import read_config
from dialects.matchers import Grammars
from engine import SWITCH_INTERVAL_S, Emit, Engine, StepOutput
from request.template import ChatTemplate
from sampling import Choice
from scheduler import Sequence
from service import loading
from service.connections import bind
from tokenizer import Tokenizer
from worker import LocalWorker

STREAMS = {1: 2000, 50: 100, 500: 20}  # streams: tokens of each when nothing paces them
TICK_S = 1.0  # of the paced engine: all streams get a token then, as the sequences of a batch do
N_TICKS = 5
N_WARM = 2  # of them, while streams are still being opened
PATH = "/v1/responses"
DELTA = b"event: response.output_text.delta\n"

# --- what is served -----------------------------------------------------------------------------------------


class Script:
    """An engine that says a token over and over: one a tick, whose milliseconds are the seed; 0: at once."""

    alive = True

    def __init__(self, directory: Path, token_id: int) -> None:
        self.config = read_config(directory)
        self.max_seq_len = self.config.max_seq_len
        self._step = StepOutput([Choice(token_id)])

    async def generate(self, sequence: Sequence, emit: Emit) -> None:
        for n_left in range(sequence.max_tokens - 1, -1, -1):
            await tick(sequence.sampling.seed)
            emit(self._step if n_left else self._step._replace(finish="length"))

    def counts(self) -> dict[str, int]:
        return {}


async def tick(ms: int) -> None:
    """Wait for the next of the moments that all processes of this machine agree on."""
    await asyncio.sleep(ms / 1e3 - time.monotonic() % (ms / 1e3) if ms else 0)


def scripted(directory: Path, args: argparse.Namespace) -> LocalWorker:
    """What loading.load() makes of a directory, with a script in place of the engine."""
    tokenizer = Tokenizer(directory / "tokenizer.json")
    script = Script(directory, tokenizer.encode(" a")[0])
    grammars = Grammars(directory / "tokenizer.json", script.config.vocab_size, script.config.eos_token_ids)
    return LocalWorker(cast(Engine, script), tokenizer, ChatTemplate.load(directory), grammars)


def serve_ours(directory: Path) -> None:
    loading.load = scripted
    loading.facts = lambda *_: {}  # of a model
    flags = ["--model", str(directory), "--port", "0", "--log-level", "warning"]
    sys.argv = ["server.py", *flags, "--max-streams", str(max(STREAMS) + 1)]
    server.main()


def serve_least(directory: Path) -> None:
    tokenizer = Tokenizer(directory / "tokenizer.json")
    token_id = tokenizer.encode(" a")[0]

    async def answer(http: HttpRequest) -> Response:
        body = await http.json()
        texts = asyncio.Queue[str | None]()

        async def generate() -> None:
            decoder = tokenizer.decoder()
            for _ in range(body["max_output_tokens"]):
                await tick(body["seed"])
                for piece in decoder.feed(token_id):
                    texts.put_nowait(piece.text)
            texts.put_nowait(None)

        async def frames() -> AsyncGenerator[bytes]:
            generating = asyncio.create_task(generate())
            place = '"item_id":"msg_0123456789abcdef","output_index":0,"content_index":0'
            number = 0
            while (text := await texts.get()) is not None:
                data = f'{{"sequence_number":{number},{place},"delta":{sse.dumps(text)}}}'
                yield DELTA + f"data: {data}\n\n".encode()
                number += 1
            await generating

        return StreamingResponse(frames(), media_type="text/event-stream")

    app = Starlette(routes=[Route(PATH, answer, methods=["POST"])])
    listener = bind("127.0.0.1", 0)
    server.tune_garbage_collector()
    print(f"listening http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off")
    uvicorn.Server(config).run(sockets=[listener])


SERVED = {"script": serve_ours, "least": serve_least}

# --- clients ------------------------------------------------------------------------------------------------


class Heard(NamedTuple):
    """Of one stream."""

    n_events: int
    late_s: list[float]  # from a tick to the arrival of its delta


async def listen(url: str, n_tokens: int, paced: bool) -> Heard:
    """Read a stream to its end."""
    body: dict[str, Any] = {"model": "default", "input": "hi", "stream": True, "max_output_tokens": n_tokens}
    body["seed"] = round(1e3 * TICK_S) if paced else 0
    n_events = 0
    late_s: list[float] = []
    async for lines in stream(url, PATH, body):
        n_events += lines.count(b"event: ")
        late_s += [time.monotonic() % TICK_S] * lines.count(DELTA)
    return Heard(n_events, late_s)


async def hear(url: str, n_streams: int, n_tokens: int, paced: bool) -> list[Heard]:
    return await asyncio.gather(*(listen(url, n_tokens, paced) for _ in range(n_streams)))


# --- what is measured ---------------------------------------------------------------------------------------


def speed(running: Running, n_streams: int) -> Figures:
    """With nothing to wait for."""
    began, cpu_began_s = time.perf_counter(), cpu_s(running.pid)
    heard = asyncio.run(hear(running.url, n_streams, STREAMS[n_streams], paced=False))
    n_events = sum(each.n_events for each in heard)
    cpu_us = 1e6 * (cpu_s(running.pid) - cpu_began_s) / n_events
    return {
        f"{n_streams} streams, events/s": n_events / (time.perf_counter() - began),
        f"{n_streams} streams, CPU µs an event": cpu_us,
    }


def lateness(running: Running, n_streams: int) -> Figures:
    """From the tick of all streams to the arrival of each delta."""
    heard = asyncio.run(hear(running.url, n_streams, N_TICKS, paced=True))
    late_ms = [1e3 * late_s for each in heard for late_s in each.late_s[N_WARM:]]
    return {
        f"{n_streams} streams, median late, ms": median(late_ms),
        f"{n_streams} streams, p99 late, ms": quantiles(late_ms, n=100)[98],
    }


def memory(command: list[str], checkout: Path, n_streams: int) -> Figures:
    """What so many streams take in a fresh process while they are open."""

    async def held(running: Running) -> float:
        await hear(running.url, 1, 2, paced=False)
        before_kb = resident_kb(running.pid)
        streams = asyncio.create_task(hear(running.url, n_streams, N_TICKS, paced=True))
        await asyncio.sleep(N_WARM * TICK_S)
        during_kb = resident_kb(running.pid)
        await streams
        return (during_kb - before_kb) / n_streams

    with started(*command, checkout=checkout) as running:
        return {f"{n_streams} streams, kB a stream": asyncio.run(held(running))}


def cpu_s(pid: int) -> float:
    """What a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_kb(pid: int) -> int:
    """The memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


def run(args: argparse.Namespace) -> None:
    directory = hub.find(args.model)
    if args.serve:
        sys.setswitchinterval(SWITCH_INTERVAL_S)  # as an engine does
        SERVED[args.serve](directory)
        return
    contenders = {"ours": (command_of("script", directory), ROOT)}
    if args.beside:
        contenders["beside"] = (command_of("script", directory), args.beside)
    contenders["least"] = (command_of("least", directory), ROOT)
    with ExitStack() as stack:
        servers: dict[str, Running] = {}
        for name, (command, checkout) in contenders.items():
            servers[name] = stack.enter_context(started(*command, checkout=checkout))
        cases: list[Case] = []
        for n_streams in STREAMS:
            for measure in (speed, lateness):
                cases.append({name: partial(measure, each, n_streams) for name, each in servers.items()})
        most = max(STREAMS)
        cases.append({name: partial(memory, *contender, most) for name, contender in contenders.items()})
        report(args, "Streams with an engine that only says a token.", cases)


def command_of(name: str, directory: Path) -> list[str]:
    return ["bench.py", "server", "--model", str(directory), "--serve", name]


def options(add: argparse.ArgumentParser) -> None:
    model_option(add)
    add.add_argument(
        "--beside", type=Path, metavar="DIR", help="another checkout, measured in the same rounds"
    )
    add.add_argument("--serve", choices=SERVED, help="only serve this, on a port that is printed")
