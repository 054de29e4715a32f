"""`python -m audit`: holds a live server, or a recorded stream, against the rules.

    URL --session.look(), judge_all()--> Result, ... --report.row()--> lines and files, as they come
    bytes of a recorded stream --recording.violations()--> lines, or a page

Authority: `python -m audit --help`.

Rules of this file:
1. The exit status: 0 all is well, 1 a rule is broken, 2 nothing could be judged, 3 a must had no reply.
2. Only the standard library, and this folder: `make audit.pyz` packs it.
3. If anything ends the audit early (a signal, --deadline), it reports its findings so far.

Not here: the rules (rules.py and the modules of rules), the verdicts (session.py), the form of a report
(report.py), the known failures of a server (expected.py).
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 (one line, ahead of imports that would fail)
    sys.exit("error: Python 3.11 or later is needed, this is " + sys.version.split()[0])

import argparse
import json
import os
import re
import signal
import time
from pathlib import Path

from audit import expected, report, session
from audit.peer import BUDGET_S, Peer
from audit.recording import violations
from audit.rules import RULES, NoReply, NotApplicable
from audit.schema import GRAMMAR, Json, label
from audit.session import Result
from audit.stream import read

EXAMPLES = """\
a server:
  %(prog)s http://127.0.0.1:8000/v1 --model NAME
  %(prog)s http://127.0.0.1:8000/v1 --profile chat --junit audit.xml --html audit.html
  %(prog)s http://127.0.0.1:8000/v1 --write-expect known.txt
  %(prog)s http://127.0.0.1:8000/v1 --expect known.txt

servers side by side:
  %(prog)s http://127.0.0.1:8000/v1 --json > ours.json
  %(prog)s --compare ours.json theirs.json --html page.html

a recorded stream:
  curl -sN http://127.0.0.1:8000/v1/responses -H 'Content-Type: application/json' \\
      -d '{"model": "m", "input": "hi", "stream": true}' > capture.sse
  %(prog)s capture.sse

exit status: 0 all is well; 1 a must is broken (of a recording: any rule; with --strict: any rule, flaky ones
too; with --expect: any rule that is not as listed); 2 nothing could be judged: no such file, no server, no
such stream, or every rule ended as error or n/a; 3 a must could not be judged, for it had no reply
"""


# Option, its kind, its help.
OPTIONS = """
--list          flag    list the rules with their sources, without asking a server
--json          flag    print JSON instead of text
--model         text    name of the model; the first of /models if left out
--api-key       text    sent as a bearer token; better kept out of the command line, in AUDIT_API_KEY
--profile       text    which rules: chat, responses, messages, stateful, agents, websocket; all if left out
--rules         texts   only these, such as 'resume*'
--strict        flag    exit status 1 for every failure, not for a failed must alone
--repeat        number  ask every rule N times; differing verdicts are flaky
--timeout       number  seconds for each rule (%(default)g)
--deadline      number  seconds for all; the rules that are left then end as error
--expect        file    the known verdicts: any other verdict fails the run
--write-expect  file    write such a file; it keeps the lines of --expect that still hold
--junit         file    write a report for CI, as JUnit XML
--html          file    write a page for people
--compare       files   make one page (--html, or compared.html) of reports that --json has printed
"""
KINDS: dict[str, Json] = {
    "flag": {"action": "store_true"},
    "text": {"default": ""},
    "texts": {"action": "append", "default": []},
    "number": {"type": float, "metavar": "N"},
    "file": {"type": Path, "metavar": "FILE"},
    "files": {"type": Path, "metavar": "FILE", "nargs": "+"},
}


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"{Path(sys.argv[0]).name}".replace("__main__.py", "python -m audit"),
        description="Hold a server of the Responses or Chat Completions API, or a stream recorded of one, "
        "against the rules that clients rely on.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("target", nargs="?", help="base URL of a server, with its /v1; a file; - for stdin")
    for option, kind, text in re.findall(r"^(\S+) +(\w+) +(.+)", OPTIONS, re.MULTILINE):
        parser.add_argument(option, help=text, **KINDS[kind])
    key = os.environ.get("AUDIT_API_KEY", "")
    parser.set_defaults(profile="all", repeat=1, timeout=BUDGET_S, deadline=0, api_key=key)
    return parser


def main() -> int:
    parser = arguments()
    options = parser.parse_args()
    sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]
    try:
        if not __debug__:
            raise ValueError("the rules are assertions, which python -O leaves out")
        if options.list:
            for name in session.chosen(options.profile, options.rules):
                print(*report.listed(RULES[name]), sep="\n")
        elif options.compare:
            servers = {path.stem: json.loads(path.read_bytes()) for path in options.compare}
            (options.html or Path("compared.html")).write_text(report.page({"servers": servers}), "utf-8")
        elif options.target is None:
            parser.print_help(sys.stderr)
            return 2
        elif options.target.startswith(("http://", "https://")):
            return audit(options)
        else:
            return judge_recording(options)
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
    except (OSError, ValueError, NotApplicable, NoReply, AssertionError, KeyboardInterrupt) as error:
        print("error:", *(str(error) or "stopped before the first verdict").split(), file=sys.stderr)
        return 2
    return 0


# --- a live server ------------------------------------------------------------------------------------------


def audit(options: argparse.Namespace) -> int:
    """Ask all rules, report each verdict as it comes, and return the exit status."""
    names = session.chosen(options.profile, options.rules)
    known = expected.read(options.expect) if options.expect else None
    rows: list[Json] = []
    findings: Json = {"about": {"url": options.target, "date": time.strftime("%Y-%m-%d")}, "results": rows}
    keep(options, findings, known)  # a file that cannot be written fails now
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if options.deadline:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, options.deadline)
    peer = Peer(options.target, options.model, options.api_key, options.timeout)
    apis = session.look(peer)
    findings["about"] |= {"apis": apis, "model": peer.model, "long": peer.long}
    head = [f"{options.target}, model {peer.model}: {' and '.join(apis)}"]
    try:
        for result in session.judge_all(peer, names, int(options.repeat)):
            rows.append(report.row(result, known))
            keep(options, findings, known)
            progress("")
            if not options.json and rows[-1]["verdict"] == "fail":
                print(*head, *report.lines(rows[-1]), sep="\n", flush=True)
                head = []
            progress(f"{len(rows)} of {len(names)}, after {result.rule}")
    except KeyboardInterrupt:
        left = [Result(name, "error", "the audit was stopped before it") for name in names[len(rows) :]]
        rows += [report.row(result, known) for result in left]
        keep(options, findings, known)
    progress("")
    if options.json:
        print(json.dumps(findings, indent=2, ensure_ascii=False))
    else:
        print(*head, *report.conclusion(rows), sep="\n")
    return status(rows, options.strict)


def progress(text: str) -> None:
    """Show on a terminal how far we are."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def keep(options: argparse.Namespace, findings: Json, known: expected.Known | None) -> None:
    """Write the files."""
    texts = {
        options.junit: report.junit(findings),
        options.html: report.page(findings),
        options.write_expect: expected.written(findings["results"], known or {}),
    }
    for file, text in texts.items():
        if file:
            file.write_text(text, encoding="utf-8")


def status(rows: list[Json], strict: bool) -> int:
    """Return the exit status, as --help lists it."""
    ends = {(row["verdict"], row["strength"]) for row in rows}
    verdicts = {verdict for verdict, _ in ends}
    if verdicts <= {"error", "n/a"}:
        return 2
    news = [row["news"] for row in rows if "news" in row]
    is_broken = ("fail", "must") in ends or (strict and verdicts & {"fail", "flaky"})
    if any(news) if news else is_broken:
        return 1
    return 3 if ("error", "must") in ends else 0


# --- a recorded stream --------------------------------------------------------------------------------------


def judge_recording(options: argparse.Namespace) -> int:
    """Report what is wrong with a stream, and return the exit status."""
    file = Path(options.target)
    if options.target != "-" and not file.exists():
        raise ValueError(f"no file {file}; an address begins with a scheme: http://{file}")
    capture = read(sys.stdin.buffer.read() if options.target == "-" else file.read_bytes())
    faults = [fault._asdict() for fault in violations(capture)]
    findings: Json = {
        "kind": capture.kind,
        "events": len(capture.raw),
        "ok": not faults,
        "violations": faults,
    }
    if options.html:
        labels = [label(event) for _, event in capture.events]
        stream = {"stream": capture.raw, "labels": labels, "grammar": [*GRAMMAR.items()]}
        options.html.write_text(report.page(findings | stream), encoding="utf-8")
    if options.json:
        print(json.dumps(findings, indent=2))
    else:
        for fault in faults:
            print("event {event}: {message} ({rule}: {link})".format_map(fault))
        found = f"{len(faults)} violations" if faults else "OK"
        print(f"{found}. {len(capture.raw)} events of a {capture.kind} stream")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
