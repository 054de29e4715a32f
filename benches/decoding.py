"""Models to measure, and runs that decode.

    --model, or --shape: random weights --checkpoint()--> a folder that every reader of checkpoints takes
    prompts --generate()--> when each token came --speed()--> tokens a second, in the rows of measure()

shapes.json has the config.json of each shape. Those whose name begins with "dry" are of no model. Weights are
bfloat16, those that a model has in MXFP4 are that, and never zeros: a product of zeros is faster. They repeat
after BLOCK numbers, which no kernel can tell, and so an 8B takes seconds.
"""

import argparse
import asyncio
import itertools
import json
import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import TensorSpec, serialize_file

import scheduler
from benches.harness import FOLDER, Case, Figures, Options, report
from checkpoint import hub
from checkpoint.config import Config, read_config
from checkpoint.weights import Part, all_parts
from engine import Engine, StepOutput
from sampling import Sampling

GREEDY = Sampling(temperature=0)
BLOCK = 1 << 22  # numbers
SCALE = 0.02  # their standard deviation
MXFP4_SCALE = 121  # of a block: its numbers are some 2^-5
SHAPES: dict[str, dict[str, Any]] = json.loads((FOLDER / "shapes.json").read_text(encoding="utf-8"))


def options(shape: str, prompts: list[int], contexts: list[int], batches: list[int]) -> Options:
    return {
        "--model": ("", "as of server.py; without it, the default model"),
        "--shape": (shape, f"random weights instead: {', '.join(SHAPES)}"),
        "--layers": (1000, "of --shape, at most: what memory holds"),
        "--prompts": (prompts, "tokens"),
        "--contexts": (contexts, "tokens before what is decoded"),
        "--batches": (batches, "sequences"),
        "--new": (64, "tokens to decode"),
    }


# --- models -------------------------------------------------------------------------------------------------


def checkpoint(args: argparse.Namespace, folder: Path) -> Path:
    """Return the folder of --model; of --shape, once its files are written into this folder."""
    if args.model or not args.shape:
        return hub.find(args.model or None)
    config = SHAPES[args.shape]
    config["num_hidden_layers"] = min(args.layers, config["num_hidden_layers"])
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    parts = all_parts(read_config(folder))
    noise = np.random.default_rng(0).standard_normal(BLOCK, np.float32) * SCALE
    in_bfloat16 = noise.view(np.uint16)[1::2]
    random = np.resize(in_bfloat16, max(map(part_bytes, parts)) // 2)
    scales = np.full(len(random), MXFP4_SCALE, np.uint8)
    specs: dict[str, TensorSpec] = {}
    for part in parts:
        array = scales if part.field.endswith("_scales") else random  # that of all matrices is the same
        kind = "uint8" if part.is_mxfp4 else "bfloat16"
        pointer, size = array.ctypes.data, part_bytes(part)
        specs[part.name] = TensorSpec(dtype=kind, shape=part.shape, data_ptr=pointer, data_len=size)
    serialize_file(specs, folder / "model.safetensors")
    return folder


def part_bytes(part: Part) -> int:
    return math.prod(part.shape) * (1 if part.is_mxfp4 else 2)


def read_bytes(config: Config, n_rows: int) -> int:
    """Return the bytes of the weights that a step of so many rows needs.

    Of the experts as many are read as rows choose that choose at random; an embedding only if it is the head.
    """
    total = 0.0
    for part in all_parts(config):
        if config.experts and ".experts." in part.name:
            total += part_bytes(part) * (1 - (1 - config.experts.n_chosen / config.experts.n) ** n_rows)
        elif part.field != "embed" or config.tied:
            total += part_bytes(part)
    return round(total)


# --- runs that decode ---------------------------------------------------------------------------------------

Prompts = list[list[int]]
TokenTimes = list[list[float]]  # of each sequence: seconds from the question to each of its tokens
Run = Callable[[Prompts, int], TokenTimes]  # (prompts of one length, tokens to say after each)
N_WORDS = 512  # tokens that every vocabulary has


_numbers = itertools.count()  # of runs: none finds its prompt in a prefix cache


class Row(NamedTuple):
    name: str
    batch: int
    n_prompt: int
    n_new: int  # 1: the row is about the prompt


Floor = Callable[[Row], float]


def random_prompts(batch: int, n_prompt: int) -> Prompts:
    """Return prompts of random tokens, which no run has had before, and the next benchmark has again."""
    rng = np.random.default_rng(next(_numbers))
    prompts: Prompts = rng.integers(N_WORDS, size=(batch, n_prompt)).tolist()
    return prompts


def speed(run: Run, row: Row) -> Figures:
    """Return tokens a second: of the prompts if one token is said, else of all after the first ones."""
    token_times = run(random_prompts(row.batch, row.n_prompt), row.n_new)
    first_s = max(times[0] for times in token_times)
    if row.n_new == 1:
        return {row.name: row.batch * row.n_prompt / first_s}
    last_s = max(times[-1] for times in token_times)
    n_decoded = sum(s > first_s for times in token_times for s in times)
    return {row.name: n_decoded / max(last_s - first_s, 1e-9)}


def generate(engine: Engine, prompts: Prompts, n_new: int) -> TokenTimes:
    """Ask the engine for all answers together, as the server does."""

    async def one(prompt: list[int]) -> list[float]:
        times: list[float] = []

        def read(step: StepOutput) -> bool:
            times.extend(time.perf_counter() - began for _ in step.tokens)
            if step.finish == "failed":
                raise RuntimeError(step.message)
            return True

        await engine.generate(scheduler.Sequence(prompt, n_new, frozenset(), GREEDY), read)
        return times

    async def all_of() -> TokenTimes:
        return await asyncio.gather(*map(one, prompts))

    began = time.perf_counter()
    return asyncio.run(all_of())


def measure(args: argparse.Namespace, about: str, runs: Mapping[str, Run], floor: Floor, *more: Case) -> None:
    """Measure the rows that the options name; `floor` returns how often a second a row's step could read."""

    def at_floor(row: Row) -> Figures:
        return {row.name: row.batch * floor(row)}

    cases: list[Case] = []
    for n in args.prompts:
        cases.append((runs, partial(speed, row=Row(f"prompt of {n}, tokens/s", 1, n, 1))))
    for context, batch in itertools.product(args.contexts, args.batches):
        row = Row(f"decode, {batch} x {context}, tokens/s", batch, context, args.new)
        cases += [(runs, partial(speed, row=row)), ({"floor": row}, at_floor)]
    report(args, about, [*cases, *more])
