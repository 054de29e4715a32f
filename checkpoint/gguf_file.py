"""A GGUF file as a model directory: its texts in Hugging Face's words, its tensors as they lie in the file.

    FILE.gguf --as_directory()--> config.json, tokenizer.json, chat_template.jinja, ..., model.gguf (a link)
    model.gguf --map_tensors()--> tensors by Hugging Face's names: floats, or Blocks

The other modules do not know whether a model came from a GGUF file. The directory is a temporary one, of some
MB; the weights are read from the file itself.

Authority: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md for the names of the metadata; for the
names and the order of rows of the tensors, llama.cpp's gguf-py/gguf/tensor_mapping.py and
convert_hf_to_gguf.py (https://github.com/ggml-org/llama.cpp).

Rules of this file:
  * We guess nothing: UnsupportedModel names each architecture, block format or tokenizer that is not in a
    table, and each entry of the metadata that has another type than expected.
  * The file names only its tokenizer's model and a pre-tokenizer; PRE_TOKENIZERS maps each of these to its
    definition in the model's own tokenizer.json.
"""

import atexit
import json
import os
import shutil
import tempfile
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from checkpoint.config import UnsupportedModel, parse_config
from checkpoint.gguf_container import Metadata, Tensors, read


def entry(metadata: Metadata, name: str, kind: type | UnionType) -> Any:
    """Return the value of an entry; raises UnsupportedModel if it is missing, or of another type."""
    value = metadata.get(name)
    if not isinstance(value, kind):
        raise UnsupportedModel(f"{name} is {str(value)[:80]!r}; supported: {kind}")
    return value


def choice(metadata: Metadata, name: str, supported: Collection[str]) -> Any:
    """Return the value of an entry that is one of some texts; raises UnsupportedModel."""
    value = entry(metadata, name, str)
    if value not in supported:
        raise UnsupportedModel(
            f"{name} is {value[:80]!r}; supported: {', '.join(supported)}. "
            "Another server, such as llama.cpp's, may have it: --upstream"
        )
    return value


# --- config.json --------------------------------------------------------------------------------------------

ARCHITECTURES = ("llama", "qwen2", "qwen3", "granite", "phi3")  # a model_type has the same name
PAIRS_ADJACENT = ("llama", "granite")  # convert_hf_to_gguf.py, LlamaModel.permute
# They end an answer, whatever the metadata names: special_eog_ids of llama.cpp's src/llama-vocab.cpp
END_TOKENS = {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>"}

# config.json                GGUF metadata, after the architecture
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
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "embedding_multiplier": "embedding_scale",  # Granite's four
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
}
# Divisors of the frequencies, pair by pair: Llama 3.1 and later as its rope_type llama3 makes them,
# and the two of longrope
DIVISORS = {
    "rope_freqs.weight": ("short_factor", "long_factor"),
    "rope_factors_short.weight": ("short_factor",),
    "rope_factors_long.weight": ("long_factor",),
}
# Entries that would change the forward pass: the two of heads if they were not those of a key, the others if
# they were not 0 or 1
OTHERS = (
    "attention.sliding_window",
    "attention.value_length",
    "expert_count",
    "rope.dimension_count",
    "rope.scale_linear",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scaling.yarn_ext_factor",
)


def config_json(metadata: Metadata, tensors: Tensors) -> dict[str, Any]:
    architecture = choice(metadata, "general.architecture", ARCHITECTURES)
    tokens = entry(metadata, "tokenizer.ggml.tokens", list)
    named = map(tokens.index, END_TOKENS.intersection(tokens))
    ends: Any = {token_id(metadata, "eos"), token_id(metadata, "eot"), *named} - {None}
    fields: dict[str, Any] = {
        "model_type": architecture,
        "vocab_size": len(tokens),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "rope_interleave": architecture in PAIRS_ADJACENT,
        "eos_token_id": sorted(ends),
        **entries(metadata, CONFIG_FIELDS),
    }
    head_dim = parse_config(fields, {}).head_dim
    others = entries(metadata, {suffix: suffix for suffix in OTHERS})
    fields["partial_rotary_factor"] = others.pop("rope.dimension_count", head_dim) / head_dim
    if architecture == "phi3":
        fields["sliding_window"] = others.pop("attention.sliding_window", 0) or None
    rope = entries(metadata, {"factor": "rope.scaling.factor"})
    if rope:
        rope["rope_type"] = str(metadata.get(f"{architecture}.rope.scaling.type", "linear"))
    for name in DIVISORS.keys() & tensors:
        rope |= dict.fromkeys(DIVISORS[name], np.array(tensors[name]).tolist())
    if "long_factor" in rope:
        rope |= {"rope_type": "longrope", "attention_factor": others.pop("rope.scaling.attn_factor", 1.0)}
    fields["rope_scaling"] = rope
    supported = {"attention.value_length": [head_dim]}
    for suffix, value in others.items():
        expected = supported.get(suffix, [0, 1])
        if value not in expected:
            raise UnsupportedModel(f"{architecture}.{suffix} is {value}; supported: {expected}")
    return fields


def entries(metadata: Metadata, names: Mapping[str, str]) -> dict[str, Any]:
    """Return the numbers that are there of the architecture's entries, by the names that we give them."""
    architecture = metadata["general.architecture"]
    return {
        name: entry(metadata, f"{architecture}.{suffix}", int | float)
        for name, suffix in names.items()
        if f"{architecture}.{suffix}" in metadata
    }


def token_id(metadata: Metadata, name: str) -> int | None:
    """Return the id of a special token; None if the file names none."""
    key = f"tokenizer.ggml.{name}_token_id"
    if key not in metadata:
        return None
    number: int = entry(metadata, key, int)
    n_tokens = len(metadata["tokenizer.ggml.tokens"])
    if not 0 <= number < n_tokens:
        raise UnsupportedModel(f"{key} is {number}; there are {n_tokens} tokens")
    return number


# --- tokenizer.json -----------------------------------------------------------------------------------------

CONTROL, USER_DEFINED, UNUSED = 3, 4, 5  # of gguf.TokenType

GPT_2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT_2])


# tiktoken's patterns: of cl100k, which families group digits in differently, and of o200k, which cuts words
# where lower case ends
WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
OTHER = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    words = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


# tokenizer.ggml.pre: https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp
PRE_TOKENIZERS = {
    "gpt-2": GPT_2,
    "smollm": DIGITS,
    "refact": DIGITS,
    "llama-bpe": split(rf"{WORD}|\p{{N}}{{1,3}}|{OTHER}"),
    "dbrx": split(rf"{WORD}|\p{{N}}{{1,3}}|{OTHER}"),
    "gpt-4o": split(O200K),
    "qwen2": split(rf"{WORD}|\p{{N}}|{OTHER}"),
    "deepseek-r1-qwen": split(rf"{WORD}|\p{{N}}|{OTHER}"),
}


def tokenizer_json(metadata: Metadata) -> str:
    choice(metadata, "tokenizer.ggml.model", ["gpt2"])  # byte-level BPE
    pre = choice(metadata, "tokenizer.ggml.pre", PRE_TOKENIZERS)
    tokens = metadata["tokenizer.ggml.tokens"]
    token_types = entry(metadata, "tokenizer.ggml.token_type", np.ndarray).tolist()
    if len(token_types) != len(tokens):
        raise UnsupportedModel(f"{len(tokens)} tokens and {len(token_types)} entries of token_type")
    vocabulary: dict[str, int] = {}
    added: list[AddedToken] = []
    for number, (token, token_type) in enumerate(zip(tokens, token_types, strict=True)):
        if token_type != UNUSED:
            vocabulary[token] = number
        if token_type in (CONTROL, USER_DEFINED):
            added.append(AddedToken(token, special=token_type == CONTROL, normalized=False))
    merges = [tuple(merge.split(" ")) for merge in entry(metadata, "tokenizer.ggml.merges", list)]
    try:
        # Llama's: a word that is a token is that token
        tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre == "llama-bpe"))
    except Exception as error:  # the library raises nothing more precise
        raise UnsupportedModel(f"its tokenizer: {str(error).splitlines()[0]}") from None
    if pre in ("qwen2", "deepseek-r1-qwen"):  # as in their tokenizer.json
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(added)
    return tokenizer.to_str()


def tokenizer_config(metadata: Metadata) -> dict[str, Any]:
    """The tokens that a chat template may name, and the chat templates."""
    tokens = {
        f"{name}_token": metadata["tokenizer.ggml.tokens"][number]
        for name in ("bos", "eos")
        if (number := token_id(metadata, name)) is not None
    }
    templates = [{"name": "default", "template": entry(metadata, "tokenizer.chat_template", str)}]
    if with_tools := metadata.get("tokenizer.chat_template.tool_use"):
        templates.append({"name": "tool_use", "template": str(with_tools)})
    return {**tokens, "chat_template": templates}


# --- the directory ------------------------------------------------------------------------------------------


PREFIX = "llmref-gguf-"  # of the directory's name; the process id follows


@cache
def as_directory(file: Path, presets: str = "{}") -> Path:
    """Make a temporary directory, named as the file, that is removed when Python ends.

    A process that was killed leaves its own, which the next one removes. `presets` is JSON:
    generation_config.json.
    """
    for left_over in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        process_id = left_over.name.removeprefix(PREFIX).partition("-")[0]
        try:
            os.kill(int(process_id), 0)  # sends nothing
        except ProcessLookupError:
            shutil.rmtree(left_over, ignore_errors=True)
        except (PermissionError, ValueError, OverflowError):
            pass  # it runs, as another user's; or the directory is not ours
    root = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    directory = root / file.name.removesuffix(".gguf")
    directory.mkdir()
    (directory / "model.gguf").symlink_to(file.absolute())
    try:
        metadata, tensors = read(directory / "model.gguf")
        config = config_json(metadata, tensors)
        parse_config(config, {})
        texts = {
            "config.json": json.dumps(config),
            "generation_config.json": presets,
            "tokenizer.json": tokenizer_json(metadata),
            "tokenizer_config.json": json.dumps(tokenizer_config(metadata)),
        }
    except (OSError, ValueError, KeyError) as error:  # also text that is not UTF-8, and an empty file
        raise UnsupportedModel(f"{file} is not a GGUF file that is supported: {error}") from None
    for name, text in texts.items():
        (directory / name).write_text(text, encoding="utf-8")
    return directory


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
PHI3_TENSORS = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
OUTER_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def map_tensors(file: Path) -> Tensors:
    """Return all tensors by Hugging Face's names, as views of the file, but those that config_json() reads.

    A tensor that has none keeps its own, which weights.py refuses.
    """
    metadata, tensors = read(file)
    read.cache_clear()  # its lists of strings are large, and no longer needed
    parts = LAYER_TENSORS | (PHI3_TENSORS if metadata["general.architecture"] == "phi3" else {})
    found: Tensors = {}
    for name in tensors.keys() - DIVISORS:
        match name.split("."):
            case ["blk", layer, part, kind] if part in parts:
                found[f"model.layers.{layer}.{parts[part]}.{kind}"] = tensors[name]
            case _:
                found[OUTER_TENSORS.get(name, name)] = tensors[name]
    return found
