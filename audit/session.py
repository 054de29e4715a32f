"""One audit: every rule asked of one server, each with its verdict.

    Peer, names of rules --judge_all()--> Result, Result, ...

    pass     the rule holds                     fail     it does not, and the excerpt shows it
    n/a      the server lacks what it is about  error    it could not be asked, and the reason says why

Authority: DESIGN of xUnit's reports: an error is no failure.

Rules of this file:
1. A rule that raises is an error of that rule alone: each one has its verdict, whatever the server does.

Not here: the rules (checks.py), what is printed (reports.py).
"""

import time
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

from audit.checks import CHECKS
from audit.peer import Failed, NoReply, NotApplicable, Peer

Verdict = Literal["pass", "fail", "n/a", "error"]
VERDICTS: tuple[Verdict, ...] = ("pass", "fail", "n/a", "error")


class Result(NamedTuple):
    rule: str  # key of CHECKS
    verdict: Verdict
    reason: str = ""  # what was expected, or why it does not apply or could not be asked
    excerpt: str = ""  # what shows it
    seconds: float = 0.0


def chosen(profile: str, patterns: Iterable[str]) -> list[str]:
    """The rules of a profile whose names match one of the patterns, if there are any; raises ValueError."""
    names = [name for name, check in CHECKS.items() if profile in ("all", *check.profiles.split())]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"no rule of the profile {profile!r} is called {pattern!r}: see --list")
    if not patterns:
        return names
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def judge_all(peer: Peer, names: Iterable[str]) -> Iterator[Result]:
    for name in names:
        started_at = time.monotonic()
        result = judge(peer, name)
        yield result._replace(seconds=round(time.monotonic() - started_at, 3))


def judge(peer: Peer, name: str) -> Result:
    peer.start()
    try:
        CHECKS[name].run(peer)
    except Failed as failure:
        return Result(name, "fail", failure.message, failure.excerpt)
    except NotApplicable as reason:
        return Result(name, "n/a", str(reason))
    except NoReply as reason:
        return Result(name, "error", str(reason))
    except Exception as error:  # a reply that no rule expected: rule 1
        return Result(name, "error", f"{type(error).__name__} in the rule itself: {error}")
    return Result(name, "pass")
