"""How fast, beside others: `python bench.py WHAT` prints a table in Markdown.

    a row of BENCHES --COMMANDS of benches/MODULE.py: its run and its options--> table

Rules of the measurements:
1. The ratio is the result. The contenders take turns in each round: if the machine is busy for a while, it
   is busy for all of them. A number is the median of the rounds, after one that warms up.
2. A measurement is a row of a table, a contender a column.

Not here: how good what is said is.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

# fmt: off
BENCHES = {
    # command    module
    "cpu":       ("cpu",    "prefill and decoding of the model, beside NumPy and llama.cpp"),
    "http":      ("http",   "running servers beside each other"),
    "server":    ("server", "many streams, requests and a full store, beside the least that any server does"),
    "relay":     ("server", "what it costs to ask through --upstream"),
    "gpu":       ("gpu",    "decoding on a GPU, with random weights, beside what its memory allows"),
    "gpu-parts": ("gpu",    "all that a GPU is needed for, in three commands of less than ten minutes"),
    "gpu-report": ("gpu_report", "a page about one GPU for an issue: its check, each op, tokens a second"),
}
# fmt: on


def main(argv: Sequence[str]) -> None:
    rows = "\n".join(f"  {name:12} {about}" for name, (_, about) in BENCHES.items())
    parser = argparse.ArgumentParser(
        description=f"Measure speeds, beside others.\n\n{rows}",
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("what", choices=BENCHES, metavar="WHAT", help="and its options: WHAT --help")
    name = parser.parse_args(argv[:1]).what
    module, about = BENCHES[name]
    # It alone: the others may need what is not installed.
    run, options = importlib.import_module(f"benches.{module}").COMMANDS[name]
    parser = argparse.ArgumentParser(
        prog=f"{parser.prog} {name}",
        description=about,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, help="a file that the table is written to, too")
    for flag, (default, about) in {"--repeat": (5, "rounds"), **options}.items():
        nargs = "+" if isinstance(default, list) else None
        kind = type(default[0] if nargs else default)
        parser.add_argument(flag, type=kind, nargs=nargs, default=default, help=about)
    run(parser.parse_args(argv[1:]))


if __name__ == "__main__":
    main(sys.argv[1:])
