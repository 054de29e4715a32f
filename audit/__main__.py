"""`python -m audit`: holds a live server, or a recorded stream, against the rules.

    URL --session.look(), judge_all()--> results --details(), junit()--> lines, a file
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
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from xml.etree.ElementTree import Element, SubElement, tostring

from audit import session
from audit.peer import BUDGET_S, Peer
from audit.rules import RULES, NoReply, NotApplicable
from audit.schema import Json, printable, shortened
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
    return parser


def main() -> int:
    options = arguments().parse_args()
    try:
        if not __debug__:
            raise ValueError("the rules are assertions, which python -O leaves out")
        if options.list:
            lines, status = [*listing(session.chosen(options.profile, options.rules))], 0
        elif options.target.startswith(("http://", "https://")):
            lines, status = audit(options)
        else:
            stream = sys.stdin.buffer.read() if options.target == "-" else Path(options.target).read_bytes()
            lines, status = judge_recording(stream, options.json)
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]
        print(*lines, sep="\n", flush=True)
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
    except (OSError, ValueError, NotApplicable, NoReply, AssertionError) as error:
        print("error:", *str(error).split(), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return status


# --- a live server ------------------------------------------------------------------------------------------


def audit(options: argparse.Namespace) -> tuple[list[str], int]:
    """Return the lines to print, and the exit status."""
    names = session.chosen(options.profile, options.rules)
    peer = Peer(options.target, options.model, options.api_key, options.timeout)
    about: Json = {"url": options.target, "apis": session.look(peer), "model": peer.model, "long": peer.long}
    results = session.judge_all(peer, names, options.repeat)
    if options.junit:
        options.junit.write_text(junit(results, options.target), encoding="utf-8")
    exit_status = status(results, options.strict)
    if options.json:
        report = {"about": about, "results": [*map(row, results)]}
        return [json.dumps(report, indent=2, ensure_ascii=False)], exit_status
    counts = Counter(result.verdict for result in results)
    head = f"{options.target}, model {peer.model}: {' and '.join(about['apis'])}"
    summary = f"{len(results)} rules: {', '.join(f'{n} {verdict}' for verdict, n in counts.items())}"
    return [head, summary, *details(results)], exit_status


def status(results: list[Result], strict: bool) -> int:
    """Return the exit status: 1 if a must fails, with `strict` any rule; 2 if no rule was judged."""
    if {result.verdict for result in results} <= {"error", "n/a"}:
        return 2
    failures = [RULES[result.rule].strength for result in results if result.verdict == "fail"]
    return int("must" in failures or bool(strict and failures))


# --- reports ------------------------------------------------------------------------------------------------


def details(results: Iterable[Result]) -> Iterator[str]:
    """Yield what failed and why, what could not be asked, and what does not apply."""
    for result in results:
        rule = RULES[result.rule]
        if result.verdict != "pass":
            yield f"{result.verdict:6}{rule.name} ({rule.strength}): {printable(result.reason)}"
        if result.verdict in ("fail", "flaky"):
            yield f"      {rule.title}"
            yield f"      | {printable(shortened(result.excerpt, 400))}"
            yield f"      {rule.source}"
            yield f"      {rule.link}"


def listing(names: Iterable[str]) -> Iterator[str]:
    """Yield the rules."""
    for name in names:
        rule = RULES[name]
        yield f"{name:24} {rule.strength:7} {rule.profiles:16} {rule.title}"
        yield f"{'':24} {rule.source}; {rule.link}"


def row(result: Result) -> Json:
    rule = RULES[result.rule]
    return result._asdict() | {"strength": rule.strength, "title": rule.title, "link": rule.link}


# Verdict -> its element in JUnit's XML, and how a suite counts these.
ELEMENTS = {"fail": "failure", "error": "error", "n/a": "skipped", "flaky": "skipped"}
COUNTS = {"tests": "testcase", "failures": "*/failure", "errors": "*/error", "skipped": "*/skipped"}


def junit(results: Iterable[Result], url: str) -> str:
    """Write a suite for each group."""
    root = Element("testsuites", name=f"audit of {url}")
    for name, group in groupby(results, lambda result: RULES[result.rule].group):
        suite = SubElement(root, "testsuite", name=name)
        for result in group:
            rule = RULES[result.rule]
            case = SubElement(suite, "testcase", classname=name, name=rule.name, time=str(result.seconds))
            properties = SubElement(case, "properties")
            for fact in ("strength", "title", "source", "link", "bugs"):
                SubElement(properties, "property", name=fact, value=getattr(rule, fact))
            if tag := ELEMENTS.get(result.verdict):
                element = SubElement(case, tag, message=printable(result.reason), type=rule.strength)
                element.text = "\n".join(map(printable, result.excerpt.splitlines()))
        for attribute, path in COUNTS.items():
            suite.set(attribute, str(len(suite.findall(path))))
    return tostring(root, encoding="unicode", xml_declaration=True) + "\n"


# --- a recorded stream --------------------------------------------------------------------------------------


def judge_recording(stream: bytes, as_json: bool) -> tuple[list[str], int]:
    """Return the lines to print, and the exit status."""
    capture = read(stream)
    faults = violations(capture)
    lines = [f"event {fault.event}: {fault.message} ({fault.rule}: {fault.link})" for fault in faults]
    verdict = f"{len(faults)} violations" if faults else "OK"
    lines.append(f"{verdict}. {len(capture.raw)} events of a {capture.kind} stream")
    if as_json:
        report = {"kind": capture.kind, "events": len(capture.raw), "ok": not faults}
        lines = [json.dumps(report | {"violations": [fault._asdict() for fault in faults]}, indent=2)]
    return lines, int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
