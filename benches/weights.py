"""Random weights of real shapes, as files that every reader of checkpoints takes; how much a step reads.

    name of a shape --checkpoint()--> config.json, model.safetensors
    Config --read_bytes()--> bytes of the weights that a step needs

Rules of this file:
1. Weights are bfloat16, those that a model has in MXFP4 are that, and never zeros: a product of zeros is
   faster. They repeat after BLOCK numbers, which no kernel can tell, and so an 8B takes seconds.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from checkpoint.config import Config, read_config
from checkpoint.weights import Part, all_parts, bfloat16

BLOCK = 1 << 22  # numbers
SCALE = 0.02  # their standard deviation
ONE = 0x3F80  # in bfloat16: the weight of a norm
MXFP4_SCALE = 121  # of a block: its numbers are some 2^-5
EXPERTS = ".experts."  # in the names of their tensors

GPT_OSS = {"quantization_config": {"quant_method": "mxfp4"}, "num_experts_per_tok": 4}
QWEN3_MOE = {"num_experts_per_tok": 8, "norm_topk_prob": True}
# fmt: off
SIZES = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
         "head_dim", "intermediate_size", "vocab_size", "tie_word_embeddings")
SHAPES: dict[str, dict[str, Any]] = {
    name: dict(zip(SIZES, sizes, strict=True)) | more for name, sizes, more in (
    # name             family       dim  layers heads kv head_dim hidden  vocabulary tied
    ("qwen3-0.6b",    ("qwen3",     1024,  28,  16,  8, 128,      3072,  151_936,   True),  {}),
    ("qwen3-8b",      ("qwen3",     4096,  36,  32,  8, 128,     12_288, 151_936,   False), {}),
    ("llama-3-8b",    ("llama",     4096,  32,  32,  8, 128,     14_336, 128_256,   False), {}),
    ("gpt-oss-20b",   ("gpt_oss",   2880,  24,  64,  8,  64,      2880,  201_088,   False),
     {"num_local_experts": 32} | GPT_OSS),
    ("qwen3-30b-a3b", ("qwen3_moe", 2048,  48,  32,  4, 128,      6144,  151_936,   False),
     {"num_experts": 128, "moe_intermediate_size": 768} | QWEN3_MOE),
    # of no model: for a machine without a GPU
    ("dry",           ("qwen3",       64,   2,   4,  2,  32,       128,      512,   True),  {}),
    ("dry-gpt-oss",   ("gpt_oss",     64,   2,   4,  2,  32,        64,      512,   False),
     {"num_local_experts": 8} | GPT_OSS),
    ("dry-qwen3-moe", ("qwen3_moe",   64,   2,   4,  2,  32,        96,      512,   False),
     {"num_experts": 10, "moe_intermediate_size": 40} | QWEN3_MOE),
)}
# fmt: on
FOR_ALL = {
    "rms_norm_eps": 1e-6,
    "eos_token_id": 0,
    "bos_token_id": 0,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rope_theta": 1e6,
}  # fmt: skip


def config_json(shape: str, n_layers: int | None = None) -> dict[str, Any]:
    """The shape with so many of its layers; None: all."""
    config = SHAPES[shape] | FOR_ALL
    if n_layers:
        config["num_hidden_layers"] = min(n_layers, config["num_hidden_layers"])
    return config


def checkpoint(shape: str, folder: Path, n_layers: int | None = None) -> Path:
    """Write the files, unless the folder has them, and return the folder."""
    if (folder / "model.safetensors").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    config = json.dumps(config_json(shape, n_layers), indent=1)
    (folder / "config.json").write_text(config, encoding="utf-8")
    parts = all_parts(read_config(folder))
    header: dict[str, Any] = {}
    n_bytes = 0
    for part in parts:
        begin, n_bytes = n_bytes, n_bytes + part_bytes(part)
        dtype = "U8" if part.is_mxfp4 else "BF16"
        header[part.name] = {"dtype": dtype, "shape": part.shape, "data_offsets": [begin, n_bytes]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    unfinished = folder / "unfinished"
    noise = np.random.default_rng(0).standard_normal(BLOCK, np.float32)
    random_bytes = bfloat16(noise * np.float32(SCALE)).tobytes()
    with unfinished.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for part in parts:
            n = part_bytes(part)
            if part.name.endswith("norm.weight"):
                file.write(np.full(n // 2, ONE, np.uint16).tobytes())
                continue
            if part.field.endswith("_scales"):
                file.write(bytes([MXFP4_SCALE]) * n)
                continue
            while n > 0:
                n -= file.write(random_bytes[:n])
    unfinished.rename(folder / "model.safetensors")  # a command that was ended leaves no weights
    return folder


def part_bytes(part: Part) -> int:
    n = math.prod(part.shape)
    return n if part.is_mxfp4 else 2 * n


def read_bytes(config: Config, n_rows: int) -> int:
    """Bytes of the weights that a step of so many rows needs, without an embedding that is not the head."""
    total = expert_bytes(config, n_rows)
    for part in all_parts(config):
        is_read = part.field != "embed" or config.tied
        if is_read and EXPERTS not in part.name:
            total += part_bytes(part)
    return round(total)


def expert_bytes(config: Config, n_rows: int) -> float:
    """Those of the experts, if as many are read as rows choose that choose at random."""
    if not config.experts:
        return 0
    share_of_row = config.experts.n_chosen / config.experts.n
    share = 1 - (1 - share_of_row) ** n_rows
    return share * sum(part_bytes(part) for part in all_parts(config) if EXPERTS in part.name)
