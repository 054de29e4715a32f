"""What devices/ and benches/ ask of CuPy and cuda.h, held against the packages of the extra `cuda`.

They import without a driver, so no GPU is needed: the emulator has these names because we wrote it so, and a
name that CuPy lacks would be missed by the first person with a GPU alone.
"""

import importlib
import inspect
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from devices import kernels

pytestmark = pytest.mark.sweep
cupy: Any = pytest.importorskip("cupy", reason="pip install -e '.[cuda]'")

ROOT = Path(__file__).parents[2]
ASKED = tomllib.loads(Path(__file__).with_name("cupy.toml").read_text(encoding="utf-8"))
CUPY = r"\b(?:cp|import_module\(\"cupy\"\))\.([a-zA-Z_.]+)"


def test_the_names_are_those_that_the_code_has() -> None:
    """`cp.driver` alone is the emulator's: open_driver() asks whether it is there."""
    files = [*(ROOT / "devices").glob("*.py"), ROOT / "benches" / "decoding.py"]
    found = {name for file in files for name in re.findall(CUPY, file.read_text(encoding="utf-8"))}
    used = {name.removesuffix("().ptr") for name in found} - {"driver"}
    assert {re.sub(r"\.(ptr|mem_info)$", "", name) for name in used} == {
        name for name in ASKED["names"] if name.count(".") < 3 and "Device." not in name
    }
    assert not hasattr(cupy, "driver")


@pytest.mark.parametrize(("name", "words"), (ASKED["names"] | ASKED["methods"]).items())
def test_cupy_has_it_with_these_arguments(name: str, words: str) -> None:
    found: Any = cupy
    for part in name.split("."):
        found = getattr(found, part)
    try:
        signature = str(inspect.signature(found))
    except (TypeError, ValueError):
        signature = ""
    text = f"{found.__doc__} {signature}".replace("'", "")
    assert all(word in text for word in words.split()), text


def test_structures_and_constants_are_those_of_cuda_h() -> None:
    [folder] = kernels.include_paths()
    number = kernels.PROGRAMMATIC_STREAM_SERIALIZATION
    asserts = f"""
    #include <cstddef>
    #include "cuda.h"
    static_assert(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION == {number});
    static_assert(sizeof(CUlaunchAttribute) == 72 && offsetof(CUlaunchAttribute, value) == 8);
    static_assert(sizeof(CUlaunchConfig) == 56 && offsetof(CUlaunchConfig, blockDimX) == 12);
    static_assert(offsetof(CUlaunchConfig, sharedMemBytes) == 24 && offsetof(CUlaunchConfig, hStream) == 32);
    static_assert(offsetof(CUlaunchConfig, attrs) == 40 && offsetof(CUlaunchConfig, numAttrs) == 48);
    """
    command = ["g++", "-std=c++17", "-fsyntax-only", "-x", "c++", f"-I{folder}", "-"]
    subprocess.run(command, input=asserts, text=True, check=True)


def test_what_cupy_raises_is_what_a_start_catches() -> None:
    memory, runtime = (importlib.import_module(f"cupy.cuda.{name}") for name in ("memory", "runtime"))
    assert issubclass(memory.OutOfMemoryError, MemoryError)
    assert issubclass(runtime.CUDARuntimeError, Exception)
    assert not issubclass(runtime.CUDARuntimeError, ValueError)
