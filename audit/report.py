"""What an audit found, as people, CI servers and browsers read it.

    Result --row()--> row of a report --lines()--> text
    report, {"about": {...}, "results": [row, ...]} --junit()--> XML
    {"servers": {name: report, ...}}, or the findings on a stream --page()--> HTML

We make every output from the report, which is plain JSON, and not from the results: so we can make the page
of a kept report at any time, and show reports of different days and machines side by side.

Authority: https://github.com/testmoapp/junitxml for what CI servers read of JUnit's XML.

Rules of this file:
1. Nothing that a terminal, XML or a browser would obey is passed on from a server.

Not here: the verdicts (session.py), drawing the page (page.html), the files of reports (__main__.py).
"""

import json
import pkgutil
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from xml.sax.saxutils import escape, quoteattr

from audit.expected import Known, news
from audit.rules import RULES, Rule
from audit.schema import Json, printable, shortened
from audit.session import Result

FACTS = ("strength", "title", "source", "link", "bugs", "group")  # of a rule


def row(result: Result, known: Known | None) -> Json:
    """Return a verdict with the facts of its rule, and its news if there is an expectation file."""
    rule = RULES[result.rule]
    facts = {fact: getattr(rule, fact) for fact in FACTS}
    return result._asdict() | facts | ({} if known is None else {"news": news(result, known)})


# --- text ---------------------------------------------------------------------------------------------------


def listed(rule: Rule) -> Iterator[str]:
    yield f"{rule.name:24} {rule.strength:7} {rule.profiles:16} {rule.title}"
    yield f"{'':24} {rule.source}; {rule.link}"


def lines(row: Json) -> Iterator[str]:
    """Yield what failed and why, with the request as it can be repeated."""
    yield f"{row['verdict']:6}{row['rule']} ({row['strength']}): {printable(row['reason'])}"
    yield f"      {row['title']}"
    for exchange in row["exchanges"][-1:]:
        yield f"      $ {printable(shortened(exchange['asked'], 2000))}"
        for line in shortened(row["excerpt"] or exchange["reply"], 800).split("\n"):
            yield f"      | {printable(line.rstrip())}"
    yield f"      {row['source']}: {row['link']}"


def conclusion(rows: list[Json]) -> Iterator[str]:
    """Yield what is left to be said when all verdicts are there: a line for each reason not to judge."""
    unjudged: dict[str, list[str]] = {}
    for row in rows:
        verdict, reason = row["verdict"], row["reason"]
        if verdict == "flaky":
            yield from lines(row)
        if verdict in ("n/a", "error"):
            # The rest of why a rule does not apply is its request.
            reason = reason.partition(": ")[0] if verdict == "n/a" else reason
            unjudged.setdefault(f"{verdict:6}{printable(reason)}", []).append(row["rule"])
    for reason, names in unjudged.items():
        yield f"{reason}: {', '.join(names)}"
    for row in rows:
        if row.get("news"):
            yield f"NEWS  {row['rule']}: {row['news']}, and now {row['verdict']}"
    counts = Counter(row["verdict"] for row in rows)
    yield f"{len(rows)} rules: {', '.join(f'{n} {verdict}' for verdict, n in counts.items())}"


# --- JUnit's XML --------------------------------------------------------------------------------------------

# Verdict -> its element in JUnit's XML, and how a suite counts these.
ELEMENTS = {"fail": "failure", "error": "error", "n/a": "skipped", "flaky": "skipped"}
COUNTS = {"tests": "testcase", "failures": "failure", "errors": "error", "skipped": "skipped"}


def junit(report: Json) -> str:
    """Write a suite for each group; with an expectation file, what differs from it is a failure."""
    suites = ""
    for group, rows in groupby(report["results"], lambda row: row["group"]):
        cases = "".join(map(testcase, rows))
        counts = [f"{name}='{cases.count(f'<{element} ')}'" for name, element in COUNTS.items()]
        suites += f"<testsuite name='{group}' {' '.join(counts)}>{cases}</testsuite>\n"
    return f"<?xml version='1.0' encoding='utf-8'?>\n<testsuites name='audit'>\n{suites}</testsuites>\n"


def testcase(row: Json) -> str:
    properties = "".join(f"<property name='{fact}' value={attribute(row[fact])}/>" for fact in FACTS)
    tag = ELEMENTS.get(row["verdict"], "")
    if "news" in row and tag != "error":
        tag = "failure" if row["news"] else tag and "skipped"
    outcome = ""
    if tag:
        message = attribute(row.get("news") or row["reason"])
        outcome = (
            f"<{tag} type='{row['strength']}' message={message}>{escape(chr(10).join(lines(row)))}</{tag}>"
        )
    name = f"classname='{row['group']}' name='{row['rule']}' time='{row['seconds']}'"
    return f"<testcase {name}><properties>{properties}</properties>{outcome}</testcase>\n"


def attribute(text: str) -> str:
    return quoteattr(printable(text))


# --- the page -----------------------------------------------------------------------------------------------

EMPTY = '<script id="data" type="application/json">null'


def page(data: Json) -> str:
    """Put a report, {"servers": {name: report}} or the findings on a stream into page.html."""
    template = (pkgutil.get_data("audit", "page.html") or b"").decode()
    return template.replace(EMPTY, EMPTY.replace("null", json.dumps(data).replace("<", r"\u003c")))
