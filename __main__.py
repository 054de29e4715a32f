"""`llmref`, or `python -m llmref`: the server; `llmref audit`, `bench` and `course` run the other commands.

    argv --main()--> server.py, or the module that its first word names

In a wheel the whole tree is the folder of one package, since modules called `model` or `server` would collide
with those of other packages. main() puts this folder first on the path: our modules find each other by the
names that they have in a clone. Relative imports would do too, but `python server.py` would not work.
"""

import os
import runpy
import sys


def main() -> None:
    """Run the command that the first argument names, else the server."""
    sys.path.insert(0, os.path.dirname(__file__))
    name = "server"
    if {*sys.argv[1:2]} & {"audit", "bench", "course"}:
        name = sys.argv.pop(1)
        sys.argv[0] = f"llmref {name}"
    runpy.run_module(name, run_name="__main__")


if __name__ == "__main__":
    main()
