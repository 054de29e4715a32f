"""kernels.cu, compiled for a model, and its launches.

    Config, Shape --options()--> NVRTC --> Kernels --launch(name, shape, grid, arguments)-->

Authority: CuPy's reference (https://docs.cupy.dev) for RawModule; cuda.h for cuLaunchKernelEx,
https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__EXEC.html.

Rules of this file:
1. A kernel gets its arguments through `Kernels` alone, which checks them against its signature: CuPy does
   not, and passes a Python float as a double.
2. In a graph, where device and driver take it, a kernel is put on the processors while the one ahead of it
   still runs; it waits by itself before it touches what that one writes (kernels.cu, rule 2). Elsewhere that
   would not pay: the launch costs more than it saves.

Not here: what is computed (kernels.cu), with which arguments (cuda.py).
"""

import ctypes
import importlib
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from checkpoint.config import Config, UnsupportedModel

CODE = Path(__file__).parents[1] / "kernels.cu"
DeviceArray = Any  # cupy.ndarray; bfloat16 is seen as uint16

# --- what kernels.cu is compiled with -----------------------------------------------------------------------


class Shape(NamedTuple):
    """How much of a product a block computes: 16 * rows by 8 * columns."""

    rows: int
    columns: int


SHAPES = ONE_TILE, FEW_ROWS, MANY_ROWS = Shape(1, 1), Shape(4, 4), Shape(8, 16)
ANY = ONE_TILE  # for kernels that are no product
PLAIN = Shape(0, 0)  # for those that have no blocks of a product: a module of their own

# what kernels.cu calls the same
QUERIES = 16  # of a tile of attention
NORMED_ROWS = 2  # of the residual stream: up to so many, a product norms them itself
MAX_TOP = 20  # likeliest tokens whose logprobs can be had: what the API allows
CHOICE = 2 + 2 * MAX_TOP
LOGITS_COLUMNS = 4  # the shape of `logits` for one tile of rows
THREADS = {"pick": 1024, "count": 1024, "keep": 32}  # the others have 256, attention attend_threads()


def shape_for(n_rows: int, n_columns: int, enough: int) -> Shape:
    """The largest that leaves no processor idle: `enough` blocks of it."""
    if n_rows <= 16:
        return ONE_TILE
    n_blocks = -(-n_rows // (16 * MANY_ROWS.rows)) * -(-n_columns // (8 * MANY_ROWS.columns))
    return MANY_ROWS if n_blocks >= enough else FEW_ROWS


def head_pad(config: Config) -> int:
    """Numbers of a key in its page: whole steps of the tensor cores."""
    return -(-config.head_dim // 32) * 32


def attend_threads(config: Config) -> int:
    """As many as the keys that a block takes at a time; as the shared memory allows."""
    return 128 if head_pad(config) <= 128 else 64


def defines(config: Config, shape: Shape) -> list[str]:
    """The constants that kernels.cu is compiled with."""
    c = config
    values = {
        "DIM": c.dim,
        "HIDDEN_DIM": c.hidden_dim,
        "N_HEADS": c.n_heads,
        "N_KV_HEADS": c.n_kv_heads,
        "HEAD_DIM": c.head_dim,
        "VOCAB_SIZE": c.vocab_size,
        "NORM_EPS": f"{c.norm_eps!r}f",
        "ROW_TILES": shape.rows,
        "COLUMN_TILES": shape.columns,
        "PLAIN": int(shape == PLAIN),
    }
    return [f"-D{name}={value}" for name, value in values.items()]


def options(config: Config, shape: Shape) -> tuple[str, ...]:
    """For NVRTC. No contraction: fused multiply-adds are where kernels.cu says."""
    return (
        *defines(config, shape),
        "--std=c++17",
        "--fmad=false",
        *(f"-I{path}" for path in include_paths()),
    )


def include_paths() -> list[str]:
    """Where cuda_bf16.h is: in the package nvidia-cuda-runtime, or in a toolkit that CuPy finds by itself."""
    try:
        found = importlib.import_module("cuda.pathfinder").find_nvidia_header_directory("cudart")
    except ImportError:
        return []
    return [found] if found else []


def check_sizes(config: Config) -> None:
    """Rows of matrices are read 16 bytes at a time, heads by pairs; a block's memory holds
    NORMED_ROWS, a tile of heads of 256, and a bit for each token.
    """
    c = config
    # fmt: off
    #  name                   size                     multiples of, up to
    rules = [
        ("dim",                  c.dim,                    8, 10_000),
        ("hidden_dim",           c.hidden_dim,             8, None),
        ("n_heads * head_dim",   c.n_heads * c.head_dim,   8, None),
        ("head_dim",             c.head_dim,               2, 256),
        ("vocab_size",           c.vocab_size,             1, 300_000),
    ]
    # fmt: on
    for name, n, step, most in rules:
        if n % step or (most and n > most):
            takes = ", ".join([f"multiples of {step}"] * (step > 1) + [f"up to {most}"] * bool(most))
            raise UnsupportedModel(f"{name} is {n}; supported on a GPU: {takes}. --device cpu takes it")


# --- launches -----------------------------------------------------------------------------------------------

# The attribute of a launch whose kernel may start before the one ahead of it has ended, and the structures of
# cuda.h that say so.
PROGRAMMATIC_STREAM_SERIALIZATION = 6
NULL = np.uintp(0)
MAX_SEEN = 10_000  # arrays; those of a model and its buffers are some hundred


class LaunchAttribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_uint * 16))


class LaunchConfig(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("n_attributes", ctypes.c_uint),
    )


class Parameter(NamedTuple):
    name: str
    dtype: "np.dtype[Any]"  # of the array, or of the number
    is_array: bool


#  type in kernels.cu   in an array or as a number
DTYPES = {
    "weight": "u2",
    "table": "i4",
    "bf16": "u2",
    "float": "f4",
    "float2": "c8",
    "int": "i4",
    "unsigned": "u4",
    "u64": "u8",
}


def signatures(code: str) -> dict[str, list[Parameter]]:
    """The parameters of each kernel in the code."""
    found = re.findall(r'extern "C" __global__ void (?:__launch_bounds__\([^)]*\)\s+)?(\w+)\(([^)]*)\)', code)

    def parse(text: str) -> Parameter:
        kind, star, name = re.fullmatch(r"\s*(?:const )?(\w+) (\*?)(\w+)\s*", text).groups()  # type: ignore[union-attr]
        return Parameter(name, np.dtype(DTYPES[kind]), star == "*")

    return {name: [parse(text) for text in texts.split(",")] for name, texts in found}


class Kernels:
    """The kernels of kernels.cu, compiled for one model."""

    def __init__(self, cp: Any, config: Config, driver: Any = None) -> None:
        """driver: libcuda, for launches that overlap; None: there are none."""
        self.overlap = False  # do kernels start before the one ahead of them has ended?
        code = CODE.read_text(encoding="utf-8")
        self._cp, self._driver = cp, driver
        self._signatures = signatures(code)
        shapes = [*SHAPES, PLAIN]  # CuPy compiles what is asked for
        self._modules = {shape: cp.RawModule(code=code, options=options(config, shape)) for shape in shapes}
        self._functions: dict[tuple[str, Shape], Any] = {}
        self._seen: dict[int, DeviceArray] = {}  # contiguous ones by id, theirs as long as they are here
        self._threads = THREADS | dict.fromkeys(["attend", "attend_prompt"], attend_threads(config))

    def load(self) -> None:
        """Compile what is not compiled yet, all shapes: no step has to wait for that."""
        for shape in SHAPES:
            self._modules[shape].get_function("logits")

    def launch(self, name: str, shape: Shape, grid: tuple[int, ...], *args: Any) -> None:
        """An array for each array, a number for each number, None for an array that there is none of."""
        function, block = self._function(name, shape), (self._threads.get(name, 256),)
        values, seen = [], self._seen
        for parameter, arg in zip(self._signatures[name], args, strict=True):
            _, dtype, is_array = parameter
            if not is_array:
                values.append(dtype.type(arg))
            elif arg is None:
                values.append(NULL)
            else:
                if id(arg) not in seen or arg.dtype is not dtype:
                    self._check(name, parameter, arg)
                values.append(arg)
        if self._driver is None or not self.overlap:
            function(grid, block, tuple(values))
        elif code := self._launch_early(function.kernel.ptr, grid, block, values):
            raise RuntimeError(f"cuLaunchKernelEx of {name} returned {code}")

    def _function(self, name: str, shape: Shape) -> Any:
        if (name, shape) not in self._functions:
            self._functions[name, shape] = self._modules[shape].get_function(name)
        return self._functions[name, shape]

    def _check(self, kernel: str, parameter: Parameter, array: DeviceArray) -> None:
        if array.dtype != parameter.dtype:
            raise TypeError(f"{kernel}: {parameter.name} is {array.dtype}, not {parameter.dtype}")
        if not array.flags.c_contiguous:
            raise TypeError(f"{kernel}: {parameter.name} is not contiguous")
        if len(self._seen) == MAX_SEEN:
            self._seen.clear()
        self._seen[id(array)] = array

    def _launch_early(
        self, function: int, grid: tuple[int, ...], block: tuple[int, ...], values: list[Any]
    ) -> int:
        """As soon as every block of the kernel ahead has said start_next(); cuLaunchKernelEx's result."""
        attribute = LaunchAttribute(PROGRAMMATIC_STREAM_SERIALIZATION)
        attribute.value[0] = 1
        config = LaunchConfig(
            (ctypes.c_uint * 3)(*(*grid, 1, 1)[:3]),
            (ctypes.c_uint * 3)(*(*block, 1, 1)[:3]),
            0,
            self._cp.cuda.get_current_stream().ptr,
            ctypes.pointer(attribute),
            1,
        )
        held = [
            np.array(value if isinstance(value, np.generic) else np.uintp(value.data.ptr)) for value in values
        ]
        pointers = (ctypes.c_void_p * len(held))(*[value.ctypes.data for value in held])
        return int(
            self._driver.cuLaunchKernelEx(ctypes.byref(config), ctypes.c_void_p(function), pointers, None)
        )


def open_driver(cp: Any) -> Any:
    """libcuda, where the device can start a kernel early: compute capability 9.0 and above."""
    if int(cp.cuda.Device().compute_capability) < 90:
        return None
    try:
        return cp.driver if hasattr(cp, "driver") else ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
