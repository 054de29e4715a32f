"""Random weights of real shapes, as files that every reader of checkpoints takes; how much a step reads.

    name of a shape --checkpoint()--> config.json, model.safetensors
    Config --read_bytes()--> bytes of the weights that a step needs

shapes.json has the config.json of each shape. Those whose name begins with "dry" are of no model.

Rules of this file:
1. Weights are bfloat16, those that a model has in MXFP4 are that, and never zeros: a product of zeros is
   faster. They repeat after BLOCK numbers, which no kernel can tell, and so an 8B takes seconds.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import TensorSpec, serialize_file

from benches.harness import FOLDER, number_option
from checkpoint import hub
from checkpoint.config import Config, read_config
from checkpoint.weights import Part, all_parts

BLOCK = 1 << 22  # numbers
SCALE = 0.02  # their standard deviation
ONE = 0x3F80  # in bfloat16: the weight of a norm
MXFP4_SCALE = 121  # of a block: its numbers are some 2^-5
SHAPES: dict[str, dict[str, Any]] = json.loads((FOLDER / "shapes.json").read_text(encoding="utf-8"))


def checkpoint(args: argparse.Namespace, folder: Path) -> Path:
    """Return the folder of --model; of --shape, once its files are written into this folder."""
    if args.model or not args.shape:
        return hub.find(args.model)
    config = SHAPES[args.shape]
    config["num_hidden_layers"] = min(args.layers, config["num_hidden_layers"])
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    parts = all_parts(read_config(folder))
    noise = np.random.default_rng(0).standard_normal(BLOCK, np.float32) * SCALE
    in_bfloat16 = noise.view(np.uint16)[1::2]
    random = np.resize(in_bfloat16, max(map(part_bytes, parts)) // 2)
    arrays = {part.name: numbers(part, random) for part in parts}
    specs: dict[str, TensorSpec] = {}
    for part in parts:
        specs[part.name] = TensorSpec(
            dtype="uint8" if part.is_mxfp4 else "bfloat16",
            shape=part.shape,
            data_ptr=arrays[part.name].ctypes.data,  # those of all matrices begin in the same place
            data_len=part_bytes(part),
        )
    serialize_file(specs, folder / "model.safetensors")
    return folder


def numbers(part: Part, random: NDArray[np.uint16]) -> NDArray[Any]:
    if part.name.endswith("norm.weight"):
        return np.full(part.shape, ONE, np.uint16)
    if part.field.endswith("_scales"):
        return np.full(part.shape, MXFP4_SCALE, np.uint8)
    return random


def part_bytes(part: Part) -> int:
    n = math.prod(part.shape)
    return n if part.is_mxfp4 else 2 * n


def read_bytes(config: Config, n_rows: int) -> int:
    """Return the bytes of the weights that a step of so many rows needs.

    Of the experts as many are read as rows choose that choose at random; an embedding only if it is the head.
    """
    total = 0.0
    for part in all_parts(config):
        n_bytes = part_bytes(part)
        if config.experts and ".experts." in part.name:
            total += n_bytes * (1 - (1 - config.experts.n_chosen / config.experts.n) ** n_rows)
        elif part.field != "embed" or config.tied:
            total += n_bytes
    return round(total)


def options(add: argparse.ArgumentParser) -> None:
    add.add_argument("--model", metavar="DIR|ID", help="as of server.py; without it, the default model")
    add.add_argument("--shape", choices=SHAPES, metavar="NAME", help=f"random weights: {', '.join(SHAPES)}")
    number_option(add, "--layers", 1000, "of --shape, at most: what memory holds")
