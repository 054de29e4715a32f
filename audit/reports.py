"""What an audit says: lines for people, and JSON, JUnit XML and Markdown for machines and papers.

    [Result, ...] --summary(), details()--> lines       --to_json(), junit(), markdown()--> a file's text
    old, new --difference()--> lines                    text --read_baseline()--> {rule: reason}

Authority: https://github.com/testmoapp/junitxml for what CI servers read of JUnit's XML.

Rules of this file:
1. Whatever is counted stands in all forms, and is counted once.
2. Colours go to terminals only.

Not here: the verdicts (session.py), the command line (__main__.py).
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from xml.etree import ElementTree

from audit.checks import CHECKS, GROUPS
from audit.members import shortened
from audit.session import VERDICTS, Result, Verdict

COLOURS: dict[Verdict, str] = {"pass": "32", "fail": "31", "n/a": "90", "error": "33"}
SHOWN = 400  # characters of an excerpt


def coloured(text: str, verdict: Verdict, in_colour: bool) -> str:
    if not in_colour:
        return text
    return f"\033[{COLOURS[verdict]}m{text}\033[0m"


def count(results: Iterable[Result], verdict: Verdict) -> int:
    return sum(result.verdict == verdict for result in results)


def failed(results: Iterable[Result], strict: bool, known: Mapping[str, str]) -> list[Result]:
    """What makes the exit status 1: a failed must, with `strict` any failure; nothing that is known."""
    failures = [result for result in results if result.verdict == "fail" and result.rule not in known]
    return [result for result in failures if strict or CHECKS[result.rule].strength == "must"]


# --- for people ---------------------------------------------------------------------------------------------


def summary(results: Sequence[Result], known: Mapping[str, str], in_colour: bool = False) -> Iterator[str]:
    """A line for each group that was asked, the total, and the musts that fail and are not known to."""
    yield f"{'':12}{''.join(f'{verdict:>8}' for verdict in VERDICTS)}"
    for group, checks in GROUPS.items():
        of_group = [result for result in results if result.rule in checks]
        if of_group:
            yield counts(group, of_group, in_colour)
    yield counts(f"{len(results)} rules", results, in_colour)
    musts = [result.rule for result in failed(results, strict=False, known=known)]
    if musts:
        yield f"{len(musts)} failed musts: {', '.join(musts)}"


def counts(name: str, results: Sequence[Result], in_colour: bool) -> str:
    cells = [coloured(f"{count(results, verdict):8}", verdict, in_colour) for verdict in VERDICTS]
    return f"{name:12}{''.join(cells)}"


def details(results: Sequence[Result], in_colour: bool = False) -> Iterator[str]:
    """What failed and why, then what could not be asked, then what does not apply."""
    for verdict in ("fail", "error"):
        for result in results:
            if result.verdict == verdict:
                yield from detail(result, in_colour)
    by_reason: dict[str, list[str]] = {}  # rules that do not apply
    for result in results:
        if result.verdict == "n/a":
            by_reason.setdefault(result.reason, []).append(result.rule)
    for reason, names in by_reason.items():
        yield ""
        verdict = coloured("n/a   ", "n/a", in_colour)
        yield f"{verdict}{printable(shortened(reason, 200))}"
        yield f"      {', '.join(names)}"


def printable(text: str) -> str:
    """Without what a terminal would obey."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def detail(result: Result, in_colour: bool) -> Iterator[str]:
    check = CHECKS[result.rule]
    verdict = coloured(f"{result.verdict:6}", result.verdict, in_colour)
    yield ""
    yield f"{verdict}{result.rule} ({check.strength}): {check.title}"
    yield f"      {printable(result.reason)}"
    for line in shortened(result.excerpt.strip(), SHOWN).split("\n"):
        yield f"      | {printable(line)}"
    yield f"      {check.source}"
    yield f"      {check.link}"


def listing(names: Iterable[str]) -> Iterator[str]:
    """The rules, without asking anybody."""
    for name in names:
        check = CHECKS[name]
        yield f"{name:24} {check.strength:7} {check.profiles:16} {check.title}"
        yield f"{'':24} {check.source}; {check.link}"


# --- for machines -------------------------------------------------------------------------------------------


def to_json(results: Iterable[Result], about: Mapping[str, Any]) -> str:
    rows = []
    for result in results:
        check = CHECKS[result.rule]
        rows.append(result._asdict() | {"strength": check.strength, "title": check.title, "link": check.link})
    return json.dumps({"about": about, "results": rows}, indent=2, ensure_ascii=False) + "\n"


def verdicts(report: str) -> dict[str, str]:
    """The verdict of each rule in a report that to_json() has written; raises ValueError."""
    try:
        return {row["rule"]: row["verdict"] for row in json.loads(report)["results"]}
    except (KeyError, TypeError) as error:
        raise ValueError("expected a report written by --json") from error


def junit(results: Sequence[Result], about: Mapping[str, Any]) -> str:
    root = ElementTree.Element("testsuites", name=f"audit of {about.get('url')}")
    for group, checks in GROUPS.items():
        of_group = [result for result in results if result.rule in checks]
        if not of_group:
            continue
        n_known = sum(known_reason(result, about) != "" for result in of_group)
        suite = ElementTree.SubElement(
            root,
            "testsuite",
            name=group,
            tests=str(len(of_group)),
            failures=str(count(of_group, "fail") - n_known),
            errors=str(count(of_group, "error")),
            skipped=str(count(of_group, "n/a") + n_known),
        )
        for result in of_group:
            suite.append(testcase(group, result, known_reason(result, about)))
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


JUNIT_ELEMENTS = {"fail": "failure", "error": "error", "n/a": "skipped"}


def known_reason(result: Result, about: Mapping[str, Any]) -> str:
    """Why a failure was expected; "" if it was not."""
    if result.verdict != "fail":
        return ""
    return str(about.get("known", {}).get(result.rule, ""))


def testcase(group: str, result: Result, known: str) -> ElementTree.Element:
    """A failure that is `known` is skipped, with its reason."""
    check = CHECKS[result.rule]
    case = ElementTree.Element("testcase", classname=group, name=result.rule, time=str(result.seconds))
    properties = ElementTree.SubElement(case, "properties")
    facts = {
        "strength": check.strength,
        "title": check.title,
        "source": check.source,
        "link": check.link,
        "bugs": check.bugs,
    }
    for name, value in facts.items():
        ElementTree.SubElement(properties, "property", name=name, value=value)
    if known:
        ElementTree.SubElement(case, "skipped", message=for_xml(f"known: {known}"))
    elif result.verdict in JUNIT_ELEMENTS:
        element = ElementTree.SubElement(
            case, JUNIT_ELEMENTS[result.verdict], message=for_xml(result.reason), type=check.strength
        )
        element.text = for_xml(result.excerpt)
    return case


def for_xml(text: str) -> str:
    """Without the control characters that XML 1.0 cannot say."""
    return re.sub(r"[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\N{REPLACEMENT CHARACTER}", text)


def markdown(results: Sequence[Result], about: Mapping[str, Any]) -> str:
    totals = ", ".join(f"{count(results, verdict)} {verdict}" for verdict in VERDICTS)
    lines = [f"{about.get('url')}, model {about.get('model')}: {len(results)} rules, {totals}.", ""]
    lines += ["| rule | strength | result | what shows it |", "|---|---|---|---|"]
    for result in results:
        check = CHECKS[result.rule]
        shown = " ".join(f"{result.reason} {result.excerpt}".split())
        cell = shortened(shown, SHOWN).replace("|", "\\|").replace("`", "'")
        if cell:
            cell = f"`{cell}`"
        title = f"[{result.rule}]({check.link}): {check.title}"
        lines.append(f"| {title} | {check.strength} | {result.verdict} | {cell} |")
    return "\n".join([*lines, ""])


# --- one run against another --------------------------------------------------------------------------------


def read_baseline(text: str) -> dict[str, str]:
    """Known failures, a line each, 'RULE: reason'; lines with # are comments. Raises ValueError."""
    known = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        rule, _, reason = line.partition(":")
        if rule.strip() not in CHECKS or not reason.strip():
            raise ValueError(f"line {number}: expected 'RULE: reason' with a rule of --list, got {line!r}")
        known[rule.strip()] = reason.strip()
    return known


def against_baseline(results: Iterable[Result], known: Mapping[str, str]) -> Iterator[str]:
    for result in results:
        if result.rule in known and result.verdict == "fail":
            yield f"known   {result.rule}: {known[result.rule]}"
        elif result.rule in known and result.verdict == "pass":
            yield f"fixed   {result.rule}: it passes now, take it out of the baseline"


def difference(old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[str]:
    """A line for each rule whose verdict differs."""
    for rule in dict.fromkeys([*old, *new]):
        verdict_before = old.get(rule, "not asked")
        verdict_now = new.get(rule, "not asked")
        if verdict_before != verdict_now:
            yield f"{rule:24} {verdict_before} -> {verdict_now}"
