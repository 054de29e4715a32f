"""What the parser of the output costs, in every dialect.

Not here: tokens to pieces (tokenizer.py).
"""

import argparse
import json
import platform
import re
import time
from datetime import date
from statistics import median

from benches.common import cpu_name, repeat_option, write
from channels import Dialect, Parser, Piece
from dialects.families import DIALECTS
from dialects.families import find as find_dialect

PIECE = 4  # characters a token, about
STREAM = 1000  # tokens a second, of one response: more than most engines give it


def run(args: argparse.Namespace) -> None:
    rows = [(name, pieces_per_s(name, args, False), pieces_per_s(name, args, True)) for name in DIALECTS]
    report = [
        f"{date.today()}, a turn of {args.pieces} pieces: half of it reasoning, then text and a call,",
        f"{cpu_name()}, processor time of one thread, Python {platform.python_version()}.",
        "",
        f"| pieces/s, median of {args.repeat} | markers are tokens | share of {STREAM} tok/s "
        "| markers are spelled | share |",
        "|---|---|---|---|---|",
        *(
            f"| {name} | {tokens:.0f} | {STREAM / tokens:.1%} | {spelled:.0f} | {STREAM / spelled:.1%} |"
            for name, tokens, spelled in rows
        ),
        "",
    ]
    write(report, args.out)


def pieces_per_s(name: str, args: argparse.Namespace, spelled: bool) -> float:
    row = DIALECTS[name]
    dialect = find_dialect(row, () if spelled else row.markers, "".join(row.markers), tools=True)
    pieces, speeds = turn(dialect, args.pieces), []
    for _ in range(args.repeat):
        parser = Parser(dialect, dialect.start, stop=["STOP"], schemas={"f": {}})
        started = time.process_time()  # what it costs, however busy the machine is with other things
        n_outputs = sum(len(parser.feed(piece)) for piece in pieces) + len(parser.close(cut=False))
        speeds.append(len(pieces) / (time.process_time() - started))
        assert n_outputs > len(pieces) // 2, "the parser has lost its way"
    return median(speeds)


def turn(dialect: Dialect, n_pieces: int) -> list[Piece]:
    """As the forms of the dialect write it; its markers are pieces of their own, or text like all else."""
    forms, quarter = dialect.forms, "So, some <b>words</b>.\n" * (n_pieces // 4 * PIECE // 23)
    text = (forms.before or "").replace("TEXT", quarter)
    arguments = {"json": json.dumps({"a": quarter}), "xml": f"<parameter=a>\n{quarter}\n</parameter>\n"}
    call = forms.call.replace("NAME", "f").replace("ARGUMENTS", arguments[forms.arguments])
    whole = (2 * quarter).join(forms.thought) + text + call.join(forms.calls)
    cut = re.split("(" + "|".join(map(re.escape, dialect.tokens)) + ")", whole) if dialect.tokens else [whole]
    pieces: list[Piece] = []
    for unit in cut:
        is_marker = unit in dialect.tokens
        texts = [unit] if is_marker else [unit[i : i + PIECE] for i in range(0, len(unit), PIECE)]
        pieces += (Piece(text, text if is_marker else "") for text in texts)
    return pieces


def options(add: argparse.ArgumentParser) -> None:
    repeat_option(add)
    add.add_argument("--pieces", type=int, default=20_000, metavar="N", help="of a turn (default: 20000)")
