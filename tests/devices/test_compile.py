"""kernels.cu and plain.cu by NVRTC, the real compiler, without a GPU: three architectures, shapes of models.

No kernel of theirs may spill registers to memory, nor keep arrays there that should be registers (`attend`
does for heads of 256, which no model here has); registers and shared memory let enough blocks run at once on
a processor of 65,536 registers. Needs the packages of the extra `cuda`, and no driver. Another NVRTC is taken
with LD_LIBRARY_PATH=FOLDER LD_PRELOAD=FOLDER/libnvrtc.so.13, FOLDER being nvidia/cu13/lib of its wheel.
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
    MANY_ROWS,
    PLAIN_CODE,
    SHAPES,
    SOME_ROWS,
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

ARCHITECTURES = ["sm_80", "sm_90", "sm_120"]
# Registers by shape; of plain.cu, None, what lets a block of 256 run at all
REGISTERS = dict[Shape | None, int](dict.fromkeys(SHAPES, 128)) | {MANY_ROWS: 255, None: 255}
LIMITS = {"attend": 168, "attend_prompt": 168, "pick": 64, "count": 64}
# One block of SOME_ROWS runs at once on sm_120. Its processors have 100 KB of shared memory: two blocks of
# attention run whatever their registers are.
OF_SM_120 = {"attend": 255, "attend_prompt": 255}
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


CASES = list(itertools.product(MODELS, [*SHAPES, None], ARCHITECTURES))


@pytest.mark.parametrize(("name", "shape", "architecture"), CASES, ids=str)
def test_kernels_fit(name: str, shape: Shape | None, architecture: str) -> None:
    """Of each shape; None: the plain kernels, which have no shared memory."""
    path = PLAIN_CODE if shape is None else FAST_CODE
    used = compiled(MODELS[name], shape or ANY_SHAPE, architecture, path)
    most = 168 if (shape, architecture) == (SOME_ROWS, "sm_120") else REGISTERS[shape]
    limits = {} if shape is None else LIMITS
    if shape and architecture == "sm_120":
        limits = LIMITS | OF_SM_120
    expected = {"qkv", "out", "gate_up", "down", "logits"}
    if shape in (ANY_SHAPE, None):
        expected = kernels_of(name, path)
    assert used.keys() == expected
    for kernel, use in used.items():
        assert use.memory_bytes == 0, kernel
        assert use.registers <= limits.get(kernel, most), kernel
        assert use.shared_bytes <= (SHARED_BYTES if shape else 0), kernel


def test_a_bit_for_each_token_fits_into_shared_memory() -> None:
    most = config(vocab_size=300_000)
    check_sizes(most)
    assert compiled(most, ANY_SHAPE, "sm_80")["pick"].shared_bytes <= SHARED_BYTES
