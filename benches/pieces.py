"""Two pieces by themselves: reading the output of a model in every dialect, and keeping events in the store.

python bench.py pieces --> pieces/s of the parser by dialect, events/s of the store
"""

import argparse
import json
import re
import time
from functools import partial
from tempfile import TemporaryDirectory

import numpy as np

from benches.harness import Case, Figures, number_option, report
from channels import Dialect, Parser, Piece
from dialects.families import DIALECTS, find
from store import Retention, Row, Store

PIECE = 4  # characters a token, about
N_FRAMES = 64  # of a response, stored in groups as they come
N_TOGETHER = 8


def parse(name: str, n_pieces: int) -> Figures:
    """Measure a turn: half of it reasoning, then text and a call. Its time is that of the processor."""
    row = DIALECTS[name]
    dialect = find(row, row.markers, "".join(row.markers), tools=True)
    pieces = turn(dialect, n_pieces)
    parser = Parser(dialect, dialect.start, stop=["STOP"], schemas={"f": {}})
    began = time.process_time()
    n_outputs = sum(len(parser.feed(piece)) for piece in pieces)
    seconds = time.process_time() - began
    assert n_outputs > n_pieces // 2, f"{name}: the parser has lost its way"
    return {f"{name}, pieces/s": n_pieces / seconds}


def turn(dialect: Dialect, n_pieces: int) -> list[Piece]:
    """Return a turn as the forms of the dialect write it; its markers are pieces of their own."""
    forms = dialect.forms
    quarter = "So, some <b>words</b>.\n" * (n_pieces // 4 * PIECE // 23)
    arguments = {"json": json.dumps({"a": quarter}), "xml": f"<parameter=a>\n{quarter}\n</parameter>\n"}
    call = forms.call.replace("NAME", "f").replace("ARGUMENTS", arguments[forms.arguments])
    text = (forms.before or "").replace("TEXT", quarter)
    whole = (2 * quarter).join(forms.thought) + text + call.join(forms.calls)
    markers = "|".join(map(re.escape, dialect.tokens))
    pieces: list[Piece] = []
    for unit in re.split(f"({markers})", whole):
        special = unit if unit in dialect.tokens else ""
        size = len(special) or PIECE
        pieces += (Piece(unit[i : i + size], special) for i in range(0, len(unit), size))
    return pieces


def keep(n_responses: int) -> Figures:
    """Measure responses that are written to a file, their events in groups, and read back."""
    frames = [b'event: response.output_text.delta\ndata: {"delta":" token"}\n\n'] * N_TOGETHER
    with TemporaryDirectory() as folder:
        store = Store(f"{folder}/store.db", Retention())
        times = [time.perf_counter()]
        for n in range(n_responses):
            row = Row(f"resp_{n}", "", time.time(), None, True, True, True, "{}", "[]", "queued", "{}")
            for first in range(0, N_FRAMES, N_TOGETHER):
                store.write(row, first, frames)
        times.append(time.perf_counter())
        for n in range(n_responses):
            store.frames(f"resp_{n}")
        times.append(time.perf_counter())
        store.close()
    written_s, read_s = np.diff(times)
    n_events = n_responses * N_FRAMES
    return {"events/s stored": n_events / written_s, "events/s read": n_events / read_s}


def run(args: argparse.Namespace) -> None:
    cases: list[Case] = [({"": name}, partial(parse, n_pieces=args.pieces)) for name in DIALECTS]
    cases.append(({"": args.pieces // N_FRAMES}, keep))
    report(args, "The parser of the output, and the store of events.", cases)


def options(add: argparse.ArgumentParser) -> None:
    number_option(add, "--pieces", 64_000, "of a turn, and events that are stored")
