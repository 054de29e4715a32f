"""The emulator and its checker, on a kernel of their own: can they fail?

Each bug is planted into a kernel that is right; most of them change no output in any order of threads, as
most races of a GPU do not on the day they are written.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import emulator
from emulator import Emulator

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
# fmt: on


def planted() -> str:
    """The kernel, and beside it each wrong one under a name of its own."""
    kernels = [TOTAL]
    for name, line, becomes, _ in PLANTED:
        assert TOTAL.count(line) == 1, line
        kernels.append(
            TOTAL.replace(line, becomes).replace("void __launch_bounds__(64) total", f"void {name}")
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


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("order", range(4))
def test_total(order: int, check: bool) -> None:
    assert total(Emulator(order, check)) == 2 * sum(range(200))


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize(("name", "says"), [(row[0], row[3]) for row in PLANTED])
def test_planted(name: str, says: str, order: int) -> None:
    with pytest.raises(RuntimeError, match=says) as caught:
        total(Emulator(order, check=True), name)
    if "deadlock" not in str(caught.value):
        assert "kernels.cu:" in str(caught.value), "the checker names the line"


def bad_arguments() -> Iterator[tuple[str, Any]]:
    cp = Emulator()
    x = cp.zeros(64, np.float32)
    yield "wants f4, not float64", cp.zeros(64, np.float64)
    yield "wants f4, not int32", cp.zeros(64, np.int32)
    yield "not contiguous", cp.zeros((64, 2), np.float32)[:, 0]
    yield "an array of the device", x.get()
    yield "an array of the device", 0


@pytest.mark.parametrize(("says", "x"), list(bad_arguments()))
def test_arguments_of_another_type(says: str, x: Any) -> None:
    cp = Emulator()
    kernel = cp.RawModule(code=planted()).get_function("total")
    w, part, n_done, y = (cp.zeros(64, t) for t in (np.uint16, np.float32, np.int32, np.float32))
    with pytest.raises(TypeError, match=says):
        kernel((1,), (64,), (w, x, part, n_done, y, np.int32(64)))
    with pytest.raises(TypeError, match="CuPy passes float"):
        kernel((1,), (64,), (w, part, part, n_done, y, 64.0))
    with pytest.raises(TypeError, match="takes 6 arguments"):
        kernel((1,), (64,), (w,))


def test_work_is_done_when_somebody_waits() -> None:
    """As late as a GPU might do it: a buffer of the host that is used again too early shows."""
    cp = Emulator()
    stream, event, host = cp.cuda.Stream(), cp.cuda.Event(), np.zeros(4, np.float32)
    device = cp.zeros(4, np.float32)
    device.set(np.ones(4, np.float32), stream)
    device.get(stream, out=host, blocking=False)
    event.record(stream)
    assert not event.done
    assert host.sum() == 0
    event.synchronize()
    assert event.done
    assert host.sum() == 4


def test_a_graph_repeats_what_was_captured() -> None:
    cp = Emulator()
    step = """extern "C" __global__ void step(int* token, int* position, int* out) {
      await_previous();
      out[position[0]] = token[0];
      token[0] = token[0] * 3 % 101;
      position[0] += 1;
    }"""
    kernel = cp.RawModule(code=HEAD + step).get_function("step")
    token, position, out = cp.zeros(1, np.int32), cp.zeros(1, np.int32), cp.zeros(8, np.int32)
    token.set(np.array([7], np.int32))
    with cp.cuda.Stream() as stream:
        stream.begin_capture()
        kernel((1,), (1,), (token, position, out))
        graph = stream.end_capture()
        for _ in range(8):
            graph.launch(stream)
        stream.synchronize()
    assert list(out.get()) == [7 * 3**i % 101 for i in range(8)]


def test_memory_that_nobody_wrote_is_nan() -> None:
    cp = Emulator()
    assert np.isnan(cp.empty(8, np.float32).get()).all()
    kernel = """extern "C" __global__ void unset(float* y) {
      __shared__ float s[4];
      await_previous();
      if (y[0] > 0) s[1] = 2;
      y[0] = s[1];
    }"""
    y = cp.zeros(1, np.float32)
    cp.RawModule(code=kernel).get_function("unset")((1,), (1,), (y,))
    assert np.isnan(y.get()).all()


def test_the_device_has_an_end() -> None:
    with pytest.raises(MemoryError):
        Emulator(memory=1000).zeros(300, np.float32)
