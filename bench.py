"""How fast, beside others: the same weights, the same prompts, the same machine, the same minutes.

    python bench.py cpu      MEASUREMENTS x contenders --run()--> Speeds --median--> a table in Markdown
    python bench.py store    background responses through the registry and back, and the memory they take
    python bench.py relay    a scripted worker in another process, asked directly and through server.py

`cpu` compares the engine with transformers in float32 (https://github.com/huggingface/transformers), which
`pip install -e '.[parity]'` brings; without it only our own numbers are shown.

Rules of this file:
1. The ratio is the result. The contenders take turns in each round: where the machine is busy for a while, it
   is busy for all of them. A number is the median of the rounds.
2. What is measured is what runs: `engine` is Engine.generate with all that is around the model, `forward` the
   forward pass and the choice of a token alone. All are greedy, and the table says if they said the same.
3. A measurement is a row of a table, a contender a column.

Not here: how long an HTTP request to a model takes.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import threadpoolctl

import answers
import hub
import params
import responses
import sse
from api import encode_event
from background import EventLog, Producer, Registry
from channels import Delta, Finish, Usage
from engine import Engine, Job
from model import Batch, Cache, Context, NumpyOps, Sampling, Span, forward
from store import Limits, Row, Store
from tokenizer import Tokenizer
from weights import Config, Weights, read_config, read_weights

Prompts = list[list[int]]
GREEDY = Sampling(temperature=0)


class Speeds(NamedTuple):
    """Of one run: tokens a second, and what was said first."""

    prefill: float
    decode: float
    said: list[int]  # by the first sequence


class Measurement(NamedTuple):
    """A run of `batch` prompts of n_prompt tokens, and which of its speeds counts."""

    n_prompt: int
    batch: int
    n_new: int | None  # None: what --new says
    speed: Callable[[Speeds], float]


# fmt: off
#  tokens/s                         n_prompt  batch  n_new  speed
MEASUREMENTS = {
    "prefill, 128 tokens": Measurement(128,   1,     1,     lambda speeds: speeds.prefill),
    "decode, batch 1":     Measurement(32,    1,     None,  lambda speeds: speeds.decode),
    "decode, batch 8":     Measurement(32,    8,     None,  lambda speeds: speeds.decode),
}
# fmt: on

Run = Callable[[Prompts, int], Speeds]  # (prompts of one length, tokens to say after each)


def speeds(prompts: Prompts, started: float, token_times: list[list[float]], said: list[int]) -> Speeds:
    """Prefill lasts until each sequence has its first token; decoding is all that comes after it."""
    first, last = max(times[0] for times in token_times), max(times[-1] for times in token_times)
    n_decoded = sum(t > first for times in token_times for t in times)
    n_prompt = sum(map(len, prompts))
    return Speeds(n_prompt / (first - started), n_decoded / max(last - first, 1e-9), said)


# --- contenders ---------------------------------------------------------------------------------------------


def engine_run(engine: Engine) -> Run:
    """Engine.generate, as the server calls it."""

    async def one(prompt: list[int], n_new: int) -> list[tuple[float, int]]:
        async with aclosing(engine.generate(Job(prompt, n_new, frozenset(), GREEDY))) as steps:
            return [(time.perf_counter(), token.token_id) async for step in steps for token in step.tokens]

    async def all_of(prompts: Prompts, n_new: int) -> Speeds:
        started = time.perf_counter()
        tokens = await asyncio.gather(*(one(prompt, n_new) for prompt in prompts))
        times = [[t for t, _ in sequence] for sequence in tokens]
        return speeds(prompts, started, times, [token_id for _, token_id in tokens[0]])

    return lambda prompts, n_new: asyncio.run(all_of(prompts, n_new))


def forward_run(config: Config, weights: Weights, max_seq_len: int) -> Run:
    """The forward pass and the choice of the tokens, one step after another."""
    ops = NumpyOps(config, max_seq_len)

    def run(prompts: Prompts, n_new: int) -> Speeds:
        caches = [Cache(config, len(prompt) + n_new) for prompt in prompts]
        said: Prompts = [[] for _ in prompts]
        times, started = [], time.perf_counter()
        for n in range(n_new):
            start = len(prompts[0]) + n - 1 if n else 0
            spans = [
                Span(cache, output[-1:] or prompt, start, wanted=True)
                for cache, prompt, output in zip(caches, prompts, said, strict=True)
            ]
            logits = forward(ops, weights, Batch(spans))
            contexts = [Context(GREEDY, prompt, out) for prompt, out in zip(prompts, said, strict=True)]
            for output, choice in zip(said, ops.pick(logits, contexts), strict=True):
                output.append(choice.token_id)
            times.append(time.perf_counter())
        return speeds(prompts, started, [times] * len(prompts), said[0])

    return run


def transformers_run(model: Any, attention: str) -> Run:
    """The same steps with their model and their cache; `generate` is slower by what it checks around them."""
    import torch

    def run(prompts: Prompts, n_new: int) -> Speeds:
        with torch.inference_mode():
            return steps(prompts, n_new)

    def steps(prompts: Prompts, n_new: int) -> Speeds:
        model.set_attn_implementation(attention)
        said, times, cache, started = [], [], None, time.perf_counter()
        token_ids = torch.tensor(prompts)  # (batch, n_tokens)
        for _ in range(n_new):
            output = model(token_ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, token_ids = output.past_key_values, output.logits[:, -1:].argmax(-1)
            said.append(int(token_ids[0, 0]))
            times.append(time.perf_counter())
        return speeds(prompts, started, [times] * len(prompts), said)

    return run


def transformers_model(directory: Path, n_threads: int) -> Any:
    """Their model of the same files, float32; None where they are not installed."""
    try:
        import torch
        import transformers
    except ImportError as error:
        print(f"no comparison ({error}): pip install -e '.[parity]' brings it", file=sys.stderr)
        return None
    torch.set_num_threads(n_threads)
    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


# --- cpu ----------------------------------------------------------------------------------------------------


def cpu(args: argparse.Namespace) -> None:
    directory = hub.find(args.model)
    config = read_config(directory)
    weights = read_weights(directory, config)
    max_seq_len = min(config.max_seq_len, 256 + args.new)
    engine = Engine(config, weights, max_seq_len)
    contenders = {"engine": engine_run(engine), "forward": forward_run(config, weights, max_seq_len)}
    if model := transformers_model(directory, args.threads):
        for attention in ("eager", "sdpa"):
            contenders[f"transformers {attention}"] = transformers_run(model, attention)
    with threadpoolctl.threadpool_limits(args.threads, user_api="blas"):
        found = measure(contenders, Tokenizer(directory / "tokenizer.json"), args.new, args.repeat)
    engine.close()
    report = "\n".join([*setting(directory, args), "", *table(found, list(contenders)), ""])
    print(report, end="")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(report, encoding="utf-8")


Found = dict[str, dict[str, list[Speeds]]]  # measurement -> contender -> a run a round


def measure(contenders: dict[str, Run], tokenizer: Tokenizer, n_new: int, repeat: int) -> Found:
    """All runs; a round before the first warms up and does not count."""
    found: Found = {name: {contender: [] for contender in contenders} for name in MEASUREMENTS}
    for number in range(repeat + 1):
        for name, m in MEASUREMENTS.items():
            for contender, run in contenders.items():
                result = run(prompts(tokenizer, m.batch, m.n_prompt), m.n_new or n_new)
                if number:
                    found[name][contender].append(result)
                shown = f"{m.speed(result):8.1f} tok/s" if number else "warm"
                print(f"round {number}/{repeat}  {name:20} {contender:20} {shown}", file=sys.stderr)
    return found


def prompts(tokenizer: Tokenizer, batch: int, n_prompt: int) -> Prompts:
    """Pieces of this file's own prose."""
    assert __doc__
    token_ids = tokenizer.encode(__doc__ * (1 + batch * n_prompt // 256))
    return [token_ids[i * n_prompt : (i + 1) * n_prompt] for i in range(batch)]


def setting(directory: Path, args: argparse.Namespace) -> Iterator[str]:
    """What a number means nothing without."""
    installed = ["numpy", "torch", "transformers"] if "torch" in sys.modules else ["numpy"]
    versions = ", ".join(f"{name} {version(name)}" for name in installed)
    yield f"{date.today()}, {directory.name} in float32, {args.new} tokens decoded a sequence,"
    yield f"{cpu_name()}, {os.cpu_count()} cores, {args.threads} threads,"
    yield f"Python {platform.python_version()}, {versions}."


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    named = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def table(found: Found, contenders: Sequence[str]) -> Iterator[str]:
    """Medians, and how many times as fast the engine is as the fastest of the others that is not ours."""
    theirs = [name for name in contenders if name.startswith("transformers")]
    n_rounds = len(next(iter(found.values()))[contenders[0]])
    columns = [*contenders, *(["engine / their best", "same words"] if theirs else [])]
    yield f"| tokens/s, median of {n_rounds} | " + " | ".join(columns) + " |"
    yield "|---" * (len(columns) + 1) + "|"
    for name, runs in found.items():
        medians = {who: median(map(MEASUREMENTS[name].speed, runs[who])) for who in contenders}
        cells = [f"{value:.1f}" for value in medians.values()]
        if theirs:
            best = max(medians[who] for who in theirs)
            said = {tuple(runs[who][0].said) for who in contenders}
            cells += [f"{medians['engine'] / best:.2f}", "yes" if len(said) == 1 else "no"]
        yield f"| {name} | " + " | ".join(cells) + " |"


# --- store --------------------------------------------------------------------------------------------------

N_DELTAS = 64  # tokens of one response: a frame each, and eight around them


def store(args: argparse.Namespace) -> None:
    with TemporaryDirectory() as folder:
        lines = asyncio.run(store_run(Path(folder) / "store.db", args.responses))
    directory = hub.find(args.model)
    config = read_config(directory)
    engine = Engine(config, read_weights(directory, config), 256)
    rate = engine_run(engine)(prompts(Tokenizer(directory / "tokenizer.json"), 8, 32), N_DELTAS).decode
    engine.close()
    report = "\n".join(
        [
            f"{date.today()}, {args.responses} background responses of {N_DELTAS} tokens, stored in a file,",
            f"{cpu_name()}, {os.cpu_count()} cores, Python {platform.python_version()}.",
            "",
            "| what | how much |",
            "|---|---|",
            *(f"| {name} | {value} |" for name, value in lines.items()),
            f"| {directory.name}, decode, batch 8 | {rate:.0f} tokens/s |",
            "",
        ]
    )
    print(report, end="")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(report, encoding="utf-8")


async def store_run(path: Path, n_responses: int) -> dict[str, str]:
    """Events appended and written, events read back, and the resident memory on the way."""
    database = Store(str(path), Limits())
    registry = Registry(database, encode_event)
    ids, memory, started = [], {}, time.perf_counter()
    for n in range(1, n_responses + 1):
        row, producer = scripted(f"resp_{n}")
        ids.append(row.id)
        events = await registry.submit(row, producer)
        async with aclosing(events.read()) as frames:
            n_events = len([frame async for frame in frames])
        if n in (n_responses // 10, n_responses):
            memory[n] = resident_mb()
            print(f"{n}/{n_responses} responses, {memory[n]:.0f} MB resident", file=sys.stderr)
    appended, started = time.perf_counter() - started, time.perf_counter()
    for id_ in ids:
        again = await registry.events(id_)
        assert again
        async with aclosing(again.read()) as frames:
            assert len([frame async for frame in frames]) == n_events
    replayed = time.perf_counter() - started
    await registry.close(persistent=True)
    database.close()
    n_all = n_responses * n_events
    at = {f"resident memory after {n} responses": f"{mb:.0f} MB" for n, mb in memory.items()}
    return {
        "appended and written": f"{n_all / appended:.0f} events/s",
        "replayed": f"{n_all / replayed:.0f} events/s",
    } | at


def scripted(id: str) -> tuple[Row, Producer]:
    """A response whose tokens are already there."""
    request = params.from_responses({"model": "bench", "input": "hi", "background": True}, {})
    head = {"id": id, "object": "response", "created_at": 0, "model": "bench"} | request.echo
    builder = responses.Builder(head, answers.new_id)

    async def fill(events: EventLog) -> None:
        events.extend(builder.run())
        for _ in range(N_DELTAS):
            events.extend(builder.feed(Delta("final", " token")))
            await asyncio.sleep(0)  # as tokens come: one by one
        events.extend(builder.finish(Finish("stop", Usage(8, N_DELTAS)), 0))

    row = Row(id, time.time(), None, True, True, True, {}, [], head)
    return row, Producer(lambda: builder.start(queued=True), fill, lambda *_: [])


def resident_mb() -> float:
    """Of this process; 0 where /proc does not say."""
    status = Path("/proc/self/status")
    lines = status.read_text(encoding="utf-8").splitlines() if status.exists() else []
    return sum(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1e3


# --- relay --------------------------------------------------------------------------------------------------

# A contender is a way to the same worker, which writes the time into each of its deltas: the clock of all
# processes is one, CLOCK_MONOTONIC. A client reads the times where they arrive, whatever is around them.
WAYS = {"direct": "/v1/chat/completions", "chat": "/v1/chat/completions", "responses": "/v1/responses"}
WRITTEN_AT = re.compile(rb'"(?:content|delta)":"(\d+\.\d+) ')
N_STREAMS = 32


class Load(NamedTuple):
    """What the worker is asked to write."""

    n_events: int
    pace_s: float  # between two of them


async def worker_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One request to the worker: as many frames as its message says."""
    request = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"content-length: *(\d+)", request, re.IGNORECASE)
    head = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nConnection: close\r\n\r\n"
    if length is None:
        writer.write(head % b"application/json" + b'{"object":"list","data":[{"id":"bench"}]}')
    else:
        body = json.loads(await reader.readexactly(int(length[1])))
        load = Load(*json.loads(body["messages"][0]["content"]))
        writer.write(head % b"text/event-stream")
        chunk = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "bench"}
        frame = sse.encode(sse.dumps(chunk | {"choices": [{"index": 0, "delta": {"content": "%.6f token"}}]}))
        for n in range(load.n_events):
            if n and load.pace_s:
                await asyncio.sleep(load.pace_s)
            writer.write(frame % time.perf_counter())
            await writer.drain()
        end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
        writer.write(sse.encode(sse.dumps(chunk | end)) + sse.DONE)
    await writer.drain()
    writer.close()


async def worker_process() -> None:
    listening = await asyncio.start_server(worker_connection, "127.0.0.1", 0)
    print(f"listening http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", flush=True)
    await listening.serve_forever()


@contextlib.contextmanager
def started(*command: str) -> Iterator[str]:
    """A process of this folder that announces its URL."""
    folder = Path(__file__).parent
    with subprocess.Popen(
        [sys.executable, *command], cwd=folder, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout
            yield next(line.split()[1] for line in process.stdout if line.startswith("listening"))
        finally:
            process.kill()


async def times(url: str, path: str, load: Load) -> list[tuple[float, float]]:
    """When each delta was written, and when it was here."""
    found = []
    text = json.dumps(load)
    asked = {"model": "bench", "stream": True, "store": False, "input": text}
    body = json.dumps(asked | {"messages": [{"role": "user", "content": text}]}).encode()
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port, limit=2**26)
    head = f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    async for line in reader:
        if written := WRITTEN_AT.search(line):
            found.append((float(written[1]), time.perf_counter()))
        if line.startswith((b"data: [DONE]", b"event: response.output_text.done")):
            break
    writer.close()
    return found


async def first_event(url: str, path: str, _: int) -> float:
    """Milliseconds from the request to the first delta."""
    asked_at = time.perf_counter()
    return 1e3 * ((await times(url, path, Load(1, 0)))[0][1] - asked_at)


async def latency(url: str, path: str, n_events: int) -> float:
    """Milliseconds from the worker's write to the client's read, the median of a stream of 200 events/s."""
    found = await times(url, path, Load(n_events // 40, 0.005))
    return 1e3 * median(here - written for written, here in found)


async def rate(url: str, path: str, n_events: int, n_streams: int = 1) -> float:
    """Events a second, of all streams together."""
    load = Load(n_events // n_streams, 0)
    asked_at = time.perf_counter()
    found = await asyncio.gather(*(times(url, path, load) for _ in range(n_streams)))
    return sum(map(len, found)) / (max(pairs[-1][1] for pairs in found) - asked_at)


async def before_the_second(url: str, path: str, _: int) -> float:
    """1 if the client had the worker's first frame before the second was written."""
    (_written, first_here), (second_written, _here) = await times(url, path, Load(2, 0.1))
    return float(first_here < second_written)


# fmt: off
RELAYED: dict[str, Callable[[str, str, int], Any]] = {
    "first event, ms":                                first_event,
    "an event, ms":                                   latency,
    "events/s":                                       rate,
    f"events/s, {N_STREAMS} streams":                 partial(rate, n_streams=N_STREAMS),
    "first one is here before the second is written": before_the_second,
}
# fmt: on


def relay(args: argparse.Namespace) -> None:
    found: dict[str, dict[str, list[float]]] = {name: {way: [] for way in WAYS} for name in RELAYED}
    with (
        started("bench.py", "worker") as direct,
        started("server.py", "--upstream", direct + "/v1", "--port", "0", "--log-level", "warning") as front,
    ):
        for number in range(args.repeat + 1):  # the first round warms up
            for name, measured in RELAYED.items():
                for way, path in WAYS.items():
                    value = asyncio.run(measured(direct if way == "direct" else front, path, args.events))
                    found[name][way] += [value] if number else []
            print(f"round {number}/{args.repeat}", file=sys.stderr)
    lines = [
        f"{date.today()}, a scripted worker, asked directly and through `server.py --upstream`,",
        f"{cpu_name()}, {os.cpu_count()} cores,",
        f"Python {platform.python_version()}, httpx2 {version('httpx2')}, uvicorn {version('uvicorn')}.",
        "",
        f"| median of {args.repeat} | direct | chat | responses | chat / direct | responses / direct |",
        "|---|---|---|---|---|---|",
        *(relayed_row(name, [median(values) for values in ways.values()]) for name, ways in found.items()),
        "",
    ]
    report = "\n".join(lines)
    print(report, end="")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(report, encoding="utf-8")


def relayed_row(name: str, medians: list[float]) -> str:
    if RELAYED[name] is before_the_second:
        return f"| {name} | " + " | ".join("yes" if m == 1 else "no" for m in medians) + " | | |"
    cells = [f"{m:.0f}" if m > 100 else f"{m:.2f}" for m in medians]
    ratios = [f"{m / medians[0]:.2f}" for m in medians[1:]]
    return f"| {name} | " + " | ".join(cells + ratios) + " |"


# --- the command line ---------------------------------------------------------------------------------------


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Measure speeds, beside others.")
    commands = parser.add_subparsers(required=True, metavar="WHAT")
    add = commands.add_parser("store", help="events kept and read back, and the memory it takes")
    add.set_defaults(run=store)
    add.add_argument("--responses", type=int, default=10_000, metavar="N", help="how many (default: 10000)")
    common(add)
    add = commands.add_parser("relay", help="what it costs to ask through --upstream")
    add.set_defaults(run=relay)
    add.add_argument("--repeat", type=int, default=5, metavar="N", help="rounds (default: 5)")
    add.add_argument("--events", type=int, default=8000, metavar="N", help="in a stream (default: 8000)")
    add.add_argument("--out", type=Path, metavar="FILE", help="write the table there too")
    add = commands.add_parser("worker", help="the worker that `relay` asks")
    add.set_defaults(run=lambda _: asyncio.run(worker_process()))
    add = commands.add_parser("cpu", help="prefill and decoding of the model, beside transformers")
    add.set_defaults(run=cpu)
    common(add)
    add.add_argument("--repeat", type=int, default=5, metavar="N", help="rounds (default: 5)")
    add.add_argument("--new", type=int, default=64, metavar="N", help="tokens to decode (default: 64)")
    add.add_argument("--threads", type=int, default=os.cpu_count(), metavar="N", help="default: all cores")
    return parser


def common(add: argparse.ArgumentParser) -> None:
    add.add_argument("--model", metavar="DIR|ID", help="as of server.py; without it, the default model")
    add.add_argument("--out", type=Path, metavar="FILE", help="write the table there too")


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments().parse_args(argv)
    args.run(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
