"""How fast, beside others: `python bench.py WHAT` prints a table in Markdown, and its progress on stderr.

    a table of benches/rows.toml --its options--> a function of benches/ --rounds()--> table

Rules of the measurements:
1. The ratio is the result. The contenders take turns in each round: if the machine is busy for a while, it
   is busy for all of them. A number is the median of the rounds, after one that warms up.
2. A measurement is a row of a table, a contender a column.

Not here: how good what is said is.
"""

import sys
from importlib.util import find_spec

if sys.version_info < (3, 11) or not find_spec("uvicorn"):
    sys.exit("error: expected Python 3.11 or later, and its packages: pip install -e '.[fast]'")

import argparse
import tomllib
from collections.abc import Sequence

from benches import decoding, servers
from benches.harness import FOLDER

RUNS = {"decoding": decoding.run, "parts": decoding.run_part, "servers": servers.run}
TABLES = tomllib.loads((FOLDER / "rows.toml").read_text(encoding="utf-8"))
HELP = TABLES.pop("help")  # by option


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="Measure speeds, beside others.")
    commands = parser.add_subparsers(metavar="WHAT", required=True)
    for name, table in TABLES.items():
        kind = argparse.ArgumentDefaultsHelpFormatter
        command = commands.add_parser(name, help=table["about"], formatter_class=kind)
        command.set_defaults(table=table)
        for option, default in {"--repeat": 5, **table["options"]}.items():
            nargs = "+" if isinstance(default, list) else None
            convert = type(default[0] if nargs else default)
            command.add_argument(option, type=convert, nargs=nargs, default=default, help=HELP[option])
    args = parser.parse_args(argv)
    RUNS[args.table["run"]](args)


if __name__ == "__main__":
    main(sys.argv[1:])
