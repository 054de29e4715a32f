"""Random weights of a real shape as checkpoint files, which every contender of `bench.py gpu` reads.

    SHAPES, a folder --checkpoint()--> config.json, model.safetensors

Authority: the config.json of the model of each name; https://github.com/huggingface/safetensors#format.

Rules of this file:
1. Files are written once: where a folder has them, they are taken as they are.
2. Weights are bfloat16, and those that a model has in MXFP4 are that; random and never zeros: a product of
   zeros is faster. They repeat after BLOCK numbers, which no kernel can tell, and so an 8B takes seconds.

Not here: reading them (checkpoint/weights.py).
"""

import json
import math
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from checkpoint.config import Config, read_config
from checkpoint.weights import Part, all_parts, bfloat16

BLOCK = 1 << 22  # numbers
SCALE = 0.02  # their standard deviation
ONE = 0x3F80  # in bfloat16: the weight of a norm
EXPERTS = ".experts."  # in the names of their tensors
MXFP4_SCALE = 121  # of a block: its numbers are some 2^-5

# fmt: off
#  shape            its config.json, as the model of that name has it; else it is the family's default
SHAPES: dict[str, dict[str, Any]] = {
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"],
        "vocab_size": 201_088, "hidden_size": 2880, "intermediate_size": 2880,
        "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
        "num_local_experts": 32, "num_experts_per_tok": 4, "quantization_config": {"quant_method": "mxfp4"}},
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"],
        "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True},
    "qwen3-0.6b":   {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151_936, "tie_word_embeddings": True,
        "rope_theta": 1e6, "max_position_embeddings": 40_960},
    "qwen3-8b":     {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 12_288, "vocab_size": 151_936, "tie_word_embeddings": False,
        "rope_theta": 1e6, "max_position_embeddings": 40_960},
    "qwen2.5-0.5b": {
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
        "intermediate_size": 4864, "vocab_size": 151_936, "tie_word_embeddings": True,
        "rope_theta": 1e6, "max_position_embeddings": 32_768},
    "smollm2-135m": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"],
        "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "intermediate_size": 1536, "vocab_size": 49_152, "tie_word_embeddings": True,
        "rope_theta": 1e5, "max_position_embeddings": 8192},
    "llama-3-8b":   {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 14_336, "vocab_size": 128_256, "tie_word_embeddings": False,
        "rope_theta": 5e5, "max_position_embeddings": 8192},
    "dry":          {  # of no model: for a machine without a GPU
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 32, "intermediate_size": 128, "vocab_size": 512, "tie_word_embeddings": True,
        "rope_theta": 1e6, "max_position_embeddings": 8192},
    "dry-mixture":  {
        "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"],
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "num_local_experts": 8, "num_experts_per_tok": 2, "quantization_config": {"quant_method": "mxfp4"}},
}
# fmt: on
FOR_ALL = {
    "rms_norm_eps": 1e-6,
    "eos_token_id": 0,
    "bos_token_id": 0,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}  # fmt: skip


def checkpoint(shape: str, folder: Path) -> None:
    """Write the files, if the folder has none."""
    weights, config = folder / "model.safetensors", folder / "config.json"
    if weights.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    config.write_text(json.dumps(SHAPES[shape] | FOR_ALL, indent=1), encoding="utf-8")
    parts = all_parts(read_config(folder))
    unfinished = folder / "unfinished"
    with unfinished.open("wb") as file:
        write_safetensors(file, parts)
    unfinished.rename(weights)  # now: a folder whose command was ended has no weights


def write_safetensors(file: BinaryIO, parts: list[Part]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    n_bytes = 0
    for part in parts:
        end = n_bytes + part_bytes(part)
        dtype = "U8" if part.is_mxfp4 else "BF16"
        header[part.name] = {"dtype": dtype, "shape": part.shape, "data_offsets": [n_bytes, end]}
        n_bytes = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    noise = np.random.default_rng(0).standard_normal(BLOCK, np.float32)
    block = bfloat16(noise * np.float32(SCALE))
    for part in parts:
        write_tensor(file, part, block)


def write_tensor(file: BinaryIO, part: Part, block: NDArray[np.uint16]) -> None:
    n = part_bytes(part)
    if part.name.endswith("norm.weight"):
        file.write(np.full(n // 2, ONE, np.uint16).tobytes())
        return
    if part.field.endswith("_scales"):
        file.write(np.full(n, MXFP4_SCALE, np.uint8).tobytes())
        return
    random_bytes = block.view(np.uint8)
    while n > 0:
        some = random_bytes[:n]
        file.write(some.tobytes())
        n -= len(some)


def part_bytes(part: Part) -> int:
    n = math.prod(part.shape)
    if part.is_mxfp4:
        return n
    return 2 * n


def read_bytes(config: Config, n_rows: int) -> int:
    """Bytes of the weights that a step of so many rows needs; an embedding that is no head counts nothing."""
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
