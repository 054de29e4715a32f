"""check.py on the emulator, with planted faults: each is caught, named and stepped back from.

A fault is planted behind a kernel of kernels.cu, in the memory that it has written, or at its launch.
plain.cu is left alone, or both are hit, and then the CPU serves.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from devices import check
from devices.cuda import NO_GRAPHS, OPS, CudaOps, plainly
from helpers import emulator
from helpers.device_models import both_of
from helpers.device_ops import TABLES, sweep
from helpers.emulator import ITEMS, Emulator, Kernel, Module
from helpers.serving import TINY
from service import loading, options
from worker import LocalWorker, Workers

pytestmark = pytest.mark.skipif(emulator.MISSING is not None, reason=str(emulator.MISSING))
ALL_STEPS = check.STEPS
SPOILED: dict[str, dict[str, str]] = TABLES["spoiled"]


@pytest.fixture(autouse=True)
def few_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt, a decode, drafts: the long prompt after them is most of the time. No verdict is kept yet."""
    monkeypatch.setenv("LLMREF_CACHE", str(tmp_path))
    monkeypatch.setattr(check, "STEPS", ALL_STEPS[: check.FOR_NUMPY])


def wrong_stride(values: Any, before: Any, n_rows: int) -> None:
    values[:] = np.roll(values, 1)


def missing_barrier(values: Any, before: Any, n_rows: int) -> None:
    """Every second number is read before it was written."""
    values[::2] = before[::2]


def depends_on_the_batch(values: Any, before: Any, n_rows: int) -> None:
    """The lowest bit of some numbers."""
    if n_rows > 1:
        values.view(np.uint8)[: 64 : values.itemsize] ^= 1


def no_number(values: Any, before: Any, n_rows: int) -> None:
    values[:1] = {"f4": np.nan, "u2": 0x7FC0, "i4": -1, "u4": 5}[values.dtype.str[1:]]


def no_number_at_the_end(values: Any, before: Any, n_rows: int) -> None:
    """Of keys: a place that no query has seen yet."""
    no_number(values[-1:], before, n_rows)


def raises(values: Any, before: Any, n_rows: int) -> None:
    raise RuntimeError("CUDA_ERROR_LAUNCH_FAILED: {unspecified launch failure}")


FAULTS = [wrong_stride, missing_barrier, depends_on_the_batch, no_number, raises]


class SpoiledKernel(Kernel):
    """A kernel whose fault is seen when it has run; `raises` is seen at its launch."""

    fault: Any
    array: str

    def submit(self, grid: Any, block: Any, packed: list[Any]) -> None:
        if self.fault is raises:
            raises(None, None, 0)
        given = {p.name: (p, value.value) for p, value in zip(self.parameters, packed, strict=True)}
        parameter, address = given[self.array]
        memory, begin, n_bytes = self.emulator.memory_at(address)
        first = address - memory.ctypes.data
        values = memory[first : begin + n_bytes - memory.ctypes.data].view(ITEMS[parameter.kind])
        n_blocks = grid[0 if self.name in ("embed", "pick", "add_experts") else -1]
        n_rows = given["n_rows"][1] if "n_rows" in given else n_blocks
        before = np.empty_like(values)
        self.emulator.submit(lambda: np.copyto(before, values))
        super().submit(grid, block, packed)
        self.emulator.submit(lambda: self.fault(values, before, n_rows))


class Spoiled(Emulator):
    """A GPU on which some fast kernels are wrong; with `plain`, the plain ones of the same names as well."""

    def __init__(self, kernels: dict[str, str], fault: Any, plain: bool = False) -> None:
        super().__init__()
        self.spoiled, self.fault, self.plain = kernels, fault, plain

    def RawModule(self, *, code: str, options: Any = ()) -> Module:
        module = super().RawModule(code=code, options=options)
        if "plain.cu" not in code.partition("\n")[0] or self.plain:
            module.get_function = lambda name: self.function(module, name)  # type: ignore[method-assign]
        return module

    def function(self, module: Module, name: str) -> Kernel:
        if name not in self.spoiled:
            return Kernel(module, name, module.signatures[name][1])
        kernel = SpoiledKernel(module, name, module.signatures[name][1])
        kernel.fault, kernel.array = self.fault, self.spoiled[name]
        return kernel


def row(of: str, fault: str, degraded: Mapping[str, str]) -> None:
    """Print a row of results/gpu/planted.md: what was spoiled and how, what ran instead, and why."""
    for how, why in degraded.items():
        print(f"\n| {of} | {fault.replace('_', ' ')} | {how} | {why} |")


def ops_on(cp: Any, name: str, max_seq_len: int = 64) -> CudaOps:
    model, packed = both_of(name)
    return CudaOps(model.config, packed, max_seq_len, 24, 6, cp)


EVERY = [(op, fault) for op in OPS for fault in FAULTS if (op, fault) != ("count", depends_on_the_batch)]
FIRST = [("attend", wrong_stride), ("qkv", raises), ("pick", depends_on_the_batch)]


@pytest.mark.parametrize(("op", "fault"), sweep(EVERY, FIRST))
def test_a_planted_fault_is_named_and_stepped_back_from(
    op: str, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if op == "attend":  # whose blocks are others in each step
        monkeypatch.setattr(check, "STEPS", ALL_STEPS)
    name = "qwen3-moe-dense-layers" if op == "experts" else "smollm3-untied-biases"
    ops, right = (ops_on(cp, name, 192) for cp in (Spoiled(SPOILED[op], fault), Emulator()))
    check.check(ops)
    row(op, fault.__name__, ops.degraded)
    assert [*ops.degraded] == [plainly(op)]
    assert max(ops.differences.values()) < check.LIMIT
    tops: Any = [[c.top for choices in check.run(each, 1) for c in choices] for each in (ops, right)]
    assert np.median(np.abs(np.subtract(*tops)[..., 1])) < check.NUMPY_LIMIT


def test_a_number_that_is_none_fails_wherever_it_lies() -> None:
    ops = ops_on(Spoiled({"write_kv": "keys"}, no_number_at_the_end), "smollm3-untied-biases")
    check.check(ops)
    row("attend", no_number_at_the_end.__name__, ops.degraded)
    assert ops.degraded == {plainly("attend"): "it differs from them by nan of a number"}


def one_row(values: Any, before: Any, n_rows: int) -> None:
    """Of the prompt of 12, which every sequence of the batch has."""
    if n_rows in (12, 12 * check.SLOTS):
        values.reshape(-1, 48)[:n_rows:12] *= 2


def test_another_expert_may_be_chosen_of_a_near_tie() -> None:
    ops = ops_on(Spoiled(SPOILED["experts"] | SPOILED["out"], one_row), "qwen3-moe-dense-layers")
    check.check(ops)
    assert [*ops.degraded] == [plainly("out")]


def test_what_a_driver_refuses_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture that does not begin."""
    ops = ops_on(Emulator(), "smollm3-untied-biases", 160)
    monkeypatch.setattr(emulator.Stream, "begin_capture", None)
    check.check(ops)
    row("graphs", "a capture that does not begin", ops.degraded)
    assert [*ops.degraded] == [NO_GRAPHS]


class LostKernel(emulator.Stream):
    """A driver whose graphs leave out the last kernel but the copy of the choices."""

    def end_capture(self) -> SimpleNamespace:
        self.recording = (self.recording or [])[:-1]
        return super().end_capture()


def test_a_graph_with_other_bits_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "STEPS", [*check.STEPS, 1, 1])
    cp = Emulator()
    cp.cuda.Stream = lambda non_blocking=False: LostKernel(cp)
    ops = ops_on(cp, "smollm3-untied-biases")
    check.check(ops)
    row("graphs", "a graph without its last kernel", ops.degraded)
    assert [*ops.degraded] == [NO_GRAPHS]


def load(cp: Emulator, monkeypatch: pytest.MonkeyPatch, *others: str) -> LocalWorker:
    monkeypatch.setattr(check, "STEPS", ALL_STEPS[:1])
    monkeypatch.setattr(check, "N_LAYERS", 2)
    monkeypatch.setitem(sys.modules, "cupy", cast("ModuleType", cp))
    monkeypatch.setitem(sys.modules, "devices.cpu", cast("ModuleType", None))  # NumPy is the CPU's
    command = ["--model", str(TINY), "--max-model-len", "64", "--max-batch", "3", *others]
    worker = loading.load(TINY, options.arguments().parse_args(command))
    worker.engine.close()
    return worker


def test_the_verdict_is_kept(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The second start checks nothing, steps back and says so all the same; --check-kernels asks again."""
    n_launches = []
    for others in ([], [], ["--check-kernels"]):
        caplog.clear()
        cp = Spoiled(SPOILED["qkv"] | SPOILED["out"], depends_on_the_batch)
        worker = load(cp, monkeypatch, *others)
        n_launches.append(cp.n_launches)
        lines = loading.facts(worker)
        why = "a row has other bits in a batch"
        assert lines["degraded"] == f"qkv by plain kernels ({why}), out by plain kernels ({why})"
        assert lines["kernels"].startswith("checked on the emulator: 7 ops, largest difference 0.")
        assert Workers(worker).degraded() == "qkv by plain kernels, out by plain kernels"
        report = "Please report it: `python bench.py gpu-report`"
        assert caplog.messages == [f"{op} by plain kernels: {why}. {report}" for op in ("qkv", "out")]
    assert n_launches[1] == 0 < n_launches[0] == n_launches[2]
    assert load(Emulator(), monkeypatch).engine.degraded, "it is of the same GPU, driver, CuPy and code"


class Short(Emulator):
    """A GPU that has no memory left from some allocation on; the pinned memory of the host counts as well."""

    def __init__(self, n_left: float) -> None:
        super().__init__()
        self.n_left = n_left
        self.pinned = self.cuda.alloc_pinned_memory
        self.cuda.alloc_pinned_memory = self.take_pinned

    def take_pinned(self, n_bytes: int) -> Any:
        self.take()
        return self.pinned(n_bytes)

    def take(self) -> None:
        self.n_left -= 1
        if self.n_left < 0:
            raise MemoryError("out of memory allocating 512 bytes")

    def empty(self, shape: Any, dtype: Any) -> Any:
        self.take()
        return super().empty(shape, dtype)


@pytest.mark.parametrize("n_tried", sweep([2, 10**6], [2]))
@pytest.mark.timeout(1200)
def test_without_memory_the_cpu_serves(
    n_tried: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """From the first allocation to the last: wherever the memory ends."""
    cp = Short(1e9)
    load(cp, monkeypatch)
    n = int(1e9 - cp.n_left)
    for n_left in np.linspace(0, n - 1, min(n, n_tried)).astype(int):
        caplog.clear()
        with monkeypatch.context() as patches:  # which keeps what it replaces
            worker = load(Short(n_left), patches, "--check-kernels")
        assert loading.facts(worker)["degraded"].startswith("by the CPU (out of memory allocating")
        assert not worker.engine.about["device"].startswith("CUDA")
        assert "the CPU serves, because the GPU cannot: out of memory allocating" in caplog.text
    row("memory", f"{min(n, n_tried)} of {n} allocations, one at a time", worker.engine.degraded)
    with pytest.raises(ValueError, match="--device cuda: out of memory allocating"):
        load(Short(n_left), monkeypatch, "--check-kernels", "--device", "cuda")


@pytest.mark.parametrize("fault", [no_number, raises])
def test_where_plain_kernels_fail_too_the_cpu_serves(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cp = Spoiled(SPOILED["qkv"], fault, plain=True)
    worker = load(cp, monkeypatch)
    row("qkv, plain kernels too", fault.__name__, worker.engine.degraded)
    assert loading.facts(worker)["degraded"].startswith("by the CPU (")
    with pytest.raises(ValueError, match="--device cuda: "):
        load(cp, monkeypatch, "--device", "cuda")
