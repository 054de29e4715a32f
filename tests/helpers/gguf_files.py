"""GGUF files of the models that the tests have, for the reader in gguf_file.py.

    a model directory in Hugging Face's layout, a block format --write_gguf()--> a GGUF file

Names, and the order of the rows of q and k, are those of llama.cpp.
"""

import json
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter, TokenType, quantize

from checkpoint.gguf_file import CONFIG_FIELDS, LAYER_TENSORS, OUTER_TENSORS
from checkpoint.weights import Array, map_tensors, unpacked

PART_OF = {theirs: ours for ours, theirs in LAYER_TENSORS.items()}
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
    for name, key in CONFIG_FIELDS.items():
        metadata.setdefault(f"{architecture}.{key}", config.get(name))
    writer = GGUFWriter(file, metadata["general.architecture"] or "none")
    for name, value in metadata.items():
        if value is not None and name != "general.architecture":
            writer.add_key_value(name, value, GGUFValueType.get_type(value))
    kind = GGMLQuantizationType[block_format]
    for name, tensor in map_tensors(directory).items():
        numbers = unpacked(tensor)
        if architecture == "llama":
            numbers = pairs_adjacent(name, numbers, config)
        is_packed = numbers.ndim > 1 and numbers.shape[-1] % 32 == 0
        format_ = kind if is_packed else GGMLQuantizationType.F32
        writer.add_tensor(gguf_name(name), quantize(numbers, format_), raw_dtype=format_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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
