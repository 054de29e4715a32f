"""kernels.cu and plain.cu, compiled for a model by NVRTC, and their launches.

    Config, Shape --constants()--> -DNAME=value --NVRTC--> Kernels --launch(name, grid, arguments)-->

Authority: CuPy's reference (https://docs.cupy.dev) for RawModule.

Rules of this file:
1. This file alone defines the numbers that Python and a .cu file both need. The compiler gets them
   as -DNAME=value, and no .cu file defines them again.
2. A kernel gets its arguments through `Kernels` alone, by the names of its parameters, and numbers in the
   types of its signature: CuPy passes a Python float as a double. Neither checks arrays; the emulator of the
   tests does, at each launch.

Why no programmatic dependent launch (PDL), by which a kernel starts while the one ahead of it still runs:
CuPy has no name for it. It would take structures of cuda.h packed by hand, and nobody has measured its gain.

Not here: the arithmetic (kernels.cu, plain.cu), the arrays (cuda.py, step_memory.py).
"""

import hashlib
import importlib
import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from checkpoint.config import Config, UnsupportedModel
from checkpoint.default_model import cache_folder
from model import PAGE

FAST_CODE = Path(__file__).parents[1] / "kernels.cu"
PLAIN_CODE = Path(__file__).parent / "plain.cu"
DeviceArray = Any  # cupy.ndarray; bfloat16 is seen as uint16
Named = dict[str, Any]  # numbers, arrays or constants by their names in the .cu files

# --- constants that Python shares with the .cu files --------------------------------------------------------

QUERIES = 16  # query rows of a tile of attention: the rows of one tensor core instruction
NORMED_ROWS = 2  # a product norms up to so many rows of the residual stream itself
MAX_TOP = 20  # likeliest tokens with logprobs: the limit of the API
PENALISED, BIASED, MASKED, CHAINS, ADVANCES = 1, 2, 4, 8, 16  # flags of a row that a token is picked for
# numbers in a row of the arrays that step_memory.py fills and reads
TILE_WIDTH, PICK_ROW_WIDTH, SETTINGS_WIDTH, SEEDS_WIDTH, CHOICE_WIDTH = 6, 6, 6, 3, 2 + 2 * MAX_TOP
GROUP_WIDTH = 3  # and of groups, which `route` writes
THREADS, PICK_THREADS = 256, 1024  # of a block

# All numbers above by name, and the bit of a token's count that `count` sets and `pick` reads
SHARED: dict[str, int | str] = {name: value for name, value in globals().items() if type(value) is int}
SHARED |= {"PAGE": PAGE, "SEEN_IN_PROMPT": "0x80000000u"}


class Shape(NamedTuple):
    """How much of a product one block computes: rows, and columns of its matrix."""

    rows: int
    columns: int
    pair_columns: int  # of each of the two matrices of gate_up
    logits_columns: int
    min_rows: int  # rows of a product; with fewer it takes a smaller shape


# A block reads its rows of x from the L2 cache, beside its columns of the matrix. 16 rows are twice the bytes
# of 8 columns, more than the cache gives while memory gives these: FEW_ROWS has 32 columns, and SOME_WIDE has
# 128 for 64 rows: it is for a batch's wide products (gate_up of an 8B, logits).
# fmt: off
#                  rows, columns, of a pair, of logits; min_rows
ONE_TILE  = Shape(  16,     8,        8,        32,        1)
FEW_ROWS  = Shape(  16,    32,       16,        32,        5)
SOME_ROWS = Shape(  64,    32,       16,        32,       17)
SOME_WIDE = Shape(  64,   128,       64,       128,       17)
MANY_ROWS = Shape( 128,   128,       64,       128,       65)
# fmt: on
SHAPES = ONE_TILE, FEW_ROWS, SOME_ROWS, SOME_WIDE, MANY_ROWS  # the largest last
PLAIN = Shape(1, 1, 1, 1, 1)  # of the kernels of plain.cu: a thread computes a number
ANY_SHAPE = ONE_TILE  # the kernels that are not products are compiled with it alone

# ONE_TILE alone norms rows by itself (kernels.cu, NormedRows): of so few rows, no other shape is taken.
assert all(shape is ONE_TILE or shape.min_rows > NORMED_ROWS for shape in SHAPES)


def model_constants(config: Config) -> Named:
    """The numbers that follow from a model, by their names in the .cu files."""
    c = config
    head_pad = -(-c.head_dim // 32) * 32
    attend_threads = 64 if head_pad > 128 else 128  # as many as the shared memory of a block allows
    found: Named = {
        "DIM": c.dim,
        "HIDDEN_DIM": c.hidden_dim,
        "N_HEADS": c.n_heads,
        "N_KV_HEADS": c.n_kv_heads,
        "GROUP": c.n_heads // c.n_kv_heads,  # query heads that share a key head (grouped-query attention)
        "HEAD_DIM": c.head_dim,
        "HEAD_PAD": head_pad,  # numbers of a key in its page: whole steps of the tensor cores
        "QKV_DIM": (c.n_heads + 2 * c.n_kv_heads) * c.head_dim,
        "VOCAB_SIZE": c.vocab_size,
        "MASK_WORDS": -(-c.vocab_size // 32),  # of 32 bits, that hold a bit for each token
        "NORM_EPS": f"{c.norm_eps!r}f",
        "ATTEND_THREADS": attend_threads,
        # Keys of one split of the attention to a sequence (flash-decoding): each warp of a block takes 32.
        "SPLIT_KEYS": attend_threads,
        # The result of a split for a query head: weighted values, greatest score, sum of weights.
        "PART_WIDTH": c.head_dim + 2,
    }
    if c.experts:  # kernels.cu has no kernels of experts for a model without
        found |= {
            "N_EXPERTS": c.experts.n,
            "N_CHOSEN": c.experts.n_chosen,
            "EXPERT_DIM": c.experts.hidden_dim,
            "PACKED": int(c.experts.mxfp4),
            "NORMALISED": int(c.experts.normalised),
            "CLAMPED": int(c.experts.limit is not None),
            "LIMIT": f"{c.experts.limit or 0.0!r}f",
            "ALPHA": f"{c.experts.alpha!r}f",
        }
    return found


OF_SHAPE = "BLOCK_ROWS", "BLOCK_COLUMNS", "PAIR_COLUMNS", "LOGITS_COLUMNS"


def constants(config: Config, shape: Shape) -> Named:
    """All that the .cu files are compiled with."""
    of_shape = zip(OF_SHAPE, shape, strict=False)
    return SHARED | model_constants(config) | dict(of_shape)


def shape_for(n_rows: int, n_columns: int, enough_blocks: int) -> Shape:
    """The largest that leaves no processor idle, which takes `enough_blocks` blocks."""
    for shape in reversed(SHAPES):
        n_blocks = -(-n_rows // shape.rows) * -(-n_columns // shape.columns)
        if n_rows >= shape.min_rows and n_blocks >= enough_blocks:
            return shape
    return ONE_TILE


NO_LIMIT = 2**31 - 1


def check_sizes(config: Config) -> None:
    """Raise UnsupportedModel for a model whose sizes the kernels do not take.

    They read rows of matrices 16 bytes at a time, and heads by pairs. The shared memory of a block holds
    NORMED_ROWS rows, a tile of queries with heads of 256, and a bit for each token.
    """
    c = config
    # fmt: off
    #  name                   size                     multiples of, at most
    rules = [
        ("dim",                  c.dim,                    8, 10_000),
        ("hidden_dim",           c.hidden_dim,             8, NO_LIMIT),
        ("n_heads * head_dim",   c.n_heads * c.head_dim,   8, NO_LIMIT),
        ("head_dim",             c.head_dim,               2, 256),
        ("vocab_size",           c.vocab_size,             1, 300_000),
    ]
    if c.experts:
        rules += [
            ("hidden_dim of an expert", c.experts.hidden_dim, 8, NO_LIMIT),
            ("experts",                 c.experts.n,          1, PICK_THREADS),
            ("experts of a token",      c.experts.n_chosen,   1, 32),
        ]
    # fmt: on
    for name, size, multiple, most in rules:
        if size % multiple or size > most:
            raise UnsupportedModel(
                f"{name} is {size}; supported on a GPU: multiples of {multiple}, up to {most}. "
                "--device cpu takes it"
            )


# --- the cache ----------------------------------------------------------------------------------------------


def cache_file(*facts: object) -> Path:
    """Where to keep what follows from these facts, kernels.cu, sampling.py and the code of this folder."""
    paths = FAST_CODE, FAST_CODE.with_name("sampling.py"), *sorted(PLAIN_CODE.parent.glob("*.*"))
    sources = [path.read_bytes() for path in paths]
    digest = hashlib.sha256(b"".join([*sources, repr((PAGE, *facts)).encode()])).hexdigest()
    return cache_folder() / "kernels" / digest[:16]


# --- compilation --------------------------------------------------------------------------------------------


def options(config: Config, shape: Shape) -> tuple[str, ...]:
    """Return the options for NVRTC. Without contraction, only what kernels.cu writes as fmaf is fused."""
    defines = [f"-D{name}={value}" for name, value in constants(config, shape).items()]
    includes = [f"-I{path}" for path in include_paths()]
    return (*defines, "--std=c++17", "--fmad=false", *includes)


def include_paths() -> list[str]:
    """Find cuda_bf16.h: in the package nvidia-cuda-runtime, or in a toolkit that CuPy finds by itself."""
    try:
        path = importlib.import_module("cuda.pathfinder").find_nvidia_header_directory("cudart")
    except ImportError:
        return []
    return [path] if path else []


def read_code(path: Path) -> str:
    """The text of a .cu file, whose name the compiler's messages say."""
    return f'#line 1 "{path.name}"\n' + path.read_text(encoding="utf-8")


class Parameter(NamedTuple):
    kind: str  # C++ type of the number, or of the array's numbers
    is_array: bool
    name: str


KERNEL = re.compile(r'extern "C" __global__ void (?:__launch_bounds__\((\w+)[^)]*\)\s+)?(\w+)\(([^)]*)\)')
PARAMETER = re.compile(r"(\w+) (\*?)(\w+)(?:,|$)")  # `const` may precede it

NUMBERS: Named = {"int": np.int32, "float": np.float32}  # by kind, of a parameter that is one


def signatures(code: str) -> dict[str, tuple[str, list[Parameter]]]:
    """The kernels of the code, by name: threads of a block and parameters.

    The threads are the first word of __launch_bounds__, a constant's name or a number.
    """
    found = {}
    for threads, kernel, parameters in KERNEL.findall(code):
        parsed = PARAMETER.findall(parameters)
        found[kernel] = threads, [Parameter(kind, star == "*", name) for kind, star, name in parsed]
    return found


# --- launches -----------------------------------------------------------------------------------------------

NULL = np.uintp(0)


class Kernels:
    """The kernels of both .cu files, compiled for one model: the fast ones once for each shape."""

    def __init__(self, cp: Any, config: Config) -> None:
        code = {shape: read_code(PLAIN_CODE if shape is PLAIN else FAST_CODE) for shape in (*SHAPES, PLAIN)}
        self._modules = {
            shape: cp.RawModule(code=text, options=options(config, shape)) for shape, text in code.items()
        }
        self._function = cache(lambda name, shape: self._modules[shape].get_function(name))
        self._constants = constants(config, ANY_SHAPE)
        self._signatures = {shape: signatures(text) for shape, text in code.items()}

    def load(self) -> None:
        """Compile what is not compiled yet, all shapes: no step has to wait for that."""
        for shape in SHAPES:  # CuPy compiles when a function is asked for
            self._modules[shape].get_function("logits")

    def launch(self, name: str, grid: tuple[int, ...], arguments: Named, shape: Shape = ANY_SHAPE) -> None:
        """Launch a kernel with the arguments of its parameters' names.

        An array for each array, None for one that the model does not have, a number for each number. What has
        no plain kernel is not needed before one: plain kernels norm their rows themselves.
        """
        if shape is PLAIN and name not in self._signatures[PLAIN]:
            return
        threads, parameters = self._signatures[shape][name]
        grid = (*grid, 1, 1)[:3]
        block = int(self._constants.get(threads, threads)), 1, 1
        values: list[Any] = []
        for parameter in parameters:
            argument = arguments[parameter.name]
            if not parameter.is_array:
                argument = NUMBERS[parameter.kind](argument)
            values.append(NULL if argument is None else argument)
        self._function(name, shape)(grid, block, tuple(values))
