"""config.json to Config: the architecture of a model, for all families from one description.

    directory --read_config()--> Config

Authority: names, defaults and meaning of the fields are those of Hugging Face transformers 5
(https://github.com/huggingface/transformers, models/<model_type>/configuration_<model_type>.py and
modeling_rope_utils.py).

Rules of this file:
  * One description serves all families: the table FAMILIES has their differences. A new family is a row
    there, a row of Fields for each field that is new, a case of tests/parity.py and its name in
    docs/operating.md; and rows of NAMES in weights.py if its tensors are not named as Llama's are.
  * No field is used before msgspec has checked its type and its range, which Fields and Rope declare.
  * A value that this program does not support raises UnsupportedModel; nothing is guessed or skipped.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from checkpoint.rope import ROPE_TYPES, Number, Rope, Size, Theta, longrope

T = TypeVar("T")


class UnsupportedModel(ValueError):
    """A model that we cannot serve; one line names the wrong field, tensor or file, and what is supported."""


# ---- The fields of config.json -----------------------------------------------------------------------------

Count = Annotated[int, Meta(ge=1, le=2**16)]
# The largest vocabulary so far has 2**18 tokens; masks have a bit for each.
VocabSize = Annotated[int, Meta(ge=1, le=2**20)]
Index = Annotated[int, Meta(ge=0, le=2**31 - 1)]  # of a token, or a layer
LayerType = Literal["full_attention", "sliding_attention", "attention"]
EndTokens = Index | list[Index] | None
RopeFields = dict[str, int | float | str | bool | list[float] | None]  # one set of numbers for all layers


class Fields(msgspec.Struct):
    """The fields of config.json that we read. A default serves every family without one of its own."""

    hidden_size: Size
    intermediate_size: Size
    vocab_size: VocabSize
    num_hidden_layers: Count
    num_attention_heads: Count
    shared_intermediate_size: Size | None = None  # of Granite 4, whose intermediate_size is for experts
    num_key_value_heads: Count | None = None  # None: num_attention_heads
    max_position_embeddings: Size = 32_768
    head_dim: Count | None = None  # None: hidden_size / num_attention_heads
    hidden_act: Annotated[str, Meta(pattern="^silu$")] = "silu"
    rms_norm_eps: Number = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    embedding_multiplier: Number = 1.0  # of embedding rows
    residual_multiplier: Number = 1.0  # scales the outputs of attention and MLP before they are added
    attention_multiplier: Number | None = None  # of scores; None: 1 / sqrt(head_dim)
    logits_scaling: Number = 1.0  # that logits are divided by
    eos_token_id: EndTokens = None
    use_sliding_window: bool = False
    sliding_window: Size | None = 4096
    max_window_layers: Index | None = None
    window_interval: Count = 1  # our name: gpt-oss's every second layer has one
    layer_types: list[LayerType] | None = None
    no_rope_layers: list[Literal[0, 1]] | None = None  # 1: a layer WITH rotary positions; 0: without (NoPE)
    rope_interleave: bool = False  # rows of q and k have their rotary pairs adjacent
    rope_theta: Theta = 10_000.0
    rope_scaling: RopeFields | None = None
    rope_parameters: RopeFields | None = None
    partial_rotary_factor: float = 1.0
    original_max_position_embeddings: Size | None = None  # beside the parameters of RoPE: Phi-3
    position_embedding_type: Literal["rope"] = "rope"  # Granite 4
    num_experts: Count | None = None
    num_local_experts: Index | None = None  # 0: Granite 4 without experts
    num_experts_per_tok: Index = 1
    moe_intermediate_size: Size | None = None
    norm_topk_prob: bool = True
    decoder_sparse_step: Count = 1
    mlp_only_layers: list[Index] | None = None
    swiglu_alpha: Number = 1.702
    swiglu_limit: Number = 7.0
    quantization_config: dict[str, Any] | None = None


class GenerationFields(msgspec.Struct):
    eos_token_id: EndTokens = None


def checked(fields: Mapping[str, Any], kind: type[T], file: str = "config.json") -> T:
    """Return the fields as one of the types above; raises UnsupportedModel."""
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        [name] = re.findall(r"\$\.(\w+)", str(error)) or [""]
        value = f"{name} is {json.dumps(fields[name])[:80]}: " if name in fields else ""
        raise UnsupportedModel(
            f"{file}: {value}{str(error)[:200]}. Another server, such as vLLM, may have it: --upstream"
        ) from None


def require(is_supported: bool, name: str, value: object, supported: str) -> None:
    if not is_supported:
        raise UnsupportedModel(
            f"config.json: {name} is {json.dumps(value)[:80]}; supported: {supported}. "
            "Another server, such as vLLM, may have it: --upstream"
        )


# ---- Differences between the families ----------------------------------------------------------------------


class Family(NamedTuple):
    """How a model_type reads config.json; a bias is True, False, or the name of the field that decides it.

    It is a mixture of experts if its defaults have num_experts_per_tok.
    """

    qkv_bias: bool | str
    o_bias: bool | str
    mlp_bias: bool | str
    qk_norm: bool  # RMSNorm over each head of q and k, before the rotation
    defaults: dict[str, Any]  # of absent fields, if they differ from those of Fields
    is_gpt_oss: bool = False  # sinks, experts with biases and a clamped SwiGLU, numbers of 4 bits


ALL_SLIDE: dict[str, Any] = {"use_sliding_window": True, "max_window_layers": 0}  # if there is a window
MISTRAL = ALL_SLIDE | {"eos_token_id": 2, "max_position_embeddings": 131_072, "num_key_value_heads": 8}
# fmt: off
FAMILIES = {
    #                  qkv_bias          o_bias            mlp_bias    qk_norm  defaults
    "llama":    Family("attention_bias", "attention_bias", "mlp_bias", False,   {
                       "eos_token_id": 2, "max_position_embeddings": 2048}),
    "mistral":  Family(False,            False,            False,      False,   MISTRAL),
    "qwen2":    Family(True,             False,            False,      False,   {
                       "num_key_value_heads": 32, "max_window_layers": 28}),
    "qwen3":    Family("attention_bias", "attention_bias", False,      True,    {
                       "num_key_value_heads": 32, "head_dim": 128, "max_window_layers": 28}),
    "smollm3":  Family("attention_bias", "attention_bias", "mlp_bias", False,   {
                       "num_key_value_heads": 4, "eos_token_id": 128_001, "rope_theta": 2_000_000.0,
                       "tie_word_embeddings": True, "sliding_window": None,
                       "no_rope_layers": [1, 1, 1, 0] * 9}),
    "mixtral":  Family(False,            False,            False,      False,   MISTRAL | {
                       "sliding_window": None, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0,
                       "num_local_experts": 8, "num_experts_per_tok": 2}),
    "qwen3_moe": Family("attention_bias", "attention_bias", False,     True,    {
                       "num_key_value_heads": 4, "num_local_experts": 128, "num_experts_per_tok": 8,
                       "moe_intermediate_size": 768, "norm_topk_prob": False}),
    "phi3":     Family(False,            False,            False,      False,   {
                       "eos_token_id": 32_000, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
                       "sliding_window": None} | ALL_SLIDE),
    "granite":  Family("attention_bias", "attention_bias", "mlp_bias", False,   {
                       "eos_token_id": 2, "max_position_embeddings": 2048, "attention_multiplier": 1.0}),
    "gpt_oss":  Family("attention_bias", "attention_bias", False,      False,   {
                       "max_position_embeddings": 131_072, "num_key_value_heads": 8, "head_dim": 64,
                       "attention_bias": True, "sliding_window": 128, "window_interval": 2,
                       "rms_norm_eps": 1e-5, "rope_theta": 150_000.0, "num_local_experts": 128,
                       "num_experts_per_tok": 4, "rope_parameters": {
                           "rope_type": "yarn", "factor": 32.0, "truncate": False,
                           "original_max_position_embeddings": 4096}} | ALL_SLIDE,
                       is_gpt_oss=True),
}
FAMILIES["granitemoehybrid"] = FAMILIES["granite"]  # Granite 4; its layers of Mamba and experts are refused
# fmt: on


# ---- config.json -------------------------------------------------------------------------------------------


class Experts(NamedTuple):
    """The MLPs of a layer, of which the router chooses some for each token (mixture of experts)."""

    n: int
    n_chosen: int  # of a token
    hidden_dim: int  # of each
    layers: tuple[bool, ...]  # which have experts; the others have one MLP
    normalised: bool  # the weights of the chosen ones sum to 1
    has_biases: bool  # the router too
    limit: float | None  # of gate and up, for gpt-oss's SwiGLU; None: the usual one
    alpha: float  # that gpt-oss's gate is multiplied by in the sigmoid
    mxfp4: bool  # the checkpoint has numbers of 4 bits


@dataclass(frozen=True)
class Config:
    """A decoder of the Llama kind."""

    model_type: str
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_dim: int
    vocab_size: int
    max_seq_len: int
    norm_eps: float
    rope: Rope
    windows: tuple[int | None, ...]  # a layer: a token sees itself and the window - 1 before it; None: all
    rotary: tuple[bool, ...]  # a layer; False: it has no positions (NoPE)
    tied: bool  # the head's matrix is that of the embedding
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...]
    generation: dict[str, Any]  # generation_config.json; {} without one
    sinks: bool = False  # attention of each head has one more score, whose value is nothing
    experts: Experts | None = None
    pairs_adjacent: bool = False  # in the checkpoint's rows of q and k; False: halves, for `rotate_half`
    embed_scale: float = 1.0  # of the embedding, not of a head that is tied to it
    logit_scale: float = 1.0


def read_config(directory: Path) -> Config:
    """Read config.json and, if there is one, generation_config.json; raises UnsupportedModel."""
    if not (directory / "config.json").is_file():
        raise UnsupportedModel(
            f"{directory} holds no model: expected config.json in it, or a GGUF file's own path"
        )
    path = directory / "generation_config.json"
    generation: dict[str, Any] = read_json(path) if path.is_file() else {}
    return parse_config(read_json(directory / "config.json"), generation)


def parse_config(raw: dict[str, Any], generation: dict[str, Any]) -> Config:
    """Return the Config of both files' contents; raises UnsupportedModel."""
    model_type: Any = raw.get("model_type")
    require(model_type in [*FAMILIES], "model_type", model_type, " or ".join(FAMILIES))
    family = FAMILIES[model_type]
    fields = checked(family.defaults | raw, Fields)
    ends = checked(generation, GenerationFields, "generation_config.json").eos_token_id
    if ends is None:
        ends = fields.eos_token_id
    n_heads = fields.num_attention_heads
    n_kv_heads = fields.num_key_value_heads or n_heads
    require(n_heads % n_kv_heads == 0, "num_key_value_heads", n_kv_heads, "a divisor of num_attention_heads")
    head_dim = fields.head_dim or fields.hidden_size // n_heads
    rope = parse_rope(fields, head_dim)
    n_turning = rope.n_turning(head_dim)
    is_even = 0 < n_turning <= head_dim and n_turning % 2 == head_dim % 2 == 0
    pairs = "even numbers above 0, for rotary pairs"
    require(is_even, "head_dim, and how many of it turn,", [head_dim, n_turning], pairs)
    partial = rope.partial_rotary_factor
    require(partial == 1 or model_type == "phi3", "partial_rotary_factor", partial, f"1 in a {model_type}")
    max_seq_len = fields.max_position_embeddings
    if rope.rope_type == "yarn":  # many files give the context before it became longer
        max_seq_len = max(max_seq_len, int(rope.original_max_position_embeddings * rope.factor))
    # RMSNorm forgets the size of the residual stream, all but eps. So we keep the stream divided by
    # residual_multiplier: then the layers add their outputs as they are, and only the embedding is scaled.
    residual = fields.residual_multiplier

    def has_bias(source: bool | str) -> Any:
        return source if isinstance(source, bool) else getattr(fields, source)

    return Config(
        model_type=model_type,
        dim=fields.hidden_size,
        n_layers=fields.num_hidden_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        hidden_dim=fields.shared_intermediate_size or fields.intermediate_size,
        vocab_size=fields.vocab_size,
        max_seq_len=max_seq_len,
        norm_eps=fields.rms_norm_eps / residual**2,
        embed_scale=fields.embedding_multiplier / residual,
        logit_scale=1 / fields.logits_scaling,
        rope=rope,
        windows=parse_windows(fields),
        rotary=parse_rotary(fields),
        tied=fields.tie_word_embeddings,
        qkv_bias=has_bias(family.qkv_bias),
        o_bias=has_bias(family.o_bias),
        mlp_bias=has_bias(family.mlp_bias),
        qk_norm=family.qk_norm,
        eos_token_ids=(ends,) if isinstance(ends, int) else tuple(ends or ()),
        generation=generation,
        sinks=family.is_gpt_oss,
        experts=parse_experts(fields, family),
        pairs_adjacent=fields.rope_interleave,
    )


def parse_rotary(fields: Fields) -> tuple[bool, ...]:
    n_layers = fields.num_hidden_layers
    rotary = fields.no_rope_layers or [1] * n_layers
    require(len(rotary) == n_layers, "no_rope_layers", rotary, f"a list of {n_layers}")
    return tuple(map(bool, rotary))


def parse_windows(fields: Fields) -> tuple[int | None, ...]:
    """Return the window of each layer. `layer_types` lists the layers that have one; without it, all layers
    from `max_window_layers` on have one, or every nth of these.
    """
    layers = range(fields.num_hidden_layers)
    if not fields.use_sliding_window:
        return (None,) * len(layers)
    kinds, first = fields.layer_types, fields.max_window_layers
    if kinds is None:
        require(first is not None, "max_window_layers", first, "a number, or a list layer_types")
        slides = [layer >= (first or 0) and layer % fields.window_interval == 0 for layer in layers]
    else:
        require(len(kinds) == len(layers), "layer_types", kinds, f"a list of {len(layers)}")
        slides = [kind == "sliding_attention" for kind in kinds]
    return tuple(fields.sliding_window if has_window else None for has_window in slides)


def parse_experts(fields: Fields, family: Family) -> Experts | None:
    """Return the experts of a mixture; None if each layer has one MLP."""
    quantized = fields.quantization_config or {}
    mxfp4 = family.is_gpt_oss and quantized.get("quant_method") == "mxfp4"
    # A fuller program would read the scales of other quantised tensors.
    require(mxfp4 or not quantized, "quantization_config", quantized, "null, and mxfp4 of a gpt_oss")
    if "num_experts_per_tok" not in family.defaults:
        return None
    n = fields.num_experts or fields.num_local_experts or 0
    n_chosen = fields.num_experts_per_tok
    require(1 <= n_chosen <= n, "num_experts_per_tok", n_chosen, f"1 to {n}")
    hidden_dim = fields.moe_intermediate_size or fields.intermediate_size
    for size in (fields.hidden_size, hidden_dim):
        require(size % 32 == 0 or not mxfp4, "a size of experts", size, "a multiple of 32, for MXFP4")
    dense = fields.mlp_only_layers or []
    step = fields.decoder_sparse_step
    layers = range(fields.num_hidden_layers)
    return Experts(
        n=n,
        n_chosen=n_chosen,
        hidden_dim=hidden_dim,
        layers=tuple(layer not in dense and (layer + 1) % step == 0 for layer in layers),
        normalised=fields.norm_topk_prob,
        has_biases=family.is_gpt_oss,
        limit=fields.swiglu_limit if family.is_gpt_oss else None,
        alpha=fields.swiglu_alpha,
        mxfp4=mxfp4,
    )


def parse_rope(fields: Fields, head_dim: int) -> Rope:
    """Read `rope_scaling` and `rope_theta`, or transformers 5's `rope_parameters`, which holds both."""
    parameters = fields.rope_scaling or fields.rope_parameters or {}
    given: dict[str, Any] = {name: value for name, value in parameters.items() if value is not None}
    context = fields.max_position_embeddings
    defaults = {
        "rope_theta": fields.rope_theta,
        "rope_type": given.get("type", "default"),  # the older spelling
        "original_max_position_embeddings": fields.original_max_position_embeddings or context,
        "partial_rotary_factor": fields.partial_rotary_factor,
    }
    rope = checked(defaults | given, Rope, "config.json: RoPE")
    require(rope.rope_type in ROPE_TYPES, "rope_type", rope.rope_type, " or ".join(ROPE_TYPES))
    if fields.attention_multiplier:
        rope = replace(rope, score_scale=fields.attention_multiplier * math.sqrt(head_dim))
    if ROPE_TYPES[rope.rope_type] == longrope:
        n_pairs = rope.n_turning(head_dim) // 2
        for name in ("short_factor", "long_factor"):
            numbers = given.get(name, [])
            require(len(numbers) == n_pairs, name, numbers, f"a list of {n_pairs}")
        rope = replace(rope, factor=given.get("factor", context / rope.original_max_position_embeddings))
    else:
        require(rope.rope_type == "default" or "factor" in given, "factor", None, "a number")
    high = rope.high_freq_factor
    require(high > rope.low_freq_factor, "high_freq_factor", high, "a number above low_freq_factor")
    return rope


def read_json(path: Path, kind: Any = dict[str, Any]) -> Any:
    """Read a JSON object of the given kind from a file; raises UnsupportedModel if the file holds none."""
    try:
        # As transformers reads it: Infinity, which is no JSON, stands in files that it has written.
        return msgspec.convert(json.loads(path.read_bytes()), kind)
    except (OSError, ValueError, RecursionError) as error:
        raise UnsupportedModel(f"{path} is not JSON that can be read: {error}") from None
