"""`python -m audit`: holds a live server, or a recorded stream, against the rules.

    URL --session.look(), judge_all()--> results --summary(), details(), to_json(), junit()--> lines, files
    bytes of a recorded stream --judge_recording()--> lines

Authority: `python -m audit --help`; https://github.com/testmoapp/junitxml for what CI servers read of
JUnit's XML.

Rules of this file:
1. The exit status tells: 0 all is well, 1 a rule is broken, 2 nothing could be judged.
2. Only the standard library, and this folder: `make audit.pyz` packs it.
3. Nothing that a terminal would obey is passed on from a server.

Not here: what is judged (rules.py and the modules of rules), the verdicts (session.py).
"""

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from xml.etree.ElementTree import Element, SubElement, tostring

from audit import session
from audit.peer import BUDGET_S, Peer
from audit.rules import RULES, NoReply, NotApplicable
from audit.schema import printable, shortened
from audit.session import Result
from audit.stream import read, violations

EXAMPLES = """\
a server:
  %(prog)s http://127.0.0.1:8000/v1 --model NAME
  %(prog)s http://127.0.0.1:8000/v1 --profile chat --junit audit.xml

a recorded stream:
  curl -sN http://127.0.0.1:8000/v1/responses -H 'Content-Type: application/json' \\
      -d '{"model": "m", "input": "hi", "stream": true}' > capture.sse
  %(prog)s capture.sse

exit status: 0 all is well; 1 a must is broken (of a recording, or with --strict: any rule);
2 nothing could be judged: no such file, no server, no such stream, or every rule ended as error or n/a
"""


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python {Path(sys.argv[0]).name}".replace("__main__.py", "-m audit"),
        description="Hold a server of the Responses or Chat Completions API, or a stream recorded of one, "
        "against the rules that clients rely on.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("target", nargs="?", default="-", help="base URL of a server, with its /v1; a file; - for stdin")
    add("--list", action="store_true", help="list the rules with their sources, without asking a server")
    add("--json", action="store_true", help="print JSON instead of text")
    add("--model", default="", help="name of the model; the first of /models if left out")
    add(
        "--api-key",
        default=os.environ.get("AUDIT_API_KEY", ""),
        help="sent as a bearer token; better kept out of the command line, in AUDIT_API_KEY",
    )
    add("--profile", choices=session.PROFILES, default="all", help="which rules; all if left out")
    add("--rules", action="append", default=[], help="only these, such as 'resume*'")
    add("--strict", action="store_true", help="exit status 1 for every failure, not for a failed must alone")
    add("--repeat", type=int, default=1, help="ask all N times; what differs is flaky")
    add("--timeout", type=float, default=BUDGET_S, help="seconds for each rule (%(default)g)")
    add("--junit", type=Path, help="write a report for CI, as JUnit XML")
    add("--json-file", type=Path, help="write what --json prints")
    return parser


def main() -> int:
    options = arguments().parse_args()
    if not __debug__:
        print("error: the rules are assertions, which python -O leaves out", file=sys.stderr)
        return 2
    try:
        lines, status = task(options)
        for line in lines:
            sys.stdout.buffer.write((line + "\n").encode("utf-8", "backslashreplace"))
        sys.stdout.buffer.flush()
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
    except (OSError, ValueError, NotApplicable, NoReply, AssertionError) as error:
        print("error:", *str(error).split(), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return status


def task(options: argparse.Namespace) -> tuple[Iterable[str], int]:
    """Do what the options ask for; return the lines to print, and the exit status."""
    if options.list:
        return listing(session.chosen(options.profile, options.rules)), 0
    if urlsplit(options.target).scheme in ("http", "https"):
        return audit(options)
    stream = sys.stdin.buffer.read() if options.target == "-" else Path(options.target).read_bytes()
    return judge_recording(stream, options.json)


# --- a live server ------------------------------------------------------------------------------------------


def audit(options: argparse.Namespace) -> tuple[Iterable[str], int]:
    names = session.chosen(options.profile, options.rules)
    peer = Peer(options.target, options.model, options.api_key, options.timeout)
    apis = session.look(peer)
    about = {"url": options.target, "model": peer.model, "apis": apis, "long": peer.long}

    by_rule = {result.rule: result for result in session.judge_all(peer, names, options.repeat)}
    results = [*by_rule.values()]
    for path, text in ((options.junit, junit), (options.json_file, to_json)):
        if path:
            path.write_text(text(results, about), encoding="utf-8")
    exit_status = status(results, options.strict)
    if options.json:
        return [to_json(results, about).rstrip()], exit_status
    head = f"{options.target}, model {peer.model}: {' and '.join(apis)}"
    return [head, *summary(results), *details(results)], exit_status


# --- reports ------------------------------------------------------------------------------------------------

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
    for name, of_group in groupby(results, lambda result: RULES[result.rule].group):
        group = list(of_group)
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


if __name__ == "__main__":
    sys.exit(main())
