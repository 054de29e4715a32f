"""Checkpoint files to named arrays: safetensors to float32.

    directory, Config --read_weights()--> Weights

Authority: the names of the tensors are those of Hugging Face transformers 5
(https://github.com/huggingface/transformers, models/<model_type>/modeling_<model_type>.py); the file format
is https://github.com/huggingface/safetensors#format.

Rules of this file:
  * The tensors of a layer are one table for all families.
  * config.json and the tensors must agree in every name and shape; else UnsupportedModel is raised. Nothing
    is guessed, skipped or left random.
  * Each tensor is copied once: from the memory map, widened, into its rows of the matrix it shares.
  * Rotary pairs are ADJACENT here. Row (half, pair) of a head in the checkpoint, meant for `rotate_half`,
    becomes row (pair, half): a head of q or k, seen as complex numbers, is rotated by one multiplication.

Not here: quantised files, mixtures of experts; config.json (config.py), obtaining the files (hub.py).
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from checkpoint.config import Config, FieldCheck, UnsupportedModel, check_fields, listing, read_json

Array = NDArray[np.float32]
Tensors = dict[str, NDArray[Any]]  # of the checkpoint: float32, float16, or bfloat16 seen as uint16


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


def n_params(c: Config) -> int:
    """Numbers in the checkpoint; a tied head is not counted twice."""
    layer = sum(math.prod(part.shape) for part in layer_parts(c))
    return c.n_layers * layer + sum(math.prod(part.shape) for part in outer_parts(c))


def unpacked(w: Array) -> Matrix:
    return w


def read_weights(directory: Path, config: Config, pack: Callable[[Array], Matrix] = unpacked) -> Weights:
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

FILE_NAMES = FieldCheck(
    "an object from the names of tensors to the names of files",
    lambda v: type(v) is dict and all(type(name) is str for name in v.values()),
)


def map_tensors(directory: Path) -> Tensors:
    """All tensors of model.safetensors, or of the shards that its index names, as views of memory maps."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file():
        return map_file(single)
    if not index.is_file():
        raise UnsupportedModel(f"no {single.name}, no {index.name} in {directory}: {listing(directory)}")
    tensors: Tensors = {}
    fields = read_json(index)
    check_fields(fields, {"weight_map": FILE_NAMES}, index)
    for shard in sorted({*fields["weight_map"].values()}):
        if not (directory / shard).is_file():
            raise UnsupportedModel(f"no {shard}, which {index} names: {listing(directory)}")
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
