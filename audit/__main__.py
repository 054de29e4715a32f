"""The linter for recordings, as a command.

    bytes --captures.read()--> Capture --rules.violations()--> a line for each fault

    python -m audit capture.sse             judges a recording, or what comes on the standard input
    python -m audit capture.sse --frames    shows its frames

Authority: that of each rule is the link printed with it.

Rules of this file:
1. What can be read is judged; only bytes without an event of either API are no recording.
2. The exit status tells: 0 all is well, 1 violations, 2 no such stream.
3. A fault is told once, however many events commit it.

Not here: the rules (rules.py), bytes to events (recordings.py), requests to a server (tests/wire/).
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from audit.chunks import choices
from audit.recordings import Capture, frames, read
from audit.rules import RULES, Violation, violations
from audit.shapes import shortened


def summary(c: Capture) -> str:
    """One line on what a stream said."""
    if c.kind == "chat":
        reasons = [choice["finish_reason"] for _, _, choice, _ in choices(c) if "finish_reason" in choice]
        return f"chat completion chunks: {len(c.raw)}, ended by {', '.join(reasons) or 'nothing'}"
    last = c.events[-1].get("response", {})
    items = ", ".join(item.get("type", "?") for item in last.get("output", ())) or "none"
    usage = last.get("usage", {})
    counts = f"{usage.get('input_tokens', '?')} tokens in, {usage.get('output_tokens', '?')} out"
    return f"Responses stream: {len(c.raw)} events, {last.get('status')}; items: {items}; {counts}"


def told(found: list[Violation]) -> Iterator[str]:
    """Rule by rule, a line for each fault: what differs in a number or a name alone is one."""
    for rule in dict.fromkeys(violation.rule for violation in found):
        yield f"{rule}: {RULES[rule].title}"
        yield f"    {RULES[rule].link}"
        faults: dict[str, list[Violation]] = {}
        for violation in found:
            if violation.rule == rule:
                faults.setdefault(re.sub(r"'[^']*'|-?\d+", "", violation.message), []).append(violation)
        for first, *others in faults.values():
            more = f" and {len(others)} more" if others else ""
            yield f"    event {first.event}{more}: {first.message}"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m audit",
        description="Judge a recorded stream, of Responses events or of chat completion chunks.",
        epilog="Exit status: 0 all is well, 1 violations, 2 no such stream.",
    )
    parser.add_argument("capture", nargs="?", default="-", help="file; the standard input if left out")
    parser.add_argument(
        "--frames", action="store_true", help="show the frames of the stream, and judge nothing"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    show = frames_shown if options.frames else judged
    try:
        stream = sys.stdin.buffer.read() if options.capture == "-" else Path(options.capture).read_bytes()
        lines, status = show(stream, options.json)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    sys.stdout.buffer.write("".join(line + "\n" for line in lines).encode("utf-8", "backslashreplace"))
    return status


def judged(stream: bytes, as_json: bool) -> tuple[list[str], int]:
    capture = read(stream)
    found = violations(capture)
    if as_json:
        report = {"kind": capture.kind, "events": len(capture.raw), "ok": not found,
                  "violations": [violation._asdict() for violation in found]}  # fmt: skip
        return [json.dumps(report, indent=2)], int(bool(found))
    verdict = f"{len(found)} violations" if found else "OK"
    return [*told(found), f"{verdict}. {summary(capture)}"], int(bool(found))


def frames_shown(stream: bytes, as_json: bool) -> tuple[list[str], int]:
    found, tail = frames(stream)
    if not found and not tail:
        raise ValueError("expected server-sent events, got none")
    rows = [frame.event._asdict() | {"number": frame.number} for frame in found if frame.event]
    if as_json:
        return [json.dumps(row) for row in rows], int(bool(tail))
    lines = [f"{row['number']:5} {row['type']}  {shortened(row['data'], 160)}" for row in rows]
    return [*lines, *([tail] if tail else [])], int(bool(tail))


if __name__ == "__main__":
    sys.exit(main())
