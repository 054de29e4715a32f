"""Checkpoint files to named arrays: config.json to Config, safetensors to float32.

    directory --read_config()--> Config --read_weights()--> Weights

Authority: names, defaults and meaning of the fields are those of Hugging Face transformers 5
(https://github.com/huggingface/transformers, models/<model_type>/configuration_<model_type>.py and
modeling_rope_utils.py); the file format is https://github.com/huggingface/safetensors#format.

Rules of this file:
  * One description for all families: FAMILIES holds what differs, and the tensors of a layer are one table.
  * Each field of config.json is held against its Kind before it is used.
  * config.json and the tensors must agree in every name and shape. What this file does not know raises
    UnsupportedModel; nothing is guessed, skipped or left random.
  * Each tensor is copied once: from the memory map, widened, into its rows of the matrix it shares.
  * Rotary pairs are ADJACENT here. Row (half, pair) of a head in the checkpoint, meant for `rotate_half`,
    becomes row (pair, half): a head of q or k, seen as complex numbers, is rotated by one multiplication.

Not here: quantised files, mixtures of experts; rotary frequencies (rope.py), the tokenizer (tokenizer.py),
obtaining the files (hub.py).
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

from rope import ROPE_TYPES, Rope

Array = NDArray[np.float32]
Tensors = dict[str, NDArray[Any]]  # of the checkpoint: float32, float16, or bfloat16 seen as uint16
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

    @property
    def n_params(self) -> int:
        """Numbers in the checkpoint; a tied head is not counted twice."""
        layer = sum(math.prod(part.shape) for part in layer_parts(self))
        return self.n_layers * layer + sum(math.prod(part.shape) for part in outer_parts(self))


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
            raise UnsupportedModel(f"tensor {name} is {tensors[name].shape}; config.json says {shape}")
    for name in sorted(tensors.keys() - wanted.keys()):
        if name == "lm_head.weight" and np.array_equal(tensors[name], tensors["model.embed_tokens.weight"]):
            continue  # tied, and saved twice
        if name.endswith("rotary_emb.inv_freq"):
            continue  # old Llama files hold what follows from rope_theta
        raise UnsupportedModel(f"tensor {name} has no place in a {config.model_type} with this config.json")


def progress(title: str, n_bytes: int) -> "tqdm[Any]":
    """A bar on a terminal, for files that take more than about a second."""
    hidden = True if n_bytes < 1e9 else None  # None, to tqdm: unless stderr is a terminal
    return tqdm(desc=title, total=n_bytes, unit="B", unit_scale=True, disable=hidden)


def fuse(
    tensors: Tensors, parts: list[Part], head_dim: int, bar: "tqdm[Any]", pack: Callable[[Array], Matrix]
) -> dict[str, Matrix]:
    """float32 arrays by field; each tensor is read and written once, each matrix packed once it is whole."""
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
    """Write a tensor of any of DTYPES as float32; bfloat16, seen as uint16, is the upper half of one."""
    if tensor.dtype == np.uint16:
        np.left_shift(tensor, 16, out=out.view(np.uint32), dtype=np.uint32)
    else:
        np.copyto(out, tensor)


def bfloat16(array: NDArray[Any]) -> NDArray[np.uint16]:
    """The bfloat16 nearest to each float32, ties to even; not for NaN. uint16 is bfloat16 already."""
    if array.dtype == np.uint16:
        return array
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


# ---- safetensors -------------------------------------------------------------------------------------------
# u64 n | n bytes of JSON {name: {dtype, shape, data_offsets: [begin, end]}} | data        all little-endian

# NumPy has no bfloat16
DTYPES: dict[str, np.dtype[Any]] = {"BF16": np.dtype("<u2"), "F16": np.dtype("<f2"), "F32": np.dtype("<f4")}

FILE_NAMES = Kind(
    "an object from the names of tensors to the names of files",
    lambda v: type(v) is dict and all(type(name) is str for name in v.values()),
)


def map_tensors(directory: Path) -> Tensors:
    """All tensors of model.safetensors, or of the shards that its index names, as views of memory maps."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file():
        return map_file(single)
    if not index.is_file():
        raise UnsupportedModel(f"no {single.name}, no {index.name} in {directory}: {found_in(directory)}")
    tensors: Tensors = {}
    fields = read_json(index)
    check(fields, {"weight_map": FILE_NAMES}, index)
    for shard in sorted({*fields["weight_map"].values()}):
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
    except (ValueError, TypeError, RecursionError) as error:
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
