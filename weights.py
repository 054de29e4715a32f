"""Checkpoint files to named arrays: config.json to Config, safetensors to float32.

    directory --read_config()--> Config --read_weights()--> Weights      Config --rope_table()--> cos + i sin

Authority: names, defaults and meaning of the fields are those of Hugging Face transformers 5
(https://github.com/huggingface/transformers, models/<model_type>/configuration_<model_type>.py and
modeling_rope_utils.py); the file format is https://github.com/huggingface/safetensors#format.

Rules of this file:
  * One description for all families: FAMILIES holds what differs, and the tensors of a layer are one table.
  * config.json and the tensors must agree in every name and shape. What this file does not know raises
    UnsupportedModel; nothing is guessed, skipped or left random.
  * Each tensor is copied once: from the memory map, widened, into its rows of the matrix it shares.
  * Rotary pairs are ADJACENT here. Row (half, pair) of a head in the checkpoint, meant for `rotate_half`,
    becomes row (pair, half): a head of q or k, seen as complex numbers, is rotated by one multiplication.

Not here: quantised files, mixtures of experts, the tokenizer; obtaining the files is hub.py's affair.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

Array = NDArray[np.float32]
Tensors = dict[str, NDArray[Any]]  # of the checkpoint: float32, float16, or bfloat16 seen as uint16
Fields = Mapping[str, Any]  # of config.json, over the defaults of absent ones; null is None, not absent


class UnsupportedModel(ValueError):
    """One line: which field, tensor or file, what it holds, and what is supported."""


# ---- What the families differ in ---------------------------------------------------------------------------


def is_rotary(fields: Fields, layer: int) -> bool:
    """`no_rope_layers` has 1 for layers WITH rotary positions; the interval counts those without, from 1."""
    if fields["no_rope_layers"] is not None:
        return bool(fields["no_rope_layers"][layer])
    return fields["no_rope_layer_interval"] is None or (layer + 1) % fields["no_rope_layer_interval"] != 0


def no_layer(fields: Fields, layer: int) -> bool:
    return False


def every_layer(fields: Fields, layer: int) -> bool:
    return True


def upper_layers(fields: Fields, layer: int) -> bool:
    return bool(layer >= fields["max_window_layers"])


def unrotated_layers(fields: Fields, layer: int) -> bool:
    return not is_rotary(fields, layer)


class Family(NamedTuple):
    """What a model_type makes of config.json. A bias is True, False, or the field that switches it."""

    qkv_bias: bool | str
    o_bias: bool | str
    mlp_bias: bool | str
    qk_norm: bool  # RMSNorm over each head of q and k, before the rotation
    slides: Callable[[Fields, int], bool]  # has this layer a window? asked where `layer_types` is absent
    defaults: dict[str, Any]  # of absent fields, where they are not those of DEFAULTS


DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "num_key_value_heads": None,  # None: as many as num_attention_heads
    "head_dim": None,  # None: hidden_size / num_attention_heads
    "eos_token_id": None,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
    "no_rope_layers": None,
    "no_rope_layer_interval": None,  # None: every layer is rotary
}

# fmt: off
FAMILIES = {
    #                  qkv_bias          o_bias            mlp_bias    qk_norm  slides            defaults
    "llama":    Family("attention_bias", "attention_bias", "mlp_bias", False,   no_layer,         {
                       "eos_token_id": 2, "max_position_embeddings": 2048}),
    "mistral":  Family(False,            False,            False,      False,   every_layer,      {
                       "eos_token_id": 2, "max_position_embeddings": 131_072, "num_key_value_heads": 8,
                       "use_sliding_window": True}),
    "qwen2":    Family(True,             False,            False,      False,   upper_layers,     {
                       "max_position_embeddings": 32_768, "num_key_value_heads": 32}),
    "qwen3":    Family("attention_bias", "attention_bias", False,      True,    upper_layers,     {
                       "max_position_embeddings": 32_768, "num_key_value_heads": 32, "head_dim": 128}),
    "smollm3":  Family("attention_bias", "attention_bias", "mlp_bias", False,   unrotated_layers, {
                       "max_position_embeddings": 32_768, "num_key_value_heads": 4, "eos_token_id": 128_001,
                       "rope_theta": 2_000_000.0, "tie_word_embeddings": True, "sliding_window": None,
                       "no_rope_layer_interval": 4}),
}
# fmt: on


# ---- config.json -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rope:
    """Rotary frequencies and their scaling; what a type does not use keeps these defaults."""

    theta: float
    type: str = "default"  # a key of ROPE_TYPES
    factor: float = 1.0  # linear, llama3, yarn: how much longer the context has become
    original_max_seq_len: int = 0  # llama3, yarn: before that
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: the ramp begins and ends at whole pairs
    attention_factor: float = 1.0  # yarn: multiplies cos and sin, so q and k both


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
    rotary: tuple[bool, ...]  # a layer: False: no positions at all (NoPE)
    tied: bool  # the head is the embedding
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...]
    generation: dict[str, Any]  # generation_config.json; {} without one
    dtype: str  # of the files, as config.json says; the arrays are float32 whatever it is

    @property
    def n_params(self) -> int:
        """Numbers in the checkpoint; a tied head is not counted twice."""
        layer = sum(math.prod(part.shape) for part in layer_parts(self))
        return self.n_layers * layer + sum(math.prod(part.shape) for part in outer_parts(self))


# config.json's whole numbers: our name for each
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


def read_config(directory: Path) -> Config:
    """config.json and, where there is one, generation_config.json; raises UnsupportedModel."""
    if not (directory / "config.json").is_file():
        raise UnsupportedModel(f"no config.json in {directory}: {found_in(directory)}")
    raw = read_json(directory / "config.json")
    has_generation = (directory / "generation_config.json").is_file()
    return parse_config(raw, read_json(directory / "generation_config.json") if has_generation else {})


def parse_config(raw: Fields, generation: dict[str, Any]) -> Config:
    if raw.get("model_type") not in FAMILIES:
        raise unsupported("model_type", raw.get("model_type"), ", ".join(FAMILIES))
    family = FAMILIES[raw["model_type"]]
    fields = {**DEFAULTS, **family.defaults, **raw}
    if fields["hidden_act"] != "silu":
        raise unsupported("hidden_act", fields["hidden_act"], '"silu"')
    if fields.get("quantization_config"):  # a fuller program would multiply by quantised weights
        raise unsupported("quantization_config", fields["quantization_config"], "bfloat16, float16, float32")
    sizes = parse_sizes(fields)
    eos = fields["eos_token_id"] if generation.get("eos_token_id") is None else generation["eos_token_id"]

    def switched(bias: bool | str) -> bool:
        return bool(fields[bias]) if isinstance(bias, str) else bias

    return Config(
        model_type=raw["model_type"],
        **sizes,
        norm_eps=number(fields, "rms_norm_eps"),
        rope=parse_rope(fields),
        windows=parse_windows(fields, family, sizes["n_layers"]),
        rotary=parse_rotary(fields, sizes["n_layers"]),
        tied=bool(fields["tie_word_embeddings"]),
        qkv_bias=switched(family.qkv_bias),
        o_bias=switched(family.o_bias),
        mlp_bias=switched(family.mlp_bias),
        qk_norm=family.qk_norm,
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        generation=generation,
        dtype=fields.get("dtype") or fields.get("torch_dtype") or "float32",  # transformers 5 renamed it
    )


def parse_sizes(fields: Fields) -> dict[str, int]:
    """The numbers of SIZES under our names."""
    derived = dict(fields)
    if fields["num_key_value_heads"] is None:
        derived["num_key_value_heads"] = whole(fields, "num_attention_heads")
    if fields["head_dim"] is None:
        derived["head_dim"] = whole(fields, "hidden_size") // whole(fields, "num_attention_heads")
    sizes = {ours: whole(derived, theirs) for theirs, ours in SIZES.items()}
    if sizes["n_heads"] % sizes["n_kv_heads"]:
        raise unsupported("num_key_value_heads", sizes["n_kv_heads"], "a divisor of num_attention_heads")
    if sizes["head_dim"] % 2:
        raise unsupported("head_dim", sizes["head_dim"], "an even number, for rotary pairs")
    return sizes


def parse_windows(fields: Fields, family: Family, n_layers: int) -> tuple[int | None, ...]:
    """Which layers attend within `sliding_window`: by `layer_types`, else by the family's habit."""
    types, known = fields["layer_types"], {"full_attention", "sliding_attention"}
    if types is not None and (len(types) != n_layers or {*types} - known):
        raise unsupported("layer_types", types, f"full_attention or sliding_attention, {n_layers} times")
    if not fields["use_sliding_window"] or fields["sliding_window"] is None:
        return (None,) * n_layers
    if types is None:
        slides = [family.slides(fields, layer) for layer in range(n_layers)]
    else:
        slides = [kind == "sliding_attention" for kind in types]
    window = whole(fields, "sliding_window")
    return tuple(window if sliding else None for sliding in slides)


def parse_rotary(fields: Fields, n_layers: int) -> tuple[bool, ...]:
    given = fields["no_rope_layers"]
    if given is not None and len(given) < n_layers:
        raise unsupported("no_rope_layers", given, f"1 (rotary) or 0, {n_layers} times")
    return tuple(is_rotary(fields, layer) for layer in range(n_layers))


# rope_type: the numbers that it must come with
ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),  # all its numbers have defaults: parse_yarn
}


def parse_rope(fields: Fields) -> Rope:
    """From `rope_scaling` and `rope_theta`, or transformers 5's `rope_parameters`, which holds both."""
    given = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    rope = {name: fields.get(name) for name in ("rope_theta", "partial_rotary_factor")} | given
    if any(isinstance(value, dict) for value in rope.values()):
        raise unsupported("rope_parameters", given, "one set of numbers for all layers")
    if rope["partial_rotary_factor"] not in (None, 1):  # a fuller program would rotate part of each head
        raise unsupported("partial_rotary_factor", rope["partial_rotary_factor"], "1")
    rope_type = rope.get("rope_type", rope.get("type", "default"))  # "type" is the older spelling
    if rope_type not in ROPE_TYPES:
        raise unsupported("rope_type", rope_type, ", ".join(ROPE_TYPES))
    max_seq_len = whole(fields, "max_position_embeddings")
    original = fields.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    rope["original_max_position_embeddings"] = original or max_seq_len
    scaling: dict[str, Any] = {name: number(rope, name) for name in ROPE_TYPES[rope_type]}
    if rope_type == "yarn":
        scaling = parse_yarn(rope, max_seq_len)
    return Rope(
        theta=number(rope, "rope_theta"),
        type=rope_type,
        original_max_seq_len=whole(rope, "original_max_position_embeddings"),
        **scaling,
    )


def parse_yarn(rope: Fields, max_seq_len: int) -> dict[str, Any]:
    """The fields of Rope for YaRN, https://arxiv.org/abs/2309.00071; `mscale` is DeepSeek's addition."""
    factor = max_seq_len / rope["original_max_position_embeddings"]
    if rope.get("factor") is not None:
        factor = number(rope, "factor")

    def magnitude(mscale: float) -> float:  # sqrt(1/t) of section 3.4, equation 22
        return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0

    if rope.get("attention_factor") is not None:
        attention_factor = number(rope, "attention_factor")
    elif rope.get("mscale") and rope.get("mscale_all_dim"):
        attention_factor = magnitude(number(rope, "mscale")) / magnitude(number(rope, "mscale_all_dim"))
    else:
        attention_factor = magnitude(1)
    return {
        "factor": factor,
        "attention_factor": attention_factor,
        "truncate": bool(rope.get("truncate", True)),
        **{name: number(rope, name) for name in ("beta_fast", "beta_slow") if rope.get(name)},
    }


def whole(fields: Fields, name: str) -> int:
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise unsupported(name, value, "a whole number above 0")
    return value


def number(fields: Fields, name: str) -> float:
    value = fields.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise unsupported(name, value, "a number above 0")
    return float(value)


def unsupported(name: str, value: object, supported: str) -> UnsupportedModel:
    return UnsupportedModel(f"config.json: {name} is {json.dumps(value)[:80]}; supported: {supported}")


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # JSONDecodeError or UnicodeDecodeError
        raise UnsupportedModel(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise UnsupportedModel(f"{path} holds a JSON {type(value).__name__}; supported: an object")
    return value


def found_in(directory: Path) -> str:
    """What lies there instead, for messages about what does not."""
    if not directory.is_dir():
        return "no such directory"
    names = sorted(entry.name for entry in directory.iterdir())
    return f"found {', '.join(names[:8]) or 'nothing'}{', ...' if len(names) > 8 else ''}"


# ---- Rotary positions --------------------------------------------------------------------------------------


def rope_table(config: Config, n: int) -> NDArray[np.complex64]:
    """cos + i sin of every pair's angle at positions 0 .. n-1, times the attention factor. (n, head_dim/2)

    Angles are float64: an angle of some thousands is off by 2e-4 in float32.
    """
    angles = np.arange(n)[:, None] * inv_freq(config)  # (n, head_dim/2) float64
    table = np.empty(angles.shape, np.complex64)
    table.real = np.cos(angles) * config.rope.attention_factor
    table.imag = np.sin(angles) * config.rope.attention_factor
    return table


def inv_freq(config: Config) -> NDArray[np.float64]:
    """Radians a position for each pair of a head: theta^(-2 pair / head_dim), scaled. (head_dim/2,)"""
    rope = config.rope
    freq: NDArray[np.float64] = rope.theta ** -(np.arange(0, config.head_dim, 2) / config.head_dim)
    kept = ROPE_KEPT[rope.type](rope, freq)  # (head_dim/2,) 1: as trained; 0: stretched by the factor
    return freq * kept + freq / rope.factor * (1 - kept)


def none_kept(rope: Rope, freq: NDArray[np.float64]) -> NDArray[np.float64]:
    """Linear interpolation, https://arxiv.org/abs/2306.15595; by default the factor is 1."""
    return np.zeros_like(freq)


def llama3_kept(rope: Rope, freq: NDArray[np.float64]) -> NDArray[np.float64]:
    """By the turns that a pair makes within the original context.

    https://github.com/meta-llama/llama-models/blob/main/models/llama3/model.py, apply_scaling
    """
    turns = rope.original_max_seq_len * freq / (2 * math.pi)
    return np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0, 1)


def yarn_kept(rope: Rope, freq: NDArray[np.float64]) -> NDArray[np.float64]:
    """A ramp over the pairs, from the one that turns beta_fast times to the one that turns beta_slow times.

    https://github.com/jquesnelle/yarn/blob/master/scaled_rope/LlamaYaRNScaledRotaryEmbedding.py
    """
    n_pairs = len(freq)

    def pair_that_turns(times: float) -> float:  # inv_freq's formula solved for the pair
        return n_pairs * math.log(rope.original_max_seq_len / (times * 2 * math.pi)) / math.log(rope.theta)

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * n_pairs - 1)  # head_dim - 1 in the original: beyond the last pair
    return 1 - np.clip((np.arange(n_pairs, dtype=np.float64) - low) / (high - low or 0.001), 0, 1)


ROPE_KEPT = {"default": none_kept, "linear": none_kept, "llama3": llama3_kept, "yarn": yarn_kept}


# ---- Weights -----------------------------------------------------------------------------------------------

Matrix = Any  # an Array, (outputs, inputs), as in the checkpoint; or what the ops keep of it (`pack`)


@dataclass
class Layer:
    """One transformer block."""

    attn_norm: Array  # (dim,)
    wqkv: Matrix  # ((n_heads + 2 * n_kv_heads) * head_dim, dim) rows of q, k, v; q's and k's pairs adjacent
    wo: Matrix  # (dim, n_heads * head_dim)
    mlp_norm: Array  # (dim,)
    w_gate_up: Matrix  # (2 * hidden_dim, dim) rows of gate, up
    w_down: Matrix  # (dim, hidden_dim)
    bqkv: Array | None = None  # ((n_heads + 2 * n_kv_heads) * head_dim,) in the order of wqkv
    bo: Array | None = None  # (dim,)
    b_gate_up: Array | None = None  # (2 * hidden_dim,)
    b_down: Array | None = None  # (dim,)
    q_norm: Array | None = None  # (head_dim,) pairs adjacent
    k_norm: Array | None = None  # (head_dim,) pairs adjacent


@dataclass
class Weights:
    embed: Matrix  # (vocab_size, dim)
    layers: list[Layer]
    norm: Array  # (dim,)
    head: Matrix  # (vocab_size, dim) the same object as embed when tied

    @property
    def nbytes(self) -> int:
        held = [self.embed, self.norm] if self.head is self.embed else [self.embed, self.norm, self.head]
        held += [array for layer in self.layers for array in vars(layer).values() if array is not None]
        return sum(array.nbytes for array in held)


class Part(NamedTuple):
    """A tensor of the checkpoint and its place; parts of one field are stacked as rows, in order."""

    field: str  # of Layer or Weights
    name: str  # in the checkpoint
    shape: tuple[int, ...]
    rotary: bool = False  # its rows are rotated, so pairs become adjacent


def outer_parts(c: Config) -> list[Part]:
    parts = [
        Part("embed", "model.embed_tokens.weight", (c.vocab_size, c.dim)),
        Part("norm", "model.norm.weight", (c.dim,)),
        Part("head", "lm_head.weight", (c.vocab_size, c.dim)),
    ]
    return parts[:2] if c.tied else parts


def layer_parts(c: Config, prefix: str = "") -> list[Part]:
    n_q, n_kv = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    # fmt: off
    table = [
        # only if          field        tensor                             shape                  rotary
        (True,       Part("attn_norm", "input_layernorm.weight",          (c.dim,))),
        (True,       Part("wqkv",      "self_attn.q_proj.weight",         (n_q, c.dim),          True)),
        (True,       Part("wqkv",      "self_attn.k_proj.weight",         (n_kv, c.dim),         True)),
        (True,       Part("wqkv",      "self_attn.v_proj.weight",         (n_kv, c.dim))),
        (c.qkv_bias, Part("bqkv",      "self_attn.q_proj.bias",           (n_q,),                True)),
        (c.qkv_bias, Part("bqkv",      "self_attn.k_proj.bias",           (n_kv,),               True)),
        (c.qkv_bias, Part("bqkv",      "self_attn.v_proj.bias",           (n_kv,))),
        (c.qk_norm,  Part("q_norm",    "self_attn.q_norm.weight",         (c.head_dim,),         True)),
        (c.qk_norm,  Part("k_norm",    "self_attn.k_norm.weight",         (c.head_dim,),         True)),
        (True,       Part("wo",        "self_attn.o_proj.weight",         (c.dim, n_q))),
        (c.o_bias,   Part("bo",        "self_attn.o_proj.bias",           (c.dim,))),
        (True,       Part("mlp_norm",  "post_attention_layernorm.weight", (c.dim,))),
        (True,       Part("w_gate_up", "mlp.gate_proj.weight",            (c.hidden_dim, c.dim))),
        (True,       Part("w_gate_up", "mlp.up_proj.weight",              (c.hidden_dim, c.dim))),
        (c.mlp_bias, Part("b_gate_up", "mlp.gate_proj.bias",              (c.hidden_dim,))),
        (c.mlp_bias, Part("b_gate_up", "mlp.up_proj.bias",                (c.hidden_dim,))),
        (True,       Part("w_down",    "mlp.down_proj.weight",            (c.dim, c.hidden_dim))),
        (c.mlp_bias, Part("b_down",    "mlp.down_proj.bias",              (c.dim,))),
    ]
    # fmt: on
    return [part._replace(name=prefix + part.name) for wanted, part in table if wanted]


def as_read(w: Array) -> Matrix:
    return w


def read_weights(directory: Path, config: Config, pack: Callable[[Array], Matrix] = as_read) -> Weights:
    """Every tensor as float32, every matrix packed; raises UnsupportedModel before any is copied."""
    tensors = map_tensors(directory)
    outer = outer_parts(config)
    layers = [layer_parts(config, f"model.layers.{layer}.") for layer in range(config.n_layers)]
    check_tensors(tensors, {part.name: part.shape for parts in (outer, *layers) for part in parts}, config)
    with progress("Reading weights", sum(tensor.nbytes for tensor in tensors.values())) as bar:
        arrays = fuse(tensors, outer, config.head_dim, bar, pack)
        return Weights(
            embed=arrays["embed"],
            layers=[Layer(**fuse(tensors, parts, config.head_dim, bar, pack)) for parts in layers],
            norm=arrays["norm"],
            head=arrays.get("head", arrays["embed"]),
        )


def check_tensors(tensors: Tensors, wanted: dict[str, tuple[int, ...]], config: Config) -> None:
    for name, shape in wanted.items():
        if name not in tensors:
            raise UnsupportedModel(f"tensor {name} {shape} is missing; the files hold {len(tensors)} tensors")
        if tensors[name].shape != shape:
            raise UnsupportedModel(f"tensor {name} is {tensors[name].shape}; config.json makes it {shape}")
    for name in sorted(tensors.keys() - wanted.keys()):
        if name == "lm_head.weight" and np.array_equal(tensors[name], tensors["model.embed_tokens.weight"]):
            continue  # tied, and saved twice
        if name.endswith("rotary_emb.inv_freq"):
            continue  # old Llama files hold what follows from rope_theta
        raise UnsupportedModel(f"tensor {name} has no place in a {config.model_type} with this config.json")


def progress(title: str, n_bytes: int) -> "tqdm[Any]":
    """A bar on a terminal, for files that take longer than a glance (1 GB: about a second)."""
    hidden = True if n_bytes < 1e9 else None  # None is tqdm's word for: unless stderr is a terminal
    return tqdm(desc=title, total=n_bytes, unit="B", unit_scale=True, disable=hidden)


def fuse(
    tensors: Tensors, parts: list[Part], head_dim: int, bar: "tqdm[Any]", pack: Callable[[Array], Matrix]
) -> dict[str, Matrix]:
    """float32 arrays by field; each tensor is read once and written once, and a matrix packed at once."""
    arrays: dict[str, Matrix] = {}
    for field in dict.fromkeys(part.field for part in parts):
        group = [part for part in parts if part.field == field]
        ends = np.cumsum([part.shape[0] for part in group])
        arrays[field] = np.empty((ends[-1], *group[0].shape[1:]), np.float32)
        for part, rows in zip(group, np.split(arrays[field], ends[:-1]), strict=True):
            tensor = tensors[part.name]
            if part.rotary:
                tensor = adjacent_pairs(tensor, head_dim)
            widen(tensor, rows.reshape(tensor.shape))
            bar.update(tensor.nbytes)
        if arrays[field].ndim == 2:
            arrays[field] = pack(arrays[field])
    return arrays


def adjacent_pairs(tensor: NDArray[Any], head_dim: int) -> NDArray[Any]:
    """A view with each head's rows (half, pair) turned to (pair, half). (n_heads, head_dim/2, 2, ...)"""
    return tensor.reshape(-1, 2, head_dim // 2, *tensor.shape[1:]).swapaxes(1, 2)


def widen(tensor: NDArray[Any], out: Array) -> None:
    """Write any of DTYPES to float32; bfloat16, seen as uint16, is the upper half of a float32."""
    if tensor.dtype == np.uint16:
        np.left_shift(tensor, 16, out=out.view(np.uint32), dtype=np.uint32)
    else:
        np.copyto(out, tensor)


# ---- safetensors -------------------------------------------------------------------------------------------
# u64 n | n bytes of JSON {name: {dtype, shape, data_offsets: [begin, end]}} | data        all little-endian

# NumPy has no bfloat16
DTYPES: dict[str, np.dtype[Any]] = {"BF16": np.dtype("<u2"), "F16": np.dtype("<f2"), "F32": np.dtype("<f4")}


def map_tensors(directory: Path) -> Tensors:
    """All tensors of model.safetensors, or of the shards that its index names, as views of memory maps."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file():
        return map_file(single)
    if not index.is_file():
        raise UnsupportedModel(f"no {single.name}, no {index.name} in {directory}: {found_in(directory)}")
    tensors: Tensors = {}
    for shard in sorted(set(read_json(index).get("weight_map", {}).values())):
        if not (directory / shard).is_file():
            raise UnsupportedModel(f"no {shard}, which {index} names: {found_in(directory)}")
        tensors |= map_file(directory / shard)
    return tensors


def map_file(path: Path) -> Tensors:
    size = path.stat().st_size
    if size < 8:
        raise UnsupportedModel(f"{path} has {size} bytes, too few for a safetensors header")
    file = np.memmap(path, np.uint8, mode="r").view(np.ndarray)
    begin = 8 + int.from_bytes(file[:8].tobytes(), "little")
    if begin > size:
        raise UnsupportedModel(f"{path} has {size} bytes, its header {begin}: truncated, or not safetensors")
    try:
        header = dict(json.loads(file[8:begin].tobytes()))
    except (ValueError, TypeError) as error:
        raise UnsupportedModel(f"{path} has a broken safetensors header: {error}") from None
    header.pop("__metadata__", None)
    tensors: Tensors = {}
    for name, entry in header.items():
        try:
            tensors[name] = map_tensor(file[begin:], entry["dtype"], entry["shape"], *entry["data_offsets"])
        except (ValueError, TypeError, KeyError) as error:
            raise UnsupportedModel(f"{path}: tensor {name}: {error}") from None
    return tensors


def map_tensor(data: NDArray[np.uint8], dtype: str, shape: list[int], begin: int, end: int) -> NDArray[Any]:
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype}; supported: {', '.join(DTYPES)}")
    if not 0 <= begin <= end <= data.size:
        raise ValueError(f"bytes {begin} to {end} of {data.size}: truncated")
    if end - begin != math.prod(shape) * DTYPES[dtype].itemsize:
        raise ValueError(f"{end - begin} bytes for {dtype} {shape}")
    return data[begin:end].view(DTYPES[dtype]).reshape(shape)
