"""Servers of faulty_server.py, forked from a process that has imported all that they need.

    started(flags, environment, folder) --run()--> `python -m tests.helpers.faulty_server`, a second sooner

Most of a start is its imports, and the suite starts sixty servers. The process that forks begins with the
first of them, and ends with the tests. What is forked has no thread and no file of it.
"""

import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path

multiprocessing.get_context("forkserver").set_forkserver_preload(["server"])


class Forked(ForkServerProcess):
    """A process, with what the tests use of subprocess.Popen."""

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid or 0, number)

    def poll(self) -> int | None:
        return self.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.join(timeout)
        assert self.exitcode is not None, "it has not ended"
        return self.exitcode


def started(flags: Sequence[str], environment: Mapping[str, str], folder: Path) -> Forked:
    process = Forked(target=run, args=(flags, environment, folder))
    process.start()
    return process


def run(flags: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
    """Become such a server; what it prints goes to files of the folder."""
    os.chdir(Path(__file__).parents[2])
    os.environ.clear()
    os.environ.update(environment)
    for number, name in ((1, "said"), (2, "log")):
        os.dup2(os.open(folder / name, os.O_WRONLY), number)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.argv[1:] = flags
    runpy.run_module("tests.helpers.faulty_server", run_name="__main__", alter_sys=True)
