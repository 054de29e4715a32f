"""A limit on the processor time that a block of a test may take: other work on the machine does not count."""

import contextlib
import signal
from collections.abc import Iterator
from typing import NoReturn


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
