"""How fast, beside others: `python bench.py WHAT` prints a table in Markdown.

    a row of BENCHES --benches/WHAT.py: options(), run()--> table

Rules of the measurements:
1. The ratio is the result. The contenders take turns in each round: where the machine is busy for a while, it
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
    "cpu":    "prefill and decoding of the model, beside transformers and llama.cpp",
    "gpu":    "the same on a GPU, with random weights of real shapes, beside the memory's limit",
    "parse":  "pieces of output a second, in every dialect",
    "relay":  "what it costs to ask through --upstream",
    "server": "events/s, latency and memory of many streams",
    "store":  "events kept and read back, and the memory it takes",
}
# fmt: on


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Measure speeds, beside others.")
    commands = parser.add_subparsers(required=True, metavar="WHAT")
    for name, about in BENCHES.items():
        bench = importlib.import_module(f"benches.{name}")
        add = commands.add_parser(name, help=about, description=bench.__doc__)
        add.add_argument("--out", type=Path, metavar="FILE", help="write the table there too")
        bench.options(add)
        add.set_defaults(run=bench.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments().parse_args(argv)
    args.run(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
