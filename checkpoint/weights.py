"""Checkpoint files to named arrays: safetensors to float32.

    directory, Config --read_weights()--> Weights

Authority: the names of the tensors are those of Hugging Face transformers 5
(https://github.com/huggingface/transformers, models/<model_type>/modeling_<model_type>.py); the file format
is https://github.com/huggingface/safetensors#format.

Rules of this file:
  * The tensors of a layer are one table for all families.
  * config.json and the tensors must agree in every name and shape; else UnsupportedModel is raised. Nothing
    is guessed, skipped or left random.
  * Each tensor is copied once: from the memory map, widened to float32, into its rows of a matrix.
  * Rotary pairs are ADJACENT here. Row (half, pair) of a head in the checkpoint, meant for `rotate_half`,
    becomes row (pair, half): a head of q or k, seen as complex numbers, is rotated by one multiplication.

Not here: mixtures of experts; GGUF files (gguf_file.py), config.json (config.py), obtaining the files
(hub.py).
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

from checkpoint import gguf_file
from checkpoint.blocks import Blocks, decoded
from checkpoint.config import Config, FieldCheck, UnsupportedModel, check_fields, listing, read_json

Array = NDArray[np.float32]
# By name in the checkpoint: float32, float16, or bfloat16 as uint16; in a GGUF file also blocks.
Tensors = dict[str, NDArray[Any] | Blocks]


# ---- Weights -----------------------------------------------------------------------------------------------

Matrix = Any  # an Array (n_out, n_in), as in the checkpoint, or what `pack` of the ops makes of one


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
        arrays = [self.embed, self.norm]
        if self.head is not self.embed:
            arrays.append(self.head)
        for layer in self.layers:
            arrays += [array for array in vars(layer).values() if array is not None]
        return sum(array.nbytes for array in arrays)


class Part(NamedTuple):
    """A tensor of the checkpoint, and the field whose rows it is part of, in the order of the tables."""

    field: str  # of Layer or Weights
    name: str  # in the checkpoint
    shape: tuple[int, ...]
    rotary: bool = False  # RoPE turns what its rows compute, so their pairs become adjacent


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
        # if this          field        tensor                             shape                  rotary
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
    return [part._replace(name=prefix + part.name) for is_present, part in table if is_present]


def n_params(c: Config) -> int:
    """How many numbers the checkpoint holds; a tied head is not counted twice."""
    in_a_layer = sum(math.prod(part.shape) for part in layer_parts(c))
    outside = sum(math.prod(part.shape) for part in outer_parts(c))
    return c.n_layers * in_a_layer + outside


Pack = Callable[
    [Array | list[Blocks]], Matrix
]  # what the ops keep of a matrix, or of blocks that stack to one


def unpacked(w: Array | list[Blocks]) -> Matrix:
    """Keep a matrix in float32."""
    if isinstance(w, list):
        return np.concatenate([decoded(blocks) for blocks in w])
    return w


def read_weights(
    directory: Path, config: Config, pack: Pack = unpacked, pack_outer: Pack | None = None
) -> Weights:
    """Read every tensor as float32, and pack every matrix; raises UnsupportedModel before any is copied.

    `pack_outer` is for the embedding and the head, None: as the others.
    """
    tensors = map_tensors(directory)
    outer = outer_parts(config)
    layers = [layer_parts(config, f"model.layers.{layer}.") for layer in range(config.n_layers)]
    check_tensors(tensors, {part.name: part.shape for parts in (outer, *layers) for part in parts}, config)
    with progress("Reading weights", sum(tensor.nbytes for tensor in tensors.values())) as bar:
        arrays = fuse(tensors, outer, config.head_dim, bar, pack_outer or pack)
        return Weights(
            embed=arrays["embed"],
            layers=[Layer(**fuse(tensors, parts, config.head_dim, bar, pack)) for parts in layers],
            norm=arrays["norm"],
            head=arrays.get("head", arrays["embed"]),
        )


def check_tensors(tensors: Tensors, shapes: dict[str, tuple[int, ...]], config: Config) -> None:
    for name, shape in shapes.items():
        if name not in tensors:
            raise UnsupportedModel(f"tensor {name} {shape} is missing; the files hold {len(tensors)} tensors")
        if tensors[name].shape != shape:
            raise UnsupportedModel(f"tensor {name} is {tensors[name].shape}; config.json says {shape}")
    for name in sorted(tensors.keys() - shapes.keys()):
        if name == "lm_head.weight" and equal(tensors[name], tensors["model.embed_tokens.weight"]):
            continue  # the head is tied, and saved all the same
        if name.endswith("rotary_emb.inv_freq"):
            continue  # old Llama files hold it, though it follows from rope_theta
        raise UnsupportedModel(f"tensor {name} has no place in a {config.model_type} with this config.json")


def equal(a: NDArray[Any] | Blocks, b: NDArray[Any] | Blocks) -> bool:
    if isinstance(a, Blocks) and isinstance(b, Blocks):
        return a.format == b.format and np.array_equal(a.data, b.data)
    return isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and np.array_equal(a, b)


def progress(title: str, n_bytes: int) -> "tqdm[Any]":
    """A bar on a terminal, for files that take more than about a second."""
    disable = None  # to tqdm: unless stderr is a terminal
    if n_bytes < 1e9:
        disable = True
    return tqdm(desc=title, total=n_bytes, unit="B", unit_scale=True, disable=disable)


def fuse(
    tensors: Tensors, parts: list[Part], head_dim: int, bar: "tqdm[Any]", pack: Pack
) -> dict[str, Matrix]:
    """The arrays by field: its parts stacked as rows, in float32, and packed where that makes a matrix."""
    arrays: dict[str, Matrix] = {}
    for field in dict.fromkeys(part.field for part in parts):
        group = [part for part in parts if part.field == field]
        blocks = in_blocks(tensors, group, head_dim)
        if blocks:
            arrays[field] = pack(blocks)
            bar.update(sum(part.nbytes for part in blocks))
            continue
        ends = np.cumsum([part.shape[0] for part in group])
        arrays[field] = np.empty((ends[-1], *group[0].shape[1:]), np.float32)
        for part, rows in zip(group, np.split(arrays[field], ends[:-1]), strict=True):
            tensor = tensors[part.name]
            if isinstance(tensor, Blocks):
                tensor = decoded(tensor)
            if part.rotary:
                tensor = adjacent_pairs(tensor, head_dim)
            widen(tensor, rows.reshape(tensor.shape))
            bar.update(tensor.nbytes)
        if arrays[field].ndim == 2:
            arrays[field] = pack(arrays[field])
    return arrays


def in_blocks(tensors: Tensors, group: list[Part], head_dim: int) -> list[Blocks]:
    """The parts of a matrix with their rows in our order if all are in blocks, else []."""
    parts: list[Blocks] = []
    for part in group:
        tensor = tensors[part.name]
        if not isinstance(tensor, Blocks):
            return []
        if part.rotary:
            order = adjacent_pairs(np.arange(len(tensor.data)), head_dim).reshape(-1)
            tensor = tensor._replace(data=tensor.data[order])
        parts.append(tensor)
    return parts


def adjacent_pairs(tensor: NDArray[Any], head_dim: int) -> NDArray[Any]:
    """A view in which each head's rows (half, pair) are (pair, half). -> (n_heads, head_dim/2, 2, ...)"""
    return tensor.reshape(-1, 2, head_dim // 2, *tensor.shape[1:]).swapaxes(1, 2)


def widen(tensor: NDArray[Any], out: Array) -> None:
    """Write a tensor of any of DTYPES as float32; bfloat16, here uint16, is the upper half of a float32."""
    if tensor.dtype == np.uint16:
        np.left_shift(tensor, 16, out=out.view(np.uint32), dtype=np.uint32)
    else:
        np.copyto(out, tensor)


def bfloat16(array: NDArray[Any] | list[Blocks]) -> NDArray[np.uint16]:
    """Round each float32 to the nearest bfloat16, ties to even; not for NaN. uint16 is bfloat16 already."""
    if isinstance(array, list):
        return bfloat16(unpacked(array))
    if array.dtype == np.uint16:
        return array
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


# ---- safetensors -------------------------------------------------------------------------------------------
# u64 n | n bytes of JSON {name: {dtype, shape, data_offsets: [begin, end]}} | data        all little-endian

# NumPy has no bfloat16, so its bits are read as uint16.
DTYPES: dict[str, np.dtype[Any]] = {"BF16": np.dtype("<u2"), "F16": np.dtype("<f2"), "F32": np.dtype("<f4")}

MAX_HEADER_BYTES = 100_000_000  # https://github.com/huggingface/safetensors#format

FILE_NAMES = FieldCheck(
    "an object from the names of tensors to the names of files beside it",
    lambda v: type(v) is dict and all(type(name) is str and name == Path(name).name for name in v.values()),
)


def map_tensors(directory: Path) -> Tensors:
    """All tensors of model.safetensors, or of the shards that its index names, as views of memory maps."""
    if (directory / "model.gguf").is_file():
        return gguf_file.map_tensors(directory / "model.gguf")
    single = directory / "model.safetensors"
    index = directory / "model.safetensors.index.json"
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
    if begin > min(size, MAX_HEADER_BYTES):
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
