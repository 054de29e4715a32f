"""What one streamed request passes: what stands above the fold of each module, in the order of the calls.

    server.serve(), traced --one request--> its functions == the functions above the folds

    python tests/reading_list.py             prints them; fails if a function stands on the wrong side
    python tests/reading_list.py --write     puts them into docs/reading.md; test_walkthrough.py checks that

The server is the real one, in this process, with the tiny model and NumpyOps; a thread of it is the client.
Above a fold stand the functions that the request calls, and what declares their values. Tables of which it
uses a few rows are below, such as those of the parameters, and what runs when the server starts or ends.
"""

import ast
import asyncio
import contextlib
import http.client
import json
import operator
import os
import signal
import sys
import textwrap
import threading
import time
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))  # the server's modules

import server
import walkthrough
from checkpoint import hub
from service import loading, options
from service.connections import EventLoop, bind
from store import Retention, Store
from test_layout import n_tokens

PAGE = walkthrough.ROOT / "docs" / "reading.md"
BODY = {"model": "tiny", "input": "What is 2+2?", "temperature": 0, "stream": True}
FLAGS = ["--model", str(walkthrough.TINY), "--port", "0", "--log-level", "warning", "--secret", "any"]
PAUSE_S = 0.5  # in which a connection is closed and a response written to the store
INDENT = 28
FOLD = "# --- the fold"  # a class has its own, indented
MAX_ABOVE = {"": 17_800, "request/": 4_500}  # tokens: an afternoon, at 100 a minute
CALLED_BY_THE_CLOCK = {"Registry.evict", "Store.evict"}
DECLARATIONS = {"__init__", "__post_init__", "__new__"}  # a request may pass them, or not


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


def traced() -> list[CodeType]:
    """Return the code that a request calls, as it is called first, a caller before what it calls."""
    called: dict[CodeType, None] = {}
    is_traced = threading.Event()

    def trace(frame: FrameType | None, event: str, _: Any) -> None:
        callers: list[CodeType] = []
        while is_traced.is_set() and event == "call" and frame and frame.f_code not in called:
            if frame.f_code.co_qualname in CALLED_BY_THE_CLOCK:
                return
            callers.append(frame.f_code)
            frame = frame.f_back
        called.update(dict.fromkeys(reversed(callers)))

    args = options.arguments().parse_args(FLAGS)
    args.device = "cpu"
    sys.modules["numba"] = None  # type: ignore[assignment]  # NumpyOps, also if Numba is installed
    listener = bind(args.host, args.port)
    threading.setprofile(trace)
    local = loading.load(hub.find(args.model, args.revision), args)
    store = Store(args.store, Retention())
    sys.setprofile(trace)
    threading.Thread(target=ask, args=(listener.getsockname()[1], is_traced)).start()
    what_it_prints = contextlib.redirect_stdout(sys.stderr)
    with what_it_prints, asyncio.Runner(loop_factory=EventLoop) as runner:
        runner.run(server.serve(args, set(), local, None, store, listener))
    return [*called]


# --- the folds ----------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """Where a function stands."""

    is_above: bool  # the fold
    is_declaration: bool  # it has no body, a table names it, or it makes what outlives a request


def places(module: Path) -> dict[str, Place]:
    """Return the functions of a module, in its order; those inside others are a part of these."""
    above, found = lines_above(module), dict[str, Place]()
    body = ast.parse(module.read_text(encoding="utf-8")).body
    classes = [node for node in body if isinstance(node, ast.ClassDef)]
    for outer in body:
        prefix, nodes = (f"{outer.name}.", outer.body) if isinstance(outer, ast.ClassDef) else ("", [outer])
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                has_no_body = all(isinstance(each, ast.Expr) for each in node.body)
                is_declaration = has_no_body or node.name in DECLARATIONS
                found[prefix + node.name] = Place(node.lineno in above, is_declaration)
    statements = [*body, *(node for each in classes for node in each.body)]
    tables = [node for node in statements if isinstance(node, ast.Assign | ast.AnnAssign)]
    for name in (part for table in tables for part in ast.walk(table)):
        if isinstance(name, ast.Name) and name.id in found:
            found[name.id] = found[name.id]._replace(is_declaration=True)
    return found


def lines_above(module: Path) -> set[int]:
    """Return the numbers of the lines that stand above the folds, without imports."""
    text = module.read_text(encoding="utf-8")
    above: set[int] = set()
    is_above = True  # the fold of the module
    is_above_in_class = True
    for number, line in enumerate(text.splitlines(), 1):
        is_above = is_above and not line.startswith(FOLD)
        is_above_in_class = (is_above_in_class and not line.strip().startswith(FOLD)) or line[:1] > " "
        if is_above and is_above_in_class:
            above.add(number)
    for node in ast.parse(text).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            assert node.end_lineno
            above -= {*range(node.lineno, node.end_lineno + 1)}
    return above


def passed() -> dict[Path, list[str]]:
    """Return the functions that a request calls, by module of the root and of request/."""
    functions: dict[Path, list[str]] = {}
    for code in traced():
        module = Path(code.co_filename)
        name = code.co_qualname.partition(".<locals>")[0]
        if "<" not in name and module.parent in (walkthrough.ROOT, walkthrough.ROOT / "request"):
            names = functions.setdefault(module, [])
            if name not in names:
                names.append(name)
    return functions


def reading_list() -> str:
    lines: list[str] = []
    totals = {"": Counter[str](), "request/": Counter[str]()}
    for module, names in passed().items():
        standing = places(module)
        above = {name for name, place in standing.items() if place.is_above and not place.is_declaration}
        below = {name for name, place in standing.items() if not place.is_above}
        assert above <= {*names}, f"{module.name}: to be put below the fold: {above - {*names}}"
        assert not below & {*names}, f"{module.name}: to be put above the fold: {below & {*names}}"
        sides = [place.is_above for place in standing.values()]
        name = str(module.relative_to(walkthrough.ROOT))
        total = totals["request/" if "/" in name else ""]
        n_above = n_tokens(module, lines_above(module))
        total.update(tokens=n_above, switches=sum(map(operator.ne, sides, sides[1:])))
        lines.append(f"{name:{INDENT}}{n_above:6,} of {n_tokens(module):5,} tokens")
        indent = " " * 4
        lines += textwrap.wrap(
            ", ".join(name for name in standing if name in names),
            walkthrough.MAX_WIDTH,
            initial_indent=indent,
            subsequent_indent=indent,
        )
    for folder, total in totals.items():
        assert total["tokens"] <= MAX_ABOVE[folder], folder
        name, n_switches = folder or "the root", total["switches"]
        lines.append(f"{name:{INDENT}}{total['tokens']:6,} tokens above the folds, {n_switches} switches")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    walkthrough.command("reading_list", "What one request passes.", reading_list, PAGE)
