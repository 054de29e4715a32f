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
from xml.etree import ElementTree

import pytest
import yaml

from audit import report
from audit.peer import Peer
from audit.rules import RULES
from audit.session import PROFILES, Result, both, chosen, judge
from helpers.serving import ROOT, Server, serve

FEW = ["--rules", "bad-[jmi]*", "--rules", "models", "--long", "{}"]


@pytest.fixture(scope="module")
def ours() -> Iterator[Server]:
    with serve() as server:
        yield server


def audit(*words: str, program: tuple[str, ...] = ("-m", "audit")) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *program, *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)


def test_a_server_is_audited(ours: Server, tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("junit", "json-file")}
    options = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    ended = audit(f"{ours.url}/v1", "--model", "tiny", *FEW, *options)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "4 rules" in ended.stdout
    suites = ElementTree.parse(files["junit"]).getroot()
    cases = {case.attrib["name"] for case in suites.iter("testcase")}
    assert cases == {"bad-json", "bad-model", "bad-input", "models"}
    assert report.verdicts(files["json-file"].read_text()) == dict.fromkeys(cases, "pass")


def test_the_model_is_found_out(ours: Server) -> None:
    ended = audit(f"{ours.url}/v1", "--rules", "models", "--long", "{}", "--json")
    about = json.loads(ended.stdout)["about"]
    assert about["model"] == "tiny"
    assert about["apis"] == ["/responses", "/chat/completions"]


def test_what_makes_an_answer_long_is_found_out(ours: Server) -> None:
    ended = audit(f"{ours.url}/v1", "--model", "tiny", "--rules", "models", "--json")
    assert json.loads(ended.stdout)["about"]["long"] == {"ignore_eos": True}


class NoLlm(http.server.BaseHTTPRequestHandler):
    """A web server, which is no LLM server; or one that is busy."""

    def do_GET(self) -> None:
        self.send_error(503 if self.path.startswith("/busy") else 404)

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def no_llm() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), NoLlm) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def no_http() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"220 mail.example ESMTP\r\n")

        threading.Thread(target=answer, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def refusal(ended: subprocess.CompletedProcess[str]) -> str:
    """The one line with which nothing was judged."""
    assert (ended.returncode, ended.stdout) == (2, "")
    (line,) = ended.stderr.splitlines()
    return line


def test_the_layer_that_failed_is_named(no_http: str) -> None:
    """The name, the connection, TLS, HTTP; for the key and the model see below."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert "name: no address of" in refusal(audit("http://no-such-host.invalid/v1", "--model", "m"))
    assert "connection: " in refusal(audit(f"http://127.0.0.1:{port}/v1", "--model", "m"))
    assert "HTTP: expected HTTP/1.1" in refusal(audit(no_http, "--model", "m"))


def test_that_tls_failed_is_named(no_http: str) -> None:
    assert "TLS: " in refusal(audit(no_http.replace("http:", "https:"), "--model", "m"))


def test_it_is_no_llm(no_llm: str) -> None:
    line = refusal(audit(no_llm, "--model", "m"))
    assert "no LLM server" in line
    assert f"try {no_llm}/v1" in line


def test_it_is_busy(no_llm: str) -> None:
    result = judge(Peer(no_llm + "/busy", "m"), "models")
    assert (result.verdict, result.reason[:18]) == ("error", "the server is busy")


def test_a_key_is_missing() -> None:
    with serve("--api-key", "secret") as server:
        assert "--api-key" in refusal(audit(f"{server.url}/v1", "--model", "tiny"))
        ended = audit(f"{server.url}/v1", "--model", "tiny", "--api-key", "secret", *FEW)
        assert ended.returncode == 0
        ended = audit(f"{server.url}/v1", "--model", "tiny", "--header", "Authorization: Bearer secret", *FEW)
        assert ended.returncode == 0


def test_asked_again_and_again(ours: Server) -> None:
    """What differs is flaky: no failure, and no pass."""
    ended = audit(f"{ours.url}/v1", "--model", "tiny", "--repeat", "2", *FEW)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "4 rules" in ended.stdout
    passed, failed = Result("cancel", "pass"), Result("cancel", "fail", "late", "{}")
    flaky = both(passed, failed)
    assert flaky == both(failed, passed)._replace(reason=flaky.reason)
    assert (flaky.verdict, flaky.reason, flaky.excerpt) == ("flaky", "pass, then fail: late", "{}")
    assert report.failed([flaky], strict=True, known={}) == []
    (suite,) = ElementTree.fromstring(report.junit([flaky], {}))
    assert suite.attrib["skipped"] == "1"


def test_the_model_is_wrong(ours: Server) -> None:
    assert "'nobody'" in refusal(audit(f"{ours.url}/v1", "--model", "nobody"))


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


def test_two_runs_are_compared(tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text(report.to_json([Result("models", "fail"), Result("resume", "pass")], {}))
    new.write_text(report.to_json([Result("models", "pass"), Result("resume", "pass")], {}))
    ended = audit("--diff", str(old), str(new))
    assert (ended.returncode, ended.stdout.split()) == (0, ["models", "fail", "->", "pass"])


def test_a_failed_must_decides() -> None:
    must, should = Result("cancel", "fail"), Result("cancel-completed", "fail")
    assert report.failed([must, should], strict=False, known={}) == [must]
    assert report.failed([must, should], strict=True, known={}) == [must, should]
    assert report.failed([must, should], strict=True, known={"cancel": "known"}) == [should]
    assert report.failed([Result("cancel", "error")], strict=True, known={}) == []


def test_a_baseline_tells_what_is_fixed() -> None:
    known = report.read_baseline("# ours\n\ncancel: #12, next release\nresume: later\n")
    assert known == {"resume": "later"} | {"cancel": "#12, next release"}
    lines = list(report.against_baseline([Result("cancel", "pass"), Result("resume", "fail")], known))
    assert [line.split()[0] for line in lines] == ["fixed", "known"]


@pytest.mark.parametrize("text", ["nothing: why", "cancel", "cancel:"])
def test_a_baseline_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ValueError, match="line 1"):
        report.read_baseline(text)


def test_junit_says_whatever_a_server_sends() -> None:
    results = [Result("cancel", "fail", "a\x00<b>", "\ud800 & ]]>"), Result("resume", "n/a", "none")]
    suites = ElementTree.fromstring(report.junit(results, {"url": "http://x"}))
    assert [case.attrib["name"] for case in suites.iter("testcase")] == ["cancel", "resume"]
    properties = {p.attrib["name"] for p in suites.iter("property")}
    assert properties == {"strength", "title", "source", "link", "bugs"}


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


def test_a_terminal_obeys_nothing_of_what_a_server_sends() -> None:
    lines = report.details([Result("cancel", "fail", "got \033[2J", "a\u2028\r\nb")])
    assert all(line.isprintable() for line in lines)


def test_a_reader_may_leave() -> None:
    """As `| head -1` does."""
    command = [sys.executable, "-m", "audit", "--list"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as listing:
        assert listing.stdout
        assert listing.stderr
        listing.stdout.readline()
        listing.stdout.close()
        assert listing.stderr.read() == b""
    assert listing.returncode == 0


def test_each_rule_is_of_a_profile() -> None:
    assert {profile for check in RULES.values() for profile in check.profiles.split()} <= {*PROFILES}
    assert sorted(chosen("all", [])) == sorted(RULES)
    assert {*chosen("chat", [])} < {*RULES}
    assert chosen("stateful", ["resume*"]) == ["resume", "resume-end", "resume-number"]


def test_each_rule_says_who_wrote_it_down() -> None:
    assert [name for name, check in RULES.items() if not check.source or "://" not in check.link] == []


def test_it_runs_as_one_file_with_nothing_installed(ours: Server, tmp_path: Path) -> None:
    if not shutil.which("make"):
        pytest.skip("there is no make")
    subprocess.run(["make", "audit.pyz"], cwd=ROOT, check=True, capture_output=True)
    packed = ROOT / "llmref-audit.pyz"
    assert packed.stat().st_size < 300_000
    shutil.copy(packed, tmp_path)
    program = ("-I", "-S", str(tmp_path / packed.name))
    ended = audit(f"{ours.url}/v1", "--model", "tiny", *FEW, program=program)
    assert (ended.returncode, ended.stderr) == (0, "")


# --- what others rely on ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "inputs",
    [
        {},
        {"model": "tiny", "baseline": "known.txt", "arguments": "--strict --header 'x: a b'", "api-key": "k"},
    ],
)
def test_the_github_action(ours: Server, tmp_path: Path, inputs: dict[str, str]) -> None:
    """Its one step, run by bash as GitHub does it, with the variables that it is given of its inputs."""
    action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    (step,) = action["runs"]["steps"]
    given = {name: row.get("default", "") for name, row in action["inputs"].items()} | inputs
    given |= {"url": f"{ours.url}/v1", "arguments": f"{given['arguments']} {shlex.join(FEW)}"}
    expressions = {f"${{{{ inputs.{name} }}}}": value for name, value in given.items()}
    expressions["${{ github.action_path }}"] = str(ROOT)
    variables = {name: expressions[value] for name, value in step["env"].items()}
    (tmp_path / "known.txt").write_text("resume: later\n")
    (tmp_path / "bad-j").touch()  # what a pattern without quotes would become
    ended = subprocess.run(
        [step["shell"], "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
        cwd=tmp_path,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "4 rules" in ended.stdout
    assert (tmp_path / given["junit"]).exists()
    assert set(re.findall(r"\$\{?(\w+)", step["run"])) - variables.keys() == {"word", "words"}
    assert "API_KEY" not in step["run"], "the command line is seen by all"


def rows(table: str) -> list[list[str]]:
    """The cells of a table in Markdown, without its head."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_the_front_page_says_what_the_results_say() -> None:
    """The totals of other servers: those of results/peers.md, and these count its table of rules."""
    peers = (ROOT / "results" / "peers.md").read_text(encoding="utf-8")
    readme = (ROOT / "audit" / "README.md").read_text(encoding="utf-8")
    tables = re.findall(r"(?:^\|.*\n)+", peers, re.MULTILINE)
    (totals,) = (table for table in tables if table.startswith("| server | version"))
    (by_rule,) = (table for table in tables if table.startswith("| rule |"))
    said = [re.findall(r"\d+", row[-1]) for row in rows(totals)[1:]]
    start = readme.index("| | pass | fail |")
    assert [row[1:] for row in rows(readme[start:].split("\n\n")[0])] == [
        [n_passed, n_failed, n_musts, n_not] for n_passed, n_failed, n_musts, n_not in said
    ]
    columns = [*zip(*[row[3:] for row in rows(by_rule)], strict=True)]
    strengths = [row[1] for row in rows(by_rule)]
    counted = [
        [
            column.count("pass"),
            column.count("FAIL"),
            [*zip(column, strengths, strict=True)].count(("FAIL", "must")),
            column.count("n/a"),
        ]
        for column in columns
    ]
    assert counted == [[*map(int, row)] for row in said]
    assert {row[0] for row in rows(by_rule)} <= RULES.keys()
