"""Checkpoint files to named arrays: safetensors to float32, or to bfloat16 as it is.

    directory, Config --read_weights()--> Weights

Authority: the names of the tensors are those of Hugging Face transformers 5
(https://github.com/huggingface/transformers, models/<model_type>/modeling_<model_type>.py); the file format
is https://github.com/huggingface/safetensors#format, and its own library reads and checks the header.

Rules of this file:
  * The tensors of a layer are one table for all families.
  * config.json and the tensors must agree in every name and shape; else UnsupportedModel is raised. Nothing
    is guessed, skipped or left random.
  * A matrix of bfloat16 stays bfloat16, seen as uint16, for `pack` of the ops, and so do MXFP4, the 4 bits of
    gpt-oss's experts (class Mxfp4), and the blocks of a GGUF file. Everything else is widened to float32. One
    matrix at a time is copied from the memory map.
  * Rotary pairs are ADJACENT here. Row (half, pair) of a head in the checkpoint, meant for `rotate_half`,
    becomes row (pair, half): a head of q or k, seen as complex numbers, is rotated by one multiplication. In
    llama.cpp's files of the Llama architecture they are adjacent already (Config.pairs_adjacent).
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from checkpoint import gguf_file
from checkpoint.config import Config, Experts, UnsupportedModel, read_json
from checkpoint.gguf_blocks import FLOATS, Blocks, decoded

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


def gguf_bytes(w: Mxfp4) -> NDArray[np.uint8]:
    """Return blocks as in GGUF: the scale, then 16 bytes, in whose lower halves lie the first 16 numbers."""
    data = np.empty((*w.scales.shape, 17), np.uint8)
    data[..., 0] = w.scales
    for expert, blocks in zip(data, w.blocks, strict=True):
        first, second = blocks[..., :8], blocks[..., 8:]  # 16 numbers each
        expert[..., 1::2] = first & 15 | second << 4
        expert[..., 2::2] = first >> 4 | second & 240
    return data


@np.errstate(over="ignore")  # 4 * 2^127 is infinite
def decoded_mxfp4(w: Mxfp4) -> Array:
    """Return the numbers, (n_experts, n_out, n_in)."""
    n_experts, n_out, n_blocks = w.scales.shape
    rows = gguf_bytes(w).reshape(n_experts * n_out, n_blocks, 17)
    return decoded(Blocks("MXFP4", rows)).reshape(n_experts, n_out, -1)


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
        """Count the bytes of all arrays and matrices; one matrix for both embedding and head counts once."""
        total = -self.head.nbytes if self.head is self.embed else 0
        for part in (self, *self.layers):
            for value in vars(part).values():
                arrays = value if isinstance(value, list) else [value]
                total += sum(getattr(array, "nbytes", 0) for array in arrays)
        return total


class Part(NamedTuple):
    """A tensor of the checkpoint, and the field whose rows it is part of, in the order of the tables."""

    field: str  # of Layer or Weights
    name: str  # in the checkpoint
    shape: tuple[int, ...]  # in the checkpoint
    rotary: int = 0  # its first rows: RoPE turns what they compute, so their pairs become adjacent
    scale: float = 1.0  # of its numbers, which become float32 if it is not 1
    expert: bool = False  # one of the matrices that follow one another, by expert
    interleaved: bool = False  # gate and up take turns, here they become halves: axis 1
    transposed: bool = False  # (n_experts, n_in, n_out)

    @property
    def is_mxfp4(self) -> bool:
        return self.field.endswith(("_blocks", "_scales"))

    def ordered(self, tensor: Any, c: Config) -> Any:
        """Put the rows of a tensor in our order, and scale it."""
        if self.scale != 1:
            return unpacked(tensor) * self.scale
        if isinstance(tensor, Blocks):
            return tensor._replace(data=self.ordered(tensor.data, c))
        if self.rotary:  # (half, pair) becomes (pair, half), among the dimensions of a head that turn
            rows = np.arange(len(tensor))
            heads = rows[: self.rotary].reshape(-1, c.head_dim)[:, : c.rope.n_turning(c.head_dim)]
            heads[:] = heads.reshape(len(heads), 2, -1).swapaxes(1, 2).reshape(heads.shape)
            return tensor[rows]
        if self.transposed:
            tensor = tensor.swapaxes(1, 2)
        if self.interleaved:
            return np.concatenate([tensor[:, ::2], tensor[:, 1::2]], axis=1)
        return tensor


# model_type: patterns in our names of tensors, which are Llama's, and what this family has in their place
NAMES = {
    "mixtral": {r"mlp\.": "block_sparse_moe.", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
    "phi3": {r"[qkv]_proj": "qkv_proj", r"(gate|up)_proj": "gate_up_proj"},
    "granitemoehybrid": {
        r"mlp\.(gate|up)_proj": "shared_mlp.input_linear",
        r"mlp\.down_proj": "shared_mlp.output_linear",
    },
}


def named(parts: list[Part], c: Config, layer: int) -> list[Part]:
    """Name a layer's parts as the family does; those with one name are one tensor with all their rows."""
    found: dict[str, Part] = {}
    for part in parts:
        name = f"model.layers.{layer}.{part.name}"
        for ours, theirs in NAMES.get(c.model_type, {}).items():
            name = re.sub(ours, theirs, name)
        n_out, rotary = part.shape[0], part.rotary
        if name in found:
            n_out += found[name].shape[0]
            rotary += found[name].rotary
        found[name] = part._replace(name=name, shape=(n_out, *part.shape[1:]), rotary=rotary)
    return [*found.values()]


EMBED = "model.embed_tokens.weight"


def outer_parts(c: Config) -> list[Part]:
    shape = c.vocab_size, c.dim
    parts = [
        Part("embed", EMBED, shape, scale=c.embed_scale),
        Part("norm", "model.norm.weight", (c.dim,), scale=c.logit_scale),
    ]
    if not c.tied or c.embed_scale != 1:
        parts.append(Part("head", EMBED if c.tied else "lm_head.weight", shape))
    return parts


def layer_parts(c: Config, layer: int) -> list[Part]:
    dim, n_q, n_kv = c.dim, c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    halves = not c.pairs_adjacent
    experts = c.experts if c.experts and c.experts.layers[layer] else None
    hidden = experts.hidden_dim if experts else c.hidden_dim
    # fmt: off
    norms = [
        # if this  field        tensor                             shape          rotary
        (True,      "attn_norm", "input_layernorm.weight",          dim,          False),
        (True,      "mlp_norm",  "post_attention_layernorm.weight", dim,          False),
        (c.qk_norm, "q_norm",    "self_attn.q_norm.weight",         c.head_dim,   halves),
        (c.qk_norm, "k_norm",    "self_attn.k_norm.weight",         c.head_dim,   halves),
        (c.sinks,   "sinks",     "self_attn.sinks",                 c.n_heads,    False),
    ]
    attention = [
        # field  module              n_out  n_in  has a bias  rotary
        ("qkv", "self_attn.q_proj", n_q,   dim,  c.qkv_bias, halves),
        ("qkv", "self_attn.k_proj", n_kv,  dim,  c.qkv_bias, halves),
        ("qkv", "self_attn.v_proj", n_kv,  dim,  c.qkv_bias, False),
        ("o",   "self_attn.o_proj", dim,   n_q,  c.o_bias,   False),
    ]
    mlp = [
        ("_gate_up", "mlp.gate_proj", hidden, dim,    c.mlp_bias, False),
        ("_gate_up", "mlp.up_proj",   hidden, dim,    c.mlp_bias, False),
        ("_down",    "mlp.down_proj", dim,    hidden, c.mlp_bias, False),
    ]
    # fmt: on
    parts = [Part(field, name, (n,), n * rotary) for is_there, field, name, n, rotary in norms if is_there]
    for field, module, n_out, n_in, has_bias, rotary in attention if experts else attention + mlp:
        parts.append(Part(f"w{field}", f"{module}.weight", (n_out, n_in), n_out * rotary))
        if has_bias:
            parts.append(Part(f"b{field}", f"{module}.bias", (n_out,), n_out * rotary))
    if experts and experts.has_biases:
        parts += stacked_experts(c, experts)
    elif experts:
        parts.append(Part("router", "mlp.gate.weight", (experts.n, dim)))
        for i in range(experts.n):
            for field, module, n_out, n_in, *_ in mlp:
                name = module.replace("mlp", f"mlp.experts.{i}")
                parts.append(Part(f"w{field}", f"{name}.weight", (n_out, n_in), expert=True))
    return named(parts, c, layer)


def stacked_experts(c: Config, experts: Experts) -> list[Part]:
    """gpt-oss: a tensor for the matrices of all experts, or two if they are MXFP4. Gate and up take turns."""
    n, size = experts.n, experts.hidden_dim
    parts = [Part("router", "mlp.router.weight", (n, c.dim)), Part("b_router", "mlp.router.bias", (n,))]
    for field, n_out, n_in in [("gate_up", 2 * size, c.dim), ("down", c.dim, size)]:
        name = f"mlp.experts.{field}_proj"
        stacked = [Part(f"b_{field}", f"{name}_bias", (n, n_out))]
        if experts.mxfp4:
            stacked.append(Part(f"w_{field}_blocks", f"{name}_blocks", (n, n_out, n_in // 32, 16)))
            stacked.append(Part(f"w_{field}_scales", f"{name}_scales", (n, n_out, n_in // 32)))
        else:
            stacked.append(Part(f"w_{field}", name, (n, n_in, n_out), transposed=True))
        parts += [part._replace(interleaved=field == "gate_up") for part in stacked]
    return parts


def all_parts(c: Config) -> list[Part]:
    """Return every tensor of the checkpoint; a tied head is none."""
    parts = outer_parts(c)
    for layer in range(c.n_layers):
        parts += layer_parts(c, layer)
    return parts


NUMBERS_OF = {"blocks": 2, "scales": 0}  # in an entry of a tensor of MXFP4; elsewhere each is one


def n_params(c: Config) -> int:
    """Count the numbers that the checkpoint holds."""
    parts = {part.name: part for part in all_parts(c)}.values()
    return sum(NUMBERS_OF.get(part.field.split("_")[-1], 1) * math.prod(part.shape) for part in parts)


def n_weight_bytes(c: Config) -> int:
    """Count the bytes of the weights in bfloat16, and MXFP4 as it is."""
    return sum((1 if part.is_mxfp4 else 2) * math.prod(part.shape) for part in all_parts(c))


MATRICES = {"embed", "head", "wqkv", "wo", "w_gate_up", "w_down", "router"}  # fields
# A matrix in float32, in bfloat16 as uint16, an Mxfp4, or a list[Blocks]; to what the ops keep.
Packer = Callable[[Any], Matrix]


def unpacked(w: Any) -> Matrix:
    """Return a matrix, or the list of tensors that stack to one, in float32.

    bfloat16, here uint16, is the upper half of a float32.
    """
    if isinstance(w, list):
        return np.concatenate([unpacked(tensor) for tensor in w])
    if isinstance(w, Mxfp4):
        return decoded_mxfp4(w)
    if isinstance(w, Blocks):
        return decoded(w)
    if w.dtype == np.uint16:
        return np.left_shift(w, 16, dtype=np.uint32).view(np.float32)
    return w.astype(np.float32, copy=False)


def read_weights(
    directory: Path, config: Config, pack: Packer = unpacked, pack_outer: Packer | None = None
) -> Weights:
    """Read every tensor, and pack every matrix; raises UnsupportedModel before any is copied.

    `pack_outer` is for the embedding and the head, None: the same as for the others.
    """
    tensors = map_tensors(directory)
    embed: Any = tensors.get(EMBED)
    head: Any = tensors.get("lm_head.weight")
    if config.tied and head is not None and not np.array_equal(head, embed):
        config = replace(config, tied=False)  # as in transformers 5: the tensor wins over config.json
    check_tensors(tensors, config)
    outer = fuse(tensors, outer_parts(config), config, pack_outer or pack)
    layers: list[Layer] = []
    # A bar on a terminal, for weights that take more than about a second. None: unless stderr is a terminal.
    disable = None if n_weight_bytes(config) >= 1e9 else True
    for i in tqdm(range(config.n_layers), "Reading weights", unit="layer", disable=disable):
        layers.append(Layer(**fuse(tensors, layer_parts(config, i), config, pack)))
    return Weights(outer["embed"], layers, outer["norm"], outer.get("head", outer["embed"]))


def check_tensors(tensors: Tensors, config: Config) -> None:
    parts = {part.name: part for part in all_parts(config)}
    for name, part in parts.items():
        if name not in tensors:
            raise UnsupportedModel(f"tensor {name} {part.shape} is missing, of {len(parts)} tensors")
        tensor = tensors[name]
        has_bytes = tensor.dtype == np.uint8
        if tensor.shape != part.shape or has_bytes != part.is_mxfp4:
            raise UnsupportedModel(
                f"tensor {name} is {tensor.shape} of {tensor.dtype}; "
                f"expected {part.shape}, of bytes if it is MXFP4"
            )
    for name in sorted(tensors.keys() - parts):
        # read_weights() has compared the head. Old Llama files hold inv_freq, which follows from rope_theta.
        if name != "lm_head.weight" and not name.endswith("rotary_emb.inv_freq"):
            raise UnsupportedModel(f"tensor {name} has no place in this {config.model_type}")


def fuse(tensors: Tensors, parts: list[Part], config: Config, pack: Packer) -> dict[str, Matrix]:
    """Return the arrays by field: its parts stacked as rows, and packed if that makes a matrix.

    Arrays become float32, but matrices of bfloat16, of MXFP4 and of blocks stay that.
    """
    arrays: dict[str, Matrix] = {}
    for field in dict.fromkeys(part.field for part in parts):
        group = [part for part in parts if part.field == field]
        rows = [part.ordered(tensors[part.name], config) for part in group]
        if all(isinstance(some, Blocks) for some in rows):
            arrays[field] = pack(rows)
            continue
        is_matrix = field in MATRICES
        stays = group[0].is_mxfp4 or (is_matrix and all(some.dtype == np.uint16 for some in rows))
        array: Any = np.concatenate(rows) if stays else unpacked(rows)
        if group[0].expert and config.experts:
            array = array.reshape(config.experts.n, -1, array.shape[1])
        arrays[field] = pack(array) if is_matrix else array
    for field in ("w_gate_up", "w_down"):
        if f"{field}_blocks" in arrays:
            arrays[field] = pack(Mxfp4(arrays.pop(f"{field}_blocks"), arrays.pop(f"{field}_scales")))
    return arrays


def bfloat16(w: NDArray[Any] | list[Blocks]) -> NDArray[np.uint16]:
    """Round each float32 to the nearest bfloat16, ties to even; not for NaN. uint16 is bfloat16 already."""
    if isinstance(w, np.ndarray) and w.dtype == np.uint16:
        return w
    bits = np.ascontiguousarray(unpacked(w)).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


# ---- safetensors -------------------------------------------------------------------------------------------

DTYPES = FLOATS | {"U8": np.dtype("u1")}  # bytes: MXFP4

FileName = Annotated[str, Meta(pattern=r"^[\w.-]+\Z")]  # beside the index, not elsewhere


class Shards(msgspec.Struct):
    """model.safetensors.index.json"""

    weight_map: dict[str, FileName]  # by the names of tensors


def map_tensors(directory: Path) -> Tensors:
    """Return all tensors of model.safetensors, or of an index's shards, as views of memory maps."""
    if (directory / "model.gguf").is_file():
        return gguf_file.map_tensors(directory / "model.gguf")
    shards = ["model.safetensors"]
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        shards = sorted({*read_json(index, Shards).weight_map.values()})
    tensors: Tensors = {}
    for shard in shards:
        tensors |= map_file(directory / shard)
    return tensors


def map_file(path: Path) -> Tensors:
    """Return the tensors of one file.

    The library checks that they fill the file without gaps, so each begins at the end of the one before it.
    """
    tensors: Tensors = {}
    try:
        with safe_open(path, "numpy") as file:
            data = np.memmap(path, np.uint8, mode="r").view(np.ndarray)
            start = 8 + int.from_bytes(data[:8], "little")  # after the header and its length
            for name in file.offset_keys():
                header = file.get_slice(name)
                kind, shape = header.get_dtype(), header.get_shape()
                if kind not in DTYPES:
                    raise ValueError(f"tensor {name} is {kind}; supported: {', '.join(DTYPES)}")
                dtype = DTYPES[kind]
                end = start + math.prod(shape) * dtype.itemsize
                tensors[name] = data[start:end].view(dtype).reshape(shape)
                start = end
    except (SafetensorError, OSError, ValueError) as error:
        raise UnsupportedModel(f"{path} is not a safetensors file that can be read: {error}") from None
    return tensors
