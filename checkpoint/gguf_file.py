"""A GGUF file as a model directory: its texts in Hugging Face's words, its tensors as they lie in the file.

    FILE.gguf --as_directory()--> config.json, tokenizer.json, chat_template.jinja, ..., model.gguf (a link)
    model.gguf --map_tensors()--> tensors by Hugging Face's names: floats, or Blocks

So nothing behind this module knows where a model came from. The directory is a temporary one, of some MB; the
weights are read from the file itself.

Authority: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md for the names of the metadata; for the
names and the order of rows of the tensors, llama.cpp's gguf-py/gguf/tensor_mapping.py and
convert_hf_to_gguf.py (https://github.com/ggml-org/llama.cpp).

Rules of this file:
  * Nothing is guessed: an architecture, a block format or a tokenizer that is not in a table is refused by
    name, with UnsupportedModel. An entry of the metadata that has another type is refused as well.
  * What a file says of its tokenizer is its model and the name of a pre-tokenizer; PRE_TOKENIZERS says what
    each of them is in the model's own tokenizer.json.

Not here: the container (gguf_container.py), what blocks hold (blocks.py), which tensors a model has
(weights.py), where a file comes from (hub.py, default_model.py).
"""

import atexit
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from pathlib import Path
from types import UnionType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from checkpoint import gguf_container
from checkpoint.blocks import Blocks, kind
from checkpoint.config import UnsupportedModel
from checkpoint.gguf_container import Container, Tensor

Metadata = Mapping[str, Any]
NUMBER = int | float


def entry(metadata: Metadata, name: str, kind: type | UnionType) -> Any:
    """The value of an entry; raises UnsupportedModel where it is missing, or of another type."""
    if name not in metadata:
        raise UnsupportedModel(f"no {name} in the metadata")
    value = metadata[name]
    if not isinstance(value, kind):
        supported = getattr(kind, "__name__", kind)  # a union has no name
        raise UnsupportedModel(
            f"{name} is {type(value).__name__} {str(value)[:80]!r}; supported: {supported}"
        )
    return value


# --- config.json --------------------------------------------------------------------------------------------

ARCHITECTURES = ("llama", "qwen2", "qwen3")  # a model_type has the same name

# config.json                GGUF metadata, behind the architecture
CONFIG_FIELDS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}
OPTIONAL_FIELDS = {"num_key_value_heads", "head_dim", "rope_theta"}
UNSUPPORTED = ("attention.sliding_window", "expert_count")  # entries that would change the forward pass
ROPE_SCALINGS = ("none", "linear", "yarn")


def config_json(container: Container) -> dict[str, Any]:
    metadata, tensors = container
    architecture = entry(metadata, "general.architecture", str)
    if architecture not in ARCHITECTURES:
        raise UnsupportedModel(f"architecture {architecture[:80]!r}; supported: {', '.join(ARCHITECTURES)}")
    fields: dict[str, Any] = {
        "model_type": architecture,
        "vocab_size": len(entry(metadata, "tokenizer.ggml.tokens", list)),
    }
    for name, suffix in CONFIG_FIELDS.items():
        key = f"{architecture}.{suffix}"
        if key in metadata or name not in OPTIONAL_FIELDS:
            fields[name] = entry(metadata, key, NUMBER)
    for suffix in UNSUPPORTED:
        value = metadata.get(f"{architecture}.{suffix}")
        if np.any(value):
            raise UnsupportedModel(f"{architecture}.{suffix} is {str(value)[:80]!r}; supported: none")
    fields["rms_norm_eps"] = float(str(np.float32(fields["rms_norm_eps"])))  # 1e-05, not 9.99999974...e-06
    fields["tie_word_embeddings"] = "output.weight" not in tensors
    fields["attention_bias"] = "blk.0.attn_q.bias" in tensors
    fields |= rope_scaling(metadata, f"{architecture}.rope.scaling.")
    fields |= token_ids(metadata)
    return fields


def rope_scaling(metadata: Metadata, prefix: str) -> dict[str, Any]:
    if f"{prefix}type" not in metadata:
        return {}
    kind = entry(metadata, f"{prefix}type", str)
    if kind not in ROPE_SCALINGS:
        raise UnsupportedModel(f"{prefix}type is {kind[:80]!r}; supported: {', '.join(ROPE_SCALINGS)}")
    if kind == "none":
        return {}
    scaling: dict[str, Any] = {"rope_type": kind, "factor": entry(metadata, f"{prefix}factor", NUMBER)}
    original = f"{prefix}original_context_length"
    if original in metadata:
        scaling["original_max_position_embeddings"] = entry(metadata, original, NUMBER)
    return {"rope_scaling": scaling}


def token_id(metadata: Metadata, name: str) -> int | None:
    """The id of a special token; None where the file names none."""
    key = f"tokenizer.ggml.{name}_token_id"
    if key not in metadata:
        return None
    number: int = entry(metadata, key, int)
    n_tokens = len(entry(metadata, "tokenizer.ggml.tokens", list))
    if not 0 <= number < n_tokens:
        raise UnsupportedModel(f"{key} is {number}; there are {n_tokens} tokens")
    return number


def token_ids(metadata: Metadata) -> dict[str, Any]:
    """The ids of config.json and generation_config.json; an answer ends at eos, or eot if there is one."""
    ids = {"bos_token_id": token_id(metadata, "bos"), "pad_token_id": token_id(metadata, "padding")}
    named: dict[str, Any] = {name: number for name, number in ids.items() if number is not None}
    ends = [token_id(metadata, "eos"), token_id(metadata, "eot")]
    return named | {"eos_token_id": sorted({number for number in ends if number is not None})}


# --- tokenizer.json -----------------------------------------------------------------------------------------

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # gguf.TokenType

GPT_2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT_2])


def split(digits: str) -> pre_tokenizers.PreTokenizer:
    """What tiktoken's cl100k pattern has become in Llama 3 and Qwen, which group digits differently."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    words = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


# tokenizer.ggml.pre: https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp
PRE_TOKENIZERS = {
    "gpt-2": GPT_2,
    "olmo": GPT_2,
    "smollm": DIGITS,
    "starcoder": DIGITS,
    "llama-bpe": split(r"\p{N}{1,3}"),
    "qwen2": split(r"\p{N}"),
    "deepseek-r1-qwen": split(r"\p{N}"),
}
COMPOSES = ("qwen2", "deepseek-r1-qwen")  # their tokenizer.json normalizes to NFC
IGNORE_MERGES = ("llama-bpe",)  # a word that is a token is that token


def tokenizer_json(metadata: Metadata) -> str:
    model = entry(metadata, "tokenizer.ggml.model", str)
    pre = entry(metadata, "tokenizer.ggml.pre", str)
    if model != "gpt2":
        raise UnsupportedModel(f"tokenizer.ggml.model is {model[:80]!r}; supported: gpt2, byte-level BPE")
    if pre not in PRE_TOKENIZERS:
        raise UnsupportedModel(f"tokenizer.ggml.pre is {pre[:80]!r}; supported: {', '.join(PRE_TOKENIZERS)}")
    tokens = entry(metadata, "tokenizer.ggml.tokens", list)
    token_types = entry(metadata, "tokenizer.ggml.token_type", np.ndarray).tolist()
    if len(token_types) != len(tokens):
        raise UnsupportedModel(f"{len(tokens)} tokens and {len(token_types)} entries of token_type")
    vocabulary: dict[str, int] = {}
    added: list[AddedToken] = []
    for number, (token, token_type) in enumerate(zip(tokens, token_types, strict=True)):
        if token_type == UNUSED:
            continue
        vocabulary[token] = number
        if token_type in (CONTROL, USER_DEFINED):
            added.append(AddedToken(token, special=token_type == CONTROL, normalized=False))
    merges = [tuple(merge.split(" ")) for merge in entry(metadata, "tokenizer.ggml.merges", list)]
    if any(len(merge) != 2 for merge in merges):
        raise UnsupportedModel("tokenizer.ggml.merges: supported: two texts with a space between them")
    try:
        tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre in IGNORE_MERGES))
    except Exception as error:  # the library raises nothing more precise
        raise UnsupportedModel(f"its tokenizer: {str(error).splitlines()[0]}") from None
    if pre in COMPOSES:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([token for token in added if token.special])
    tokenizer.add_tokens([token for token in added if not token.special])
    return tokenizer.to_str()


def tokenizer_config(metadata: Metadata) -> dict[str, Any]:
    """The tokens that a chat template may name."""
    config: dict[str, Any] = {"clean_up_tokenization_spaces": False}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        number = token_id(metadata, key)
        if number is not None:
            config[f"{name}_token"] = metadata["tokenizer.ggml.tokens"][number]
    return config


# --- the directory ------------------------------------------------------------------------------------------


@cache
def as_directory(file: Path, presets: str = "{}") -> Path:
    """A temporary directory, named as the file, that is gone when Python ends.

    `presets` is JSON: what a generation_config.json says besides.
    """
    root = Path(tempfile.mkdtemp(prefix="gguf-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    directory = root / file.stem
    directory.mkdir()
    (directory / "model.gguf").symlink_to(file.absolute())
    container = read(directory / "model.gguf")
    try:
        texts = texts_of(container, json.loads(presets))
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{file}: {error}") from None
    for name, text in texts.items():
        (directory / name).write_text(text, encoding="utf-8")
    return directory


def texts_of(container: Container, presets: dict[str, Any]) -> dict[str, str]:
    """The files of a model's directory by name, all but the weights."""
    metadata = container.metadata
    n_files = 1
    if "split.count" in metadata:
        n_files = entry(metadata, "split.count", int)
    if n_files != 1:
        raise UnsupportedModel(f"one of {n_files} files of a model; llama-gguf-split --merge makes one file")
    return {
        "config.json": json.dumps(config_json(container)),
        "generation_config.json": json.dumps(token_ids(metadata) | presets),
        "tokenizer.json": tokenizer_json(metadata),
        "tokenizer_config.json": json.dumps(tokenizer_config(metadata)),
        "chat_template.jinja": entry(metadata, "tokenizer.chat_template", str),
    }


@lru_cache(maxsize=1)
def read(file: Path) -> Container:
    """The container, which as_directory() reads, and map_tensors() next."""
    return gguf_container.read(file)


# --- tensors ------------------------------------------------------------------------------------------------

# GGUF, after "blk.N."   Hugging Face, after "model.layers.N."
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTER_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

# GGUF's name    how the bytes of a tensor are seen
FLOATS: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
BLOCKS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")


def map_tensors(file: Path) -> dict[str, NDArray[Any] | Blocks]:
    """All tensors by Hugging Face's names, with their rows in its order, as views of the file."""
    metadata, places = read(file)
    read.cache_clear()  # its lists of strings are large, and of no more use
    architecture = metadata["general.architecture"]
    restored: Callable[[Any, int], Any] = rows_in_order
    if architecture == "llama":
        restored = halves_first
    n_heads = metadata[f"{architecture}.attention.head_count"]
    heads_of = {"attn_q": n_heads, "attn_k": metadata.get(f"{architecture}.attention.head_count_kv", n_heads)}
    tensors: dict[str, NDArray[Any] | Blocks] = {}
    for name, tensor in places.items():
        try:
            array = tensor_of(tensor)
            match name.split("."):
                case ["blk", _, part, _] if part in heads_of:
                    array = restored(array, heads_of[part])
        except UnsupportedModel as error:
            raise UnsupportedModel(f"{file.resolve()}: tensor {name} {error}") from None
        tensors[hugging_face_name(name)] = array
    return tensors


def tensor_of(tensor: Tensor) -> NDArray[Any] | Blocks:
    from gguf import GGML_QUANT_SIZES

    if tensor.format in FLOATS:
        return tensor.data.view(FLOATS[tensor.format]).reshape(tensor.shape)
    if tensor.format not in BLOCKS:
        supported = ", ".join([*FLOATS, *BLOCKS])
        raise UnsupportedModel(f"is {tensor.format}; supported: {supported}")
    if len(tensor.shape) != 2:
        raise UnsupportedModel(f"is {tensor.format}, {tensor.shape}; blocks are supported in matrices")
    _, block_bytes = GGML_QUANT_SIZES[kind(tensor.format)]
    return Blocks(tensor.format, tensor.data.reshape(tensor.shape[0], -1, block_bytes))


def rows_in_order(tensor: NDArray[Any] | Blocks, n_heads: int) -> NDArray[Any] | Blocks:
    return tensor


def halves_first(tensor: NDArray[Any] | Blocks, n_heads: int) -> NDArray[Any] | Blocks:
    """llama.cpp has a head's rows as (pair, half), so that rotary pairs are neighbours, for llama alone.

    Hugging Face's `rotate_half` expects (half, pair). convert_hf_to_gguf.py, LlamaModel.permute
    """
    rows = tensor.data if isinstance(tensor, Blocks) else tensor
    if len(rows) % (2 * n_heads):
        raise UnsupportedModel(f"has {len(rows)} rows for {n_heads} heads")
    pairs = rows.reshape(n_heads, -1, 2, *rows.shape[1:])
    rows = pairs.swapaxes(1, 2).reshape(rows.shape)
    if isinstance(tensor, Blocks):
        return tensor._replace(data=rows)
    return rows


def hugging_face_name(name: str) -> str:
    """Of a tensor; one that has no name there keeps its own, and weights.py refuses it."""
    if name in OUTER_TENSORS:
        return OUTER_TENSORS[name]
    match name.split("."):
        case ["blk", layer, part, kind] if part in LAYER_TENSORS:
            return f"model.layers.{layer}.{LAYER_TENSORS[part]}.{kind}"
        case _:
            return name
