"""`python -m audit`: the linter for recorded streams, as a command.

    bytes --recordings.read()--> Capture --rules.violations()--> a line for each fault

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

from audit.members import shortened
from audit.recordings import Capture, frames, read
from audit.rules import RULES, Violation, violations
from audit.rules_chunks import choices

EXAMPLE = """\
record a stream:
  curl -sN http://host:port/v1/responses -H 'Content-Type: application/json' \\
      -d '{"model": "m", "input": "hi", "stream": true}' > capture.sse

exit status: 0 all is well, 1 violations, 2 no such stream
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m audit",
        description="Judge a recorded stream, of Responses events or of chat completion chunks.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("capture", nargs="?", default="-", help="file; the standard input if left out")
    parser.add_argument(
        "--frames", action="store_true", help="show the frames of the stream, and judge nothing"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    show = show_frames if options.frames else judge
    try:
        stream = sys.stdin.buffer.read() if options.capture == "-" else Path(options.capture).read_bytes()
        lines, status = show(stream, options.json)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    sys.stdout.buffer.write("".join(line + "\n" for line in lines).encode("utf-8", "backslashreplace"))
    return status


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


if __name__ == "__main__":
    sys.exit(main())
