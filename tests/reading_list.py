"""What one streamed request passes: the functions of the spine.

    server.serve(), traced --one request--> {module: its functions}

    python tests/reading_list.py             prints it
    python tests/reading_list.py --write     puts it into docs/reading.md; test_walkthrough.py checks that

The server is the real one, in this process, with the tiny model and NumpyOps; a thread of it is the client.
Not in the list: what runs at the start and at the end of the server, and what stands in the chapters.
"""

import asyncio
import contextlib
import http.client
import inspect
import json
import os
import re
import signal
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # the server's modules

import server
import walkthrough
from checkpoint import hub
from middleware import Keys
from service import loading, options
from service.connections import EventLoop, bind
from store import Retention, Store

BEGIN = "<!-- made by `python tests/reading_list.py --write` -->\n```text\n"
END = "```\n<!-- end of the reading list -->"
PAGE = walkthrough.ROOT / "docs" / "reading.md"
BODY = {"model": "tiny", "input": "What is 2+2?", "temperature": 0, "stream": True}
FLAGS = ["--model", str(walkthrough.TINY), "--port", "0", "--log-level", "warning", "--secret", "any"]
AFTERWARDS_S = 0.5  # in which the connection is closed and the response written to the store
INDENT = 16
BY_THE_CLOCK = {"Registry.evict", "Store.evict", "Store._ids"}


class Tracer:
    """The code that is called, in any thread."""

    def __init__(self) -> None:
        self.is_on = False
        self.called: set[CodeType] = set()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if self.is_on and event == "call":
            self.called.add(frame.f_code)


def ask(port: int, tracer: Tracer) -> None:
    """Be the client of one request, then stop the server."""
    client = http.client.HTTPConnection("127.0.0.1", port)
    client.request("GET", "/health")  # answered once the server has started
    client.getresponse().read()
    tracer.is_on = True
    client.request("POST", "/v1/responses", json.dumps(BODY), {"Content-Type": "application/json"})
    client.getresponse().read()
    client.close()
    time.sleep(AFTERWARDS_S)
    tracer.is_on = False
    os.kill(os.getpid(), signal.SIGTERM)


def traced() -> set[CodeType]:
    tracer = Tracer()
    args = options.arguments().parse_args(FLAGS)
    args.device = "cpu"
    sys.modules["numba"] = None  # type: ignore[assignment]  # NumpyOps, also where Numba is installed
    listener = bind(args.host, args.port)
    threading.setprofile(tracer)
    sys.setprofile(tracer)
    local = loading.load(hub.find(args.model, args.revision), args)
    store = Store(args.store, Retention())
    threading.Thread(target=ask, args=(listener.getsockname()[1], tracer)).start()
    what_it_prints = contextlib.redirect_stdout(sys.stderr)
    with what_it_prints, asyncio.Runner(loop_factory=EventLoop) as runner:
        runner.run(server.serve(args, Keys([]), local, None, store, listener))
    return tracer.called


def spine_functions(called: set[CodeType]) -> dict[Path, list[CodeType]]:
    """The functions and methods of each module of the spine, modules and functions as one reads them.

    A function inside another is a part of that one.
    """
    tree = PAGE.read_text(encoding="utf-8").split("## The files")[1]
    spine = re.findall(r"^(\w+\.py) ", tree, re.MULTILINE)
    functions: dict[Path, list[CodeType]] = {walkthrough.ROOT / name: [] for name in spine}
    for code in sorted(called, key=lambda code: code.co_firstlineno):
        module = Path(code.co_filename)
        if module in functions and "<" not in code.co_qualname and code.co_qualname not in BY_THE_CLOCK:
            functions[module].append(code)
    return {module: codes for module, codes in functions.items() if codes}


def n_lines(module: Path, functions: list[CodeType]) -> int:
    """Of these functions, and of the docstring at the top of the module."""
    docstring = inspect.getdoc(sys.modules[module.stem]) or ""
    sources = (inspect.getsourcelines(code)[0] for code in functions)
    return len(docstring.splitlines()) + sum(map(len, sources))


def reading_list() -> str:
    functions = spine_functions(traced())
    lines: list[str] = []
    total = 0
    for module, codes in functions.items():
        n_to_read = n_lines(module, codes)
        n_all = len(module.read_text(encoding="utf-8").splitlines())
        names = ", ".join(code.co_qualname for code in codes)
        total += n_to_read
        lines.append(f"{module.name:{INDENT}}{n_to_read} of {n_all} lines")
        lines += textwrap.wrap(
            names, walkthrough.MAX_WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 4
        )
    return "\n".join([*lines, f"{'together':{INDENT}}{total} lines"]) + "\n"


if __name__ == "__main__":
    walkthrough.command("What one request passes.", reading_list, BEGIN, END, PAGE)
