"""Streams held at once, beside a bare Starlette application that sends the same bytes.

Not here: what a model costs; the engine only says a token.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple, cast

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from api import Api, encode_event
from background import Registry
from benches.common import cpu_name, model_option, repeat_option, resident_mb, write
from checkpoint import hub
from checkpoint.config import Config, read_config
from dialects.matchers import Grammars
from engine import Engine, EngineRequest, StepOutput
from middleware import Keys, make_app
from request.template import ChatTemplate
from sampling import Choice
from service.admission import Room
from service.connections import bind, protocol
from store import Retention, Store
from tokenizer import Tokenizer
from worker import LocalWorker

TICK_S = 1.0  # of the paced engine: all streams get a token then, as the sequences of a batch do
N_TICKS = 5
N_WARM = 2  # of them, while streams are still being opened
# streams: tokens of each when nothing paces them
STREAMS = {1: 2000, 50: 100, 500: 20}


class Script:
    """An engine that says a token over and over: one a tick, whose milliseconds are the seed; 0: at once."""

    alive = True

    def __init__(self, config: Config, token_id: int) -> None:
        self.config = config
        self.max_seq_len = config.max_seq_len
        self._step = StepOutput([Choice(token_id, -1.0)])

    async def generate(self, job: EngineRequest) -> AsyncGenerator[StepOutput]:
        for n_left in range(job.max_tokens - 1, -1, -1):
            await tick(job.sampling.seed)
            yield self._step if n_left else self._step._replace(finish="length")

    def counts(self) -> dict[str, int]:
        return {}


async def tick(ms: int) -> None:
    """Wait for the next of the moments that all processes of this machine agree on."""
    await asyncio.sleep(ms / 1e3 - time.monotonic() % (ms / 1e3) if ms else 0)


def ours(directory: Path) -> ASGIApp:
    config, vocabulary = read_config(directory), directory / "tokenizer.json"
    tokenizer = Tokenizer(vocabulary)
    engine = cast(Engine, Script(config, tokenizer.encode(" a")[0]))
    grammars = Grammars(vocabulary, config.vocab_size, config.eos_token_ids)
    worker = LocalWorker(engine, tokenizer, ChatTemplate.load(directory), grammars, names=["bench"])
    registry = Registry(Store(":memory:", Retention()), encode_event)
    return make_app(Api(worker, None, registry, bytes(32)), Keys([]), Room(max(STREAMS) + 1))


def bare(frames: Sequence[bytes]) -> ASGIApp:
    """The frames that ours has sent, the deltas among them in time."""

    async def stream(http: HttpRequest) -> Response:
        body = await http.json()

        async def paced() -> AsyncGenerator[bytes]:
            n_left = body["max_output_tokens"]
            for frame in frames:
                if DELTA in frame:
                    if not n_left:
                        continue
                    n_left -= 1
                    await tick(body["seed"])
                yield frame

        return StreamingResponse(paced(), media_type="text/event-stream")

    return Starlette(routes=[Route("/v1/responses", stream, methods=["POST"])])


def listen(make: Callable[[Any], ASGIApp], what: Any, told: Connection) -> None:
    """In a process of its own: serve what `make` makes of `what`, and tell the port."""
    config = uvicorn.Config(
        make(what), http=protocol(60), log_level="warning", access_log=False, lifespan="off"
    )
    listener = bind("127.0.0.1", 0)
    told.send(listener.getsockname()[1])
    uvicorn.Server(config).run(sockets=[listener])


class Running(NamedTuple):
    port: int
    pid: int


@contextmanager
def running(make: Callable[[Any], ASGIApp], what: Any) -> Iterator[Running]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=listen, args=(make, what, there))
    process.start()
    try:
        assert process.pid
        yield Running(here.recv(), process.pid)
    finally:
        process.kill()
        process.join()


DELTA = b"event: response.output_text.delta\n"


class Heard(NamedTuple):
    """Of one stream."""

    body: bytes
    late: list[float]  # seconds from a tick to the arrival of its delta


async def listener(port: int, n_tokens: int, paced: bool, enough: asyncio.Event | None = None) -> Heard:
    """Read a stream to its end, or, once it has begun, until there is `enough`."""
    body = {"model": "bench", "input": "hi", "stream": True, "max_output_tokens": n_tokens}
    body["seed"] = round(1e3 * TICK_S) if paced else 0
    raw = json.dumps(body).encode()
    head = "POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
    chunks, late = [], []
    while chunk := await reader.read(2**16):
        late += [time.monotonic() % TICK_S] * chunk.count(DELTA)
        chunks.append(chunk)
        if enough and late:
            await enough.wait()
            break
    writer.close()
    return Heard(b"".join(chunks), late)


class Rate(NamedTuple):
    """Of many streams at once."""

    events_s: float
    cpu_us: float  # of the server, an event
    late_ms: list[float]  # each delta


async def hear(server: Running, n_streams: int, n_tokens: int, paced: bool) -> Rate:
    started, cpu_started = time.perf_counter(), cpu_s(server.pid)
    heard = await asyncio.gather(*(listener(server.port, n_tokens, paced) for _ in range(n_streams)))
    seconds, cpu_seconds = time.perf_counter() - started, cpu_s(server.pid) - cpu_started
    n_events = sum(each.body.count(b"event: ") for each in heard)
    late_ms = [1e3 * late for each in heard for late in each.late[N_WARM:]]
    return Rate(n_events / seconds, 1e6 * cpu_seconds / n_events, late_ms)


def cpu_s(pid: int) -> float:
    """What a process has used; 0 where /proc does not say."""
    stat = Path(f"/proc/{pid}/stat")
    fields = stat.read_text(encoding="utf-8").rpartition(")")[2].split() if stat.exists() else ["0"] * 13
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def held(server: Running, n_streams: int) -> tuple[float, float, float]:
    """Resident memory in MB: before, while so many streams are open, and when they are closed."""
    before, enough = resident_mb(server.pid), asyncio.Event()
    streams = [asyncio.create_task(listener(server.port, 1000, True, enough)) for _ in range(n_streams)]
    await asyncio.sleep(3 * TICK_S)
    during = resident_mb(server.pid)
    enough.set()
    await asyncio.gather(*streams)
    await asyncio.sleep(2 * TICK_S)
    return before, during, resident_mb(server.pid)


def run(args: argparse.Namespace) -> None:
    directory = hub.find(args.model)
    found: dict[int, list[list[float]]] = {n: [] for n in STREAMS}
    with running(ours, directory) as here:
        longest = asyncio.run(listener(here.port, max(STREAMS.values()), paced=False)).body
        with running(bare, frames_of(longest)) as there:
            for number in range(args.repeat + 1):
                for n_streams, n_tokens in STREAMS.items():
                    row = [*measured(here, n_streams, n_tokens), *measured(there, n_streams, n_tokens)]
                    found[n_streams] += [row] * bool(number)
                    print(f"round {number}/{args.repeat}  {n_streams:3} streams  {row}", file=sys.stderr)
    with running(ours, directory) as fresh:
        asyncio.run(hear(fresh, 1, N_TICKS, paced=False))
        memory = asyncio.run(held(fresh, max(STREAMS)))
    lines = [
        f"{date.today()}, streams of {directory.name} with an engine that only says a token,",
        f"{cpu_name()}, {os.cpu_count()} cores, Python {platform.python_version()}, median of {args.repeat}.",
        "",
        "| streams | events/s | bare | ratio | CPU an event | bare | median late | bare | p99 late | bare |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(server_row(n, rows) for n, rows in found.items()),
        "",
        f"Late: from the tick of all streams ({TICK_S:g} s) to the arrival of the delta. "
        f"Resident memory: {memory[0]:.0f} MB,",
        f"with {max(STREAMS)} streams held {memory[1]:.0f} MB, when they had left {memory[2]:.0f} MB.",
        "",
    ]
    write(lines, args.out)


def measured(server: Running, n_streams: int, n_tokens: int) -> tuple[float, float, float, float]:
    """Events a second and CPU of each in µs, with nothing to wait for; how late in ms with a tick."""
    fast = asyncio.run(hear(server, n_streams, n_tokens, paced=False))
    late_ms = asyncio.run(hear(server, n_streams, N_TICKS, paced=True)).late_ms
    return fast.events_s, fast.cpu_us, median(late_ms), quantiles(late_ms, n=100)[98]


def server_row(n_streams: int, rows: list[list[float]]) -> str:
    medians = [median(column) for column in zip(*rows, strict=True)]
    (speed, cpu, late, latest), (bare_speed, bare_cpu, bare_late, bare_latest) = medians[:4], medians[4:]
    numbers = [str(n_streams), f"{speed:.0f}", f"{bare_speed:.0f}", f"{speed / bare_speed:.2f}"]
    cpus = [f"{us:.0f} µs" for us in (cpu, bare_cpu)]
    times = [f"{ms:.1f} ms" for ms in (late, bare_late, latest, bare_latest)]
    return "| " + " | ".join([*numbers, *cpus, *times]) + " |"


def frames_of(reply: bytes) -> list[bytes]:
    """The frames in a reply with Transfer-Encoding: chunked: a chunk each."""
    rest, frames = reply.partition(b"\r\n\r\n")[2], []
    while size := int(rest[: rest.index(b"\r\n")], 16):
        begin = rest.index(b"\r\n") + 2
        frames.append(rest[begin : begin + size])
        rest = rest[begin + size + 2 :]
    return frames


def options(add: argparse.ArgumentParser) -> None:
    model_option(add)
    repeat_option(add)
