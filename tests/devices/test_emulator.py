"""The emulator and its checker, on a kernel of their own: can they fail?

Each bug is planted into a kernel that is right; most of them change no output in any order of threads, as
most races of a GPU do not on the day they are written.
"""

import re
from typing import Any

import numpy as np
import pytest

from helpers import emulator
from helpers.device_ops import sweep
from helpers.emulator import Emulator

pytestmark = pytest.mark.skipif(emulator.MISSING is not None, reason=str(emulator.MISSING))

HEAD = """
typedef __nv_bfloat16 bf16;
typedef const __nv_bfloat16 weight;
"""
# y[0] = sum of x[i] * w[i], by blocks of 64; the last block to finish adds up what the blocks left in `part`
TOTAL = """
extern "C" __global__ void __launch_bounds__(64) total(weight* w, const float* x, float* part, int* n_done,
                                                       float* y, int n) {
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
extern "C" __global__ void __launch_bounds__(64) rounds(const float* x, float* y, int n) {
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
# the fence of thread 0 on the wrong side of the barrier: it is not for what others do there
BARRIER, THERE = "  __syncthreads();  // 2\n", "  if (threadIdx.x == 0) __threadfence();  // there\n"
EARLY = BARRIER + THERE, THERE + BARRIER
BARRIER, HERE = "  __syncthreads();  // 3\n", "  if (threadIdx.x == 0) __threadfence();  // here\n"
LATE = HERE + BARRIER, BARRIER + HERE
UNSET, RACE = "shared memory read before it is set", "race"
# fmt: off
#    name                 line                          becomes                        the checker says
PLANTED = [
    ("no_barrier_1",      "__syncthreads();  // 1",     "",                            f"{UNSET}|{RACE}"),
    ("no_barrier_2",      "__syncthreads();  // 2",     "",                            RACE),
    ("no_barrier_3",      "__syncthreads();  // 3",     "",                            f"{UNSET}|{RACE}"),
    ("no_fence_there",    "__threadfence();  // there", ";",                           "a read races"),
    ("no_fence_here",     "__threadfence();  // here",  ";",                           "a read races"),
    ("other_fence_there", "x == 0) __threadfence();  // there", "x == 9) __threadfence();", "a read races"),
    ("other_fence_here",  "x == 0) __threadfence();  // here",  "x == 9) __threadfence();", "a read races"),
    ("fence_too_early",   *EARLY, "a read races"),
    ("fence_too_late",    *LATE, "a read races"),
    ("one_too_far",       "b < gridDim.x",              "b <= gridDim.x",              "out of bounds"),
    ("no_guard",          "i < n ? x[i] * factor : 0",  "x[i] * factor",               "out of bounds"),
    ("two_writers",       "threadIdx.x == 33",          "threadIdx.x >= 62",           "two writes race"),
    ("three_warps",       "+ of_warp[1]",               "+ of_warp[2]",                f"bounds|{UNSET}"),
    ("barrier_in_branch", "__syncthreads();  // 1",     "if (i & 32) __syncthreads();", f"{UNSET}|{RACE}"),
    ("half_a_warp",       "sum += __shfl",              "if (i % 2) sum += __shfl",    "deadlock"),
    ("too_early",         "  await_previous();\n",      "",                            "await_previous"),
    ("writes_weights",    "n_done[0] = 0;",             "((bf16*)w)[0] = {0};",        "a weight is written"),
    ("misaligned",        "part[b]",                    "((float2*)(part + 1))->x",    "misaligned"),
]
PLANTED_IN_ROUNDS = [
    ("not_awaited",       "await_copies<1>();",         "",                            UNSET),
    ("awaited_too_few",   "await_copies<1>();",         "await_copies<2>();",          UNSET),
    ("not_ended",         "end_copies();  // of",       "// of",                       UNSET),
    ("left_on_its_way",   "await_copies<0>();",         "",                            "ended while copies"),
    ("not_seen_by_all",   "__syncthreads();  // 1",     "",                            f"{UNSET}|{RACE}"),
    ("not_read_by_all",   "__syncthreads();  // 2",     "",                            f"{UNSET}|{RACE}"),
    ("copy_too_far",      "x + at, at < n);\n    end",  "x + at, true);\n    end",     "out of bounds"),
    ("copy_too_early",    "  await_previous();\n",      "",                            "await_previous"),
    ("copy_misaligned",   "x + at, at < n);\n    end",  "x + at + 1, true);\n    end", "misaligned"),
    ("prefetch_too_far",  "n * 4",                      "n * 4 + 16",                  "out of bounds"),
    ("prefetch_odd",      "n * 4",                      "n * 4 - 8",                   "misaligned"),
    ("copy_to_global",    "&round[0][threadIdx.x]",     "(uint4*)(y + at)",            "not shared"),
]
# fmt: on


def planted() -> str:
    """The kernels, and beside them each wrong one under a name of its own."""
    kernels = [TOTAL, ROUNDS]
    for right, bugs in ((TOTAL, PLANTED), (ROUNDS, PLANTED_IN_ROUNDS)):
        for name, line, becomes, _ in bugs:
            assert right.count(line) == 1, line
            kernels.append(
                re.sub(r"void __launch_bounds__\(64\) \w+", f"void {name}", right.replace(line, becomes))
            )
    return HEAD + "".join(kernels)


def total(cp: Emulator, name: str = "total", n: int = 200, x: Any = None) -> float:
    kernel = cp.RawModule(code=planted()).get_function(name)
    x = np.arange(n, dtype=np.float32) if x is None else x
    w = np.full(n, 0x4000, np.uint16)  # 2.0
    n_blocks = -(-n // 64)
    y = cp.zeros(1, np.float32)
    arrays = cp.asarray(w), cp.asarray(x), cp.empty(n_blocks, np.float32), cp.zeros(1, np.int32), y
    kernel((n_blocks,), (64,), (*arrays, np.int32(n)))
    return float(y.get()[0])


def rounds(cp: Emulator, name: str = "rounds", n: int = 1200) -> list[float]:
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
@pytest.mark.parametrize(
    ("run", "name", "says"),
    [(total, row[0], row[3]) for row in PLANTED] + [(rounds, row[0], row[3]) for row in PLANTED_IN_ROUNDS],
    ids=[row[0] for row in PLANTED + PLANTED_IN_ROUNDS],
)
def test_planted(run: Any, name: str, says: str, order: int) -> None:
    with pytest.raises(RuntimeError, match=says) as caught:
        run(Emulator(order, check=True), name)
    if "deadlock" not in says and "ended" not in says:
        assert "kernels.cu:" in str(caught.value), "the checker names the line"
