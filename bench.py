"""How fast, beside others: `python bench.py WHAT` prints a table in Markdown, and its progress on stderr.

    a row of COMMANDS --of benches/: a function and its options--> table

Rules of the measurements:
1. The ratio is the result. The contenders take turns in each round: if the machine is busy for a while, it
   is busy for all of them. A number is the median of the rounds, after one that warms up.
2. A measurement is a row of a table, a contender a column.

Not here: how good what is said is.
"""

import argparse
import sys
from collections.abc import Sequence

from benches import decoding, http, server

COMMANDS = decoding.COMMANDS | http.COMMANDS | server.COMMANDS


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="Measure speeds, beside others.")
    commands = parser.add_subparsers(metavar="WHAT", required=True)
    for name, (run, options) in COMMANDS.items():
        about = str(run.__doc__).partition("\n")[0]
        kind = argparse.ArgumentDefaultsHelpFormatter
        command = commands.add_parser(name, help=about, description=about, formatter_class=kind)
        command.set_defaults(run=run)
        for flag, (default, about) in {"--repeat": (5, "rounds"), **options}.items():
            nargs = "+" if isinstance(default, list) else None
            convert = type(default[0] if nargs else default)
            command.add_argument(flag, type=convert, nargs=nargs, default=default, help=about)
    args = parser.parse_args(argv)
    args.run(args)


if __name__ == "__main__":
    main(sys.argv[1:])
