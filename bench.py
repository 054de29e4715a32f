"""How fast, beside others: `python bench.py WHAT` prints a table in Markdown.

    a row of BENCHES --benches/WHAT.py: options(), run()--> table

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
    "cpu":       "prefill and decoding of the model, beside NumPy and llama.cpp",
    "http":      "running servers beside each other",
    "relay":     "what it costs to ask through --upstream",
    "server":    "events/s, latency and memory of many streams, beside the least",
    "pieces":    "the parser of the output in every dialect, and the store of events",
    "gpu":       "decoding on a GPU, with random weights of real shapes, beside the memory's limit",
    "kernels":   "each kernel by itself on a GPU",
    "gpu-parts": "all that a GPU is needed for, in three commands of less than ten minutes",
}
# fmt: on


def main(argv: Sequence[str]) -> None:
    rows = "\n".join(f"  {name:12} {about}" for name, about in BENCHES.items())
    parser = argparse.ArgumentParser(
        description=f"Measure speeds, beside others.\n\n{rows}",
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("what", choices=BENCHES, metavar="WHAT", help="and its options: WHAT --help")
    name = parser.parse_args(argv[:1]).what
    # It alone: the others may need what is not installed.
    bench = importlib.import_module(f"benches.{name.replace('-', '_')}")
    options = argparse.ArgumentParser(
        prog=f"bench.py {name}",
        description=BENCHES[name],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    options.add_argument("--out", type=Path, metavar="FILE", help="write the table there too")
    options.add_argument("--repeat", type=int, default=5, metavar="N", help="rounds")
    bench.options(options)
    bench.run(options.parse_args(argv[1:]))


if __name__ == "__main__":
    main(sys.argv[1:])
