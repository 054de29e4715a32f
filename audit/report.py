"""What an audit says: lines for people, and JSON and JUnit XML for machines.

    [Result, ...] --summary(), details()--> lines       --to_json(), junit()--> a file's text
    bytes of a recorded stream --judge_recording()--> lines

Authority: https://github.com/testmoapp/junitxml for what CI servers read of JUnit's XML.

Rules of this file:
1. Nothing that a terminal would obey is passed on from a server.
2. Of a recording, what can be read is judged.

Not here: the verdicts (session.py), the command line (__main__.py).
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any
from xml.etree.ElementTree import Element, SubElement, tostring

from audit.rules import RULES
from audit.schema import printable, shortened
from audit.session import Result
from audit.stream import read, violations

SHOWN = 400  # characters of an excerpt


def failed(results: Iterable[Result], strict: bool) -> list[str]:
    """Name the rules whose failure makes the exit status 1: the musts, with `strict` all of them."""
    failures = [RULES[result.rule] for result in results if result.verdict == "fail"]
    return [rule.name for rule in failures if strict or rule.strength == "must"]


def status(results: Sequence[Result], strict: bool) -> int:
    """Return the exit status; a run in which no rule was judged is not a pass."""
    if all(result.verdict in ("error", "n/a") for result in results):
        return 2
    return int(bool(failed(results, strict)))


def by_group(results: Iterable[Result]) -> dict[str, list[Result]]:
    """Return the results, which come group by group."""
    grouped = groupby(results, lambda result: RULES[result.rule].group)
    return {name: [*group] for name, group in grouped}


# --- for people ---------------------------------------------------------------------------------------------


def summary(results: Sequence[Result]) -> Iterator[str]:
    """Yield how many verdicts there are of each kind, and the musts that fail."""
    counts = Counter(result.verdict for result in results)
    yield f"{len(results)} rules: {', '.join(f'{n} {verdict}' for verdict, n in counts.items())}"
    if musts := failed(results, strict=False):
        yield f"{len(musts)} failed musts: {', '.join(musts)}"


def details(results: Sequence[Result]) -> Iterator[str]:
    """Yield what failed and why, what could not be asked, and what does not apply."""
    for result in results:
        rule = RULES[result.rule]
        if result.verdict != "pass":
            yield f"{result.verdict:6}{rule.name} ({rule.strength}): {printable(result.reason)}"
        if result.verdict in ("fail", "flaky"):
            yield f"      {rule.title}"
            yield f"      | {printable(shortened(result.excerpt, SHOWN))}"
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


# Verdict -> its element in JUnit's XML.
ELEMENTS = {"fail": "failure", "error": "error", "n/a": "skipped", "flaky": "skipped"}
COUNTED = {"failures": "failure", "errors": "error", "skipped": "skipped"}  # attributes of a suite


def junit(results: Sequence[Result], about: Mapping[str, Any]) -> str:
    """Write a suite for each group."""
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
            if tag := ELEMENTS.get(result.verdict):
                element = SubElement(case, tag, message=printable(result.reason), type=rule.strength)
                element.text = "\n".join(map(printable, result.excerpt.splitlines()))
        for attribute, tag in COUNTED.items():
            suite.set(attribute, str(len(suite.findall(f"testcase/{tag}"))))
    return tostring(root, encoding="unicode", xml_declaration=True) + "\n"


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
    lines = [f"event {fault.event}: {fault.message} ({fault.rule}: {fault.link})" for fault in faults]
    verdict = f"{len(faults)} violations" if faults else "OK"
    return [*lines, f"{verdict}. {len(capture.raw)} events of a {capture.kind} stream"], status
