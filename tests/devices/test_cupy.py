"""What devices/ and benches/ ask of CuPy, held against the packages of the extra `cuda`.

They import without a driver, so no GPU is needed: the emulator has these names because we wrote it so, and a
name that CuPy lacks would be missed by the first person with a GPU alone.
"""

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from helpers.tables import table

pytestmark = pytest.mark.sweep
cupy: Any = pytest.importorskip("cupy", reason="pip install -e '.[cuda]'")

ROOT = Path(__file__).parents[2]
ASKED = table("cupy")
CUPY = r"\b(?:cp|import_module\(\"cupy\"\))\.([a-zA-Z_.]+)"


def test_the_names_are_those_that_the_code_has() -> None:
    files = [*(ROOT / "devices").glob("*.py"), ROOT / "benches" / "decoding.py"]
    found = {name for file in files for name in re.findall(CUPY, file.read_text(encoding="utf-8"))}
    assert {re.sub(r"\.mem_info$", "", name) for name in found} == {
        name for name in ASKED["names"] if name.count(".") < 3 and "Device." not in name
    }


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


def test_what_cupy_raises_is_what_a_start_catches() -> None:
    memory, runtime = (importlib.import_module(f"cupy.cuda.{name}") for name in ("memory", "runtime"))
    assert issubclass(memory.OutOfMemoryError, MemoryError)
    assert issubclass(runtime.CUDARuntimeError, Exception)
    assert not issubclass(runtime.CUDARuntimeError, ValueError)
