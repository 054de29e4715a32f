"""What an audit says: lines for people, and JSON and JUnit XML for machines.

    [Result, ...] --summary(), details()--> lines       --to_json(), junit()--> a file's text
    old, new --difference()--> lines                    text --read_baseline()--> {rule: reason}
    bytes of a recorded stream --judge_recording(), show_frames()--> lines

Authority: https://github.com/testmoapp/junitxml for what CI servers read of JUnit's XML.

Rules of this file:
1. Nothing that a terminal would obey is passed on from a server.
2. Of a recording, what can be read is judged, and a fault is told once, however many events commit it.

Not here: the verdicts (session.py), the command line (__main__.py).
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any
from xml.etree.ElementTree import Element, SubElement, tostring

from audit.rules import RULES, NotApplicable
from audit.schema import printable, shortened
from audit.session import VERDICTS, Result
from audit.stream import Violation, frames_of, read, violations

SHOWN = 400  # characters of an excerpt


def failed(results: Iterable[Result], strict: bool, known: Mapping[str, str]) -> list[Result]:
    """Return what makes the exit status 1: failed musts, with `strict` all failures; none that is known."""
    failures = [result for result in results if result.verdict == "fail" and result.rule not in known]
    return [result for result in failures if strict or RULES[result.rule].strength == "must"]


def status(results: Sequence[Result], strict: bool, known: Mapping[str, str]) -> int:
    """Return the exit status; a run in which no rule was judged is not a pass."""
    if all(result.verdict in ("error", "n/a") for result in results):
        return 2
    return int(bool(failed(results, strict, known)))


def by_group(results: Iterable[Result]) -> dict[str, list[Result]]:
    """Return the results, which come group by group."""
    grouped = groupby(results, lambda result: RULES[result.rule].group)
    return {name: [*group] for name, group in grouped}


# --- for people ---------------------------------------------------------------------------------------------


def summary(results: Sequence[Result], known: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each group that was asked, the total, and the musts that fail and are not known to."""
    yield f"{'':12}{''.join(f'{verdict:>8}' for verdict in VERDICTS)}"
    for name, group in {**by_group(results), f"{len(results)} rules": results}.items():
        counts = Counter(result.verdict for result in group)
        yield f"{name:12}{''.join(f'{counts[verdict]:8}' for verdict in VERDICTS)}"
    musts = [result.rule for result in failed(results, strict=False, known=known)]
    if musts:
        yield f"{len(musts)} failed musts: {', '.join(musts)}"


def details(results: Sequence[Result]) -> Iterator[str]:
    """Yield what failed and why, then what could not be asked, then what does not apply."""
    for verdict in ("fail", "flaky", "error"):
        for result in results:
            if result.verdict == verdict:
                yield from detail(result)
    by_reason: dict[str, list[str]] = {}  # rules that do not apply
    for result in results:
        if result.verdict == "n/a":
            by_reason.setdefault(result.reason, []).append(result.rule)
    for reason, names in by_reason.items():
        yield ""
        yield f"n/a   {printable(shortened(reason, 200))}"
        yield f"      {', '.join(names)}"


def detail(result: Result) -> Iterator[str]:
    rule = RULES[result.rule]
    yield ""
    yield f"{result.verdict:6}{rule.name} ({rule.strength}): {rule.title}"
    yield f"      {printable(result.reason)}"
    for line in shortened(result.excerpt.strip(), SHOWN).split("\n"):
        yield f"      | {printable(line)}"
    yield f"      {rule.source}"
    yield f"      {rule.link}"


def listing(names: Iterable[str]) -> Iterator[str]:
    """Yield the rules."""
    for name in names:
        rule = RULES[name]
        yield f"{name:24} {rule.strength:7} {rule.profiles:16} {rule.title}"
        yield f"{'':24} {rule.source}; {rule.link}"


# --- for machines -------------------------------------------------------------------------------------------


def to_json(results: Iterable[Result], about: Mapping[str, Any]) -> str:
    rows = []
    for result in results:
        rule = RULES[result.rule]
        rows.append(result._asdict() | {"strength": rule.strength, "title": rule.title, "link": rule.link})
    return json.dumps({"about": about, "results": rows}, indent=2, ensure_ascii=False) + "\n"


def verdicts(report: str) -> dict[str, str]:
    """Read the verdicts of a report that to_json() has written; raises ValueError."""
    try:
        return {row["rule"]: row["verdict"] for row in json.loads(report)["results"]}
    except (KeyError, TypeError) as error:
        raise ValueError("expected a report written by --json") from error


#  verdict    its element in JUnit's XML, and the attribute that counts these
ELEMENTS = {
    "fail":   ("failure", "failures"),
    "error":  ("error", "errors"),
    "n/a":    ("skipped", "skipped"),
    "flaky":  ("skipped", "skipped"),
}  # fmt: skip


def junit(results: Sequence[Result], about: Mapping[str, Any]) -> str:
    """Write a suite for each group; a failure that is known is skipped, with its reason."""
    known = about.get("known", {})
    root = Element("testsuites", name=f"audit of {about.get('url')}")
    for name, group in by_group(results).items():
        suite = SubElement(root, "testsuite", name=name, tests=str(len(group)))
        for result in group:
            rule = RULES[result.rule]
            seconds = str(result.seconds)
            case = SubElement(suite, "testcase", classname=name, name=rule.name, time=seconds)
            properties = SubElement(case, "properties")
            for fact in ("strength", "title", "source", "link", "bugs"):
                SubElement(properties, "property", name=fact, value=getattr(rule, fact))
            if result.verdict == "fail" and rule.name in known:
                SubElement(case, "skipped", message=printable(f"known: {known[rule.name]}"))
            elif result.verdict in ELEMENTS:
                tag, _ = ELEMENTS[result.verdict]
                element = SubElement(case, tag, message=printable(result.reason), type=rule.strength)
                element.text = "\n".join(map(printable, result.excerpt.splitlines()))
        for tag, total in ELEMENTS.values():
            suite.set(total, str(len(suite.findall(f"testcase/{tag}"))))
    return tostring(root, encoding="unicode", xml_declaration=True) + "\n"


# --- one run against another --------------------------------------------------------------------------------


def read_baseline(text: str) -> dict[str, str]:
    """Read known failures, a line each, 'RULE: reason'; lines with # are comments. Raises ValueError."""
    known = {}
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.startswith("#"):
            rule, reason = map(str.strip, line.partition(":")[::2])
            if rule not in RULES or not reason:
                expected = "'RULE: reason' with a rule of --list"
                raise ValueError(f"line {number}: expected {expected}, got {line!r}")
            known[rule] = reason
    return known


def against_baseline(results: Iterable[Result], known: Mapping[str, str]) -> Iterator[str]:
    for result in results:
        if result.rule in known and result.verdict == "fail":
            yield f"known   {result.rule}: {known[result.rule]}"
        elif result.rule in known and result.verdict == "pass":
            yield f"fixed   {result.rule}: it passes now, take it out of the baseline"


def difference(old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each rule whose verdict differs."""
    for rule in dict.fromkeys([*old, *new]):
        before, now = (run.get(rule, "not asked") for run in (old, new))
        if before != now:
            yield f"{rule:24} {before} -> {now}"


# --- a recorded stream --------------------------------------------------------------------------------------


def judge_recording(stream: bytes, as_json: bool) -> tuple[list[str], int]:
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
            yield f"{rule}: {RULES[rule].title}"
            yield f"    {first.link}"
            last_rule = rule
        more = f" and {len(others)} more" if others else ""
        yield f"    event {first.event}{more}: {first.message}"


def show_frames(stream: bytes, as_json: bool) -> tuple[list[str], int]:
    """Return the lines to print, and the exit status."""
    all_frames = list(frames_of([stream]))
    if not all_frames:
        raise NotApplicable("expected server-sent events, got none")
    fault = all_frames[-1].fault
    shown = [frame for frame in all_frames if frame.data is not None]
    if as_json:
        rows = [{"type": f.type, "data": f.data, "id": f.id, "number": f.number} for f in shown]
        return list(map(json.dumps, rows)), int(bool(fault))
    lines = [f"{f.number:5} {f.type}  {shortened(f.data or '', 160)}" for f in shown]
    return lines + [fault] * bool(fault), int(bool(fault))
