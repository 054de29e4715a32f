"""kernels.cu by the real compiler, without a GPU: NVRTC for three architectures and shapes of real models.

No kernel of theirs may spill registers to memory, nor keep arrays there that should be registers (`attend`
does for heads of 256, of which no model here has any); registers and shared memory stay within what lets
enough blocks run at once on a processor of 65,536 registers. Needs the packages of the extra `cuda`, and no
driver.
"""

import importlib
import itertools
import re
from typing import Any, NamedTuple

import pytest
from test_kernels import config

from checkpoint.config import Config
from devices.kernels import (
    ANY,
    CODE,
    PLAIN,
    SHAPES,
    Shape,
    attend_threads,
    check_sizes,
    include_paths,
    options,
    signatures,
)


def compiler() -> Any:
    """CuPy's door to NVRTC, which opens without a device, or None."""
    try:
        compiler = importlib.import_module("cupy.cuda.compiler")
        importlib.import_module("cupy_backends.cuda.libs.nvrtc").getVersion()
    except (ImportError, RuntimeError):
        return None
    return compiler if include_paths() else None


pytestmark = pytest.mark.skipif(compiler() is None, reason="needs CuPy, NVRTC and CUDA's headers: .[cuda]")

SIZES = "dim", "hidden_dim", "n_heads", "n_kv_heads", "head_dim", "vocab_size"
# fmt: off
MODELS = {
    name: config(**dict(zip(SIZES, sizes, strict=True)))
    for name, sizes in {
        "Qwen3-0.6B":   (1024,  3072, 16, 8, 128, 151936),
        "Qwen2.5-0.5B": ( 896,  4864, 14, 2,  64, 151936),
        "SmolLM2-135M": ( 576,  1536,  9, 3,  64,  49152),
        "Llama-3-8B":   (4096, 14336, 32, 8, 128, 128256),
    }.items()
}
ARCHITECTURES = ["sm_80", "sm_90", "sm_120"]
# by shape; of kernels that are no product, one; of plain ones, what lets a block of 256 run at all
REGISTERS = {(1, 1): 128, (4, 4): 128, (8, 16): 255, PLAIN: 255}
ONE_BLOCK = {((4, 4), "sm_120"): 168}  # where it takes more, and fewer blocks run at once
LIMITS = {"attend": 168, "attend_prompt": 168, "pick": 64, "count": 64}
# fmt: on
SHARED_BYTES = 48 * 1024  # what a block has without asking


class Use(NamedTuple):
    registers: int
    shared_bytes: int
    memory_bytes: int  # that a thread keeps what it has no registers for in


class Log:
    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text


def compiled(c: Config, shape: Shape, architecture: str) -> dict[str, Use]:
    """What each kernel takes, as ptxas says."""
    log, flags = Log(), (*options(c, shape), f"-arch={architecture}", "--ptxas-options=-v", "-ftz=true")
    compiler()._NVRTCProgram(CODE.read_text(), "kernels.cu", method="cubin").compile(flags, log)
    found = {}
    for part in log.text.split("Compiling entry function '")[1:]:
        memory = sum(int(n) for n in re.findall(r"(\d+) bytes (?:stack frame|spill)", part))
        registers, shared = re.search(r"Used (\d+) registers", part), re.search(r"(\d+) bytes smem", part)
        assert registers
        found[part.partition("'")[0]] = Use(int(registers[1]), int(shared[1]) if shared else 0, memory)
    return found


CASES = list(itertools.product(MODELS, [PLAIN, *SHAPES], ARCHITECTURES))


@pytest.mark.parametrize(
    ("name", "shape", "architecture"), CASES, ids=[f"{n}-{s.rows}x{s.columns}-{a}" for n, s, a in CASES]
)
def test_kernels_fit(name: str, shape: Shape, architecture: str) -> None:
    used = compiled(MODELS[name], shape, architecture)
    products = {"qkv", "out", "gate_up", "down", "logits"}
    plain = {kernel for kernel in signatures(CODE.read_text()) if kernel.startswith("plain_")}
    expected = {PLAIN: plain, ANY: signatures(CODE.read_text()).keys() - plain}
    most = ONE_BLOCK.get((shape, architecture), REGISTERS[shape])
    assert used.keys() == expected.get(shape, products)
    for kernel, use in used.items():
        assert use.memory_bytes == 0, kernel
        assert use.registers <= LIMITS.get(kernel, most), kernel
        assert use.shared_bytes <= (0 if shape == PLAIN else SHARED_BYTES), kernel


@pytest.mark.parametrize("head_dim", [136, 256])
def test_large_heads_fit_into_shared_memory(head_dim: int) -> None:
    c = config(head_dim=head_dim, n_heads=8)
    assert compiled(c, ANY, "sm_80")["attend"].shared_bytes <= SHARED_BYTES
    assert attend_threads(c) == 64


def test_normed_rows_fit_into_shared_memory() -> None:
    widest = config(dim=10_000)
    check_sizes(widest)
    assert compiled(widest, ANY, "sm_80")["gate_up"].shared_bytes <= SHARED_BYTES


def test_a_bit_for_each_token_fits_into_shared_memory() -> None:
    most = config(vocab_size=300_000)
    check_sizes(most)
    assert compiled(most, ANY, "sm_80")["pick"].shared_bytes <= SHARED_BYTES
