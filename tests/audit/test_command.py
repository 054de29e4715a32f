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

from audit import __main__ as command
from audit import session
from audit.peer import Peer
from audit.rules import RULES
from audit.session import PROFILES, Result, chosen
from helpers.serving import ROOT, Server, serve

FEW = ["--rules", "bad-[jmi]*", "--rules", "models"]
TINY = ["--model", "tiny"]


@pytest.fixture(scope="module")
def ours() -> Iterator[Server]:
    with serve("--api-key", "secret") as server:
        yield server


def audit(*words: str, program: tuple[str, ...] = ("-m", "audit")) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *program, *words]
    environment = os.environ | {"AUDIT_API_KEY": "secret"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)


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
    about = {"model": "tiny", "long": {"ignore_eos": True}, "apis": ["/responses", "/chat/completions"]}
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
    assert refusal("http://no-such-host.invalid/v1").startswith("name: ")
    assert "HTTP: no LLM server" in refusal(ours.url, "--model", "m")
    assert "key: " in refusal(f"{ours.url}/v1", *TINY, "--api-key", "")
    assert "'nobody'" in refusal(f"{ours.url}/v1", "--model", "nobody")
    assert "nothing" in refusal(f"{ours.url}/v1", "--rules", "nothing")
    assert "nowhere.sse" in refusal("nowhere.sse")


# --- verdicts and reports -----------------------------------------------------------------------------------


EXITS = [
    ({"cancel": "pass", "resume": "error"}, False, 0),
    ({"cancel": "fail"}, False, 1),
    ({"cancel-completed": "fail"}, False, 0),  # a should
    ({"cancel-completed": "fail"}, True, 1),
    ({"cancel": "flaky"}, True, 0),
    ({"cancel": "error", "resume": "n/a"}, False, 2),  # nothing was judged
]


@pytest.mark.parametrize(("verdicts", "strict", "status"), EXITS)
def test_a_failed_must_decides(verdicts: dict[str, str], strict: bool, status: int) -> None:
    results = [Result(rule, verdict) for rule, verdict in verdicts.items()]
    assert command.status(results, strict) == status


def test_what_differs_is_flaky(monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts = iter([Result("cancel", "pass"), Result("cancel", "fail", "late", "{}")])
    monkeypatch.setattr(session, "judge", lambda *_: next(verdicts))
    (flaky,) = session.judge_all(Peer("http://127.0.0.1:9", "m"), ["cancel"], 2)
    assert (flaky.verdict, flaky.reason, flaky.excerpt) == ("flaky", "pass, then fail: late", "{}")


def test_reports_say_whatever_a_server_sends() -> None:
    """And a terminal obeys nothing of it."""
    failed = Result("cancel", "fail", "a\x00<b>\033[2J", "\ud800\u2028\r\n & ]]>")
    results = [failed, Result("resume", "n/a", "none")]
    (suite,) = ElementTree.fromstring(command.junit(results, "http://x"))
    counts = {"tests": "2", "failures": "1", "errors": "0", "skipped": "1"}
    assert suite.attrib == counts | {"name": "background"}
    assert [case.attrib["name"] for case in suite.iter("testcase")] == ["cancel", "resume"]
    properties = {p.attrib["name"] for p in suite.iter("property")}
    assert properties == {"strength", "title", "source", "link", "bugs"}
    assert all(line.isprintable() for line in command.details(results))


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


@pytest.mark.parametrize("inputs", [{}, {"model": "tiny", "arguments": "--strict --rules 'bad-j*'"}])
def test_the_github_action(ours: Server, tmp_path: Path, inputs: dict[str, str]) -> None:
    """Its one step, run by bash as GitHub does it, with the variables that it is given of its inputs."""
    action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    (step,) = action["runs"]["steps"]
    given = {name: row.get("default", "") for name, row in action["inputs"].items()} | inputs
    arguments = f"{given['arguments']} {shlex.join(FEW)}"
    given |= {"url": f"{ours.url}/v1", "arguments": arguments, "api-key": "secret"}
    expressions = {f"${{{{ inputs.{name} }}}}": value for name, value in given.items()}
    expressions["${{ github.action_path }}"] = str(ROOT)
    variables = {name: expressions[value] for name, value in step["env"].items()}
    (tmp_path / "bad-j").touch()  # what a pattern without quotes would become
    words = [step["shell"], "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
    environment = os.environ | variables
    ended = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "4 rules: 4 pass" in ended.stdout
    assert (tmp_path / given["junit"]).exists()
    assert set(re.findall(r"\$\{?(\w+)", step["run"])) - variables.keys() == {"word", "words"}
    assert "API_KEY" not in step["run"], "the command line is seen by all"
