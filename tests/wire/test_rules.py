"""Every rule: our own server and a minimal one break none, and a planted fault is named by its rule alone."""

import tomllib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from audit import answers, peer
from audit.isolation import CODES
from audit.peer import Peer
from audit.rules import RULES
from audit.session import Result, judge
from helpers.asked import NO_END
from helpers.device_ops import sweep
from helpers.limits import SLOWNESS
from helpers.serving import ROOT, SERVER, Server, serve
from wire.foreign import NO_FAULT, Exchange, Fault, Foreign, changes
from wire.minimal import Minimal

HERE = Path(__file__).parent
KEY = "a key of the tests"
# Requests of peer.STREAMS.
STREAMS = {
    "responses": r'POST /v1/responses .*"stream": true(?!.*("background"|_tokens": (16|32|\d00)|get_time))',
    "chat": r'POST /v1/chat.*"stream": true(?!.*("stop"|"logprobs"))',
}
# A fault for each rule: of a rule on one stream, the first of tests/faults.toml if it has none here.
FAULTS: dict[str, Fault] = tomllib.loads((HERE / "faults.toml").read_text(encoding="utf-8"))
OF_STREAMS = tomllib.loads((HERE.parent / "faults.toml").read_text(encoding="utf-8"))
for _rule, (_first, *_) in OF_STREAMS.items():
    _change = {"when": STREAMS[_first["stream"]], "reply": [_first["old"], _first["new"]]}
    FAULTS.setdefault(_rule, _change | {"was": 200, "as_whole": True})
SOCKETS = [rule for rule in RULES if rule.startswith("ws-")]
OVER_HTTP = [rule for rule in RULES if rule not in SOCKETS]
BESIDE_OTHERS = [rule for rule in OVER_HTTP if rule != "leaving"]  # it needs a server that is idle


def test_every_rule_has_a_fault_and_the_front_page_counts_them() -> None:
    assert FAULTS.keys() == RULES.keys()
    assert f"against {len(RULES)} rules that" in (ROOT / "audit/README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def ours() -> Iterator[Server]:
    with serve("--api-key", KEY, script=SERVER) as server:
        yield server


def endless(url: str) -> Peer:
    """Return a peer whose model writes as much as it may."""
    endless_peer = Peer(url, "tiny", KEY)
    endless_peer.long = NO_END
    return endless_peer


@pytest.fixture(scope="module")
def our_peer(ours: Server) -> Peer:
    return endless(ours.url + "/v1")


@pytest.mark.bug("S08")
@pytest.mark.parametrize("rule", [rule for rule in RULES if "isolation" not in rule])  # see below
def test_rule(our_peer: Peer, rule: str) -> None:
    assert judge(our_peer, rule) == Result(rule, "pass")


@pytest.mark.parametrize("n_clients", sweep([11, 5], [5]))
def test_clients_are_kept_apart_in_a_small_pool(n_clients: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In 32 pages, which change hands all the time; the mutants that leak are seen from outside."""
    monkeypatch.setattr("audit.isolation.CODES", CODES[:n_clients])
    monkeypatch.setattr("audit.isolation.SECONDS", 60 * SLOWNESS)  # a slow server has fewer clients
    with serve("--kv-memory", "2M") as server:
        crowded = Peer(server.url + "/v1", "tiny", budget=60 * SLOWNESS)
        for rule in ("isolation", "chat-isolation"):
            assert judge(crowded, rule) == Result(rule, "pass")


def test_a_minimal_server_is_not_accused() -> None:
    """What it does not have it may refuse: then the rule does not apply; most rules do."""
    with Minimal() as server:
        minimal = Peer(server.url, "minimal")
        verdicts = [judge(minimal, rule) for rule in RULES]
    assert [result for result in verdicts if result.verdict not in ("pass", "n/a")] == []
    assert len([result for result in verdicts if result.verdict == "pass"]) > 80


# --- planted faults -----------------------------------------------------------------------------------------


def judged(ours: Server, rule: str, fault: Fault, earlier: Iterable[Exchange] = ()) -> tuple[Result, Foreign]:
    """Judge a server with a fault, and return the verdict and the server, which keeps its exchanges."""
    with Foreign(ours.url, fault, earlier) as between:
        return judge(endless(between.url), rule), between


@pytest.fixture
def exchanges(ours: Server, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Exchange]]:
    """Return what each rule asks, and what a server without a fault answers; most streams are made once."""
    monkeypatch.setattr("audit.peer.N_FOXES", 5_000)  # each fault is looked for in all that was said
    with Foreign(ours.url, NO_FAULT) as between:
        recorder = endless(between.url)
        for name in peer.STREAMS:
            recorder.recorded(name)
    judge_without_fault = partial(judged, ours, fault=NO_FAULT, earlier=between.exchanges)
    with ThreadPoolExecutor(4) as threads:
        verdicts = [*threads.map(judge_without_fault, BESIDE_OTHERS), judge_without_fault("leaving")]
    assert [result for result, _ in verdicts] == [Result(result.rule, "pass") for result, _ in verdicts]
    return {result.rule: server.exchanges + server.repeated for result, server in verdicts}


def test_a_fault_is_named_by_its_rule(ours: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "PATIENCE_S", 0.5)
    monkeypatch.setattr("audit.peer.N_FOXES", 5_000)
    monkeypatch.setattr("audit.isolation.CODES", CODES[:3])

    def judged_by_its_own(rule: str) -> list[Result]:
        return [judged(ours, rule, FAULTS[rule])[0]]

    with ThreadPoolExecutor(4) as threads:
        verdicts = {"leaving": judged_by_its_own("leaving")}
        verdicts |= zip(BESIDE_OTHERS, threads.map(judged_by_its_own, BESIDE_OTHERS), strict=True)
    assert not_named_alone(verdicts) == []


@pytest.mark.sweep
@pytest.mark.timeout(1800)  # of a busy machine
def test_a_fault_is_named_by_its_rule_alone(
    ours: Server, exchanges: dict[str, list[Exchange]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all rules the one that is about it fails."""
    monkeypatch.setattr(answers, "PATIENCE_S", 0.5)
    judge_fault = partial(judged_by_all, ours, exchanges)
    with ThreadPoolExecutor(4) as threads:
        verdicts = dict(zip(OVER_HTTP, threads.map(judge_fault, OVER_HTTP), strict=True))
    assert not_named_alone(verdicts) == []


def not_named_alone(verdicts: dict[str, list[Result]]) -> list[str]:
    """What is wrong with the verdicts on each rule's fault."""
    wrong = []
    for rule, results in verdicts.items():
        failures = [result for result in results if result.verdict == "fail"]
        named = {failure.rule for failure in failures}
        if named != {rule}:
            wrong.append(f"the fault of {rule} is named by {sorted(named)}")
        wrong += [f"the fault of {rule}: {result}" for result in results if result.verdict == "error"]
        wrong += [f"{rule}: nothing shows what is wrong" for failure in failures if not failure.exchanges]
    return wrong


def judged_by_all(ours: Server, exchanges: dict[str, list[Exchange]], rule: str) -> list[Result]:
    """Return what the rules say of a rule's fault.

    Only a rule whose exchanges the fault changes is asked again. What was had before answers it, unless the
    fault changes requests and something is kept between them, or the rule looks at the time (first-event).
    """
    fault = FAULTS[rule]
    results = []
    asked_anew: list[Exchange] = []
    for name in OVER_HTTP:
        if "isolation" in name and name != rule:
            continue  # a crowd takes seconds: it is asked about its own fault alone
        earlier = exchanges[name]
        if not any(changes(fault, exchange) for exchange in earlier):
            continue
        is_stateless = not any("/responses/" in exchange.line for exchange in earlier)
        if is_stateless:
            earlier = [*earlier, *asked_anew]
        if name == "first-event" or (not is_stateless and "ask" in fault):
            earlier = []
        result, server = judged(ours, name, fault, earlier)
        if is_stateless:
            asked_anew += server.exchanges
        results.append(result)
    return results


def test_a_fault_of_a_websocket_is_named_by_its_rule_alone() -> None:
    def judged_by_all(rule: str) -> list[Result]:
        with Minimal(FAULTS[rule], KEY) as server:
            return [judge(Peer(server.url, "minimal", KEY), name) for name in SOCKETS]

    with ThreadPoolExecutor(4) as threads:  # a judge waits most of the time, and keeps what it reads
        verdicts = dict(zip(SOCKETS, threads.map(judged_by_all, SOCKETS), strict=True))
    assert not_named_alone(verdicts) == []


def test_a_stream_that_breaks_off_is_named_once() -> None:
    """One broken stream does not fail all rules over streams."""
    with Minimal(NO_FAULT | {"breaks_off": True}) as server:
        minimal = Peer(server.url, "minimal")
        failures = [rule for rule in OVER_HTTP if judge(minimal, rule).verdict not in ("pass", "n/a")]
    assert failures == ["whole-frames"]
