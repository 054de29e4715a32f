"""kernels.cu and plain.cu by NVRTC, the real compiler, without a GPU: three architectures, shapes of models.

Besides ours, the flags are those that CuPy adds. Another version of NVRTC than the installed one is taken
with LD_LIBRARY_PATH=FOLDER LD_PRELOAD=FOLDER/libnvrtc.so.13, where FOLDER is nvidia/cu13/lib of its wheel;
13.0 and 13.5 have been.

No kernel of theirs may spill registers to memory, nor keep arrays there that should be registers (`attend`
does for heads of 256, of which no model here has any); registers and shared memory stay within what lets
enough blocks run at once on a processor of 65,536 registers. Needs the packages of the extra `cuda`, and no
driver.
"""

import importlib
import itertools
import re
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from checkpoint.config import Config
from devices.kernels import (
    ANY_SHAPE,
    FAST_CODE,
    FEW_ROWS,
    MANY_ROWS,
    ONE_TILE,
    PLAIN_CODE,
    SHAPES,
    SOME_ROWS,
    SOME_WIDE,
    Shape,
    check_sizes,
    include_paths,
    options,
    read_code,
    signatures,
)
from helpers.device_ops import MODELS, config


def compiler() -> Any:
    """CuPy's door to NVRTC, which opens without a device, or None."""
    try:
        compiler = importlib.import_module("cupy.cuda.compiler")
        importlib.import_module("cupy_backends.cuda.libs.nvrtc").getVersion()
    except (ImportError, RuntimeError):
        return None
    return compiler if include_paths() else None


pytestmark = pytest.mark.skipif(compiler() is None, reason="needs CuPy, NVRTC and CUDA's headers: .[cuda]")

# What CuPy compiles with beside our options (cupy/cuda/compiler.py)
CUPY_FLAGS = ("-ftz=true", "--device-as-default-execution-space")

# fmt: off
ARCHITECTURES = ["sm_80", "sm_90", "sm_120"]
# by shape; kernels that are no product have one
REGISTERS = {ONE_TILE: 128, FEW_ROWS: 128, SOME_ROWS: 128, SOME_WIDE: 128, MANY_ROWS: 255}
PLAIN_REGISTERS = 255  # what lets a block of 256 run at all
ONE_BLOCK = {(SOME_ROWS, "sm_120"): 168}  # where one block runs at once
LIMITS = {"attend": 168, "attend_prompt": 168, "pick": 64, "count": 64}
# A processor of sm_120 has 100 KB of shared memory: two blocks of attention run whatever their registers are.
TWO_BLOCKS = {("attend", "sm_120"): 255, ("attend_prompt", "sm_120"): 255}
# fmt: on
SHARED_BYTES = 48 * 1024  # what a block has without asking


class Use(NamedTuple):
    registers: int
    shared_bytes: int
    memory_bytes: int  # that a thread keeps what it has no registers for in


def compiled(c: Config, shape: Shape, architecture: str, path: Path = FAST_CODE) -> dict[str, Use]:
    """What each kernel takes, as ptxas says."""
    log = StringIO()
    flags = (*options(c, shape), *CUPY_FLAGS, f"-arch={architecture}", "--ptxas-options=-v")
    compiler()._NVRTCProgram(read_code(path), path.name, method="cubin").compile(flags, log)
    found = {}
    for part in log.getvalue().split("Compiling entry function '")[1:]:
        memory = sum(int(n) for n in re.findall(r"(\d+) bytes (?:stack frame|spill)", part))
        registers, shared = re.search(r"Used (\d+) registers", part), re.search(r"(\d+) bytes smem", part)
        assert registers
        found[part.partition("'")[0]] = Use(int(registers[1]), int(shared[1]) if shared else 0, memory)
    return found


def kernels_of(name: str, path: Path = FAST_CODE) -> set[str]:
    """Those that the model has: only a mixture has those of experts."""
    names = {*signatures(path.read_text())}
    if MODELS[name].experts:
        return names
    return {kernel for kernel in names if kernel not in ("router", "route") and "expert" not in kernel}


CASES = list(itertools.product(MODELS, SHAPES, ARCHITECTURES))


@pytest.mark.parametrize(
    ("name", "shape", "architecture"), CASES, ids=[f"{n}-{s.rows}x{s.columns}-{a}" for n, s, a in CASES]
)
def test_kernels_fit(name: str, shape: Shape, architecture: str) -> None:
    used = compiled(MODELS[name], shape, architecture)
    expected = {"qkv", "out", "gate_up", "down", "logits"}
    if shape == ANY_SHAPE:
        expected = kernels_of(name)
    most = ONE_BLOCK.get((shape, architecture), REGISTERS[shape])
    assert used.keys() == expected
    for kernel, use in used.items():
        assert use.memory_bytes == 0, kernel
        limit = TWO_BLOCKS.get((kernel, architecture), LIMITS.get(kernel, most))
        assert use.registers <= limit, kernel
        assert use.shared_bytes <= SHARED_BYTES, kernel


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", MODELS)
def test_plain_kernels_fit(name: str, architecture: str) -> None:
    """Without shared memory, and in registers alone."""
    used = compiled(MODELS[name], ANY_SHAPE, architecture, PLAIN_CODE)
    assert used.keys() == kernels_of(name, PLAIN_CODE)
    for kernel, use in used.items():
        assert (use.memory_bytes, use.shared_bytes) == (0, 0), kernel
        assert use.registers <= PLAIN_REGISTERS, kernel


def test_a_bit_for_each_token_fits_into_shared_memory() -> None:
    most = config(vocab_size=300_000)
    check_sizes(most)
    assert compiled(most, ANY_SHAPE, "sm_80")["pick"].shared_bytes <= SHARED_BYTES
