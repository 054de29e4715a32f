"""The faults of one stream: all rules on frames, events and chunks judge it.

    Capture --violations()--> [Violation, ...]

Importing this module registers those rules, so a caller of the function always has all rules.

Authority: that of each rule.

Not here: the rules (frames.py, events.py, chunks.py), bytes to a Capture (stream.py).
"""

from typing import NamedTuple

from audit import chunks, events, frames  # noqa: F401
from audit.rules import OF_STREAMS, RULES
from audit.stream import Capture


class Violation(NamedTuple):
    event: int  # its number
    rule: str  # key of RULES
    message: str
    link: str


def violations(capture: Capture) -> list[Violation]:
    """Find what is wrong with a stream, in its order."""
    found: list[Violation] = []
    for rule in RULES.values():
        if rule.group in OF_STREAMS and capture.kind in rule.profiles:
            found += [Violation(number, rule.name, text, rule.link) for number, text in rule.check(capture)]
    return sorted(found)
