"""A GGUF file as a model directory: its texts in Hugging Face's words, its tensors as they lie in the file.

    FILE.gguf --as_directory()--> config.json, tokenizer.json, chat_template.jinja, ..., model.gguf (a link)
    model.gguf --map_tensors()--> tensors by Hugging Face's names: floats, or Blocks

So nothing behind this module knows where a model came from. The directory is a temporary one, of some MB; the
weights are read from the file itself.

Authority: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md for the names of the metadata; for the
names and the order of rows of the tensors, llama.cpp's gguf-py/gguf/tensor_mapping.py and
convert_hf_to_gguf.py (https://github.com/ggml-org/llama.cpp); the `gguf` package reads the container.

Rules of this file:
  * Nothing is guessed: an architecture, a block format or a tokenizer that is not in a table is refused by
    name, with UnsupportedModel.
  * What a file says of its tokenizer is its model and the name of a pre-tokenizer; PRE_TOKENIZERS says what
    each of them is in the model's own tokenizer.json.

Not here: what blocks hold (blocks.py), which tensors a model has (weights.py), where a file comes from
(hub.py, default_model.py).
"""

import atexit
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from checkpoint.blocks import Blocks
from checkpoint.config import UnsupportedModel

if TYPE_CHECKING:
    from gguf import GGUFReader

Metadata = Mapping[str, Any]

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
UNSUPPORTED = ("attention.sliding_window", "expert_count")  # metadata that would change the forward pass
ROPE_SCALINGS = ("none", "linear", "yarn")


def config_json(metadata: Metadata, tensors: Mapping[str, Any]) -> dict[str, Any]:
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise UnsupportedModel(f"architecture {architecture}; supported: {', '.join(ARCHITECTURES)}")
    fields: dict[str, Any] = {
        "model_type": architecture,
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
    }
    for name, key in CONFIG_FIELDS.items():
        value = metadata.get(f"{architecture}.{key}")
        if value is not None:
            fields[name] = value
        elif name not in OPTIONAL_FIELDS:
            raise UnsupportedModel(f"no {architecture}.{key} in the metadata")
    for key in UNSUPPORTED:
        value = metadata.get(f"{architecture}.{key}")
        if value:
            raise UnsupportedModel(f"{architecture}.{key} is {value}; supported: none")
    fields["rms_norm_eps"] = float(str(np.float32(fields["rms_norm_eps"])))  # 1e-05, not 9.99999974...e-06
    fields["tie_word_embeddings"] = "output.weight" not in tensors
    fields["attention_bias"] = "blk.0.attn_q.bias" in tensors
    fields |= rope_scaling(metadata, f"{architecture}.rope.scaling.")
    fields |= token_ids(metadata)
    return fields


def rope_scaling(metadata: Metadata, prefix: str) -> dict[str, Any]:
    kind = metadata.get(f"{prefix}type", "none")
    if kind not in ROPE_SCALINGS:
        raise UnsupportedModel(f"{prefix}type is {kind}; supported: {', '.join(ROPE_SCALINGS)}")
    if kind == "none":
        return {}
    scaling: dict[str, Any] = {"rope_type": kind, "factor": metadata[f"{prefix}factor"]}
    original = metadata.get(f"{prefix}original_context_length")
    if original is not None:
        scaling["original_max_position_embeddings"] = original
    return {"rope_scaling": scaling}


def token_ids(metadata: Metadata) -> dict[str, Any]:
    """The ids of config.json and generation_config.json; an answer ends at eos, or eot if there is one."""
    found: dict[str, Any] = {}
    for name, key in (("bos_token_id", "bos"), ("pad_token_id", "padding")):
        value = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if value is not None:
            found[name] = value
    ends = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot")]
    found["eos_token_id"] = sorted({token_id for token_id in ends if token_id is not None})
    return found


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
    model = metadata.get("tokenizer.ggml.model")
    pre = metadata.get("tokenizer.ggml.pre")
    if model != "gpt2":
        raise UnsupportedModel(f"tokenizer.ggml.model is {model}; supported: gpt2, byte-level BPE")
    if pre not in PRE_TOKENIZERS:
        raise UnsupportedModel(f"tokenizer.ggml.pre is {pre}; supported: {', '.join(PRE_TOKENIZERS)}")
    kinds = metadata["tokenizer.ggml.token_type"]
    vocabulary: dict[str, int] = {}
    added: list[AddedToken] = []
    for token_id, (token, kind) in enumerate(zip(metadata["tokenizer.ggml.tokens"], kinds, strict=True)):
        if kind == UNUSED:
            continue
        vocabulary[token] = token_id
        if kind in (CONTROL, USER_DEFINED):
            added.append(AddedToken(token, special=kind == CONTROL, normalized=False))
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    try:
        tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre in IGNORE_MERGES))
    except Exception as error:  # the library raises nothing more precise
        raise UnsupportedModel(f"its tokenizer: {error}") from None
    if pre in COMPOSES:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([token for token in added if token.special])
    tokenizer.add_tokens([token for token in added if not token.special])
    return tokenizer.to_str()


def tokenizer_config(metadata: Metadata) -> dict[str, Any]:
    """The tokens that a chat template may name."""
    tokens = metadata["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {"clean_up_tokenization_spaces": False}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            config[f"{name}_token"] = tokens[token_id]
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
    reader = read(directory / "model.gguf")
    try:
        metadata = {name: field.contents() for name, field in reader.fields.items()}
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        texts = {
            "config.json": json.dumps(config_json(metadata, tensors)),
            "generation_config.json": json.dumps(token_ids(metadata) | json.loads(presets)),
            "tokenizer.json": tokenizer_json(metadata),
            "tokenizer_config.json": json.dumps(tokenizer_config(metadata)),
        }
        if "tokenizer.chat_template" in metadata:
            texts["chat_template.jinja"] = metadata["tokenizer.chat_template"]
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{file}: {error}") from None
    except KeyError as error:
        raise UnsupportedModel(f"{file}: no {error} in the metadata") from None
    for name, text in texts.items():
        (directory / name).write_text(text, encoding="utf-8")
    return directory


@lru_cache(maxsize=1)
def read(file: Path) -> "GGUFReader":
    """The container; read by as_directory(), and once more by nobody: map_tensors() comes next."""
    from gguf import GGUFReader

    try:
        return GGUFReader(file)
    except Exception as error:  # what its parser stumbles over in a file that is cut, or none
        reason = str(error).split("\n")[0]
        name = file.resolve()
        raise UnsupportedModel(f"{name} is no GGUF file, or cut: {type(error).__name__}: {reason}") from None


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
    reader = read(file)
    read.cache_clear()  # its lists of strings are large, and of no more use
    metadata = {name: field.contents() for name, field in reader.fields.items() if "tokenizer" not in name}
    restored: Callable[[Any, int], Any] = rows_in_order
    if metadata["general.architecture"] == "llama":
        restored = halves_first
    n_heads = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}
    tensors: dict[str, NDArray[Any] | Blocks] = {}
    for tensor in reader.tensors:
        part = tensor.name.split(".")[-2]
        array = tensor_of(tensor)
        if part in n_heads:
            array = restored(array, metadata[f"{metadata['general.architecture']}.{n_heads[part]}"])
        tensors[hugging_face_name(tensor.name)] = array
    return tensors


def tensor_of(tensor: Any) -> NDArray[Any] | Blocks:
    from gguf import GGML_QUANT_SIZES

    name = tensor.tensor_type.name
    shape = [int(size) for size in reversed(tensor.shape)]  # GGUF lists the innermost first
    data = tensor.data.view(np.ndarray)
    if name in FLOATS:
        return np.ascontiguousarray(data).view(FLOATS[name]).reshape(shape)
    if name not in BLOCKS:
        raise UnsupportedModel(f"tensor {tensor.name} is {name}; supported: {', '.join([*FLOATS, *BLOCKS])}")
    _, block_bytes = GGML_QUANT_SIZES[tensor.tensor_type]
    return Blocks(name, data.reshape(shape[0], -1, block_bytes))


def rows_in_order(tensor: NDArray[Any] | Blocks, n_heads: int) -> NDArray[Any] | Blocks:
    return tensor


def halves_first(tensor: NDArray[Any] | Blocks, n_heads: int) -> NDArray[Any] | Blocks:
    """llama.cpp has a head's rows as (pair, half), so that rotary pairs are neighbours, for llama alone.

    Hugging Face's `rotate_half` expects (half, pair). convert_hf_to_gguf.py, LlamaModel.permute
    """
    rows = tensor.data if isinstance(tensor, Blocks) else tensor
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
