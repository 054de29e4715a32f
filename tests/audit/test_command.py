"""`python -m audit` as its users run it: against our server, against what is none, packed as one file."""

import http.server
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
from typing import ClassVar
from xml.etree import ElementTree

import pytest
import yaml

from audit import report
from audit.rules import RULES
from audit.session import PROFILES, Result, Verdict, both, chosen
from helpers.serving import ROOT, Server, serve

FEW = ["--rules", "bad-[jmi]*", "--rules", "models", "--long", "{}"]
TINY = ["--model", "tiny"]


@pytest.fixture(scope="module")
def ours() -> Iterator[Server]:
    with serve("--api-key", "secret") as server:
        yield server


def audit(*words: str, program: tuple[str, ...] = ("-m", "audit")) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *program, *words]
    environment = os.environ | {"AUDIT_API_KEY": "secret"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)


def passed(*words: str, program: tuple[str, ...] = ("-m", "audit")) -> str:
    """Run an audit of a few rules, which all pass; return what it prints."""
    ended = audit(*words, *FEW, program=program)
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout


def refusal(ended: subprocess.CompletedProcess[str]) -> str:
    """Return the one line with which nothing was judged."""
    assert (ended.returncode, ended.stdout) == (2, "")
    (line,) = ended.stderr.splitlines()
    return line


# --- a server -----------------------------------------------------------------------------------------------


def test_a_server_is_audited(ours: Server, tmp_path: Path) -> None:
    """What differs if it is asked twice would be flaky."""
    files = {name: tmp_path / name for name in ("junit", "json-file")}
    options = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    assert "4 rules" in passed(f"{ours.url}/v1", *TINY, "--repeat", "2", *options)
    suites = ElementTree.parse(files["junit"]).getroot()
    cases = {case.attrib["name"] for case in suites.iter("testcase")}
    assert cases == {"bad-json", "bad-model", "bad-input", "models"}
    assert report.verdicts(files["json-file"].read_text()) == dict.fromkeys(cases, "pass")


def test_model_apis_and_what_makes_an_answer_long_are_found_out(ours: Server) -> None:
    about = json.loads(audit(f"{ours.url}/v1", "--rules", "models", "--json").stdout)["about"]
    assert (about["model"], about["long"]) == ("tiny", {"ignore_eos": True})
    assert about["apis"] == ["/responses", "/chat/completions"]


def test_the_key_and_the_model_are_named(ours: Server) -> None:
    assert "--api-key" in refusal(audit(f"{ours.url}/v1", *TINY, "--api-key", ""))
    assert "'nobody'" in refusal(audit(f"{ours.url}/v1", "--model", "nobody"))
    assert passed(f"{ours.url}/v1", *TINY, "--api-key", "", "--header", "Authorization: Bearer secret")


def test_it_runs_as_one_file_with_nothing_installed(ours: Server, tmp_path: Path) -> None:
    if not shutil.which("make"):
        pytest.skip("there is no make")
    subprocess.run(["make", "audit.pyz"], cwd=ROOT, check=True, capture_output=True)
    packed = shutil.copy(ROOT / "llmref-audit.pyz", tmp_path)
    assert passed(f"{ours.url}/v1", *TINY, program=("-I", "-S", str(packed)))


# --- what is no server --------------------------------------------------------------------------------------


class NoLlm(http.server.BaseHTTPRequestHandler):
    """A web server, which is no LLM server; or one that is busy after its first answer to each path."""

    answered: ClassVar[set[str]] = set()

    def do_GET(self) -> None:
        if "busy" in self.path and self.path not in self.answered:
            self.answered.add(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"data": []}')
        else:
            self.send_error(503 if "busy" in self.path else 404)

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def no_llm() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), NoLlm) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("layer", ["HTTP: expected HTTP/1.1", "TLS: "])
def test_a_mail_server_is_no_server(layer: str) -> None:
    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1000)
            connection.sendall(b"220 mail.example ESMTP\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=answer, daemon=True).start()
        scheme = "https" if layer == "TLS: " else "http"
        url = f"{scheme}://127.0.0.1:{listener.getsockname()[1]}"
        assert layer in refusal(audit(url, "--model", "m"))


def test_the_layer_that_failed_is_named(no_llm: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert "name: no address of" in refusal(audit("http://no-such-host.invalid/v1", "--model", "m"))
    assert "connection: " in refusal(audit(f"http://127.0.0.1:{port}/v1", "--model", "m"))
    line = refusal(audit(no_llm, "--model", "m"))
    assert "no LLM server" in line
    assert f"try {no_llm}/v1" in line


def test_it_is_busy(no_llm: str) -> None:
    """Then no rule is judged, which is no pass."""
    ended = audit(f"{no_llm}/busy", "--model", "m", "--rules", "models", "--long", "{}")
    assert (ended.returncode, ended.stderr) == (2, "")
    assert "the server is busy" in ended.stdout


@pytest.mark.parametrize(
    "words",
    [
        ["nowhere.sse"],
        ["--rules", "nothing", "http://127.0.0.1:9/v1"],
        ["--header", "x", "http://127.0.0.1:9"],
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(words: list[str]) -> None:
    assert refusal(audit(*words)).startswith("error: ")


# --- verdicts and reports -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verdicts", "strict", "known", "status"),
    [
        ({"cancel": "pass", "resume": "error"}, False, {}, 0),
        ({"cancel": "fail"}, False, {}, 1),
        ({"cancel-completed": "fail"}, False, {}, 0),  # a should
        ({"cancel-completed": "fail"}, True, {}, 1),
        ({"cancel": "fail"}, True, {"cancel": "#12"}, 0),
        ({"cancel": "flaky"}, True, {}, 0),
        ({"cancel": "error", "resume": "n/a"}, False, {}, 2),  # nothing was judged
    ],
)
def test_a_failed_must_decides(
    verdicts: dict[str, Verdict], strict: bool, known: dict[str, str], status: int
) -> None:
    results = [Result(rule, verdict) for rule, verdict in verdicts.items()]
    assert report.status(results, strict, known) == status


def test_what_differs_is_flaky() -> None:
    """It is no failure, and no pass."""
    passed, failed = Result("cancel", "pass"), Result("cancel", "fail", "late", "{}")
    flaky = both(passed, failed)
    assert flaky == both(failed, passed)._replace(reason=flaky.reason)
    assert (flaky.verdict, flaky.reason, flaky.excerpt) == ("flaky", "pass, then fail: late", "{}")
    (suite,) = ElementTree.fromstring(report.junit([flaky], {}))
    assert suite.attrib["skipped"] == "1"


def test_two_runs_are_compared(tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text(report.to_json([Result("models", "fail"), Result("resume", "pass")], {}))
    new.write_text(report.to_json([Result("models", "pass"), Result("resume", "pass")], {}))
    ended = audit("--diff", str(old), str(new))
    assert (ended.returncode, ended.stdout.split()) == (0, ["models", "fail", "->", "pass"])


def test_a_baseline_tells_what_is_fixed() -> None:
    known = report.read_baseline("# ours\n\ncancel: #12, next release\nresume: later\n")
    assert known == {"resume": "later"} | {"cancel": "#12, next release"}
    lines = list(report.against_baseline([Result("cancel", "pass"), Result("resume", "fail")], known))
    assert [line.split()[0] for line in lines] == ["fixed", "known"]
    for text in ("nothing: why", "cancel", "cancel:"):
        with pytest.raises(ValueError, match="line 1"):
            report.read_baseline(text)


def test_reports_say_whatever_a_server_sends() -> None:
    """And a terminal obeys nothing of it."""
    results = [
        Result("cancel", "fail", "a\x00<b>\033[2J", "\ud800\u2028\r\n & ]]>"),
        Result("resume", "n/a", "none"),
    ]
    suites = ElementTree.fromstring(report.junit(results, {"url": "http://x"}))
    assert [case.attrib["name"] for case in suites.iter("testcase")] == ["cancel", "resume"]
    properties = {p.attrib["name"] for p in suites.iter("property")}
    assert properties == {"strength", "title", "source", "link", "bugs"}
    assert all(line.isprintable() for line in report.details(results))


def test_a_known_failure_fails_no_ci() -> None:
    results = [Result("cancel", "fail", "late"), Result("resume", "fail", "early")]
    about = {"known": {"cancel": "#12"}}
    (suite,) = ElementTree.fromstring(report.junit(results, about))
    assert (suite.attrib["failures"], suite.attrib["skipped"]) == ("1", "1")
    assert [element.attrib["message"] for element in suite.iter("skipped")] == ["known: #12"]
    assert list(report.summary(results, about["known"]))[-1] == "1 failed musts: resume"


def test_what_does_not_apply_stands_by_its_reason() -> None:
    results = [Result(rule, "n/a", "no WebSocket: 426") for rule in ("ws-turn", "ws-end")]
    assert list(report.details(results)) == ["", "n/a   no WebSocket: 426", "      ws-turn, ws-end"]


# --- the list -----------------------------------------------------------------------------------------------


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
    assert sorted(chosen("all", [])) == sorted(RULES)
    assert chosen("stateful", ["resume*"]) == ["resume", "resume-end", "resume-number"]
    assert [name for name, rule in RULES.items() if not rule.source or "://" not in rule.link] == []


# --- what others rely on ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "inputs",
    [{}, {"model": "tiny", "baseline": "known.txt", "arguments": "--strict --header 'x: a b'"}],
)
def test_the_github_action(ours: Server, tmp_path: Path, inputs: dict[str, str]) -> None:
    """Its one step, run by bash as GitHub does it, with the variables that it is given of its inputs."""
    action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    (step,) = action["runs"]["steps"]
    given = {name: row.get("default", "") for name, row in action["inputs"].items()} | inputs
    given |= {"url": f"{ours.url}/v1", "arguments": f"{given['arguments']} {shlex.join(FEW)}"}
    given["api-key"] = "secret"
    expressions = {f"${{{{ inputs.{name} }}}}": value for name, value in given.items()}
    expressions["${{ github.action_path }}"] = str(ROOT)
    variables = {name: expressions[value] for name, value in step["env"].items()}
    (tmp_path / "known.txt").write_text("resume: later\n")
    (tmp_path / "bad-j").touch()  # what a pattern without quotes would become
    words = [step["shell"], "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
    environment = os.environ | variables
    ended = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "4 rules" in ended.stdout
    assert (tmp_path / given["junit"]).exists()
    assert set(re.findall(r"\$\{?(\w+)", step["run"])) - variables.keys() == {"word", "words"}
    assert "API_KEY" not in step["run"], "the command line is seen by all"
