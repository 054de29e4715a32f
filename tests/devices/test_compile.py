"""kernels.cu and plain.cu: their constants, and what NVRTC, the real compiler, makes of them without a GPU.

No kernel may spill registers to memory, nor keep arrays there that should be registers (`attend` does for
heads of 256, which no model here has); enough blocks run at once on a processor of 65,536 registers. Needs
the packages of the extra `cuda`, and no driver. Another NVRTC is taken with LD_LIBRARY_PATH=FOLDER
LD_PRELOAD=FOLDER/libnvrtc.so.13, FOLDER being nvidia/cu13/lib of its wheel.
"""

import importlib
import re
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from checkpoint.config import Config
from devices import kernels
from devices.kernels import ANY_SHAPE, FAST_CODE, MANY_ROWS, PLAIN_CODE, SHAPES, SOME_ROWS, Shape
from helpers.device_ops import MIXTURES, MODELS, config


def test_constants_stand_in_kernels_py_alone() -> None:
    """No .cu file defines what the compiler is given, and each constant is used."""
    names = kernels.constants(MIXTURES["mxfp4"], ANY_SHAPE).keys()
    words = set[str]()
    for path in (FAST_CODE, PLAIN_CODE):
        code = re.sub("//.*", "", path.read_text(encoding="utf-8"))
        defined = set(re.findall(r"#\s*define\s+(\w+)", code))
        assigned = set(re.findall(r"\b(\w+)(?:\[\w*\])?\s*=[^=]", code))
        assert not (defined | assigned) & names
        assert "#ifndef" not in code
        words.update(re.findall(r"\w+", code))
    assert words >= names


def compiler() -> Any:
    """CuPy's door to NVRTC, which opens without a device, or None."""
    try:
        compiler = importlib.import_module("cupy.cuda.compiler")
        importlib.import_module("cupy_backends.cuda.libs.nvrtc").getVersion()
    except (ImportError, RuntimeError):
        return None
    return compiler if kernels.include_paths() else None


needs_compiler = pytest.mark.skipif(compiler() is None, reason="needs CuPy, NVRTC, CUDA's headers: .[cuda]")

CUPY_FLAGS = ("-ftz=true", "--device-as-default-execution-space")  # beside our options: cupy/cuda/compiler.py
SHARED_BYTES = 48 * 1024  # what a block has without asking


def max_registers(kernel: str, shape: Shape, architecture: str) -> int:
    """On sm_120, with 100 KB of shared memory, one block of SOME_ROWS runs, and two of attention always."""
    if kernel in ("pick", "count"):
        return 64
    if kernel in ("attend", "attend_prompt"):
        return 255 if architecture == "sm_120" else 168
    if shape == SOME_ROWS and architecture == "sm_120":
        return 168
    return 255 if shape == MANY_ROWS else 128


Use = tuple[int, int, int]  # registers, shared bytes, and bytes of memory in place of registers


def compiled(c: Config, shape: Shape, architecture: str, path: Path = FAST_CODE) -> dict[str, Use]:
    """What each kernel takes, as ptxas says."""
    log = StringIO()
    flags = (*kernels.options(c, shape), *CUPY_FLAGS, f"-arch={architecture}", "--ptxas-options=-v")
    compiler()._NVRTCProgram(kernels.read_code(path), path.name, method="cubin").compile(flags, log)
    found = {}
    for part in log.getvalue().split("Compiling entry function '")[1:]:
        memory = sum(int(n) for n in re.findall(r"(\d+) bytes (?:stack frame|spill)", part))
        registers, shared = re.search(r"Used (\d+) registers", part), re.search(r"(\d+) bytes smem", part)
        assert registers
        found[part.partition("'")[0]] = int(registers[1]), int(shared[1]) if shared else 0, memory
    return found


@needs_compiler
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_120"])
@pytest.mark.parametrize("shape", [*SHAPES, None], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_kernels_fit(name: str, shape: Shape | None, architecture: str) -> None:
    """Of each shape; None: the plain kernels, which have no shared memory."""
    path = PLAIN_CODE if shape is None else FAST_CODE
    used = compiled(MODELS[name], shape or ANY_SHAPE, architecture, path)
    expected = {"qkv", "out", "gate_up", "down", "logits"}
    if shape in (ANY_SHAPE, None):
        expected = {*kernels.signatures(path.read_text())}
        if not MODELS[name].experts:  # only a mixture has the kernels of experts
            expected -= {kernel for kernel in expected if "expert" in kernel or "rout" in kernel}
    assert used.keys() == expected
    for kernel, (registers, shared_bytes, memory_bytes) in used.items():
        assert memory_bytes == 0, kernel
        assert shared_bytes <= (SHARED_BYTES if shape else 0), kernel
        assert shape is None or registers <= max_registers(kernel, shape, architecture), kernel


@needs_compiler
def test_a_bit_for_each_token_fits_into_shared_memory() -> None:
    most = config(vocab_size=300_000)
    kernels.check_sizes(most)
    _, shared_bytes, _ = compiled(most, ANY_SHAPE, "sm_80")["pick"]
    assert shared_bytes <= SHARED_BYTES
