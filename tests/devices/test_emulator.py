"""The emulator and its checker, on the two kernels of planted.cu: can they fail?

Most of the bugs that are planted change no output in any order of threads, as most races of a GPU do not.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers import emulator
from helpers.device_ops import sweep
from helpers.emulator import Emulator

pytestmark = pytest.mark.skipif(emulator.MISSING is not None, reason=str(emulator.MISSING))

TEXT = Path(__file__).with_name("planted.cu").read_text(encoding="utf-8")
TOTAL, ROUNDS = re.findall(r"^extern .*?^}\n", TEXT, re.MULTILINE | re.DOTALL)
UNSET, RACE = "shared memory read before it is set", "race"
EITHER = f"{UNSET}|{RACE}"
# fmt: off
#    kernel  name                line                          becomes                     the checker says
PLANTED = [
    (TOTAL,  "no_barrier_1",     "__syncthreads();  // 1",     "",                         EITHER),
    (TOTAL,  "no_barrier_2",     "__syncthreads();  // 2",     "",                         RACE),
    (TOTAL,  "no_fence_there",   "__threadfence();  // there", ";",                        "a read races"),
    (TOTAL,  "no_fence_here",    "__threadfence();  // here",  ";",                        "a read races"),
    (TOTAL,  "no_guard",         "i < n ? x[i] * factor : 0",  "x[i] * factor",            "out of bounds"),
    (TOTAL,  "two_writers",      "threadIdx.x == 33",          "threadIdx.x >= 62",        "two writes race"),
    (TOTAL,  "half_a_warp",      "sum += __shfl",              "if (i % 2) sum += __shfl", "deadlock"),
    (TOTAL,  "too_early",        "  await_previous();\n",      "",                         "await_previous"),
    (TOTAL,  "writes_weights",   "n_done[0] = 0;",             "((bf16*)w)[0] = {0};",     "is written"),
    (TOTAL,  "misaligned",       "part[b]",                    "((float2*)(part + 1))->x", "misaligned"),
    (ROUNDS, "not_awaited",      "await_copies<1>();",         "",                         UNSET),
    (ROUNDS, "left_on_its_way",  "await_copies<0>();",         "",                         "while copies"),
    (ROUNDS, "not_seen_by_all",  "__syncthreads();  // 1",     "",                         EITHER),
    (ROUNDS, "copy_too_far",     "x + at, at < n);\n    end",  "x + at, true);\n    end",  "out of bounds"),
    (ROUNDS, "prefetch_too_far", "n * 4",                      "n * 4 + 16",               "out of bounds"),
    (ROUNDS, "copy_to_global",   "&round[0][threadIdx.x]",     "(uint4*)(y + at)",         "not shared"),
]
# fmt: on


def planted() -> str:
    """The kernels, and beside them each wrong one under a name of its own."""
    kernels = [TEXT]
    for right, name, line, becomes, _ in PLANTED:
        assert right.count(line) == 1, line
        kernels.append(re.sub(r"\b(total|rounds)\(", f"{name}(", right.replace(line, becomes)))
    return "".join(kernels)


def total(cp: Emulator, name: str = "total") -> float:
    kernel = cp.RawModule(code=planted()).get_function(name)
    w, x = np.full(200, 0x4000, np.uint16), np.arange(200, dtype=np.float32)  # 0x4000: 2.0
    y = cp.zeros(1, np.float32)
    arrays = cp.asarray(w), cp.asarray(x), cp.empty(4, np.float32), cp.zeros(1, np.int32), y
    kernel((4,), (64,), (*arrays, np.int32(200)))
    return float(y.get()[0])


def rounds(cp: Emulator, name: str = "rounds") -> list[float]:
    n = 1200
    y = cp.zeros(64, np.float32)
    kernel = cp.RawModule(code=planted()).get_function(name)
    kernel((1,), (64,), (cp.asarray(np.arange(n, dtype=np.float32)), y, np.int32(n)))
    return [float(v) for v in y.get()]


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("order", range(4))
def test_kernels_that_are_right(order: int, check: bool) -> None:
    fours = np.pad(np.arange(1200), (0, 80)).reshape(5, 64, 4).sum((0, 2))
    assert rounds(Emulator(order, check)) == list(fours[::-1])
    assert total(Emulator(order, check)) == 2 * sum(range(200))


@pytest.mark.parametrize("order", sweep([0, 1], [0]))
@pytest.mark.parametrize(("kernel", "name", "line", "becomes", "says"), PLANTED, ids=[p[1] for p in PLANTED])
def test_planted(kernel: str, name: str, line: str, becomes: str, says: str, order: int) -> None:
    run: Any = total if kernel is TOTAL else rounds
    with pytest.raises(RuntimeError, match=says) as caught:
        run(Emulator(order, check=True), name)
    if "deadlock" not in says and "while copies" not in says:
        assert "kernels.cu:" in str(caught.value), "the checker names the line"
