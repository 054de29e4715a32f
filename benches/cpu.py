"""Prefill and decoding on the processor, beside others: the same weights, prompts, machine and minutes.

    --weights x MEASUREMENTS x contenders --run()--> Speeds --median--> tables in Markdown

The others are llama.cpp in the same format (llama_cpp.py), which `pip install xllamacpp` brings, and, for the
first of the formats, transformers in float32 (https://github.com/huggingface/transformers), which
`pip install -e '.[parity]'` brings, and NumpyOps where devices/cpu.py serves; one that is missing is named.

Rules of this file:
1. What is measured is what serves: `engine` is Engine.generate, `forward` is the forward pass and the choice
   of a token alone. All are greedy, and the table says whether they generate the same tokens.
2. What only this engine does (prefix caching, drafts) has a table of its own, beside the same without it.

Not here: how long an HTTP request takes (server.py).
"""

import argparse
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from pydoc_data.topics import topics
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import threadpoolctl
from numpy.typing import NDArray

from benches import llama_cpp
from benches.common import (
    GREEDY,
    MAX_BATCH,
    Prompts,
    Run,
    Speeds,
    cpu_name,
    engine_run,
    model_option,
    prompts,
    repeat_option,
    speeds,
    with_pages,
    write,
)
from benches.gpu_checkpoint import SHAPES
from benches.llama_cpp import Formats
from checkpoint import hub
from checkpoint.config import Config, read_config, read_json
from checkpoint.weights import Weights, read_weights
from engine import Engine
from model import Array, Batch, NumpyOps, Span, forward
from sampling import Context
from service.loading import cpu_ops, packs
from service.steps import Steps
from tokenizer import Tokenizer


class Measurement(NamedTuple):
    """What to run, and which of the two speeds counts."""

    n_prompt: int
    batch: int
    n_new: int | None  # tokens to generate; None: as --new says
    speed: Callable[[Speeds], float]


# fmt: off
#  tokens/s                         n_prompt  batch  n_new  speed
MEASUREMENTS = {
    "prefill, 128 tokens": Measurement(128,   1,     1,     lambda speeds: speeds.prefill),
    "decode, batch 1":     Measurement(32,    1,     None,  lambda speeds: speeds.decode),
    "decode, batch 8":     Measurement(32,    8,     None,  lambda speeds: speeds.decode),
}
# fmt: on

OURS = ("engine", "forward")

AS_IN_FILE = "file"  # as a name of weights

# fmt: off
#  --weights    llama.cpp's formats for the same
PEERS: dict[str, list[Formats]] = {
    "bfloat16": [("BF16", "BF16"), ("F16", "F16")],
    "int8":     [("Q8_0", "Q8_0")],
    "int4":     [("Q4_1", "Q8_0")],
}
# fmt: on
LLAMA_CPP = "llama.cpp"  # rounds otherwise, so its tokens may be others


def forward_run(ops: NumpyOps) -> Run:
    """The forward pass and the choice of the tokens, one step after another."""

    def run(prompts: Prompts, n_new: int) -> Speeds:
        n_pages = ops.n_pages // len(prompts)  # of each sequence
        outputs: Prompts = [[] for _ in prompts]
        times: list[float] = []
        started = time.perf_counter()
        for n in range(n_new):
            spans: list[Span] = []
            for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
                pages = range(i * n_pages, (i + 1) * n_pages)
                if n == 0:
                    spans.append(Span(i, pages, prompt, 0, 1))
                else:
                    spans.append(Span(i, pages, output[-1:], len(prompt) + n - 1, 1))
            pairs = zip(prompts, outputs, strict=True)
            contexts = [Context(GREEDY, prompt, output) for prompt, output in pairs]
            for output, [choice] in zip(outputs, ops.read(ops.launch(spans, contexts)), strict=True):
                output.append(choice.token_id)
            times.append(time.perf_counter())
        return speeds(prompts, started, [times] * len(prompts), outputs[0])

    return run


def transformers_run(model: Any, attention: str) -> Run:
    """The same steps with their model and their cache; their `generate` adds checks, and is slower."""
    import torch

    def run(prompts: Prompts, n_new: int) -> Speeds:
        with torch.inference_mode():
            return steps(prompts, n_new)

    def steps(prompts: Prompts, n_new: int) -> Speeds:
        model.set_attn_implementation(attention)
        generated: list[int] = []  # by the first sequence
        times: list[float] = []
        cache = None
        token_ids = torch.tensor(prompts)  # (batch, n_tokens)
        started = time.perf_counter()
        for _ in range(n_new):
            output = model(token_ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = output.past_key_values
            token_ids = output.logits[:, -1:].argmax(-1)
            generated.append(int(token_ids[0, 0]))
            times.append(time.perf_counter())
        return speeds(prompts, started, [times] * len(prompts), generated)

    return run


def transformers_model(directory: Path, n_threads: int) -> Any:
    """Load the same files as a model of transformers, float32; None where it is not installed."""
    try:
        import torch
        import transformers
    except ImportError as error:
        print(f"no comparison ({error}): pip install -e '.[parity]' brings it", file=sys.stderr)
        return None
    torch.set_num_threads(n_threads)
    transformers.utils.logging.disable_progress_bar()
    where: dict[str, Any] = {}
    if (directory / "model.gguf").is_file():
        where["gguf_file"] = "model.gguf"
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **where)


def run(args: argparse.Namespace) -> None:
    with threadpoolctl.threadpool_limits(args.threads, user_api="blas"), TemporaryDirectory() as folder:
        if args.shape:
            from benches import shapes  # needs Numba

            write(shapes.report(args), args.out)
        else:
            write(compare(args, Path(folder)), args.out)


class Entrant(NamedTuple):
    """The model with its weights in one format, ours and llama.cpp's."""

    weights: Weights
    engine: Engine
    files: dict[str, Path]  # of llama.cpp, by what it has them in
    runs: dict[str, Run]  # by contender


Entrants = dict[str, Entrant]  # by --weights


class Machine(NamedTuple):
    """What all entrants have in common."""

    directory: Path
    config: Config
    tokenizer: Tokenizer
    ops: type[NumpyOps]
    max_seq_len: int
    n_threads: int


def compare(args: argparse.Namespace, folder: Path) -> list[str]:
    directory = hub.find(args.model)
    config = read_config(directory)
    tokenizer = Tokenizer(directory / "tokenizer.json")
    max_seq_len = min(config.max_seq_len, 256 + args.new)
    machine = Machine(directory, config, tokenizer, cpu_ops(), max_seq_len, args.threads)
    found = entrants(machine, args.weights, folder)
    first = next(iter(found.values()))
    if model := transformers_model(directory, args.threads):
        for attention in ("eager", "sdpa"):
            first.runs[f"transformers {attention}"] = transformers_run(model, attention)
    results, memory = measure(found, machine, args)
    report = [*setting(directory.name, args), ""]
    for name, entrant in found.items():
        entrant.engine.close()
        report += [f"Weights: {name}. {entrant.engine.about}.", ""]
        report += [*table(results[name], list(entrant.runs)), *memory_row(entrant, results[name], memory), ""]
    report += [*feature_table(machine.ops, config, first.weights, tokenizer, args), ""]
    if args.perplexity:
        report += [*perplexity_table(found, machine), ""]
    return report


def entrants(machine: Machine, names: Sequence[str] | None, folder: Path) -> Entrants:
    """One a format; by default all that Numba has, but none that is the file's own under another name."""
    directory, config, tokenizer, ops, max_seq_len, n_threads = machine
    can_round = hasattr(ops, "pack_as") and not config.experts
    if names is None:
        names = [AS_IN_FILE, *PEERS] if can_round else [AS_IN_FILE]
    has_peer = llama_cpp.is_comparable(config)
    found: Entrants = {}
    for name in names:
        packers = packs(ops, config, None if name == AS_IN_FILE else name)
        weights = read_weights(directory, config, *packers)
        engine = Engine(with_pages(ops, config, weights, max_seq_len))
        if engine.about in [entrant.engine.about for entrant in found.values()]:
            engine.close()
            continue
        forward = forward_run(with_pages(ops, config, weights, max_seq_len))
        found[name] = Entrant(weights, engine, {}, {"engine": engine_run(engine), "forward": forward})
        if machine.ops is not NumpyOps and len(found) == 1:
            spec = with_pages(NumpyOps, config, read_weights(directory, config), max_seq_len)
            found[name].runs["forward, NumPy"] = forward_run(spec)
        if has_peer:
            found[name].files.update(peer_files(machine, name, folder))
        for peer, file in found[name].files.items():
            peer_run = llama_cpp.completions(file, max_seq_len, n_threads, tokenizer)
            found[name].runs[f"{LLAMA_CPP} {peer}"] = peer_run
    return found


def peer_files(machine: Machine, name: str, folder: Path) -> Iterator[tuple[str, Path]]:
    """What llama.cpp reads, by format: the file itself, or one that is written from the same weights."""
    own = machine.directory / "model.gguf"
    if name == AS_IN_FILE and own.is_file():
        yield "with the file", own
        return
    weights = read_weights(machine.directory, machine.config)
    tokenizer = read_json(machine.directory / "tokenizer.json")
    for formats in PEERS.get(name, PEERS["bfloat16"]):
        file = folder / f"{name}-{formats[0]}.gguf"
        llama_cpp.write_gguf(file, machine.config, weights, tokenizer, formats)
        yield formats[0], file


Results = dict[str, dict[str, list[Speeds]]]  # measurement -> contender -> a run a round


def measure(
    found: Entrants, machine: Machine, args: argparse.Namespace
) -> tuple[dict[str, Results], float | None]:
    """Run everything `repeat` times; a round before the first warms up and does not count.

    -> the runs by --weights, and the bytes a second of a plain read; None without Numba.
    """
    results: dict[str, Results] = {
        weights: {name: {who: [] for who in entrant.runs} for name in MEASUREMENTS}
        for weights, entrant in found.items()
    }
    memory: list[float] = []
    for number in range(args.repeat + 1):
        for name, m in MEASUREMENTS.items():
            for weights, entrant in found.items():
                for who, run in entrant.runs.items():
                    round_prompts = prompts(machine.tokenizer, m.batch, m.n_prompt, number)
                    result = run(round_prompts, m.n_new or args.new)
                    if number:
                        results[weights][name][who].append(result)
                    about = f"{weights:8} {name:20} {who:20} {m.speed(result):8.1f} tok/s"
                    print(f"round {number}/{args.repeat}  {about}", file=sys.stderr)
        if machine.ops is not NumpyOps:
            from benches import shapes  # needs Numba

            memory.append(shapes.memory_speed(args.threads))
    return results, median(memory[1:]) if memory else None


def setting(model: str, args: argparse.Namespace) -> Iterator[str]:
    """Model, machine and versions, without which no figure means anything."""
    used = [name for name in ("numpy", "numba", "torch", "transformers", "xllamacpp") if name in sys.modules]
    versions = ", ".join(f"{name} {version(name)}" for name in used)
    yield f"{date.today()}, {model}, {args.new} tokens decoded a sequence,"
    yield f"{cpu_name()}, {os.cpu_count()} cores, {args.threads} threads,"
    yield f"Python {platform.python_version()}, {versions}."


def table(results: Results, contenders: Sequence[str]) -> Iterator[str]:
    """The medians: those of others with the ratio engine / other, then what a batch of 8 brings.

    The last column says whether all contenders but llama.cpp generated the same tokens.
    """
    n_rounds = len(next(iter(results.values()))[contenders[0]])
    yield f"| tokens/s, median of {n_rounds} (engine / it) | {' | '.join(contenders)} | same tokens |"
    yield "|---" * (len(contenders) + 2) + "|"
    medians = {name: medians_of(name, runs) for name, runs in results.items()}
    for name, values in medians.items():
        ours = values[OURS[0]]
        cells: list[str] = []
        for who, value in values.items():
            cell = f"{value:.1f}"
            if who not in OURS:
                cell += f" ({ours / value:.2f})"
            cells.append(cell)
        generated = {tuple(runs[0].said) for who, runs in results[name].items() if LLAMA_CPP not in who}
        same = "yes" if len(generated) == 1 else "no"
        yield f"| {name} | {' | '.join(cells)} | {same} |"
    one = medians["decode, batch 1"]
    eight = medians["decode, batch 8"]
    yield f"| batch 8 / batch 1 | {' | '.join(f'{eight[who] / one[who]:.2f}' for who in contenders)} | |"


def medians_of(measurement: str, runs: dict[str, list[Speeds]]) -> dict[str, float]:
    speed = MEASUREMENTS[measurement].speed
    return {who: median(map(speed, speeds)) for who, speeds in runs.items()}


def memory_row(entrant: Entrant, results: Results, memory: float | None) -> Iterator[str]:
    """What share of the memory's speed the weights come at; above 1 where a cache holds some of them."""
    if memory is None:
        return
    weights = entrant.weights
    n_bytes = weights.nbytes
    if weights.embed is not weights.head:
        n_bytes -= weights.embed.nbytes
    one = medians_of("decode, batch 1", results["decode, batch 1"])
    cells = [f"{one[who] * n_bytes / memory:.0%}" if who in OURS else "" for who in entrant.runs]
    yield f"| batch 1, of {memory / 1e9:.1f} GB/s that are read | {' | '.join(cells)} | |"


# --- what only this engine does -----------------------------------------------------------------------------

N_TURN = 1000  # tokens of a first turn
N_MORE = 30  # tokens that the user adds in the second
N_SPECULATE = 4  # drafts a step


def feature_table(
    ops: type[NumpyOps], config: Config, weights: Weights, tokenizer: Tokenizer, args: argparse.Namespace
) -> Iterator[str]:
    """What prefix caching, batching and speculative decoding bring."""
    n_new, repeat = args.new, args.repeat
    length = min(config.max_seq_len, N_TURN + 2 * n_new + N_MORE)
    engine = Engine(with_pages(ops, config, weights, length))
    steps = Steps(engine, tokenizer.token_bytes)
    drafting = Engine(with_pages(ops, config, weights, length), speculate=N_SPECULATE)
    prose = prompts(tokenizer, 1, N_TURN)[0]
    copied = prose[:120] * 2 + prose[:20]
    found: dict[str, list[tuple[float, float]]] = {}
    for number in range(repeat + 1):
        engine.observer = None
        [turn] = prompts(tokenizer, 1, N_TURN, number)
        second = [*turn, *engine_run(engine)([turn], n_new).said, *prose[:N_MORE]]
        cold, cached = (
            engine_run(engine)([[first, *second[1:]]], 1).prefill for first in (99 + number, number)
        )
        few, many = (engine_run(engine)(prompts(tokenizer, n, 32), n_new).decode for n in (1, MAX_BATCH))
        plain, drafted = (engine_run(e)([copied], n_new).decode for e in (engine, drafting))
        engine.observer = steps.observe
        watched = engine_run(engine)(prompts(tokenizer, MAX_BATCH, 32), n_new).decode
        for name, pair in {
            f"prefill of a second turn, {len(second)} tokens: cold, cached": (cold, cached),
            f"decode: batch 1, batch {MAX_BATCH}": (few, many),
            f"decode of a text that repeats: plain, --speculate {N_SPECULATE}": (plain, drafted),
            f"decode, batch {MAX_BATCH}: plain, --debug-steps": (many, watched),
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


# --- what rounding the weights costs ------------------------------------------------------------------------

N_TEXT = 4096  # tokens
WINDOW = 512  # of them that see each other, as in llama.cpp's own measurement
CHUNK = 128  # rows that are computed together

Losses = NDArray[np.float64]  # -log p of each token but the first of each window


def window_losses(logits: Array, token_ids: Sequence[int]) -> Losses:
    """logits (n, vocab_size) behind each of the token ids, or of their first n."""
    targets = token_ids[1 : len(logits) + 1]
    rows = logits[: len(targets)]
    largest = rows.max(axis=1)
    sums = np.exp(rows - largest[:, None]).sum(axis=1, dtype=np.float64)
    losses: Losses = largest + np.log(sums) - rows[np.arange(len(rows)), targets]
    return losses


def our_losses(ops: NumpyOps, weights: Weights, windows: Sequence[Sequence[int]]) -> Losses:
    parts: list[Losses] = []
    for window in windows:
        for start in range(0, len(window), CHUNK):
            chunk = window[start : start + CHUNK]
            span = Span(0, range(ops.n_pages), chunk, start, len(chunk))
            logits = forward(ops, weights, Batch([span]))
            parts.append(window_losses(logits, window[start : start + CHUNK + 1]))
    return np.concatenate(parts)


def perplexity_table(found: Entrants, machine: Machine) -> Iterator[str]:
    """Of the language reference that comes with Python: exp of the mean loss, and how far from the first."""
    text = "\n".join(topics.values())[: 20 * N_TEXT]
    token_ids = machine.tokenizer.encode(text)[:N_TEXT]
    windows = [token_ids[start : start + WINDOW] for start in range(0, len(token_ids), WINDOW)]
    base: Losses | None = None
    yield f"| perplexity of {len(token_ids)} tokens in windows of {WINDOW} | ours | {LLAMA_CPP} |"
    yield "|---|---|---|"
    for name, entrant in found.items():
        ops = with_pages(machine.ops, machine.config, entrant.weights, WINDOW)
        losses = our_losses(ops, entrant.weights, windows)
        if base is None:
            base = losses
        theirs: list[str] = []
        for peer, file in entrant.files.items():
            of_file = llama_cpp.losses(
                file, windows, machine.n_threads, machine.config.vocab_size, window_losses
            )
            theirs.append(f"{peer} {perplexity(of_file, base)}")
        yield f"| {name} | {perplexity(losses, base)} | {', '.join(theirs)} |"


def perplexity(losses: Losses, base: Losses) -> str:
    """With the difference from the base in percent, and its standard error."""
    difference = losses - base
    error = difference.std() / math.sqrt(len(losses))
    value = f"{math.exp(losses.mean()):.3f}"
    if not difference.any():
        return value
    return f"{value} ({100 * math.expm1(difference.mean()):+.2f} ± {100 * error:.2f} %)"


def options(add: argparse.ArgumentParser) -> None:
    model_option(add)
    repeat_option(add)
    formats = "as of server.py, or file: as in the file; llama.cpp gets the like (default: all, in turns)"
    add.add_argument("--weights", nargs="+", choices=(AS_IN_FILE, *PEERS), metavar="NAME", help=formats)
    add.add_argument("--perplexity", action="store_true", help="what each of them loses; minutes")
    shapes = f"{', '.join(SHAPES)}: random weights of that shape, with as many layers as memory holds"
    add.add_argument("--shape", nargs="+", choices=SHAPES, metavar="NAME", help=shapes)
    add.add_argument(
        "--memory", type=float, default=0, metavar="GB", help="of --shape (default: 3/4 of the free)"
    )
    add.add_argument("--new", type=int, default=64, metavar="N", help="tokens to decode (default: 64)")
    add.add_argument("--threads", type=int, default=os.cpu_count(), metavar="N", help="default: all cores")
