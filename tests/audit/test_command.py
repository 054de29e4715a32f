"""`python -m audit` as its users run it: against our server, against what is none, packed as one file."""

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from playwright.sync_api import sync_playwright

from audit import __main__ as command
from audit import expected, report, session
from audit.peer import Peer
from audit.rules import RULES
from audit.session import PROFILES, Result, chosen
from helpers.limits import PATIENCE_S
from helpers.serving import ROOT, Json, Server, run, serve
from helpers.tables import table
from helpers.upstream import Exchange, head, json_answer, upstream
from pictures import CHROMIUM

FEW = ["--rules", "bad-[jm]*", "--rules", "bad-input", "--rules", "models"]
TINY = ["--model", "tiny"]
TABLES = table("audit")


@pytest.fixture(scope="module")
def ours() -> Iterator[Server]:
    with serve("--api-key", "secret") as server:
        yield server


def audit(*words: str, program: tuple[str, ...] = ("-m", "audit")) -> subprocess.CompletedProcess[str]:
    return run(*program, *words, env=os.environ | {"AUDIT_API_KEY": "secret"})


def refusal(*words: str) -> str:
    """Return the one line with which nothing was judged."""
    ended = audit(*words)
    assert (ended.returncode, ended.stdout) == (2, "")
    (line,) = ended.stderr.splitlines()
    return line.removeprefix("error: ")


# --- a server -----------------------------------------------------------------------------------------------


def test_a_server_is_audited(ours: Server, tmp_path: Path) -> None:
    """Its model, its APIs and what makes its answers long are found out."""
    junit = tmp_path / "junit.xml"
    ended = audit(f"{ours.url}/v1", *FEW, "--repeat", "2", "--junit", str(junit), "--json")
    assert (ended.returncode, ended.stderr) == (0, "")
    cases = {case.attrib["name"] for case in ElementTree.parse(junit).iter("testcase")}
    assert cases == {"bad-json", "bad-model", "bad-input", "models"}
    report = json.loads(ended.stdout)
    assert {row["rule"]: row["verdict"] for row in report["results"]} == dict.fromkeys(cases, "pass")
    about = {
        "model": "tiny",
        "long": {"ignore_eos": True},
        "apis": ["/responses", "/chat/completions", "/messages"],
    }
    assert about.items() <= report["about"].items()


def test_it_runs_as_one_file_with_nothing_installed(ours: Server, tmp_path: Path) -> None:
    if not shutil.which("make"):
        pytest.skip("there is no make")
    subprocess.run(["make", "audit.pyz"], cwd=ROOT, check=True, capture_output=True)
    packed = shutil.copy(ROOT / "llmref-audit.pyz", tmp_path)
    ended = audit(f"{ours.url}/v1", *TINY, "--rules", "models", program=("-I", "-S", str(packed)))
    assert (ended.returncode, ended.stderr) == (0, "")


def test_what_failed_is_said_in_a_line(ours: Server) -> None:
    def greet() -> None:
        for _ in range(2):
            with listener.accept()[0] as connection:
                connection.recv(1000)
                connection.sendall(b"220 mail.example ESMTP\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=greet, daemon=True).start()
        mail = f"127.0.0.1:{listener.getsockname()[1]}"
        assert refusal(f"https://{mail}").startswith("TLS: ")
        assert refusal(f"http://{mail}").startswith("HTTP: ")
    assert refusal(f"http://{mail}").startswith("connection: ")
    for words, said in TABLES["refused"]:
        assert said in refusal(*(word.format(url=ours.url) for word in words))


# --- verdicts and reports -----------------------------------------------------------------------------------


@pytest.mark.parametrize("row", TABLES["exit"])
def test_the_exit_status(tmp_path: Path, row: Json) -> None:
    """With the file that --write-expect makes of a run, the next one has no news."""
    file = tmp_path / "known.txt"
    known = None
    if (listed := row.get("listed")) is not None:
        file.write_text(f"# of an earlier run\n{listed}\n", encoding="utf-8")
        known = expected.read(file)
    results = [Result(rule, verdict, "why") for rule, verdict in row["verdicts"].items()]
    rows = [report.row(result, known) for result in results]
    assert command.status(rows, row.get("strict", False)) == row["status"]
    file.write_text(expected.written(rows, known or {}), encoding="utf-8")
    assert [expected.news(result, expected.read(file)) for result in results] == [""] * len(results)
    assert row["status"] or not listed or "flaky" in listed or listed in file.read_text(encoding="utf-8")


def test_what_differs_is_flaky(monkeypatch: pytest.MonkeyPatch) -> None:
    late = Result("cancel", "fail", "late", "{}")
    verdicts = iter([Result("cancel", "pass"), late, Result("cancel", "pass")])
    monkeypatch.setattr(session, "judge", lambda *_: next(verdicts))
    (flaky,) = session.judge_all(Peer("http://127.0.0.1:9", "m"), ["cancel"], 3)
    assert (flaky.verdict, flaky.reason, flaky.excerpt) == ("flaky", "pass, fail, pass: late", "{}")


def test_reports_say_whatever_a_server_sends() -> None:
    """And a terminal obeys nothing of it."""
    said = "a\x00<b>\033[2J\ud800\u2028\r\n & ]]></script>"
    failed = Result("cancel", "fail", said, "", [{"asked": said, "reply": said}])
    rows = [report.row(result, None) for result in (failed, Result("resume", "n/a", "none"))]
    findings: Json = {"about": {"url": "http://x"}, "results": rows}
    (suite,) = ElementTree.fromstring(report.junit(findings))
    counts = {"tests": "2", "failures": "1", "errors": "0", "skipped": "1"}
    assert suite.attrib == counts | {"name": "background"}
    assert [case.attrib["name"] for case in suite.iter("testcase")] == ["cancel", "resume"]
    properties = {p.attrib["name"] for p in suite.iter("property")}
    assert properties == {"strength", "title", "source", "link", "bugs", "group"}
    assert all(line.isprintable() for line in [*report.lines(rows[0]), *report.conclusion(rows)])
    (data,) = re.findall('type="application/json">(.*?)</script>', report.page(findings))
    assert data == json.dumps(findings).replace("<", r"\u003c"), "the page has the whole report"


def test_the_page_is_drawn(tmp_path: Path) -> None:
    """Of one server, of two side by side, and of a recording: all of it fits a narrow screen."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium")
    exchanges = [{"asked": "curl x", "reply": "<b>" * 99}]
    row = report.row(Result("cancel", "fail", "late", "", exchanges), None)
    one: Json = {"about": {"url": "http://x", "model": "m"}, "results": [row]}
    other = one | {"results": [row | {"verdict": "pass"}]}
    fault = {"event": 0, "rule": "order", "message": "m", "link": "https://x"}
    stream = {"kind": "k", "stream": [{"type": "a"}], "labels": ["a"], "grammar": [[["s", "a"], "t"]]}
    pages: dict[str, Json] = {
        "curl x": one,
        "2 servers held": {"servers": {"a": one, "b": other}},
        "next state": stream | {"violations": [fault]},
    }
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        view = browser.new_page(viewport={"width": 390, "height": 800})
        for shown, data in pages.items():
            (tmp_path / "page.html").write_text(report.page(data), encoding="utf-8")
            view.goto(f"file://{tmp_path}/page.html")
            for rule in view.locator("details").all():
                rule.evaluate("rule => rule.open = true")
            assert shown in view.inner_text("body")
            assert "Rules of this file" not in view.inner_text("body"), "it is a comment"
            assert view.evaluate("document.documentElement.scrollWidth") <= 390


def test_what_was_found_is_reported_when_the_time_is_over(tmp_path: Path) -> None:
    """At a server that sends a number without end."""
    says_this = {"choices": [{"index": 0, "message": {"content": "Hi."}, "finish_reason": "stop"}]}

    def endless(exchange: Exchange) -> None:
        if not exchange.body.get("stream"):
            exchange.send(json_answer(says_this))
            return
        exchange.send(head() + b"data: ")
        while not is_over.wait(0.01):  # at full speed the limit of bytes might come before the deadline
            exchange.send(b"1" * 65536)

    is_over, junit = threading.Event(), tmp_path / "junit.xml"
    with upstream(endless) as server:
        ended = audit(server.url, "--rules", "event*", "--deadline", "3", "--junit", str(junit))
    assert (ended.returncode, ended.stderr) == (2, "")
    assert "the audit was stopped before it: " in ended.stdout
    assert {case[-1].tag for case in ElementTree.parse(junit).iter("testcase")} == {"error"}


def test_a_reader_may_leave() -> None:
    """As `| head -1` does; the pipe holds less than the list, so the audit waits for its reader."""
    command = [sys.executable, "-m", "audit", "--list"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, pipesize=4096) as listing:
        assert listing.stdout
        assert listing.stderr
        listing.stdout.readline()
        listing.stdout.close()
        assert listing.stderr.read() == b""
    assert listing.returncode == 0


def test_each_rule_is_of_a_profile_and_says_who_wrote_it_down() -> None:
    assert {profile for rule in RULES.values() for profile in rule.profiles.split()} <= {*PROFILES}
    assert chosen("all", []) == [*RULES]
    assert chosen("stateful", ["resume*"]) == ["resume", "resume-end", "resume-number"]
    assert [name for name, rule in RULES.items() if not rule.source or "://" not in rule.link] == []
    chapters = report.page({}).partition("const CHAPTERS")[2].partition("};")[0]
    assert [rule.group for rule in RULES.values() if f" {rule.group}: " not in chapters] == []


@pytest.mark.parametrize("inputs", [{}, {"model": "tiny", "arguments": "--strict --rules 'bad-j*'"}])
def test_the_github_action(ours: Server, tmp_path: Path, inputs: dict[str, str]) -> None:
    """Its last step, run by bash as GitHub does it, in a workspace that would take over."""
    action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    python, step = action["runs"]["steps"]
    assert python["uses"].startswith("actions/setup-python@")
    given = {name: row.get("default", "") for name, row in action["inputs"].items()} | inputs
    arguments = f"{given['arguments']} {shlex.join(FEW)}"
    given |= {"url": f"{ours.url}/v1", "arguments": arguments, "api-key": "secret"}
    expressions = {f"${{{{ inputs.{name} }}}}": value for name, value in given.items()}
    expressions |= {"${{ github.action_path }}": str(ROOT), "1": "1"}
    expressions["${{ steps.python.outputs.python-path }}"] = sys.executable
    variables = {name: expressions[value] for name, value in step["env"].items()}
    (tmp_path / "bad-j").touch()  # what a pattern without quotes would become
    for module in ("audit/__main__.py", "shlex.py", "sitecustomize.py"):
        (tmp_path / module).parent.mkdir(exist_ok=True)
        (tmp_path / module).write_text("raise SystemExit('taken over')", encoding="utf-8")
    words = [step["shell"], "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
    environment = os.environ | variables
    ended = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "4 rules: 4 pass" in ended.stdout
    assert (tmp_path / given["junit"]).exists()
    assert set(re.findall(r"\$\{?(\w+)", step["run"])) - variables.keys() == {"word", "words"}
    assert "API_KEY" not in step["run"], "the command line is seen by all"
