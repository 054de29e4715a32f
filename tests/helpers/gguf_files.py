"""GGUF files of the models that the tests have, for the reader in gguf_file.py.

    a model directory in Hugging Face's layout, a block format --write_gguf()--> a GGUF file

Names, and the order of the rows of q and k, are those of llama.cpp.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter, TokenType, quantize
from numpy.typing import NDArray

from checkpoint.config import Config, read_config
from checkpoint.gguf_file import CONFIG_FIELDS, LAYER_TENSORS, OUTER_TENSORS, PAIRS_ADJACENT, PHI3_TENSORS
from checkpoint.weights import Array, map_tensors, unpacked

PART_OF = {theirs: ours for ours, theirs in [*LAYER_TENSORS.items(), *PHI3_TENSORS.items()]}
NAME_OF = {theirs: ours for ours, theirs in OUTER_TENSORS.items()}
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"  # for models that have none
BYTES = [*map(chr, range(0x21, 0x7F)), "ab"]  # a vocabulary for models that have none


def write_gguf(
    directory: Path, file: Path, block_format: str = "F32", changes: dict[str, Any] | None = None
) -> None:
    """Write matrices in the block format, vectors and matrices without whole blocks in float32.

    `changes` are entries of the metadata; None leaves one out.
    """
    config = json.loads((directory / "config.json").read_text())
    architecture = config["model_type"]
    metadata = {"general.architecture": architecture} | vocabulary(directory, config) | (changes or {})
    c = read_config(directory)
    facts: dict[str, Any] = {key: config.get(name) for name, key in CONFIG_FIELDS.items()}
    facts |= {"rope.scaling.original_context_length": c.rope.original_max_position_embeddings}
    entries, divisors = rotary(c, config.get("rope_scaling") or {})
    facts |= entries
    if architecture == "phi3":
        facts |= {"attention.sliding_window": config.get("sliding_window") or 0}
    for key, fact in facts.items():
        metadata.setdefault(f"{architecture}.{key}", fact)
    writer = GGUFWriter(file, metadata["general.architecture"] or "none")
    for name, value in metadata.items():
        if value is not None and name != "general.architecture":
            writer.add_key_value(name, value, GGUFValueType.get_type(value))
    kind = GGMLQuantizationType[block_format]
    for name, tensor in map_tensors(directory).items():
        numbers = unpacked(tensor)
        if architecture in PAIRS_ADJACENT:
            numbers = pairs_adjacent(name, numbers, config)
        is_packed = numbers.ndim > 1 and numbers.shape[-1] % 32 == 0
        format_ = kind if is_packed else GGMLQuantizationType.F32
        writer.add_tensor(gguf_name(name), quantize(numbers, format_), raw_dtype=format_)
    for name, numbers in divisors.items():
        writer.add_tensor(name, numbers.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def rotary(c: Config, given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Return what llama.cpp's converter makes of RoPE: entries, and tensors that divide the frequencies."""
    rope, n_turning = c.rope, c.rope.n_turning(c.head_dim)
    dimension = {"rope.dimension_count": n_turning}
    if rope.rope_type == "llama3":  # LlamaModel.generate_extra_tensors
        lengths = 2 * np.pi * rope.rope_theta ** (np.arange(0, n_turning, 2) / n_turning)
        smooth = rope.original_max_position_embeddings / lengths - rope.low_freq_factor
        smooth = np.clip(smooth / (rope.high_freq_factor - rope.low_freq_factor), 0, 1)
        return dimension, {"rope_freqs.weight": 1 / ((1 - smooth) / rope.factor + smooth)}
    if rope.rope_type == "longrope":  # Phi3MiniModel.generate_extra_tensors
        growth = np.log(c.max_seq_len / rope.original_max_position_embeddings)
        magnitude = np.sqrt(1 + growth / np.log(rope.original_max_position_embeddings))
        lists = {"long": rope.long_factor, "short": rope.short_factor}
        tensors = {f"rope_factors_{name}.weight": np.array(numbers) for name, numbers in lists.items()}
        return dimension | {"rope.scaling.attn_factor": float(magnitude)}, tensors
    kinds = {"rope.scaling.type": given.get("rope_type"), "rope.scaling.factor": given.get("factor")}
    return dimension | kinds, {}


def vocabulary(directory: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata of the tokenizer and the template, as the directory has them."""
    path = directory / "tokenizer.json"
    tokens = [f"<{n}>" for n in range(config["vocab_size"])]
    tokens[: len(BYTES)] = BYTES[: len(tokens)]
    kinds = [int(TokenType.NORMAL)] * len(tokens)
    merges: list[str] = []
    if path.is_file():
        fields = json.loads(path.read_text())
        merges = [" ".join(merge) for merge in fields["model"]["merges"]]
        for token, token_id in fields["model"]["vocab"].items():
            tokens[token_id] = token
        for token in fields["added_tokens"]:
            tokens[token["id"]] = token["content"]
            kinds[token["id"]] = int(TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED)
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges or ["a b"],
        "tokenizer.chat_template": TEMPLATE,
    }
    for name in ("bos_token_id", "eos_token_id"):
        metadata[f"tokenizer.ggml.{name}"] = config.get(name)
    texts = directory / "tokenizer_config.json"
    if texts.is_file():
        metadata["tokenizer.chat_template"] = json.loads(texts.read_text())["chat_template"]
    return metadata


def gguf_name(name: str) -> str:
    if name in NAME_OF:
        return NAME_OF[name]
    layer, rest = name.removeprefix("model.layers.").split(".", 1)
    part, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{PART_OF[part]}.{kind}"


def pairs_adjacent(name: str, numbers: Array, config: dict[str, Any]) -> Array:
    """Return q and k with each head's rows (half, pair) as (pair, half), any other tensor as it is."""
    n_heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    part = name.split(".")[-2]
    if part not in n_heads:
        return numbers
    return numbers.reshape(n_heads[part], 2, -1, *numbers.shape[1:]).swapaxes(1, 2).reshape(numbers.shape)
