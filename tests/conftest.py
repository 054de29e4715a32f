"""Settings of the suite: one BLAS thread, and no unseeded randomness.

With two BLAS threads everything is slow on a busy machine. Without a GPU, `pytest tests/gpu` is an error
instead of dozens of skips.
"""

import asyncio
import contextlib
import ctypes
import gc
import inspect
import itertools
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"  # before NumPy is imported

import pytest  # noqa: E402
from hypothesis import HealthCheck, Phase, settings  # noqa: E402

from helpers.limits import PATIENCE_S  # noqa: E402

os.environ.setdefault("PYTEST_TIMEOUT", f"{4 * PATIENCE_S}")  # for a test that hangs, unless it has a mark
N_EXAMPLES = int(os.environ.get("EXAMPLES", "25"))  # of a law; `make check` and the mutants try 100
NO_CLOCK: Any = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}  # of a busy machine
# The course's judge has the smallest example from oracle.py; Hypothesis searches half a minute for one.
PHASES = [each for each in Phase if "NO_SHRINK" not in os.environ or each.name not in ("shrink", "explain")]
REPEATABLE: Any = {"derandomize": True, "database": None, "max_examples": N_EXAMPLES, "phases": PHASES}
settings.register_profile("suite", **REPEATABLE, **NO_CLOCK)
settings.load_profile("suite")

ROOT = Path(__file__).parents[1]
GPU_TESTS = ROOT / "tests" / "gpu"
LONGEST = "test_rules", "test_bench", "test_course", "test_simulate", "test_kernels", "test_check"


def pytest_configure(config: pytest.Config) -> None:
    if getattr(config.option, "dist", "no") == "load":  # pytest -n auto
        # Each worker has a run of files: few start a server twice, and none works alone in the end.
        config.option.dist = "worksteal"
    paths = [Path(argument.partition("::")[0]).resolve() for argument in config.args]
    if not any(path.is_relative_to(GPU_TESTS) for path in paths):
        return
    from devices import cuda

    if reason := cuda.missing():
        raise pytest.UsageError(f"tests/gpu is for a GPU: {reason}")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    return (os.cpu_count() or 1) + 1  # of `-n auto`: tests wait now and then


@pytest.hookimpl(trylast=True)  # without those of the sweep
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let each worker begin with some of the files whose tests are the longest: in the end none works alone.

    pytest-xdist gives the first worker the first third of the items, and so on.
    """
    n_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    shares: list[list[pytest.Item]] = [[] for _ in range(n_workers)]
    for i, name in enumerate(LONGEST):
        shares[i % n_workers] += [item for item in items if item.path.stem == name]
    others = iter([item for item in items if item.path.stem not in LONGEST])
    for share in shares:
        share += itertools.islice(others, max(0, len(items) // n_workers - len(share)))
    items[:] = [*itertools.chain(*shares), *others]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


TRIM: Any = getattr(ctypes.CDLL(None), "malloc_trim", int)  # of glibc: gives free memory to the system
MARK = "STARTED_BY_TESTS"  # in the environment of all that tests start: the process that runs them


@pytest.fixture(scope="session", autouse=True)
def no_process_is_left() -> Iterator[None]:
    """Fail if a process outlives the one that started it: of servers that were killed eighteen were left."""
    os.environ[MARK] = str(os.getpid())
    yield
    for _ in range(int(100 * PATIENCE_S)):
        if not orphans():
            return
        time.sleep(0.01)
    pytest.fail(f"processes are left: {orphans()}")


@pytest.fixture(scope="module", autouse=True)
def a_module_leaves_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    """End the processes that follow grammars, and keep no memory: the peaks of modules would add up."""
    yield
    for value in vars(request.module).values():
        getattr(value, "cache_clear", int)()  # models, and answers of them
    getattr(sys.modules.get("helpers.grammars"), "end_all", int)()
    TRIM(0)


def orphans() -> list[str]:
    """Return the commands of processes with our mark whose parents are neither marked nor this process."""
    mark, parents, commands = f"{MARK}={os.getpid()}".encode(), dict[int, int](), dict[int, str]()
    for folder in Path("/proc").glob("[0-9]*"):  # only Linux has it
        with contextlib.suppress(OSError):  # it has ended meanwhile, or is another user's
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                stat = (folder / "stat").read_text()
                parents[int(folder.name)] = int(stat.rpartition(")")[2].split()[1])
                commands[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
    return [commands[pid] for pid, parent in parents.items() if parent not in {os.getpid(), *parents}]


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The server of a file of tests, with its FLAGS; in the end its log has no traceback but of faults."""
    from helpers.serving import serve  # here: tests/gpu runs where the server's packages are not installed

    with serve(*getattr(request.module, "FLAGS", ())) as started:
        yield started
        bad = ["ERROR websocket", "ERROR uvicorn", "Task exception was never retrieved"]
        if not hasattr(request.module, "RAISES"):  # the fault that a request asks for
            bad.append("Traceback")
        assert [line for line in started.log().splitlines() if any(each in line for each in bad)] == []


def pytest_collection_finish() -> None:
    gc.freeze()  # what was collected is half a gigabyte that lives on: garbage is looked for elsewhere
