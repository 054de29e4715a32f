"""What the .cu files and Python share: numbers stand in devices/kernels.py alone, named functions exist."""

import re
from pathlib import Path

import pytest

from devices.kernels import ANY_SHAPE, FAST_CODE, PLAIN_CODE, constants
from helpers.device_ops import MIXTURES

NAMES = constants(MIXTURES["mxfp4"], ANY_SHAPE).keys()
FILES = [FAST_CODE, PLAIN_CODE]


def without_comments(path: Path) -> str:
    return re.sub("//.*", "", path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_file_defines_what_the_compiler_is_given(path: Path) -> None:
    code = without_comments(path)
    defined = set(re.findall(r"#\s*define\s+(\w+)", code))
    assigned = set(re.findall(r"\b(\w+)(?:\[\w*\])?\s*=[^=]", code))
    assert not (defined | assigned) & NAMES
    assert "#ifndef" not in code


def test_every_constant_is_used() -> None:
    words = {word for path in FILES for word in re.findall(r"\w+", without_comments(path))}
    assert words >= NAMES
