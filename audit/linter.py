"""Recorded streams: judged by the rules of rules.py, or shown frame by frame.

    bytes --recordings.read()--> Capture --rules.violations()--> a line for each fault

Authority: that of each rule is the link printed with it.

Rules of this file:
1. What can be read is judged; only bytes without an event of either API are no recording.
2. A fault is told once, however many events commit it.

Not here: the rules (rules.py), bytes to events (recordings.py), live servers (session.py).
"""

import json
import re
from collections.abc import Iterator

from audit.members import shortened
from audit.recordings import Capture, frames, read
from audit.rules import RULES, Violation, violations
from audit.rules_chunks import choices

# --- the judgement ------------------------------------------------------------------------------------------


def judge(stream: bytes, as_json: bool) -> tuple[list[str], int]:
    """The lines to print, and the exit status."""
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
    return [*fault_lines(faults), f"{verdict}. {summary(capture)}"], status


def fault_lines(faults: list[Violation]) -> Iterator[str]:
    """Rule by rule, a line for each fault; what differs in a number or a name alone is the same fault."""
    for rule in dict.fromkeys(violation.rule for violation in faults):
        yield f"{rule}: {RULES[rule].title}"
        yield f"    {RULES[rule].link}"
        same: dict[str, list[Violation]] = {}
        for violation in faults:
            if violation.rule == rule:
                words = re.sub(r"'[^']*'|-?\d+", "", violation.message)
                same.setdefault(words, []).append(violation)
        for first, *others in same.values():
            more = f" and {len(others)} more" if others else ""
            yield f"    event {first.event}{more}: {first.message}"


def summary(capture: Capture) -> str:
    """One line on what a stream said."""
    if capture.kind == "chat":
        reasons = [
            choice["finish_reason"] for _, _, choice, _ in choices(capture) if "finish_reason" in choice
        ]
        ends = ", ".join(reasons) or "nothing"
        return f"chat completion chunks: {len(capture.raw)}, ended by {ends}"
    last = capture.events[-1].get("response", {})
    items = ", ".join(item.get("type", "?") for item in last.get("output", ())) or "none"
    usage = last.get("usage", {})
    counts = f"{usage.get('input_tokens', '?')} tokens in, {usage.get('output_tokens', '?')} out"
    return f"Responses stream: {len(capture.raw)} events, {last.get('status')}; items: {items}; {counts}"


# --- the frames ---------------------------------------------------------------------------------------------


def show_frames(stream: bytes, as_json: bool) -> tuple[list[str], int]:
    """The lines to print, and the exit status."""
    stream_frames, tail = frames(stream)
    if not stream_frames and not tail:
        raise ValueError("expected server-sent events, got none")
    rows = [frame.event._asdict() | {"number": frame.number} for frame in stream_frames if frame.event]
    status = int(bool(tail))
    if as_json:
        return [json.dumps(row) for row in rows], status
    lines = [f"{row['number']:5} {row['type']}  {shortened(row['data'], 160)}" for row in rows]
    if tail:
        lines.append(tail)
    return lines, status
