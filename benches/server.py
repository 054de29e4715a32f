"""Streams held at once, beside two small Starlette applications that send the same deltas.

`bare` has them ready as bytes. `least` decodes each token in one task and frames it in another, which is what
any server with an engine does: no parser, no state machine, no log to resume from.

    a row of SERVED --serve()--> a process that listens --streams()--> Rate        --table--> results

`python bench.py server --beside DIR` measures another checkout in the same rounds: a git worktree of the
commit before. Each checkout serves with its own script of an engine.

Not here: what a model costs; the engine only says a token.
"""

import argparse
import asyncio
import json
import os
import platform
import re
import subprocess
import sys
import threading
import time
from collections import abc, defaultdict
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import date
from pathlib import Path
from statistics import median, quantiles
from types import SimpleNamespace
from typing import Any, NamedTuple, cast
from urllib.request import urlopen

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

import sse
from api import Api, encode_event
from background import Registry
from benches.common import cpu_name, model_option, repeat_option, resident_mb, write
from checkpoint import hub
from checkpoint.config import Config, read_config
from dialects.matchers import Grammars
from engine import Engine, ModelRunner, StepOutput, Take
from middleware import Keys, make_app
from request.template import ChatTemplate
from sampling import Choice
from scheduler import Sequence
from server import SWITCH_S, tune_garbage_collector
from service.admission import Room
from service.connections import bind, protocol
from store import Retention, Store
from tokenizer import Tokenizer
from worker import LocalWorker

HERE = Path(__file__).parent.parent
TICK_S = 1.0  # of the paced engine: all streams get a token then, as the sequences of a batch do
N_TICKS = 5
N_WARM = 2  # of them, while streams are still being opened
# streams: tokens of each when nothing paces them
STREAMS = {1: 2000, 50: 100, 500: 20}
N_BATCH = 64  # streams of the engine that has a thread of its own
N_BATCH_TOKENS = 400  # of each
N_GPU_TOKENS = 1200  # of each, from the engine that has the pace of a GPU
GPU_TOKENS_S = 30_000  # that it makes
STEP_WORK_S = 0.001  # what its step computes, in Python: so long it needs the lock that the event loop needs


# --- scripts of an engine -----------------------------------------------------------------------------------


class Script:
    """An engine that says a token over and over: one a tick, whose milliseconds are the seed; 0: at once."""

    alive = True

    def __init__(self, config: Config, token_id: int) -> None:
        self.config = config
        self.max_seq_len = config.max_seq_len
        self._step = StepOutput([Choice(token_id)])

    async def generate(self, job: Sequence, take: Take) -> None:
        for n_left in range(job.max_tokens - 1, -1, -1):
            await tick(job.sampling.seed)
            take(self._step if n_left else self._step._replace(finish="length"))

    def counts(self) -> dict[str, int]:
        return {}


async def tick(ms: int) -> None:
    """Wait for the next of the moments that all processes of this machine agree on."""
    await asyncio.sleep(ms / 1e3 - time.monotonic() % (ms / 1e3) if ms else 0)


class BatchScript(Engine):
    """The engine's thread with a step of STEP_WORK_S, which says a token to each sequence.

    It works as for the launch of a step, delivers what the step before has brought, as the engine does (its
    rule 6), and then waits, as for a device, until the event loop has handled that.
    """

    def __init__(self, config: Config, token_id: int) -> None:
        self._choice = Choice(token_id)
        self._n_loops = loops_for(STEP_WORK_S)
        self._alone_s = median(self._work() for _ in range(100))
        self._work_s: list[float] = []  # of each step beside the event loop
        self._handled = threading.Event()  # the event loop has written what the last step brought
        runner = SimpleNamespace(
            config=config, max_seq_len=config.max_seq_len, n_pages=2**16, max_batch=N_BATCH, chunk=64,
            about="",
        )  # fmt: skip
        super().__init__(cast(ModelRunner, runner))

    def _work(self) -> float:
        started = time.perf_counter()
        for _ in range(self._n_loops):
            pass
        return time.perf_counter() - started

    def _step(self) -> None:
        sequences = list(self._readers)
        if len(sequences) < N_BATCH and not any(sequence.output for sequence in sequences):
            time.sleep(STEP_WORK_S)  # all of them begin together
            return
        self._work_s.append(self._work())
        self._deliver()
        loop = self._readers[sequences[0]].loop
        loop.call_soon_threadsafe(loop.call_soon, self._handled.set)  # behind the writes
        self._until_next()
        for sequence in sequences:
            sequence.output.append(self._choice.token_id)
            is_last = len(sequence.output) == sequence.max_tokens
            if is_last:
                self._scheduler.remove(sequence)
            self._put(sequence, StepOutput([self._choice], "length" if is_last else None))
        if not self._readers:
            self._deliver()

    def _until_next(self) -> None:
        self._handled.wait()
        self._handled.clear()

    def counts(self) -> dict[str, int]:
        beside_s = median(self._work_s or [0.0])
        return {"alone_us": round(1e6 * self._alone_s), "beside_us": round(1e6 * beside_s)}


class GpuScript(BatchScript):
    """The same at the pace of a GPU, which waits for no reader; the work is the host's part of a step."""

    _next_at = 0.0

    def _until_next(self) -> None:
        now = time.perf_counter()
        time.sleep(max(0.0, self._next_at - now))
        self._next_at = max(self._next_at, now) + N_BATCH / GPU_TOKENS_S


def loops_for(seconds: float) -> int:
    """How many turns of an empty loop take so long."""
    n_loops = 10_000

    def spin() -> float:
        started = time.perf_counter()
        for _ in range(n_loops):
            pass
        return time.perf_counter() - started

    return round(n_loops * seconds / min(spin() for _ in range(100)))


# --- what is served -----------------------------------------------------------------------------------------


def ours(directory: Path, script: Callable[[Config, int], Any]) -> ASGIApp:
    config, vocabulary = read_config(directory), directory / "tokenizer.json"
    tokenizer = Tokenizer(vocabulary)
    engine = cast(Engine, script(config, tokenizer.encode(" a")[0]))
    grammars = Grammars(vocabulary, config.vocab_size, config.eos_token_ids)
    worker = LocalWorker(engine, tokenizer, ChatTemplate.load(directory), grammars, names=["bench"])
    registry = Registry(Store(":memory:", Retention()), encode_event)
    return make_app(Api(worker, None, registry, bytes(32)), Keys([]), Room(max(STREAMS) + 1))


def bare(frames: abc.Sequence[bytes]) -> ASGIApp:
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


def least(directory: Path) -> ASGIApp:
    tokenizer = Tokenizer(directory / "tokenizer.json")
    token_id = tokenizer.encode(" a")[0]

    async def stream(http: HttpRequest) -> Response:
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
                data = f'{{"sequence_number":{number},{place},"delta":{sse.dumps_text(text)}}}'
                yield DELTA + f"data: {data}\n\n".encode()
                number += 1
            await generating

        return StreamingResponse(frames(), media_type="text/event-stream")

    return Starlette(routes=[Route("/v1/responses", stream, methods=["POST"])])


SERVED: dict[str, Callable[[Path], ASGIApp]] = {
    "script": lambda directory: ours(directory, Script),
    "batch": lambda directory: ours(directory, BatchScript),
    "gpu": lambda directory: ours(directory, GpuScript),
    "least": least,
    "bare": lambda _: bare(frames_of(sys.stdin.buffer.read())),
}


def serve(app: ASGIApp) -> None:
    """Serve, and tell the port."""
    sys.setswitchinterval(SWITCH_S)
    config = uvicorn.Config(app, http=protocol(60), log_level="warning", access_log=False, lifespan="off")
    listener = bind("127.0.0.1", 0)
    tune_garbage_collector()
    print(listener.getsockname()[1], flush=True)
    uvicorn.Server(config).run(sockets=[listener])


class Running(NamedTuple):
    port: int
    pid: int


@contextmanager
def running(name: str, directory: Path, checkout: Path = HERE, reply: bytes = b"") -> Iterator[Running]:
    """A row of SERVED in a process of its own; `reply` is one of ours, for `bare` to repeat."""
    command = [sys.executable, "bench.py", "server", "--model", str(directory), "--serve", name]
    environment = os.environ | {"PYTHONPATH": ""}  # a checkout imports its own modules
    with subprocess.Popen(
        command, cwd=checkout, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin
        assert process.stdout
        try:
            process.stdin.write(reply)
            process.stdin.close()
            yield Running(int(process.stdout.readline()), process.pid)
        finally:
            process.kill()


# --- clients ------------------------------------------------------------------------------------------------

DELTA = b"event: response.output_text.delta\n"


class Heard(NamedTuple):
    """Of one stream."""

    body: bytes
    late: list[float]  # seconds from a tick to the arrival of its delta


async def listener(port: int, n_tokens: int, paced: bool, others: asyncio.Barrier | None = None) -> Heard:
    """Read a stream to its end, or, with `others`, until all have begun and all shall leave."""
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
        if others and late:
            await others.wait()
            await others.wait()
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
    before = resident_mb(server.pid)
    all_of_them = asyncio.Barrier(n_streams + 1)
    streams = [asyncio.create_task(listener(server.port, 1000, True, all_of_them)) for _ in range(n_streams)]
    await all_of_them.wait()
    during = resident_mb(server.pid)
    await all_of_them.wait()
    await asyncio.gather(*streams)
    await asyncio.sleep(2 * TICK_S)
    return before, during, resident_mb(server.pid)


# --- rounds and their tables --------------------------------------------------------------------------------


class StreamFigures(NamedTuple):
    """Of a number of streams from one server."""

    events_s: float  # with nothing to wait for
    cpu_us: float  # an event
    median_late_ms: float  # with a tick
    p99_late_ms: float


class BatchFigures(NamedTuple):
    """Of a batch that steps as fast as it is read, from one server."""

    events_s: float
    cpu_us: float  # an event, the engine's work included
    work_alone_us: float  # a step's work in the engine's thread
    work_beside_us: float  # the same while the event loop serves


def stream_figures(server: Running, n_streams: int) -> StreamFigures:
    fast = asyncio.run(hear(server, n_streams, STREAMS[n_streams], paced=False))
    late_ms = asyncio.run(hear(server, n_streams, N_TICKS, paced=True)).late_ms
    return StreamFigures(fast.events_s, fast.cpu_us, median(late_ms), quantiles(late_ms, n=100)[98])


def batch_figures(server: Running, n_tokens: int) -> BatchFigures:
    rate = asyncio.run(hear(server, N_BATCH, n_tokens, paced=False))
    with urlopen(f"http://127.0.0.1:{server.port}/health") as answer:
        counts = json.load(answer)
    return BatchFigures(rate.events_s, rate.cpu_us, counts["alone_us"], counts["beside_us"])


def run(args: argparse.Namespace) -> None:
    directory = hub.find(args.model)
    if args.serve:
        serve(SERVED[args.serve](directory))
        return
    checkouts = {"this": HERE}
    if args.beside:
        checkouts["beside"] = args.beside
    streams, batches = measured(directory, checkouts, args.repeat)
    lines = [
        f"{date.today()}, streams of {directory.name} with an engine that only says a token,",
        f"{cpu_name()}, {os.cpu_count()} cores, Python {platform.python_version()}, median of {args.repeat}.",
        "",
        "| streams | server | events/s | / least | / bare | CPU an event | median late | p99 late |",
        "|---|---|---|---|---|---|---|---|",
        *(row for n in STREAMS for row in stream_rows(n, streams)),
        "",
        f"Late: from the tick of all streams ({TICK_S:g} s) to the arrival of the delta.",
        "",
        f"| a batch of {N_BATCH} that steps as fast as it is read "
        "| events/s | CPU an event | a step's work alone | beside the event loop |",
        "|---|---|---|---|---|",
        *(batch_row(name, rows) for name, rows in batches.items()),
        "",
        *(memory_line(name, directory, checkout) for name, checkout in checkouts.items()),
        "",
    ]
    write(lines, args.out)


def measured(
    directory: Path, checkouts: dict[str, Path], n_rounds: int
) -> tuple[dict[tuple[int, str], list[StreamFigures]], dict[str, list[BatchFigures]]]:
    """All rounds but the first, which warms up: by number of streams and server, and by checkout."""
    streams = defaultdict[tuple[int, str], list[StreamFigures]](list)
    batches = defaultdict[str, list[BatchFigures]](list)
    with ExitStack() as stack:
        servers: dict[str, Running] = {}
        engines: dict[str, Running] = {}
        for name, checkout in checkouts.items():
            servers[name] = stack.enter_context(running("script", directory, checkout))
            engines[name] = stack.enter_context(running("batch", directory, checkout))
        at_gpu_pace = f"this, {GPU_TOKENS_S} tokens/s whatever is read"
        engines[at_gpu_pace] = stack.enter_context(running("gpu", directory))
        longest = asyncio.run(listener(servers["this"].port, max(STREAMS.values()), paced=False)).body
        servers["least"] = stack.enter_context(running("least", directory))
        servers["bare"] = stack.enter_context(running("bare", directory, reply=longest))
        for number in range(n_rounds + 1):
            for n_streams in STREAMS:
                for name, server in servers.items():
                    streams[n_streams, name].append(stream_figures(server, n_streams))
            for name, server in engines.items():
                n_tokens = N_GPU_TOKENS if name == at_gpu_pace else N_BATCH_TOKENS
                batches[name].append(batch_figures(server, n_tokens))
            print(f"round {number}/{n_rounds}", file=sys.stderr)
    return {key: rows[1:] for key, rows in streams.items()}, {key: rows[1:] for key, rows in batches.items()}


def stream_rows(n_streams: int, streams: dict[tuple[int, str], list[StreamFigures]]) -> Iterator[str]:
    medians = {
        name: StreamFigures(*map(median, zip(*rows, strict=True)))
        for (n, name), rows in streams.items()
        if n == n_streams
    }
    for name, figures in medians.items():
        ratios = [f"{figures.events_s / medians[peer].events_s:.2f}" for peer in ("least", "bare")]
        speed = f"{figures.events_s:.0f} | {' | '.join(ratios)} | {figures.cpu_us:.0f} µs"
        late = f"{figures.median_late_ms:.1f} ms | {figures.p99_late_ms:.1f} ms"
        yield f"| {n_streams} | {name} | {speed} | {late} |"


def batch_row(name: str, rows: list[BatchFigures]) -> str:
    figures = BatchFigures(*map(median, zip(*rows, strict=True)))
    slower = figures.work_beside_us / figures.work_alone_us
    work = f"{figures.work_alone_us:.0f} µs | {figures.work_beside_us:.0f} µs, {slower:.2f}"
    return f"| {name} | {figures.events_s:.0f} | {figures.cpu_us:.0f} µs | {work} |"


def memory_line(name: str, directory: Path, checkout: Path) -> str:
    with running("script", directory, checkout) as fresh:
        asyncio.run(hear(fresh, 1, N_TICKS, paced=False))
        n_streams = max(STREAMS)
        before, during, after = asyncio.run(held(fresh, n_streams))
    return (
        f"Resident memory, {name}: {before:.0f} MB, with {n_streams} streams held {during:.0f} MB, "
        f"when they had left {after:.0f} MB: {1e3 * (during - before) / n_streams:.0f} kB a stream."
    )


def frames_of(reply: bytes) -> list[bytes]:
    """The frames in a reply with Transfer-Encoding: chunked; a chunk holds one or several."""
    rest = reply.partition(b"\r\n\r\n")[2]
    chunks = list[bytes]()
    while size := int(rest[: rest.index(b"\r\n")], 16):
        begin = rest.index(b"\r\n") + 2
        chunks.append(rest[begin : begin + size])
        rest = rest[begin + size + 2 :]
    return re.findall(rb".+?\n\n", b"".join(chunks), re.DOTALL)


def options(add: argparse.ArgumentParser) -> None:
    model_option(add)
    repeat_option(add)
    add.add_argument(
        "--beside", type=Path, metavar="DIR", help="another checkout, measured in the same rounds"
    )
    add.add_argument("--serve", choices=SERVED, help="only serve this, on a port that is printed")
