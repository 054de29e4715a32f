"""Two pieces by themselves: reading the output of a model in every dialect, and keeping events in the store.

python bench.py pieces --> pieces/s of the parser by dialect, events/s of the store
"""

import argparse
import json
import re
import time
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


def parse(name: str, n_pieces: int) -> Figures:
    """Processor time of a turn: half of it reasoning, then text and a call."""
    row = DIALECTS[name]
    dialect = find(row, row.markers, "".join(row.markers), tools=True)
    pieces = turn(dialect, n_pieces)
    parser = Parser(dialect, dialect.start, stop=["STOP"], schemas={"f": {}})
    began = time.process_time()
    n_outputs = sum(len(parser.feed(piece)) for piece in pieces) + len(parser.close(cut=False))
    seconds = time.process_time() - began
    if n_outputs < n_pieces // 2:
        raise RuntimeError(f"{name}: {n_pieces} pieces gave {n_outputs} outputs: the parser has lost its way")
    return {f"{name}, pieces/s": n_pieces / seconds}


def turn(dialect: Dialect, n_pieces: int) -> list[Piece]:
    """Return a turn as the forms of the dialect write it; its markers are pieces of their own."""
    forms = dialect.forms
    quarter = "So, some <b>words</b>.\n" * (n_pieces // 4 * PIECE // 23)
    arguments = {"json": json.dumps({"a": quarter}), "xml": f"<parameter=a>\n{quarter}\n</parameter>\n"}
    call = forms.call.replace("NAME", "f").replace("ARGUMENTS", arguments[forms.arguments])
    text = (forms.before or "").replace("TEXT", quarter)
    whole = (2 * quarter).join(forms.thought) + text + call.join(forms.calls)
    pieces: list[Piece] = []
    for unit in re.split("(" + "|".join(map(re.escape, dialect.tokens)) + ")", whole):
        if unit in dialect.tokens:
            pieces.append(Piece(unit, unit))
        else:
            pieces += (Piece(unit[i : i + PIECE], "") for i in range(0, len(unit), PIECE))
    return pieces


def keep(n_responses: int) -> Figures:
    """Responses written to a file, their events in groups, and read back."""
    frames = [b'event: response.output_text.delta\ndata: {"delta":" token"}\n\n'] * N_TOGETHER
    times = [time.perf_counter()]
    with TemporaryDirectory() as folder:
        store = Store(str(Path(folder) / "store.db"), Retention())
        for n in range(n_responses):
            row = Row(f"resp_{n}", "", time.time(), None, True, True, True, "{}", "[]", "queued", "{}")
            for first in range(0, N_FRAMES, N_TOGETHER):
                store.write(row, first, frames)
        times.append(time.perf_counter())
        for n in range(n_responses):
            store.frames(f"resp_{n}")
        times.append(time.perf_counter())
        store.close()
    n_events = n_responses * N_FRAMES
    return {
        "events/s stored": n_events / (times[1] - times[0]),
        "events/s read": n_events / (times[2] - times[1]),
    }


def run(args: argparse.Namespace) -> None:
    cases: list[Case] = [{"": partial(parse, name, args.pieces)} for name in DIALECTS]
    cases.append({"": partial(keep, args.responses)})
    report(args, "The parser of the output, and the store of events.", cases)


def options(add: argparse.ArgumentParser) -> None:
    number_option(add, "--pieces", 20_000, "of a turn")
    number_option(add, "--responses", 1000, "that are stored")
