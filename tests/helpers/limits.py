"""Limits that other work on the machine does not count for: patience by its load, and processor time."""

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import NoReturn

# How many processes want each core, at least one: everything takes so many times as long.
SLOWNESS = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
# For what takes milliseconds on a quiet machine: load may come later. Mutants that hang must not take long.
PATIENCE_S = float(os.environ.get("PATIENCE_S", "120")) * SLOWNESS


@contextlib.contextmanager
def processor_time(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block when it has computed for so long: for what would take hours."""

    def end(*_: object) -> NoReturn:
        raise TimeoutError(f"expected an end within {seconds} s of processor time")

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
