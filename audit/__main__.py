"""`python -m audit`: holds a live server, or a recorded stream, against the rules.

    URL --session.look(), judge_all()--> results --report--> lines and files
    file --report.judge_recording()--> lines

Authority: `python -m audit --help`.

Rules of this file:
1. The exit status tells: 0 all is well, 1 a rule is broken, 2 nothing could be judged.
2. The reports are written as the audit goes: an audit that is interrupted leaves what there is.
3. Only the standard library, and this folder: `make audit.pyz` packs it.

Not here: what is judged (rules.py and the modules of rules), and how it is told (report.py).
"""

import argparse
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

from audit import report, session
from audit.peer import BUDGET_S, Peer
from audit.rules import NoReply, NotApplicable

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
        return report.listing(session.chosen(options.profile, options.rules)), 0
    if urlsplit(options.target).scheme in ("http", "https"):
        return audit(options)
    stream = sys.stdin.buffer.read() if options.target == "-" else Path(options.target).read_bytes()
    return report.judge_recording(stream, options.json)


# --- a live server ------------------------------------------------------------------------------------------


def audit(options: argparse.Namespace) -> tuple[Iterable[str], int]:
    names = session.chosen(options.profile, options.rules)
    peer = Peer(options.target, options.model, options.api_key, None, options.timeout)
    apis = session.look(peer)
    about = {"url": options.target, "model": peer.model, "apis": apis, "long": peer.long}

    by_rule: dict[str, session.Result] = {}
    for result in session.judge_all(peer, names, options.repeat):
        by_rule[result.rule] = result
        results = [*by_rule.values()]
        for path, text in ((options.junit, report.junit), (options.json_file, report.to_json)):
            if path:
                path.write_text(text(results, about), encoding="utf-8")  # rule 2
    status = report.status(results, options.strict)
    if options.json:
        return [report.to_json(results, about).rstrip()], status
    head = f"{options.target}, model {peer.model}: {' and '.join(apis)}"
    return [head, *report.summary(results), *report.details(results)], status


if __name__ == "__main__":
    sys.exit(main())
