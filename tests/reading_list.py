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

PAGE = walkthrough.ROOT / "docs" / "reading.md"
BODY = {"model": "tiny", "input": "What is 2+2?", "temperature": 0, "stream": True}
FLAGS = ["--model", str(walkthrough.TINY), "--port", "0", "--log-level", "warning", "--secret", "any"]
PAUSE_S = 0.5  # in which a connection is closed and a response written to the store
INDENT = 16
# What the clock calls; and what stands around each request and each step, 45 lines.
LEFT_OUT = {"Registry.evict", "Store.evict", "Store._ids"}
LEFT_OUT |= {"Engine._loop", "logged.<locals>.answer", "make_app.<locals>.guarded"}


def ask(port: int, is_traced: threading.Event) -> None:
    """Be the client of one request, then stop the server."""
    client = http.client.HTTPConnection("127.0.0.1", port)
    client.request("GET", "/health")  # answered once the server has started
    client.getresponse().read()
    time.sleep(PAUSE_S)
    is_traced.set()
    client.request("POST", "/v1/responses", json.dumps(BODY), {"Content-Type": "application/json"})
    client.getresponse().read()
    client.close()
    time.sleep(PAUSE_S)
    is_traced.clear()
    os.kill(os.getpid(), signal.SIGTERM)


def traced() -> set[CodeType]:
    """Return the code that a request calls, in any thread, and what calls it, such as a thread's loop."""
    called: set[CodeType] = set()
    is_traced = threading.Event()

    def trace(frame: FrameType | None, event: str, _: Any) -> None:
        while is_traced.is_set() and event == "call" and frame and frame.f_code not in called:
            called.add(frame.f_code)
            frame = frame.f_back

    args = options.arguments().parse_args(FLAGS)
    args.device = "cpu"
    sys.modules["numba"] = None  # type: ignore[assignment]  # NumpyOps, also if Numba is installed
    listener = bind(args.host, args.port)
    threading.setprofile(trace)
    sys.setprofile(trace)
    local = loading.load(hub.find(args.model, args.revision), args)
    store = Store(args.store, Retention())
    threading.Thread(target=ask, args=(listener.getsockname()[1], is_traced)).start()
    what_it_prints = contextlib.redirect_stdout(sys.stderr)
    with what_it_prints, asyncio.Runner(loop_factory=EventLoop) as runner:
        runner.run(server.serve(args, Keys([]), local, None, store, listener))
    return called


def spine_functions(called: set[CodeType]) -> dict[Path, list[CodeType]]:
    """Return the functions of each module of the spine that are called, in the order of the files.

    A function inside another is a part of that one, unless only the inner one is called.
    """
    tree = PAGE.read_text(encoding="utf-8").split("## The files")[1]
    spine = re.findall(r"^(\w+\.py) ", tree, re.MULTILINE)
    functions: dict[Path, list[CodeType]] = {walkthrough.ROOT / name: [] for name in spine}
    names = {(code.co_filename, code.co_qualname) for code in called}
    for code in sorted(called, key=lambda code: code.co_firstlineno):
        module, name = Path(code.co_filename), code.co_qualname
        is_part = name.endswith(">") or (code.co_filename, name.rpartition(".<locals>.")[0]) in names
        if module in functions and not is_part and name not in LEFT_OUT:
            functions[module].append(code)
    return {module: codes for module, codes in functions.items() if codes}


def n_lines(module: Path, functions: list[CodeType]) -> int:
    """Count the lines of these functions, and of the docstring at the top of the module."""
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
        names = ", ".join(code.co_qualname.replace(".<locals>", "") for code in codes)
        total += n_to_read
        lines.append(f"{module.name:{INDENT}}{n_to_read} of {n_all} lines")
        lines += textwrap.wrap(
            names, walkthrough.MAX_WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 4
        )
    return "\n".join([*lines, f"{'together':{INDENT}}{total} lines"]) + "\n"


if __name__ == "__main__":
    walkthrough.command("reading_list", "What one request passes.", reading_list, PAGE)
