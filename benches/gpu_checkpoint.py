"""Random weights of a real shape as checkpoint files, which every contender of `bench.py gpu` reads.

    SHAPES, a folder --checkpoint()--> config.json, model.safetensors

Authority: the config.json of the model of each name; https://github.com/huggingface/safetensors#format.

Rules of this file:
1. Files are written once: where a folder has them, they are taken as they are.
2. Weights are bfloat16, random and never zeros: a product of zeros is faster. They repeat after BLOCK
   numbers, which no kernel can tell, and so an 8B takes seconds.

Not here: reading them (checkpoint/weights.py).
"""

import json
import math
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from checkpoint.config import read_config
from checkpoint.weights import Part, bfloat16, layer_parts, outer_parts

BLOCK = 1 << 22  # numbers
SCALE = 0.02  # their standard deviation
ONE = 0x3F80  # in bfloat16: the weight of a norm

# fmt: off
#  shape            its config.json, as the model of that name has it
SHAPES: dict[str, dict[str, Any]] = {
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
    c = read_config(folder)
    parts = outer_parts(c)
    for layer in range(c.n_layers):
        parts += layer_parts(c, layer)
    unfinished = folder / "unfinished"
    with unfinished.open("wb") as file:
        write_safetensors(file, parts)
    unfinished.rename(weights)  # now: a folder whose command was ended has no weights


def write_safetensors(file: BinaryIO, parts: list[Part]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    n_bytes = 0
    for part in parts:
        end = n_bytes + 2 * math.prod(part.shape)
        header[part.name] = {"dtype": "BF16", "shape": part.shape, "data_offsets": [n_bytes, end]}
        n_bytes = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    noise = np.random.default_rng(0).standard_normal(BLOCK, np.float32)
    block = bfloat16(noise * np.float32(SCALE))
    for part in parts:
        write_tensor(file, part, block)


def write_tensor(file: BinaryIO, part: Part, block: NDArray[np.uint16]) -> None:
    n = math.prod(part.shape)
    if part.name.endswith("norm.weight"):
        file.write(np.full(n, ONE, np.uint16).tobytes())
        return
    while n > 0:
        numbers = block[:n]
        file.write(numbers.tobytes())
        n -= len(numbers)
