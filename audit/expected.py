"""What is known of a server: a file of verdicts, so that a run fails for news alone.

    named-call   fail   # it calls get_weather: https://link-to-our-issue
    cut          pass
    compact      n/a    # refused with 404

    file --read()--> known        Result, known --news()--> "", or how it differs
    rows of a report, known --written()--> text of such a file

A run that differs from its file fails in both directions. A failure that is not listed is a regression. A
listed failure that passes is a line to take out, because a list longer than the truth hides the next
regression. A rule that was judged before and no longer applies has often lost its endpoint.

Authority: the expectation files of web-platform-tests, pytest's xfail(strict=True).

Not here: the exit status (__main__.py).
"""

import re
from collections.abc import Iterable
from pathlib import Path

from audit.rules import RULES
from audit.schema import Json, printable, shortened
from audit.session import Result

Known = dict[str, tuple[str, str]]  # rule -> (verdict, its line)

# Verdict in the file -> what may come, beside an error, which has an exit status of its own; "": no line.
ACCEPTED = {"": "pass n/a", "pass": "pass", "fail": "fail", "n/a": "n/a", "flaky": "pass fail flaky"}


def read(file: Path) -> Known:
    """Read a file; raises ValueError for a line without a verdict."""
    known: Known = {}
    for line in re.findall("^[^#\n].*", file.read_text(encoding="utf-8"), re.MULTILINE):
        rule, verdict = [*line.split(), ""][:2]
        if rule not in RULES or verdict not in ACCEPTED:
            raise ValueError(f"{file}: expected a rule of --list and its verdict, got: {line}")
        known[rule] = verdict, line
    return known


def news(result: Result, known: Known) -> str:
    """Say how a verdict differs from the file; "" if it does not."""
    listed, _ = known.get(result.rule, ("", ""))
    accepted = ["error", *ACCEPTED[listed].split()]
    return "" if result.verdict in accepted else f"listed as {listed or 'nothing'}"


def written(rows: Iterable[Json], known: Known) -> str:
    """Write the file of what was seen; the line of a verdict that was known stays, with its note."""
    lines = ["# What python -m audit has found; --expect takes it: then any other verdict fails the run."]
    for row in rows:
        verdict, line = known.get(row["rule"], ("", ""))
        if row["verdict"] not in (verdict, "error"):
            note = f" # {shortened(printable(row['reason']), 160)} {row['link']}" * bool(row["reason"])
            line = f"{row['rule']:24} {row['verdict']:5}{note}"
        lines += [line] * bool(line)
    return "\n".join(lines) + "\n"
