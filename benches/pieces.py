"""Two pieces by themselves: reading the output of a model in every dialect, and keeping events in the store.

python bench.py pieces --> pieces/s of the parser by dialect, events/s of the store
"""

import argparse
import json
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from benches.harness import Case, Figures, number_option, report
from channels import Dialect, Parser, Piece
from dialects.families import DIALECTS, find
from store import Retention, Row, Store

PIECE = 4  # characters a token, about
N_FRAMES = 64  # of a response, stored in groups as they come
N_TOGETHER = 8


def parse(name: str, n_pieces: int, spelled: bool) -> Figures:
    """Processor time of a turn: half of it reasoning, then text and a call."""
    row = DIALECTS[name]
    dialect = find(row, () if spelled else row.markers, "".join(row.markers), tools=True)
    pieces = turn(dialect, n_pieces)
    parser = Parser(dialect, dialect.start, stop=["STOP"], schemas={"f": {}})
    began = time.process_time()
    n_outputs = sum(len(parser.feed(piece)) for piece in pieces) + len(parser.close(cut=False))
    seconds = time.process_time() - began
    if n_outputs < n_pieces // 2:
        raise RuntimeError(f"{name}: {n_pieces} pieces gave {n_outputs} outputs: the parser has lost its way")
    return {f"{name}, pieces/s": n_pieces / seconds}


def turn(dialect: Dialect, n_pieces: int) -> list[Piece]:
    """As the forms of the dialect write it. Its markers are pieces of their own, or text like all else."""
    forms = dialect.forms
    quarter = "So, some <b>words</b>.\n" * (n_pieces // 4 * PIECE // 23)
    text = (forms.before or "").replace("TEXT", quarter)
    arguments = {"json": json.dumps({"a": quarter}), "xml": f"<parameter=a>\n{quarter}\n</parameter>\n"}
    call = forms.call.replace("NAME", "f").replace("ARGUMENTS", arguments[forms.arguments])
    whole = (2 * quarter).join(forms.thought) + text + call.join(forms.calls)
    units = [whole]
    if dialect.tokens:
        units = re.split("(" + "|".join(map(re.escape, dialect.tokens)) + ")", whole)
    pieces: list[Piece] = []
    for unit in units:
        if unit in dialect.tokens:
            pieces.append(Piece(unit, unit))
        else:
            pieces += (Piece(unit[i : i + PIECE], "") for i in range(0, len(unit), PIECE))
    return pieces


def keep(n_responses: int) -> Figures:
    """Responses written to a file, their events in groups, and read back."""
    frame = b'event: response.output_text.delta\ndata: {"delta":" token"}\n\n'
    with TemporaryDirectory() as folder:
        store = Store(str(Path(folder) / "store.db"), Retention())
        ids = [f"resp_{n}" for n in range(n_responses)]

        def write_all() -> None:
            for id_ in ids:
                row = Row(id_, "", time.time(), None, True, True, True, "{}", "[]", "queued", "{}")
                for first in range(0, N_FRAMES, N_TOGETHER):
                    store.write(row, first, [frame] * N_TOGETHER)

        def read_all() -> None:
            for id_ in ids:
                store.frames(id_)

        figures = {"events/s stored": rate(write_all), "events/s read": rate(read_all)}
        store.close()
    return {name: n_responses * N_FRAMES * value for name, value in figures.items()}


def rate(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return 1 / (time.perf_counter() - began)


def run(args: argparse.Namespace) -> None:
    cases: list[Case] = []
    for name in DIALECTS:
        ways = {"markers are tokens": False, "markers are spelled": True}
        cases.append({way: partial(parse, name, args.pieces, spelled) for way, spelled in ways.items()})
    cases.append({"SQLite": partial(keep, args.responses)})
    report(args, "The parser of the output, and the store of events.", cases)


def options(add: argparse.ArgumentParser) -> None:
    number_option(add, "--pieces", 20_000, "of a turn")
    number_option(add, "--responses", 1000, "that are stored")
