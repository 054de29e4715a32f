"""Recorded streams: judged by the rules on streams, or shown frame by frame.

    bytes --read()--> Capture --violations()--> a line for each fault

Authority: that of each rule is the link printed with it.

Rules of this file:
1. What can be read is judged; only bytes without an event of either API are no recording.
2. A fault is told once, however many events commit it.

Not here: the rules (frames.py, events.py, chunks.py), bytes to events (stream.py), live servers (session.py).
"""

import json
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from audit import chunks, events, frames
from audit.rules import OF_STREAMS, RULES
from audit.schema import Json, shortened
from audit.stream import Capture, captured, frames_of, read

MODULES = (frames, events, chunks)  # whose import enters their rules
STREAM_RULES = {name: rule for name, rule in RULES.items() if rule.group in OF_STREAMS}


class Violation(NamedTuple):
    event: int  # its number
    rule: str  # key of STREAM_RULES
    message: str
    link: str


def violations(stream: Capture | Iterable[Json], names: Iterable[str] = STREAM_RULES) -> list[Violation]:
    """Find what is wrong with a stream, in its order."""
    capture = stream if isinstance(stream, Capture) else captured(stream)
    found: list[Violation] = []
    for rule in map(STREAM_RULES.__getitem__, names):
        if capture.kind in rule.profiles.split():
            found += [Violation(number, rule.name, text, rule.link) for number, text in rule.check(capture)]
    return sorted(found)


def judge(stream: bytes, as_json: bool) -> tuple[list[str], int]:
    """Return the lines to print, and the exit status."""
    capture = read(stream)
    faults = violations(capture)
    status = int(bool(faults))
    if as_json:
        report = {
            "kind": capture.kind,
            "events": len(capture.raw),
            "ok": not faults,
            "violations": [violation._asdict() for violation in faults],
        }
        return [json.dumps(report, indent=2)], status
    verdict = f"{len(faults)} violations" if faults else "OK"
    return [*fault_lines(faults), f"{verdict}. {len(capture.raw)} events of a {capture.kind} stream"], status


def fault_lines(faults: list[Violation]) -> Iterator[str]:
    """Yield a line for each fault, rule by rule; what differs in a number or a name is the same fault."""
    same: dict[tuple[str, str], list[Violation]] = {}
    for fault in sorted(faults, key=lambda fault: fault.rule):
        words = re.sub(r"'[^']*'|-?\d+", "", fault.message)
        same.setdefault((fault.rule, words), []).append(fault)
    last_rule = ""
    for (rule, _), (first, *others) in same.items():
        if rule != last_rule:
            yield f"{rule}: {STREAM_RULES[rule].title}"
            yield f"    {first.link}"
            last_rule = rule
        more = f" and {len(others)} more" if others else ""
        yield f"    event {first.event}{more}: {first.message}"


def show_frames(stream: bytes, as_json: bool) -> tuple[list[str], int]:
    """Return the lines to print, and the exit status."""
    all_frames = list(frames_of([stream]))
    if not all_frames:
        raise ValueError("expected server-sent events, got none")
    fault = all_frames[-1].fault
    shown = [frame for frame in all_frames if frame.data is not None]
    if as_json:
        rows = [{"type": f.type, "data": f.data, "id": f.id, "number": f.number} for f in shown]
        return list(map(json.dumps, rows)), int(bool(fault))
    lines = [f"{f.number:5} {f.type}  {shortened(f.data or '', 160)}" for f in shown]
    return lines + [fault] * bool(fault), int(bool(fault))
