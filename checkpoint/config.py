"""config.json to Config: what a model is, for all families from one description.

    directory --read_config()--> Config

Authority: names, defaults and meaning of the fields are those of Hugging Face transformers 5
(https://github.com/huggingface/transformers, models/<model_type>/configuration_<model_type>.py and
modeling_rope_utils.py).

Rules of this file:
  * One description for all families: FAMILIES holds what differs.
  * Each field of config.json is held against its Kind before it is used.
  * What this file does not know raises UnsupportedModel; nothing is guessed or skipped.

Not here: tensors (weights.py), rotary frequencies (rope.py), obtaining the files (hub.py).
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from checkpoint.rope import ROPE_TYPES, Rope

Fields = Mapping[str, Any]  # of config.json, over the defaults of those that are absent; null is None


class UnsupportedModel(ValueError):
    """One line: which field, tensor or file, what it holds, and what is supported."""


# ---- The fields of config.json -----------------------------------------------------------------------------


class Kind(NamedTuple):
    """What a field may be: for the reader of an error, and as a test of its value."""

    words: str
    holds: Callable[[Any], bool]


def whole(low: int, high: int) -> Kind:
    return Kind(f"a whole number from {low} to {high}", lambda v: type(v) is int and low <= v <= high)


def number(low: float, high: float) -> Kind:
    return Kind(f"a number from {low:g} to {high:g}", lambda v: type(v) in (int, float) and low <= v <= high)


def above(low: float, name: str) -> Kind:
    return Kind(f"a number above {name}, {low:g}", lambda v: v > low)


def one_of(*allowed: object) -> Kind:
    return Kind(" or ".join(map(json.dumps, allowed)), lambda v: v in allowed)


def list_of(n: int, *allowed: object) -> Kind:
    words = f"{one_of(*allowed).words}, {n} times"
    return Kind(words, lambda v: type(v) is list and len(v) == n and all(item in allowed for item in v))


def optional(kind: Kind) -> Kind:
    return Kind(f"{kind.words}, or null", lambda v: v is None or kind.holds(v))


MAX = 2**31 - 1
SIZE = whole(1, MAX)
COUNT = whole(1, 2**16)
NUMBER = number(1e-12, 1e12)
FLAG = Kind("true or false", lambda v: type(v) is bool)
TOKEN_ID = whole(0, MAX)
TOKEN_IDS = Kind(
    "a token id, a list of them, or null",
    lambda v: v is None or all(map(TOKEN_ID.holds, v if type(v) is list else [v])),
)
ROPE = Kind(
    "an object, with one set of numbers for all layers",
    lambda v: type(v) is dict and not any(type(member) is dict for member in v.values()),
)
# a fuller program would read scales and multiply by them
UNQUANTISED = Kind("null: tensors of bfloat16, float16, float32", lambda v: not v)

# fmt: off
#  field; lists by layer: complete()    what it may be         where it and the family's default are absent
FIELDS: dict[str, tuple[Kind, Any]] = {
    "hidden_act":                       (one_of("silu"),       "silu"),
    "quantization_config":              (UNQUANTISED,          None),
    "hidden_size":                      (SIZE,                 None),
    "intermediate_size":                (SIZE,                 None),
    "vocab_size":                       (SIZE,                 None),
    "max_position_embeddings":          (SIZE,                 None),
    "num_hidden_layers":                (COUNT,                None),
    "num_attention_heads":              (COUNT,                None),
    "num_key_value_heads":              (optional(COUNT),      None),  # null: num_attention_heads
    "head_dim":                         (optional(COUNT),      None),  # null: hidden_size / heads
    "rms_norm_eps":                     (NUMBER,               1e-6),
    "tie_word_embeddings":              (FLAG,                 False),
    "attention_bias":                   (FLAG,                 False),
    "mlp_bias":                         (FLAG,                 False),
    "eos_token_id":                     (TOKEN_IDS,            None),
    "use_sliding_window":               (FLAG,                 False),
    "sliding_window":                   (optional(SIZE),       4096),
    "max_window_layers":                (whole(0, MAX),        28),
    "no_rope_layer_interval":           (optional(COUNT),      None),  # null: every layer is rotary
    "rope_theta":                       (number(2, 1e12),      10_000.0),
    "partial_rotary_factor":            (one_of(1, None),      None),  # a fuller program would rotate less
    "original_max_position_embeddings": (optional(SIZE),       None),
    "rope_scaling":                     (optional(ROPE),       None),
    "rope_parameters":                  (optional(ROPE),       None),
}

#  field of `rope_parameters`           of Rope                 what it may be
ROPE_FIELDS: dict[str, tuple[str, Kind]] = {
    "rope_type":                        ("type",                one_of(*ROPE_TYPES)),
    "rope_theta":                       ("theta",               number(2, 1e12)),
    "factor":                           ("factor",              optional(NUMBER)),
    "original_max_position_embeddings": ("original_max_seq_len", SIZE),
    "low_freq_factor":                  ("low_freq_factor",     optional(NUMBER)),
    "high_freq_factor":                 ("high_freq_factor",    optional(NUMBER)),
    "beta_fast":                        ("beta_fast",           optional(NUMBER)),
    "beta_slow":                        ("beta_slow",           optional(NUMBER)),
    "truncate":                         ("truncate",            FLAG),
    "attention_factor":                 ("attention_factor",    optional(NUMBER)),
    "mscale":                           ("mscale",              optional(NUMBER)),
    "mscale_all_dim":                   ("mscale_all_dim",      optional(NUMBER)),
}
# fmt: on


def check(fields: Fields, kinds: Mapping[str, Kind], file: object = "config.json") -> None:
    for name, kind in kinds.items():
        value = fields.get(name)
        if not kind.holds(value):
            raise UnsupportedModel(f"{file}: {name} is {json.dumps(value)[:80]}; supported: {kind.words}")


# ---- What the families differ in ---------------------------------------------------------------------------


def is_rotary(fields: Fields, layer: int) -> bool:
    """`no_rope_layers` has 1 for layers WITH rotary positions; the interval counts those without, from 1."""
    given, interval = fields.get("no_rope_layers"), fields["no_rope_layer_interval"]
    if given is not None:
        return bool(given[layer])
    return interval is None or (layer + 1) % interval != 0


def is_unrotated(fields: Fields, layer: int) -> bool:
    return not is_rotary(fields, layer)


def is_upper(fields: Fields, layer: int) -> bool:
    return bool(layer >= fields["max_window_layers"])


class Family(NamedTuple):
    """What a model_type makes of config.json. A bias is True, False, or the field that switches it."""

    qkv_bias: bool | str
    o_bias: bool | str
    mlp_bias: bool | str
    qk_norm: bool  # RMSNorm over each head of q and k, before the rotation
    slides: bool | Callable[[Fields, int], bool]  # has a layer a window, where `layer_types` does not say so?
    defaults: dict[str, Any]  # of absent fields, where they are not those of FIELDS


# fmt: off
FAMILIES = {
    #                  qkv_bias          o_bias            mlp_bias    qk_norm  slides        defaults
    "llama":    Family("attention_bias", "attention_bias", "mlp_bias", False,   False,        {
                       "eos_token_id": 2, "max_position_embeddings": 2048}),
    "mistral":  Family(False,            False,            False,      False,   True,         {
                       "eos_token_id": 2, "max_position_embeddings": 131_072, "num_key_value_heads": 8,
                       "use_sliding_window": True}),
    "qwen2":    Family(True,             False,            False,      False,   is_upper,     {
                       "max_position_embeddings": 32_768, "num_key_value_heads": 32}),
    "qwen3":    Family("attention_bias", "attention_bias", False,      True,    is_upper,     {
                       "max_position_embeddings": 32_768, "num_key_value_heads": 32, "head_dim": 128}),
    "smollm3":  Family("attention_bias", "attention_bias", "mlp_bias", False,   is_unrotated, {
                       "max_position_embeddings": 32_768, "num_key_value_heads": 4, "eos_token_id": 128_001,
                       "rope_theta": 2_000_000.0, "tie_word_embeddings": True, "sliding_window": None,
                       "no_rope_layer_interval": 4}),
}
# fmt: on


# ---- config.json -------------------------------------------------------------------------------------------

# its whole numbers: our name for each
SIZES = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "hidden_dim",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_seq_len",
}


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
    windows: tuple[int | None, ...]  # per layer: a token sees itself and the window - 1 before it; None: all
    rotary: tuple[bool, ...]  # per layer; False: no positions at all (NoPE)
    tied: bool  # the head is the embedding
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...]
    generation: dict[str, Any]  # generation_config.json; {} without one


def read_config(directory: Path) -> Config:
    """config.json and, where there is one, generation_config.json; raises UnsupportedModel."""
    if not (directory / "config.json").is_file():
        raise UnsupportedModel(f"no config.json in {directory}: {found_in(directory)}")
    raw = read_json(directory / "config.json")
    has_generation = (directory / "generation_config.json").is_file()
    return parse_config(raw, read_json(directory / "generation_config.json") if has_generation else {})


def parse_config(raw: Fields, generation: dict[str, Any]) -> Config:
    check(raw, {"model_type": one_of(*FAMILIES)})
    check(generation, {"eos_token_id": TOKEN_IDS}, "generation_config.json")
    family = FAMILIES[raw["model_type"]]
    fields = complete({name: default for name, (_, default) in FIELDS.items()} | family.defaults | dict(raw))
    eos = fields["eos_token_id"] if generation.get("eos_token_id") is None else generation["eos_token_id"]

    def switched(bias: bool | str) -> bool:
        return bool(fields[bias]) if isinstance(bias, str) else bias

    return Config(
        model_type=raw["model_type"],
        **{ours: fields[theirs] for theirs, ours in SIZES.items()},
        norm_eps=fields["rms_norm_eps"],
        rope=parse_rope(fields),
        windows=parse_windows(fields, family.slides),
        rotary=tuple(is_rotary(fields, layer) for layer in range(fields["num_hidden_layers"])),
        tied=fields["tie_word_embeddings"],
        qkv_bias=switched(family.qkv_bias),
        o_bias=switched(family.o_bias),
        mlp_bias=switched(family.mlp_bias),
        qk_norm=family.qk_norm,
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        generation=generation,
    )


def complete(fields: dict[str, Any]) -> Fields:
    """The fields, all checked, with those that follow from others filled in; raises UnsupportedModel."""
    check(fields, {name: kind for name, (kind, _) in FIELDS.items()})
    n_heads, n_layers = fields["num_attention_heads"], fields["num_hidden_layers"]
    derived = {"num_key_value_heads": n_heads, "head_dim": fields["hidden_size"] // n_heads}
    fields |= {name: value for name, value in derived.items() if fields[name] is None}
    kinds = {
        "num_key_value_heads": Kind("a divisor of num_attention_heads", lambda n: n_heads % n == 0),
        "head_dim": Kind("an even number above 0, for rotary pairs", lambda n: n > 0 and n % 2 == 0),
        "layer_types": optional(list_of(n_layers, "full_attention", "sliding_attention")),
        "no_rope_layers": optional(list_of(n_layers, 1, 0)),
    }
    check(fields, kinds)
    return fields


def parse_windows(fields: Fields, slides: bool | Callable[[Fields, int], bool]) -> tuple[int | None, ...]:
    """Which layers attend within `sliding_window`: by `layer_types`, else by the family's habit."""
    window = fields["sliding_window"] if fields["use_sliding_window"] else None
    types = fields.get("layer_types")

    def has_window(layer: int) -> bool:
        if types is not None:
            return bool(types[layer] == "sliding_attention")
        return slides if isinstance(slides, bool) else slides(fields, layer)

    return tuple(window if has_window(layer) else None for layer in range(fields["num_hidden_layers"]))


def parse_rope(fields: Fields) -> Rope:
    """From `rope_scaling` and `rope_theta`, or transformers 5's `rope_parameters`, which holds both."""
    given = fields["rope_scaling"] or fields["rope_parameters"] or {}
    length, original = fields["max_position_embeddings"], "original_max_position_embeddings"
    rope = {"rope_theta": fields["rope_theta"], original: length, **given}
    rope.setdefault("rope_type", given.get("type", "default"))  # "type" is the older spelling
    if fields[original] is not None:  # written outside, it wins
        rope[original] = fields[original]
    check(given, {"partial_rotary_factor": FIELDS["partial_rotary_factor"][0]})
    check(rope, {name: kind for name, (_, kind) in ROPE_FIELDS.items() if name in rope})
    check(rope, dict.fromkeys(ROPE_TYPES[rope["rope_type"]].needs, NUMBER))
    if rope.get("factor") is None:
        rope["factor"] = length / rope[original]
    known = {ours: rope[theirs] for theirs, (ours, _) in ROPE_FIELDS.items() if rope.get(theirs) is not None}
    read = Rope(**known)
    check(vars(read), {"high_freq_factor": above(read.low_freq_factor, "low_freq_factor")})
    check(vars(read), {"beta_fast": above(read.beta_slow, "beta_slow")})
    return read


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # JSONDecodeError, UnicodeDecodeError; nested too deeply
        raise UnsupportedModel(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise UnsupportedModel(f"{path} holds a JSON {type(value).__name__}; supported: an object")
    return value


def found_in(directory: Path) -> str:
    """What is there instead, for messages about what is not."""
    if not directory.is_dir():
        return "no such directory"
    names = sorted(entry.name for entry in directory.iterdir())
    return f"found {', '.join(names[:8]) or 'nothing'}{', ...' if len(names) > 8 else ''}"
