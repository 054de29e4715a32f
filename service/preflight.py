"""What is checked before all imports: that the packages are there, and that Python is new enough.

    pyproject.toml, what is installed --check()--> nothing, or one line on stderr and exit status 2

Rules of this file:
1. It imports the standard library alone, and an old Python can read it: its line is for one.
2. Ctrl-C ends the process at once and without a traceback until the server answers requests: while modules
   are imported, and while a model is loaded. A library that calls Python back may swallow an exception
   raised here, as llvmlite does. Nothing is lost: the store survives worse.
"""

import os
import signal
import sys

OLDEST_PYTHON = (3, 11)  # requires-python of pyproject.toml, which only such a Python can read
INTERRUPTED = 128 + signal.SIGINT  # exit status, as a shell has it for a process that Ctrl-C has ended
PYPROJECT = os.path.join(os.path.dirname(__file__), os.pardir, "pyproject.toml")


def check() -> None:
    """End the process if the server's modules cannot be imported, or if Ctrl-C comes before serve() runs."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    if sys.version_info < OLDEST_PYTHON:
        expected, got = (".".join(map(str, version[:2])) for version in (OLDEST_PYTHON, sys.version_info))
        problem = f"expected Python {expected} or later, got {got}: install it, and start the server with it"
    else:
        problem = missing_packages()
    if problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)


def missing_packages() -> str:
    import re
    import tomllib  # not there in an old Python
    from importlib import metadata

    with open(PYPROJECT, "rb") as file:
        dependencies = tomllib.load(file)["project"]["dependencies"]
    missing = []
    for dependency in dependencies:
        name = re.split(r"[^\w-]", dependency)[0]
        try:
            metadata.distribution(name)
        except metadata.PackageNotFoundError:
            missing.append(name)
    if not missing:
        return ""
    return f"not installed: {', '.join(missing)}; in the server's folder, run: pip install -e '.[fast]'"
