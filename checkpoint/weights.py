"""Checkpoint files to named arrays: safetensors to float32, or to bfloat16 as it is.

    directory, Config --read_weights()--> Weights

Authority: the names of the tensors are those of Hugging Face transformers 5
(https://github.com/huggingface/transformers, models/<model_type>/modeling_<model_type>.py); the file format
is https://github.com/huggingface/safetensors#format.

Rules of this file:
  * The tensors of a layer are one table for all families.
  * config.json and the tensors must agree in every name and shape; else UnsupportedModel is raised. Nothing
    is guessed, skipped or left random.
  * Each tensor is copied once: from the memory map into its rows of a matrix. A matrix of bfloat16 stays
    that, seen as uint16, for `pack` of the ops, and so do MXFP4, the 4 bits of gpt-oss's experts (class
    Mxfp4), and the blocks of a GGUF file. All else is widened to float32.
  * Rotary pairs are ADJACENT here. Row (half, pair) of a head in the checkpoint, meant for `rotate_half`,
    becomes row (pair, half): a head of q or k, seen as complex numbers, is rotated by one multiplication.

Not here: GGUF files (gguf_file.py) and their blocks (blocks.py), config.json (config.py), obtaining the files
(hub.py).
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray
from tqdm import tqdm

from checkpoint import gguf_file
from checkpoint.blocks import Blocks, decoded
from checkpoint.config import Config, Experts, FieldCheck, UnsupportedModel, check_fields, listing, read_json

Array = NDArray[np.float32]
Tensor = NDArray[Any] | Blocks  # float32, float16, bfloat16 as uint16, or uint8; in a GGUF file also blocks
Tensors = dict[str, Tensor]  # by name in the checkpoint


# ---- Weights -----------------------------------------------------------------------------------------------

Matrix = Any  # an Array (n_out, n_in), as in the checkpoint, or what `pack` of the ops makes of one


class Mxfp4(NamedTuple):
    """The matrices of experts in MXFP4: 32 numbers of 4 bits side by side have a power of 2 in common.

    https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf, section 5.3. In a
    byte, the lower half is the number that comes first.
    """

    blocks: NDArray[np.uint8]  # (n_experts, n_out, n_in/32, 16)
    scales: NDArray[np.uint8]  # (n_experts, n_out, n_in/32) the exponent of 2, plus 127

    @property
    def nbytes(self) -> int:
        return self.blocks.nbytes + self.scales.nbytes


# What 4 bits mean (E2M1): sign, exponent, mantissa
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


@np.errstate(over="ignore")  # 4 * 2^127 is infinite
def decoded_mxfp4(w: Mxfp4) -> Array:
    """The numbers, (n_experts, n_out, n_in)."""
    halves = np.stack([w.blocks & 15, w.blocks >> 4], axis=-1)  # (n_experts, n_out, n_in/32, 16, 2)
    numbers = E2M1[halves].reshape(*w.scales.shape, 32)
    exponents = w.scales[..., None].astype(np.int32) - 127
    return np.ldexp(numbers, exponents).reshape(*w.scales.shape[:-1], -1)


@dataclass
class Layer:
    """One transformer block. In a layer with experts each has a matrix, and so (n_experts, ...) begins the
    shape of the MLP's fields.
    """

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
    sinks: Array | None = None  # (n_heads,) the score of each head that no key has
    router: Matrix | None = None  # (n_experts, dim); None: the layer has one MLP
    b_router: Array | None = None  # (n_experts,)


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
    shape: tuple[int, ...]  # in the checkpoint
    rotary: bool = False  # RoPE turns what its rows compute, so their pairs become adjacent
    expert: bool = False  # one of the matrices that lie one behind another, by expert
    interleaved: bool = False  # gate and up take turns, here they become halves: axis 1
    transposed: bool = False  # (n_experts, n_in, n_out)

    @property
    def is_mxfp4(self) -> bool:
        return self.field.endswith(("_blocks", "_scales"))

    def view(self, tensor: NDArray[Any], head_dim: int) -> NDArray[Any]:
        """The tensor with its rows in our order; it may have an axis more."""
        if self.rotary:
            return adjacent_pairs(tensor, head_dim)
        if self.transposed:
            tensor = tensor.swapaxes(1, 2)
        if self.interleaved:
            n_experts, n_rows, *rest = tensor.shape
            return tensor.reshape(n_experts, n_rows // 2, 2, *rest).swapaxes(1, 2)
        return tensor


def outer_parts(c: Config) -> list[Part]:
    parts = [
        Part("embed", "model.embed_tokens.weight", (c.vocab_size, c.dim)),
        Part("norm", "model.norm.weight", (c.dim,)),
        Part("head", "lm_head.weight", (c.vocab_size, c.dim)),
    ]
    return parts[:2] if c.tied else parts


def layer_parts(c: Config, layer: int) -> list[Part]:
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
        (c.sinks,    Part("sinks",     "self_attn.sinks",                 (c.n_heads,))),
        (True,       Part("wo",        "self_attn.o_proj.weight",         (c.dim, n_q))),
        (c.o_bias,   Part("bo",        "self_attn.o_proj.bias",           (c.dim,))),
        (True,       Part("mlp_norm",  "post_attention_layernorm.weight", (c.dim,))),
    ]
    # fmt: on
    parts = [part for is_present, part in table if is_present]
    if c.experts is None or not c.experts.layers[layer]:
        parts += mlp_parts(c)
    elif c.experts.has_biases:
        parts += stacked_experts_parts(c, c.experts)
    else:
        parts += experts_parts(c, c.experts)
    return [part._replace(name=f"model.layers.{layer}.{part.name}") for part in parts]


def mlp_parts(c: Config) -> list[Part]:
    # fmt: off
    parts = [
        #     field        tensor                   shape
        Part("w_gate_up", "mlp.gate_proj.weight",  (c.hidden_dim, c.dim)),
        Part("w_gate_up", "mlp.up_proj.weight",    (c.hidden_dim, c.dim)),
        Part("w_down",    "mlp.down_proj.weight",  (c.dim, c.hidden_dim)),
    ]
    biases = [
        Part("b_gate_up", "mlp.gate_proj.bias",    (c.hidden_dim,)),
        Part("b_gate_up", "mlp.up_proj.bias",      (c.hidden_dim,)),
        Part("b_down",    "mlp.down_proj.bias",    (c.dim,)),
    ]
    # fmt: on
    return parts + biases if c.mlp_bias else parts


#  model_type: router, experts, and gate, up and down of one
EXPERT_NAMES = {
    "qwen3_moe": ("mlp.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj"),
    "mixtral": ("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2"),
}


def experts_parts(c: Config, experts: Experts) -> list[Part]:
    """A tensor for each matrix of each expert."""
    router, prefix, gate, up, down = EXPERT_NAMES[c.model_type]
    size = experts.hidden_dim
    parts = [Part("router", f"{router}.weight", (experts.n, c.dim))]
    for i in range(experts.n):
        parts.append(Part("w_gate_up", f"{prefix}.{i}.{gate}.weight", (size, c.dim), expert=True))
        parts.append(Part("w_gate_up", f"{prefix}.{i}.{up}.weight", (size, c.dim), expert=True))
        parts.append(Part("w_down", f"{prefix}.{i}.{down}.weight", (c.dim, size), expert=True))
    return parts


def stacked_experts_parts(c: Config, experts: Experts) -> list[Part]:
    """gpt-oss: a tensor for the matrices of all experts, or two where they are MXFP4."""
    n, size = experts.n, experts.hidden_dim
    # fmt: off
    both = [
        #     field               tensor                             shape
        Part("router",           "mlp.router.weight",               (n, c.dim)),
        Part("b_router",         "mlp.router.bias",                 (n,)),
        Part("b_gate_up",        "mlp.experts.gate_up_proj_bias",   (n, 2 * size)),
        Part("b_down",           "mlp.experts.down_proj_bias",      (n, c.dim)),
    ]
    unpacked = [
        Part("w_gate_up",        "mlp.experts.gate_up_proj",        (n, c.dim, 2 * size), transposed=True),
        Part("w_down",           "mlp.experts.down_proj",           (n, size, c.dim), transposed=True),
    ]
    packed = [
        Part("w_gate_up_blocks", "mlp.experts.gate_up_proj_blocks", (n, 2 * size, c.dim // 32, 16)),
        Part("w_gate_up_scales", "mlp.experts.gate_up_proj_scales", (n, 2 * size, c.dim // 32)),
        Part("w_down_blocks",    "mlp.experts.down_proj_blocks",    (n, c.dim, size // 32, 16)),
        Part("w_down_scales",    "mlp.experts.down_proj_scales",    (n, c.dim, size // 32)),
    ]
    # fmt: on
    parts = both + (packed if experts.mxfp4 else unpacked)
    return [part._replace(interleaved="gate_up" in part.field) for part in parts]


def all_parts(c: Config) -> list[Part]:
    """Every tensor of the checkpoint; a tied head is none."""
    parts = outer_parts(c)
    for layer in range(c.n_layers):
        parts += layer_parts(c, layer)
    return parts


def n_params(c: Config) -> int:
    """How many numbers the checkpoint holds; a byte of MXFP4 blocks has two, and a scale is none."""
    n = 0
    for part in all_parts(c):
        if part.field.endswith("_blocks"):
            n += 2 * math.prod(part.shape)
        elif not part.is_mxfp4:
            n += math.prod(part.shape)
    return n


def n_weight_bytes(c: Config) -> int:
    """Bytes of the weights in bfloat16, and MXFP4 as it is."""
    return sum((1 if part.is_mxfp4 else 2) * math.prod(part.shape) for part in all_parts(c))


MATRICES = {"embed", "head", "wqkv", "wo", "w_gate_up", "w_down", "router"}  # fields
# A matrix in float32, in bfloat16 as uint16, an Mxfp4, or a list[Blocks]; to what the ops keep.
Packer = Callable[[Any], Matrix]


def unpacked(w: Any) -> Matrix:
    """Keep a matrix in float32."""
    if isinstance(w, Mxfp4):
        return decoded_mxfp4(w)
    if isinstance(w, list):
        return np.concatenate([decoded(blocks) for blocks in w])
    if w.dtype != np.uint16:
        return w
    wide = np.empty(w.shape, np.float32)
    widen(w, wide)
    return wide


def read_weights(
    directory: Path, config: Config, pack: Packer = unpacked, pack_outer: Packer | None = None
) -> Weights:
    """Read every tensor, and pack every matrix; raises UnsupportedModel before any is copied.

    `pack_outer` is for the embedding and the head, None: as the others.
    """
    tensors = map_tensors(directory)
    check_tensors(tensors, all_parts(config), config)
    with progress("Reading weights", sum(tensor.nbytes for tensor in tensors.values())) as bar:
        arrays = fuse(tensors, outer_parts(config), config, bar, pack_outer or pack)
        layers = []
        for layer in range(config.n_layers):
            layers.append(Layer(**fuse(tensors, layer_parts(config, layer), config, bar, pack)))
        return Weights(
            embed=arrays["embed"],
            layers=layers,
            norm=arrays["norm"],
            head=arrays.get("head", arrays["embed"]),
        )


def check_tensors(tensors: Tensors, parts: list[Part], config: Config) -> None:
    for _, name, shape, *_ in parts:
        if name not in tensors:
            raise UnsupportedModel(f"tensor {name} {shape} is missing; the files hold {len(tensors)} tensors")
        if tensors[name].shape != shape:
            raise UnsupportedModel(f"tensor {name} is {tensors[name].shape}; config.json says {shape}")
    for part in parts:
        tensor = tensors[part.name]
        if has_dtype(tensor, np.uint8) != part.is_mxfp4:
            dtype = tensor.format if isinstance(tensor, Blocks) else tensor.dtype
            raise UnsupportedModel(f"tensor {part.name} is {dtype}: MXFP4 has bytes, alone")
    for name in sorted(tensors.keys() - {part.name for part in parts}):
        if name == "lm_head.weight" and equal(tensors[name], tensors["model.embed_tokens.weight"]):
            continue  # the head is tied, and saved all the same
        if name.endswith("rotary_emb.inv_freq"):
            continue  # old Llama files hold it, though it follows from rope_theta
        raise UnsupportedModel(f"tensor {name} has no place in a {config.model_type} with this config.json")


def has_dtype(tensor: Tensor, dtype: DTypeLike) -> bool:
    return isinstance(tensor, np.ndarray) and tensor.dtype == dtype


def equal(a: Tensor, b: Tensor) -> bool:
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
    tensors: Tensors, parts: list[Part], config: Config, bar: "tqdm[Any]", pack: Packer
) -> dict[str, Matrix]:
    """The arrays by field: its parts stacked as rows, and packed where that makes a matrix."""
    arrays: dict[str, Matrix] = {}
    for field in dict.fromkeys(part.field for part in parts):
        group = [part for part in parts if part.field == field]
        blocks = in_blocks(tensors, group, config.head_dim)
        if blocks:
            arrays[field] = pack(blocks)
            bar.update(sum(part.nbytes for part in blocks))
            continue
        arrays[field] = stack(tensors, group, config, bar)
        if field in MATRICES:
            arrays[field] = pack(arrays[field])
    for field in ("w_gate_up", "w_down"):
        if f"{field}_blocks" in arrays:
            arrays[field] = pack(Mxfp4(arrays.pop(f"{field}_blocks"), arrays.pop(f"{field}_scales")))
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


def stack(tensors: Tensors, group: list[Part], config: Config, bar: "tqdm[Any]") -> NDArray[Any]:
    """The tensors of one field one behind another, in float32; matrices of bfloat16 and MXFP4 stay that."""
    first = group[0]
    shape = first.shape[1:]
    if first.transposed:
        shape = shape[::-1]
    ends = np.cumsum([part.shape[0] for part in group])
    dtype: DTypeLike = np.float32
    if first.is_mxfp4:
        dtype = np.uint8
    elif first.field in MATRICES and all(has_dtype(tensors[part.name], np.uint16) for part in group):
        dtype = np.uint16
    array = np.empty((ends[-1], *shape), dtype)
    for part, rows in zip(group, np.split(array, ends[:-1]), strict=True):
        tensor = tensors[part.name]
        bar.update(tensor.nbytes)
        if isinstance(tensor, Blocks):
            tensor = decoded(tensor)
        tensor = part.view(tensor, config.head_dim)
        widen(tensor, rows.reshape(tensor.shape))
    if first.expert and config.experts:
        return array.reshape(config.experts.n, -1, *shape)
    return array


def adjacent_pairs(tensor: NDArray[Any], head_dim: int) -> NDArray[Any]:
    """A view in which each head's rows (half, pair) are (pair, half). -> (n_heads, head_dim/2, 2, ...)"""
    return tensor.reshape(-1, 2, head_dim // 2, *tensor.shape[1:]).swapaxes(1, 2)


def widen(tensor: NDArray[Any], out: NDArray[Any]) -> None:
    """Write a tensor of any of DTYPES to `out`: float32, or what the tensor is where that is not wider.

    bfloat16, here uint16, is the upper half of a float32.
    """
    if tensor.dtype == np.uint16 and out.dtype == np.float32:
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
DTYPES: dict[str, np.dtype[Any]] = {
    "BF16": np.dtype("<u2"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "U8": np.dtype("u1"),  # MXFP4
}

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
