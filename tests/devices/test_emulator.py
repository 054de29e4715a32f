"""The emulator and its checker, on two kernels of their own: can they fail?

Most of the bugs that are planted change no output in any order of threads, as most races of a GPU do not.
"""

import re
from typing import Any

import numpy as np
import pytest

from helpers import emulator
from helpers.device_ops import sweep
from helpers.emulator import Emulator

pytestmark = pytest.mark.skipif(emulator.MISSING is not None, reason=str(emulator.MISSING))

HEAD = "typedef __nv_bfloat16 bf16;\ntypedef const __nv_bfloat16 weight;\n"
# y[0] = sum of x[i] * w[i], by blocks of 64; the last block to finish adds up what the blocks left in `part`
TOTAL = """
extern "C" __global__ void __launch_bounds__(64) total(weight *w, const float *x, float *part, int *n_done,
                                                       float *y, int n) {
  __shared__ float of_warp[2];
  __shared__ int is_last;
  int i = blockIdx.x * 64 + threadIdx.x;
  float factor = i < n ? __bfloat162float(w[i]) : 0;
  await_previous();
  float sum = i < n ? x[i] * factor : 0;
  for (int m = 16; m; m /= 2) sum += __shfl_xor_sync(~0u, sum, m);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sum;
  __syncthreads();  // 1
  if (threadIdx.x == 40) part[blockIdx.x] = of_warp[0] + of_warp[1];
  __syncthreads();  // 2
  if (threadIdx.x == 0) __threadfence();  // there
  if (threadIdx.x == 0) is_last = atomicAdd(n_done, 1) == gridDim.x - 1;
  if (threadIdx.x == 0) __threadfence();  // here
  __syncthreads();  // 3
  if (!is_last) return;
  if (threadIdx.x == 33) {
    float all = 0;
    for (int b = 0; b < gridDim.x; b++) all += part[b];
    y[0] = all;
    n_done[0] = 0;
  }
}
"""
# y[i] = sum of the 4 numbers x[4 (63 - i)] and of those 256, 512, ... behind them, by copies one round ahead
ROUNDS = """
extern "C" __global__ void __launch_bounds__(64) rounds(const float *x, float *y, int n) {
  __shared__ uint4 round[2][64];
  int at = threadIdx.x * 4;
  if (threadIdx.x == 0) prefetch(x, n * 4);
  await_previous();
  begin_copy(&round[0][threadIdx.x], x + at, at < n);
  end_copies();
  float sum = 0;
  for (int i = 0; i * 256 < n; i++) {
    at += 256;
    begin_copy(&round[(i + 1) % 2][threadIdx.x], x + at, at < n);
    end_copies();  // of the next round
    await_copies<1>();
    __syncthreads();  // 1
    uint4 v = round[i % 2][63 - threadIdx.x];
    sum += __uint_as_float(v.x) + __uint_as_float(v.y) + __uint_as_float(v.z) + __uint_as_float(v.w);
    __syncthreads();  // 2
  }
  await_copies<0>();
  y[threadIdx.x] = sum;
}
"""
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
    kernels = [HEAD, TOTAL, ROUNDS]
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
