"""How near the engine decodes to what the memory bandwidth of a GPU allows, and others on the same weights.

    shape --gpu_checkpoint--> files --CONTENDERS x cells--> Rows --report()--> tokens/s and % of the floor

Each contender (benches/gpu_contenders.py) reads the same bfloat16 files, is warm before it is timed, and
decodes past any end of sequence.

As commands of less than ten minutes each; the minutes are estimates for qwen3-0.6b:

    minutes   python bench.py gpu --out FILE.md --contenders
      2-3         engine engine-no-early engine-no-graphs engine-plain
      4-8         compiled-loop                            each batch is compiled anew, and tuned
      4-6         transformers-compiled transformers-eager
      4-6         transformers-continuous transformers-continuous-graphs
      0                                                  nobody: the report of what is kept

Rules of this file:
1. The floor of a step is the bytes that it must read (weights once, of experts those that are chosen; the KV
   cache of every sequence) over the bandwidth that a kernel which only reads reaches here, in the same
   command.
2. A time found from two runs counts only where these differ clearly (CLEAR).
3. Results are on disk at once, whatever ends the command: Rows in FILE.json beside FILE.md, one for each
   contender in each cell on each device and shape. The next command adds to them. A contender that fails
   where it had a number before keeps the number.

Not here: whether the answers are right (tests/gpu).
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import date
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from benches.common import Prompts
from benches.gpu_checkpoint import SHAPES, checkpoint, read_bytes
from benches.gpu_contenders import (
    CONTENDERS,
    GGUF,
    OURS,
    SAMPLED,
    Cell,
    Round,
    Started,
    Times,
    cupy,
    release,
)
from checkpoint.config import Config, read_config

BEGAN = time.monotonic()

WARM_UPS = 1
ROUNDS = 3  # of which the median is reported
CELL_S = 25  # seconds, after which a cell is content with fewer rounds
CLEAR = 0.2  # the part of a run that must be decoding, where decoding is found as a difference of two runs


def cells_of(args: argparse.Namespace) -> list[Cell]:
    decoding = [Cell(batch, context, args.new) for context in args.contexts for batch in args.batches]
    sampled = Cell(1, args.contexts[0], args.new, sampled=True)
    return [*decoding, sampled, *(Cell(1, n, 1) for n in args.prompts)]


# --- the floor ----------------------------------------------------------------------------------------------

READ = r"""
extern "C" __global__ void read_all(const unsigned *x, int n, unsigned *out) {
  long n_threads = (long)gridDim.x * blockDim.x;
  unsigned seen = 0;
  for (long i = blockIdx.x * (long)blockDim.x + threadIdx.x; i + 3 * n_threads < n; i += 4 * n_threads) {
    uint4 v[4];  // on their way together
    for (int j = 0; j < 4; j++) v[j] = ((const uint4 *)x)[i + j * n_threads];
    for (int j = 0; j < 4; j++) seen ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  if (seen == 0x9e3779b9u) *out = seen;  // never, as good as; without it nothing would be read
}
"""


READ_THREADS = 512  # of a block: four blocks fill a processor


def read_bandwidth(n_launches: int = 4) -> float:
    """Bytes a second of a kernel that only reads: the limit of decoding on this card."""
    cp = cupy()
    n_free_bytes = cp.cuda.Device().mem_info[0]
    n_most: int = min(1 << 28, n_free_bytes >> 8)  # of 16 bytes each: 4 GiB, or a sixteenth of what is free
    noise = np.random.default_rng(0).integers(0, 1 << 32, 1 << 22, np.uint32)
    x, out = cp.empty(4 * n_most, np.uint32), cp.zeros(1, np.uint32)
    for begin in range(0, len(x), len(noise)):
        x[begin : begin + len(noise)] = cp.asarray(noise[: len(x) - begin])
    kernel = cp.RawModule(code=READ).get_function("read_all")
    n_processors = cp.cuda.runtime.getDeviceProperties(0)["multiProcessorCount"]

    def n_read(n_blocks: int) -> int:
        """Every thread reads as many, four at a time."""
        n_threads = n_blocks * READ_THREADS
        return n_most - n_most % (4 * n_threads)

    def elapsed(n_blocks: int) -> float:
        n = n_read(n_blocks)
        cp.cuda.get_current_stream().synchronize()
        started = time.perf_counter()
        for _ in range(n_launches):
            kernel((n_blocks,), (READ_THREADS,), (x, np.int32(n), out))
        cp.cuda.get_current_stream().synchronize()
        return time.perf_counter() - started

    def bandwidth(n_blocks: int) -> float:
        times = [elapsed(n_blocks) for _ in range(WARM_UPS + ROUNDS)]
        return 16 * n_read(n_blocks) * n_launches / median(times[WARM_UPS:])

    n_blocks_a_processor = 1, 2, 4  # how many it takes to be fast differs by card
    return max(bandwidth(n_processors * n) for n in n_blocks_a_processor)


def step_bytes(config: Config, cell: Cell) -> int:
    """What a decoding step reads at least: weights, and the KV cache of all sequences, at the run's middle.

    A layer with a window reads no more of the cache than that.
    """
    context = cell.n_prompt + cell.n_new // 2
    n_seen = sum(min(context, window or context) for window in config.windows)
    n_cached = 2 * n_seen * config.n_kv_heads * config.head_dim
    return read_bytes(config, cell.batch) + 2 * cell.batch * n_cached


# --- measuring ----------------------------------------------------------------------------------------------


class Result(NamedTuple):
    seconds: float | None  # median, of decoding or until the first token; None: no result
    why: str  # there is no result
    about: str = ""  # how it ran


OUT_OF_TIME = "out of time"


def run(args: argparse.Namespace) -> None:
    """Measure the contenders that are asked for, and report all results in the file."""
    rows = read_rows(args.out)
    if args.contenders:
        with TemporaryDirectory() as folder:
            measure_all(args, files(args, Path(folder)), rows)
    print("\n".join(report(rows.values())), end="")


def measure_all(args: argparse.Namespace, directory: Path, rows: "Rows") -> None:
    config, bandwidth = read_config(directory), read_bandwidth()
    card = cupy().cuda.runtime.getDeviceProperties(0)["name"].decode()
    weights = f"random weights of the shape of {args.shape}"
    if args.model:
        weights = args.model.name
    deadline = BEGAN + 60 * args.minutes
    release()
    for name, contender in CONTENDERS.items():
        if name not in args.contenders:
            continue
        cells = [cell for cell in cells_of(args) if contender.takes(cell)]
        for cell, result in measure(name, directory, cells, config.vocab_size, deadline):
            floor = cell.batch * bandwidth / step_bytes(config, cell)
            row = Row(card, weights, name, cell, *result, floor, bandwidth, str(date.today()), versions())
            key = row[:4]
            if key not in rows or says_more(row, rows[key]):
                rows[key] = row
            save(rows, args.out)  # now: the command may be ended at any time
            elapsed = time.monotonic() - BEGAN
            print(f"{elapsed:5.0f} s  {name:30} {cell!s:18} {progress(row)}", file=sys.stderr)
        release()


def says_more(row: "Row", earlier: "Row") -> bool:
    """A failure never takes the place of a number, nor lack of time that of another failure."""
    if row.seconds is not None:
        return True
    return earlier.seconds is None and row.why != OUT_OF_TIME


def versions() -> str:
    installed = []
    for name in ("cupy-cuda13x", "cupy-cuda12x", "torch", "transformers"):
        with suppress(PackageNotFoundError):
            installed.append(f"{name} {version(name)}")
    return ", ".join(installed) or "no version of CuPy, torch or transformers"


def progress(row: "Row") -> str:
    if not row.seconds:
        return row.why
    if row.cell.n_new == 1:
        return f"{1e3 * row.seconds:10.1f} ms"
    return f"{rate(row):10.1f} tok/s"


def measure(
    name: str, directory: Path, cells: Sequence[Cell], vocab_size: int, deadline: float
) -> Iterator[tuple[Cell, Result]]:
    """Time one contender in its cells; where it fails the result is the reason."""
    rng = np.random.default_rng(0)
    n_done = 0
    try:
        if time.monotonic() > deadline:
            raise TimeoutError(OUT_OF_TIME)
        with CONTENDERS[name].start(directory, cells) as started:
            for cell in cells:
                yield cell, measured(started, cell, vocab_size, rng, deadline)
                n_done += 1
    except Exception as error:
        for cell in cells[n_done:]:
            yield cell, Result(None, reason(error))


def measured(
    started: Started, cell: Cell, vocab_size: int, rng: np.random.Generator, deadline: float
) -> Result:
    if time.monotonic() > deadline:
        return Result(None, OUT_OF_TIME)
    try:
        release()  # what was compiled for another cell would be made to fit this one too
        if cell.n_new == 1:  # each time another prompt, or it would come out of a prefix cache
            prompts = partial(random_prompts, rng, cell, vocab_size)
        else:
            same = random_prompts(rng, cell, vocab_size)
            prompts = partial(list, same)
        return Result(seconds(started.at(cell), prompts), "", started.about())
    except Exception as error:
        return Result(None, reason(error))


def reason(error: Exception) -> str:
    if str(error) == OUT_OF_TIME:
        return OUT_OF_TIME
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def seconds(round_: Round, prompts: Callable[[], Prompts]) -> float:
    """Median of the rounds, warm."""
    times = list[Times]()
    began = time.monotonic()
    while len(times) < WARM_UPS + ROUNDS:
        times.append(round_(prompts()))
        if len(times) > WARM_UPS and time.monotonic() - began >= CELL_S:
            break
    decoding = []
    for first, total in times[WARM_UPS:]:
        if total - first < CLEAR * total:
            raise ArithmeticError(
                f"{first:.4f} s until the first token and {total:.4f} s in all: no clear rest"
            )
        decoding.append(total - first)
    return median(decoding)


def files(args: argparse.Namespace, folder: Path) -> Path:
    """--model, or random weights of a real shape, as files that all contenders read."""
    if args.model:
        return Path(args.model)
    if args.keep:
        folder = args.keep / args.shape
    checkpoint(args.shape, folder)
    if args.gguf and not (folder / GGUF).exists():
        (folder / GGUF).symlink_to(args.gguf.resolve())
    return folder


def random_prompts(rng: np.random.Generator, cell: Cell, vocab_size: int) -> Prompts:
    return [[int(i) for i in rng.integers(0, vocab_size, cell.n_prompt)] for _ in range(cell.batch)]


# --- results on disk ----------------------------------------------------------------------------------------


class Row(NamedTuple):
    """A Result, what it is of (the first four fields), and the floor that it is compared with."""

    device: str
    weights: str
    contender: str
    cell: Cell
    seconds: float | None
    why: str
    about: str
    floor: float  # tokens/s of all sequences that the bandwidth allows
    bandwidth: float
    date: str
    versions: str


Rows = dict[tuple[str, str, str, Cell], Row]


def read_rows(out: Path | None) -> Rows:
    """The rows of earlier commands, beside their report."""
    if not out:
        return {}
    file = out.with_suffix(".json")
    if not file.exists():
        return {}
    rows: Rows = {}
    for fields in json.loads(file.read_text("utf-8")):
        row = Row(**fields | {"cell": Cell(**fields["cell"])})
        rows[row[:4]] = row
    return rows


def save(rows: Rows, out: Path | None) -> None:
    if not out:
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    fields = [row._asdict() | {"cell": row.cell._asdict()} for row in rows.values()]
    out.with_suffix(".json").write_text(json.dumps(fields, indent=1), encoding="utf-8")
    out.write_text("\n".join(report(rows.values())), encoding="utf-8")


# --- the report ---------------------------------------------------------------------------------------------


def report(rows: Iterable[Row]) -> Iterator[str]:
    """A section for each device and weights."""
    for (card, weights), group in groupby(sorted(rows, key=lambda row: row[:2]), lambda row: row[:2]):
        section = list(group)
        yield f"## {card}, {weights}"
        yield ""
        bandwidth = max(row.bandwidth for row in section)
        packages = "; ".join(sorted({row.versions for row in section}))
        yield f"bfloat16; a kernel that only reads reaches {bandwidth / 1e9:.0f} GB/s; {packages}."
        yield "tokens/s of all sequences together, greedy where nothing else is said; sampled: temperature"
        yield f"{SAMPLED.temperature}, top_p {SAMPLED.top_p}, top_k {SAMPLED.top_k}."
        decoding = [row for row in section if row.cell.n_new > 1]
        first = [row for row in section if row.cell.n_new == 1]
        if decoding:
            yield ""
            yield from decode_table(decoding)
        if first:
            yield ""
            yield from first_table(first)
        yield ""
        yield from notes(section)
        yield ""


def decode_table(rows: Sequence[Row]) -> Iterator[str]:
    """tokens/s; the engine's share of the floor; how many times the best peer."""
    others = [name for name in contenders(rows) if name != OURS]
    yield from heading("batch, context", "floor", OURS, "% of floor", *others, f"{OURS} / best peer")
    for cell, of_cell in by_cell(rows):
        rates = {name: rate(row) for name, row in of_cell.items() if row.seconds}
        ours = rates.get(OURS)
        floor = max(row.floor for row in of_cell.values())
        of_peers = [rate for name, rate in rates.items() if not name.startswith(OURS)]
        share, ratio = None, "–"
        if ours:
            share = 100 * ours / floor
        if ours and of_peers:
            ratio = f"{ours / max(of_peers):.2f}"
        numbers = [floor, ours, share, *map(rates.get, others)]
        yield line(str(cell), *map(shown, numbers), ratio)


def first_table(rows: Sequence[Row]) -> Iterator[str]:
    """Milliseconds to the first token."""
    names = contenders(rows)
    yield from heading("ms to the first token", *names)
    for cell, of_cell in by_cell(rows):
        times = {name: 1e3 * row.seconds for name, row in of_cell.items() if row.seconds}
        yield line(f"prompt of {cell.n_prompt}", *(shown(times.get(name)) for name in names))


def notes(section: Sequence[Row]) -> Iterator[str]:
    """When and how each contender ran; which cells have no number, and why."""
    for name in contenders(section):
        rows = [row for row in section if row.contender == name]
        dates = sorted({row.date for row in rows})
        abouts = sorted({row.about for row in rows if row.about})
        if abouts:
            yield f"- {name}: {', '.join(dates)}; {'; '.join(abouts)}"
        for why in sorted({row.why for row in rows if row.why}):
            cells = "; ".join(str(row.cell) for row in rows if row.why == why)
            yield f"- {name}, at {cells}: {why}"


def rate(row: Row) -> float:
    """tokens/s of all sequences together."""
    assert row.seconds
    return row.cell.batch * (row.cell.n_new - 1) / row.seconds


def contenders(rows: Iterable[Row]) -> list[str]:
    names = {row.contender for row in rows}
    return [name for name in CONTENDERS if name in names]


def by_cell(rows: Iterable[Row]) -> Iterator[tuple[Cell, dict[str, Row]]]:
    def order(row: Row) -> tuple[Any, ...]:
        return row.cell.sampled, row.cell.n_prompt, row.cell

    for cell, group in groupby(sorted(rows, key=order), lambda row: row.cell):
        yield cell, {row.contender: row for row in group}


def heading(*cells: str) -> Iterator[str]:
    yield line(*cells)
    yield "|---" * len(cells) + "|"


def line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def shown(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.1f}"


def shape_options(add: argparse.ArgumentParser) -> None:
    """Which weights, for this command and gpu-ops."""
    add.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b", help="default: qwen3-0.6b")
    add.add_argument(
        "--keep", type=Path, metavar="DIR", help="the shape's files stay there for the next command"
    )
    add.add_argument("--model", type=Path, metavar="DIR", help="a checkpoint in place of a shape")
    add.add_argument("--gguf", type=Path, metavar="FILE", help="the same shape, for llama.cpp's llama-bench")


def options(add: argparse.ArgumentParser) -> None:
    shape_options(add)
    add.add_argument(
        "--contenders",
        nargs="*",
        choices=CONTENDERS,
        default=[*CONTENDERS],
        metavar="NAME",
        help=f"of {', '.join(CONTENDERS)} (default: all)",
    )
    add.add_argument("--minutes", type=float, default=6, help="begin nothing after these (default: 6)")
    for name, default, about in (
        ("contexts", [256, 4096], "tokens of the prompts that decoding begins behind"),
        ("batches", [1, 4, 16, 64], "sequences that decode side by side"),
        ("prompts", [128, 512, 2048], "tokens of the prompts whose first token is timed"),
    ):
        text = f"{about} (default: {' '.join(map(str, default))})"
        add.add_argument(f"--{name}", type=int, nargs="+", default=default, metavar="N", help=text)
    add.add_argument("--new", type=int, default=128, metavar="N", help="tokens to decode (default: 128)")
