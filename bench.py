"""How fast, beside others: the same weights, the same prompts, the same machine, the same minutes.

    python bench.py cpu      MEASUREMENTS x contenders --run()--> Speeds --median--> a table in Markdown
    python bench.py store    background responses through the registry and back, and the memory they take

`cpu` compares the engine with transformers in float32 (https://github.com/huggingface/transformers), which
`pip install -e '.[parity]'` brings; without it only our own numbers are shown.

Rules of this file:
1. The ratio is the result. The contenders take turns in each round: where the machine is busy for a while, it
   is busy for all of them. A number is the median of the rounds.
2. What is measured is what runs: `engine` is Engine.generate with all that is around the model, `forward` the
   forward pass and the choice of a token alone. All are greedy, and the table says if they said the same.
3. A measurement is a row of a table, a contender a column. What only this engine does stands in a table of
   its own, beside the same without it.

Not here: how long an HTTP request takes.
"""

import argparse
import asyncio
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import threadpoolctl

import answers
import hub
import params
import responses
from api import encode_event
from background import EventLog, Producer, Registry
from channels import Delta, Finish, Usage
from engine import Engine, Job
from model import PAGE, Context, NumpyOps, Sampling, Span
from store import Limits, Row, Store
from tokenizer import Tokenizer
from weights import Config, Weights, read_config, read_weights

Prompts = list[list[int]]
GREEDY = Sampling(temperature=0)
MAX_BATCH = 8


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


def numpy_ops(config: Config, weights: Weights, max_seq_len: int) -> NumpyOps:
    """With pages for all sequences of a batch."""
    return NumpyOps(config, weights, max_seq_len, MAX_BATCH * -(-max_seq_len // PAGE), MAX_BATCH)


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


def forward_run(ops: NumpyOps) -> Run:
    """The forward pass and the choice of the tokens, one step after another."""

    def run(prompts: Prompts, n_new: int) -> Speeds:
        size = ops.n_pages // len(prompts)
        said: Prompts = [[] for _ in prompts]
        times, started = [], time.perf_counter()
        for n in range(n_new):
            start = len(prompts[0]) + n - 1 if n else 0
            spans = [
                Span(i, range(i * size, (i + 1) * size), output[-1:] or prompt, start, 1, tile=not output)
                for i, (prompt, output) in enumerate(zip(prompts, said, strict=True))
            ]
            contexts = [Context(GREEDY, prompt, out) for prompt, out in zip(prompts, said, strict=True)]
            for output, [choice] in zip(said, ops.read(ops.launch(spans, contexts)), strict=True):
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
    engine = Engine(numpy_ops(config, weights, max_seq_len))
    forward = forward_run(numpy_ops(config, weights, max_seq_len))
    contenders = {"engine": engine_run(engine), "forward": forward}
    if model := transformers_model(directory, args.threads):
        for attention in ("eager", "sdpa"):
            contenders[f"transformers {attention}"] = transformers_run(model, attention)
    with threadpoolctl.threadpool_limits(args.threads, user_api="blas"):
        tokenizer = Tokenizer(directory / "tokenizer.json")
        found = measure(contenders, tokenizer, args.new, args.repeat)
        engine.close()
        ours = list(own(config, weights, tokenizer, args.new, args.repeat))
    report = "\n".join([*setting(directory, args), "", *table(found, list(contenders)), "", *ours, ""])
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


# --- what only this engine does -----------------------------------------------------------------------------

N_TURN, N_MORE, N_SPECULATE = 1000, 30, 4


def own(config: Config, weights: Weights, tokenizer: Tokenizer, n_new: int, repeat: int) -> Iterator[str]:
    """A table: a second turn until its first token, decoding in company and with drafts."""
    length = min(config.max_seq_len, N_TURN + 2 * n_new + N_MORE)
    engine = Engine(numpy_ops(config, weights, length))
    drafting = Engine(numpy_ops(config, weights, length), speculate=N_SPECULATE)
    prose = prompts(tokenizer, 1, N_TURN)[0]
    copied = prose[:120] * 2 + prose[:20]
    found: dict[str, list[tuple[float, float]]] = {}
    for number in range(repeat + 1):
        turn = [number, *prose[1:]]  # another beginning: nothing of it is known
        second = [*turn, *engine_run(engine)([turn], n_new).said, *prose[:N_MORE]]
        cold, cached = (
            engine_run(engine)([[first, *second[1:]]], 1).prefill for first in (99 + number, number)
        )
        few, many = (engine_run(engine)(prompts(tokenizer, n, 32), n_new).decode for n in (1, MAX_BATCH))
        plain, drafted = (engine_run(e)([copied], n_new).decode for e in (engine, drafting))
        for name, pair in {
            f"prefill of a second turn, {len(second)} tokens: cold, cached": (cold, cached),
            f"decode: batch 1, batch {MAX_BATCH}": (few, many),
            f"decode of a text that repeats: plain, --speculate {N_SPECULATE}": (plain, drafted),
        }.items():
            print(f"round {number}/{repeat}  {name}  {pair[0]:.1f}, {pair[1]:.1f} tok/s", file=sys.stderr)
            found.setdefault(name, []).extend([pair] if number else [])
    counts = drafting.counts()
    engine.close()
    drafting.close()
    yield f"| tokens/s, median of {repeat} | without | with | ratio |"
    yield "|---|---|---|---|"
    for name, pairs in found.items():
        without, with_it = (median(column) for column in zip(*pairs, strict=True))
        yield f"| {name} | {without:.1f} | {with_it:.1f} | {with_it / without:.2f} |"
    yield ""
    yield f"Of {counts['drafted']} drafts {counts['accepted']} were accepted."


# --- store --------------------------------------------------------------------------------------------------

N_DELTAS = 64  # tokens of one response: a frame each, and eight around them


def store(args: argparse.Namespace) -> None:
    with TemporaryDirectory() as folder:
        lines = asyncio.run(store_run(Path(folder) / "store.db", args.responses))
    directory = hub.find(args.model)
    config = read_config(directory)
    engine = Engine(numpy_ops(config, read_weights(directory, config), 256))
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


# --- the command line ---------------------------------------------------------------------------------------


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Measure speeds, beside others.")
    commands = parser.add_subparsers(required=True, metavar="WHAT")
    add = commands.add_parser("store", help="events kept and read back, and the memory it takes")
    add.set_defaults(run=store)
    add.add_argument("--responses", type=int, default=10_000, metavar="N", help="how many (default: 10000)")
    common(add)
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
