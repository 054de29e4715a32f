"""config.json to Config: the architecture of a model, for all families from one description.

    directory --read_config()--> Config

Authority: names, defaults and meaning of the fields are those of Hugging Face transformers 5
(https://github.com/huggingface/transformers, models/<model_type>/configuration_<model_type>.py and
modeling_rope_utils.py).

Rules of this file:
  * One description serves all families: FAMILIES is the table of what they differ in. A new family is a row
    there, a row of FIELDS for each field that is new, a case of tests/parity.py and a word in the README.
  * Each field passes its FieldCheck before it is used.
  * A value that this program does not support raises UnsupportedModel; nothing is guessed or skipped.

A FieldCheck only says whether a value is supported. The checks of request/validation.py convert the value as
well and raise errors that become HTTP answers, which a chapter that reads files does not need.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from checkpoint.rope import ROPE_TYPES, Rope

Fields = Mapping[str, Any]  # config.json, with the defaults of absent fields filled in; null is None


class UnsupportedModel(ValueError):
    """Says in one line which field, tensor or file is wrong, what it holds, and what is supported."""


# ---- The fields of config.json -----------------------------------------------------------------------------


class FieldCheck(NamedTuple):
    """Which values a field may have."""

    expected: str  # in words, for the error
    accepts: Callable[[Any], bool]


def between(low: float, high: float, kind: type = float) -> FieldCheck:
    """A number; `kind` int: a whole one."""
    kinds = {int, kind}
    name = "whole number" if kind is int else "number"
    return FieldCheck(f"a {name} from {low} to {high}", lambda v: type(v) in kinds and low <= v <= high)


def one_of(*allowed: object) -> FieldCheck:
    return FieldCheck(" or ".join(map(json.dumps, allowed)), lambda v: v in allowed)


def list_of(check: FieldCheck, n: int | None = None) -> FieldCheck:
    """A list of n values, or of any number."""
    times = f", {n} times" if n else ""
    return FieldCheck(
        f"a list of {check.expected}{times}",
        lambda v: type(v) is list and n in (None, len(v)) and all(map(check.accepts, v)),
    )


def optional(check: FieldCheck) -> FieldCheck:
    return FieldCheck(f"{check.expected}, or null", lambda v: v is None or check.accepts(v))


MAX = 2**31 - 1
SIZE = between(1, MAX, int)
COUNT = between(1, 2**16, int)
VOCABULARY = between(1, 2**20, int)  # the largest so far has 2**18; masks have a bit for each token
NUMBER = between(1e-12, 1e12)
THETA = between(2, 1e12)
FLAG = FieldCheck("true or false", lambda v: type(v) is bool)
TOKEN_ID = between(0, MAX, int)
NUMBERS = list_of(TOKEN_ID)  # of layers, or of tokens
TOKEN_IDS = FieldCheck(
    "a token id, a list of them, or null", lambda v: v is None or TOKEN_ID.accepts(v) or NUMBERS.accepts(v)
)
ROPE = FieldCheck(
    "an object, with one set of numbers for all layers",
    lambda v: type(v) is dict and not any(type(member) is dict for member in v.values()),
)
# A fuller program would read the scales of other quantised tensors and multiply by them.
UNQUANTISED = FieldCheck("null: tensors of bfloat16, float16, float32", lambda v: not v)
MXFP4 = FieldCheck(
    'null, or {"quant_method": "mxfp4"}',
    lambda v: not v or (type(v) is dict and v.get("quant_method") == "mxfp4"),
)

# fmt: off
# Those fields that have a value for each layer are checked by complete().
FIELDS: dict[str, FieldCheck] = {
    "hidden_act":                       one_of("silu"),
    "hidden_size":                      SIZE,
    "intermediate_size":                SIZE,
    "vocab_size":                       VOCABULARY,
    "max_position_embeddings":          SIZE,
    "num_hidden_layers":                COUNT,
    "num_attention_heads":              COUNT,
    "num_key_value_heads":              optional(COUNT),  # null: num_attention_heads
    "head_dim":                         optional(COUNT),  # null: hidden_size / heads
    "rms_norm_eps":                     NUMBER,
    "tie_word_embeddings":              FLAG,
    "attention_bias":                   FLAG,
    "mlp_bias":                         FLAG,
    "eos_token_id":                     TOKEN_IDS,
    "use_sliding_window":               FLAG,
    "sliding_window":                   optional(SIZE),
    "window_interval":                  COUNT,  # our name: gpt-oss's every second layer has one
    "rope_interleave":                  FLAG,  # rows of q and k have their rotary pairs adjacent
    "rope_theta":                       THETA,
    "partial_rotary_factor":            one_of(1, None),  # a fuller program would rotate less
    "original_max_position_embeddings": one_of(None),  # it belongs to the parameters of RoPE
    "rope_scaling":                     optional(ROPE),
    "rope_parameters":                  optional(ROPE),
    "num_experts":                      optional(COUNT),
    "num_local_experts":                optional(COUNT),
    "moe_intermediate_size":            optional(SIZE),
    "norm_topk_prob":                   FLAG,
    "decoder_sparse_step":              COUNT,
    "mlp_only_layers":                  optional(NUMBERS),
    "swiglu_alpha":                     NUMBER,
    "swiglu_limit":                     NUMBER,
}

# Of absent fields, if the family has no default of its own. Others are null.
DEFAULTS = {
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": False,
    "mlp_bias": False, "use_sliding_window": False, "sliding_window": 4096, "rope_interleave": False,
    "rope_theta": 10_000.0, "norm_topk_prob": True, "decoder_sparse_step": 1, "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0, "window_interval": 1,
}

# Of `rope_parameters`: the fields of Rope, and those that would change the angles in a way that is not here.
# A fuller program would rotate less, or read the two that DeepSeek has added to YaRN.
ROPE_FIELDS: dict[str, FieldCheck] = {
    "rope_type":                        one_of(*ROPE_TYPES),
    "rope_theta":                       THETA,
    "factor":                           NUMBER,
    "original_max_position_embeddings": SIZE,
    "low_freq_factor":                  NUMBER,
    "high_freq_factor":                 NUMBER,
    "beta_fast":                        NUMBER,
    "beta_slow":                        NUMBER,
    "truncate":                         FLAG,
    "attention_factor":                 optional(NUMBER),
    "partial_rotary_factor":            one_of(1, None),
    "mscale":                           one_of(None),
    "mscale_all_dim":                   one_of(None),
}
# fmt: on


def check_fields(fields: Fields, checks: Mapping[str, FieldCheck], file: object = "config.json") -> None:
    for name, check in checks.items():
        value = fields.get(name)
        if not check.accepts(value):
            raise UnsupportedModel(f"{file}: {name} is {json.dumps(value)[:80]}; supported: {check.expected}")


# ---- What the families differ in ---------------------------------------------------------------------------


class Family(NamedTuple):
    """How a model_type reads config.json; a bias is True, False, or the field that says which."""

    qkv_bias: bool | str
    o_bias: bool | str
    mlp_bias: bool | str
    qk_norm: bool  # RMSNorm over each head of q and k, before the rotation
    defaults: dict[str, Any]  # of absent fields, if they differ from DEFAULTS
    is_mixture: bool = False  # a router chooses experts; False: each layer has one MLP
    is_gpt_oss: bool = False  # sinks, experts with biases and a clamped SwiGLU, numbers of 4 bits


# fmt: off
FAMILIES = {
    #                  qkv_bias          o_bias            mlp_bias    qk_norm  defaults
    "llama":    Family("attention_bias", "attention_bias", "mlp_bias", False,   {
                       "eos_token_id": 2, "max_position_embeddings": 2048}),
    "mistral":  Family(False,            False,            False,      False,   {
                       "eos_token_id": 2, "max_position_embeddings": 131_072, "num_key_value_heads": 8,
                       "use_sliding_window": True, "max_window_layers": 0}),
    "qwen2":    Family(True,             False,            False,      False,   {
                       "max_position_embeddings": 32_768, "num_key_value_heads": 32,
                       "max_window_layers": 28}),
    "qwen3":    Family("attention_bias", "attention_bias", False,      True,    {
                       "max_position_embeddings": 32_768, "num_key_value_heads": 32, "head_dim": 128,
                       "max_window_layers": 28}),
    "smollm3":  Family("attention_bias", "attention_bias", "mlp_bias", False,   {
                       "max_position_embeddings": 32_768, "num_key_value_heads": 4, "eos_token_id": 128_001,
                       "rope_theta": 2_000_000.0, "tie_word_embeddings": True, "sliding_window": None,
                       "no_rope_layers": [1, 1, 1, 0] * 9}),
    "mixtral":  Family(False,            False,            False,      False,   {
                       "eos_token_id": 2, "max_position_embeddings": 131_072, "num_key_value_heads": 8,
                       "use_sliding_window": True, "sliding_window": None, "max_window_layers": 0,
                       "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0, "num_local_experts": 8,
                       "num_experts_per_tok": 2}, is_mixture=True),
    "qwen3_moe": Family("attention_bias", "attention_bias", False,     True,    {
                       "max_position_embeddings": 32_768, "num_key_value_heads": 4, "num_experts": 128,
                       "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": False},
                       is_mixture=True),
    "gpt_oss":  Family("attention_bias", "attention_bias", False,      False,   {
                       "max_position_embeddings": 131_072, "num_key_value_heads": 8, "head_dim": 64,
                       "attention_bias": True, "use_sliding_window": True, "sliding_window": 128,
                       "max_window_layers": 0, "window_interval": 2, "rms_norm_eps": 1e-5,
                       "rope_theta": 150_000.0, "num_local_experts": 128,
                       "num_experts_per_tok": 4, "rope_parameters": {
                           "rope_type": "yarn", "factor": 32.0, "truncate": False,
                           "original_max_position_embeddings": 4096}},
                       is_mixture=True, is_gpt_oss=True),
}
# fmt: on


# ---- config.json -------------------------------------------------------------------------------------------

# field: of Config
SIZES = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "hidden_dim",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_seq_len",
    "rms_norm_eps": "norm_eps",
    "rope_interleave": "pairs_adjacent",
    "tie_word_embeddings": "tied",
}


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


def read_config(directory: Path) -> Config:
    """Read config.json and, if there is one, generation_config.json; raises UnsupportedModel."""
    path = directory / "config.json"
    generation_path = directory / "generation_config.json"
    if not path.is_file():
        raise UnsupportedModel(f"no config.json in {directory}")
    return parse_config(read_json(path), read_json(generation_path) if generation_path.is_file() else {})


def parse_config(raw: Fields, generation: dict[str, Any]) -> Config:
    """Return the Config of both files' contents; raises UnsupportedModel."""
    check_fields(raw, {"model_type": one_of(*FAMILIES)})
    check_fields(generation, {"eos_token_id": TOKEN_IDS}, "generation_config.json")
    family = FAMILIES[raw["model_type"]]
    check_fields(raw, {"quantization_config": MXFP4 if family.is_gpt_oss else UNQUANTISED})
    fields = complete(dict.fromkeys(FIELDS) | DEFAULTS | family.defaults | dict(raw))
    eos = generation.get("eos_token_id")
    if eos is None:
        eos = fields["eos_token_id"]
    if not isinstance(eos, list):
        eos = [] if eos is None else [eos]
    biases = {name: getattr(family, name) for name in ("qkv_bias", "o_bias", "mlp_bias")}
    return Config(
        model_type=raw["model_type"],
        **{ours: fields[theirs] for theirs, ours in SIZES.items()},
        **{name: fields[bias] if isinstance(bias, str) else bias for name, bias in biases.items()},
        rope=parse_rope(fields),
        windows=parse_windows(fields),
        rotary=tuple(map(bool, fields["no_rope_layers"])),
        qk_norm=family.qk_norm,
        eos_token_ids=tuple(eos),
        generation=generation,
        sinks=family.is_gpt_oss,
        experts=parse_experts(fields, family.is_gpt_oss) if family.is_mixture else None,
    )


def complete(fields: dict[str, Any]) -> Fields:
    """Check all fields, and fill in those that follow from others; raises UnsupportedModel."""
    check_fields(fields, FIELDS)
    n_heads = fields["num_attention_heads"]
    n_layers = fields["num_hidden_layers"]
    fields["num_key_value_heads"] = fields["num_key_value_heads"] or n_heads
    fields["head_dim"] = fields["head_dim"] or fields["hidden_size"] // n_heads
    if fields.get("no_rope_layers") is None:
        fields["no_rope_layers"] = [1] * n_layers  # 1: a layer WITH rotary positions; 0: without (NoPE)
    checks = {
        "num_key_value_heads": FieldCheck("a divisor of num_attention_heads", lambda n: n_heads % n == 0),
        "head_dim": FieldCheck("an even number above 0, for rotary pairs", lambda n: n > 0 and n % 2 == 0),
        "layer_types": optional(list_of(one_of("full_attention", "sliding_attention"), n_layers)),
        "no_rope_layers": list_of(one_of(1, 0), n_layers),
    }
    check_fields(fields, checks)
    return fields


def parse_windows(fields: Fields) -> tuple[int | None, ...]:
    """Return the window of each layer: `layer_types` says which have one, else all from `max_window_layers`
    on do, or every nth of them.
    """
    n_layers: int = fields["num_hidden_layers"]
    if not fields["use_sliding_window"]:
        return (None,) * n_layers
    kinds = fields.get("layer_types")
    if kinds:
        slides = [kind == "sliding_attention" for kind in kinds]
    else:
        check_fields(fields, {"max_window_layers": TOKEN_ID})
        first, every = fields["max_window_layers"], fields["window_interval"]
        slides = [layer >= first and layer % every == 0 for layer in range(n_layers)]
    window: int | None = fields["sliding_window"]
    return tuple(window if has_window else None for has_window in slides)


def parse_experts(fields: Fields, is_gpt_oss: bool) -> Experts:
    """Return the experts of a mixture; raises UnsupportedModel if a token cannot choose so many."""
    n = fields["num_experts"] or fields["num_local_experts"]
    hidden_dim = fields["moe_intermediate_size"] or fields["intermediate_size"]
    mxfp4 = bool(fields.get("quantization_config"))
    check_fields(fields, {"num_experts_per_tok": between(1, n or 0, int)})
    if mxfp4:
        blocks = FieldCheck("a multiple of 32, for MXFP4", lambda size: size % 32 == 0)
        check_fields(fields, {"hidden_size": blocks, "intermediate_size": blocks})
    step = fields["decoder_sparse_step"]
    dense = fields["mlp_only_layers"] or []
    layers = range(fields["num_hidden_layers"])
    return Experts(
        n=n,
        n_chosen=fields["num_experts_per_tok"],
        hidden_dim=hidden_dim,
        layers=tuple(layer not in dense and (layer + 1) % step == 0 for layer in layers),
        normalised=fields["norm_topk_prob"],
        has_biases=is_gpt_oss,
        limit=fields["swiglu_limit"] if is_gpt_oss else None,
        alpha=fields["swiglu_alpha"],
        mxfp4=mxfp4,
    )


def parse_rope(fields: Fields) -> Rope:
    """Read `rope_scaling` and `rope_theta`, or transformers 5's `rope_parameters`, which holds both."""
    parameters = fields["rope_scaling"] or fields["rope_parameters"] or {}
    rope_type = parameters.get("type", "default")  # the older spelling
    default = Rope(fields["rope_theta"], rope_type, fields["max_position_embeddings"])
    given = {name: value for name, value in parameters.items() if value is not None}
    raw = vars(default) | given
    check_fields(raw, ROPE_FIELDS)
    if raw["rope_type"] != "default":
        check_fields(given, {"factor": NUMBER})
    above = FieldCheck("a number above low_freq_factor", lambda v: v > raw["low_freq_factor"])
    check_fields(raw, {"high_freq_factor": above})
    return Rope(**{name: raw[name] for name in vars(default)})


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # JSONDecodeError, UnicodeDecodeError; nested too deeply
        raise UnsupportedModel(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise UnsupportedModel(f"{path} holds a JSON {type(value).__name__}; supported: an object")
    return value
