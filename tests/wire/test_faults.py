"""A planted fault for every rule: behind a server that misbehaves by script its rule fails, and no other."""

import tomllib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from audit import answers, peer
from audit.peer import Peer
from audit.rules import RULES
from audit.session import Result, judge
from helpers.serving import Server
from wire.conftest import KEY, endless
from wire.foreign import NO_FAULT, Exchange, Fault, changes, misbehaving
from wire.minimal import minimal

HERE = Path(__file__).parent
# Requests of peer.STREAMS.
STREAMS = {
    "responses": r'POST /v1/responses .*"stream": true(?!.*("background"|_tokens": (16|32|\d00)|get_time))',
    "chat": r'POST /v1/chat.*"stream": true(?!.*("stop"|"logprobs"))',
}


def faults() -> dict[str, Fault]:
    """A fault for each rule: of a rule on one stream, the first of tests/faults.toml if it has none here."""
    by_rule = tomllib.loads((HERE / "faults.toml").read_text(encoding="utf-8"))
    of_streams = tomllib.loads((HERE.parent / "faults.toml").read_text(encoding="utf-8"))
    for rule, (first, *_) in of_streams.items():
        when, reply = STREAMS[first["stream"]], [first["old"], first["new"]]
        by_rule.setdefault(rule, {"when": when, "was": 200, "as_whole": True, "reply": reply})
    return by_rule


FAULTS = faults()
SOCKETS = [rule for rule in RULES if rule.startswith("ws-")]
OVER_HTTP = [rule for rule in RULES if rule not in SOCKETS]


def test_every_rule_has_a_fault_and_the_front_page_counts_them() -> None:
    assert FAULTS.keys() == RULES.keys()
    page = (HERE.parent.parent / "audit" / "README.md").read_text(encoding="utf-8")
    assert f"against {len(RULES)} rules that" in page


def judged(
    ours: Server, rule: str, fault: Fault, earlier: Iterable[Exchange] = ()
) -> tuple[Result, list[Exchange], list[Exchange]]:
    """Return the verdict on a server with a fault, what ours was asked for it, and what was had earlier."""
    with misbehaving(ours.url, fault, earlier) as between:
        result = judge(endless(between.url), rule)
        return result, between.exchanges, between.repeated


@pytest.fixture
def exchanges(ours: Server) -> dict[str, list[Exchange]]:
    """What each rule asks, and what a server without a fault answers: the server between is not what fails.

    The streams that most rules look at are made once. The rule on the work of a client that has left looks at
    a server that has nothing else to do.
    """
    with misbehaving(ours.url, NO_FAULT) as between:
        recorder = endless(between.url)
        for name in peer.STREAMS:
            recorder.recorded(name)
    judge_without_fault = partial(judged, ours, fault=NO_FAULT, earlier=between.exchanges)
    beside_others = [rule for rule in OVER_HTTP if rule != "leaving"]
    with ThreadPoolExecutor(4) as threads:
        verdicts = [*threads.map(judge_without_fault, beside_others), judge_without_fault("leaving")]
    assert [result for result, _, _ in verdicts] == [Result(each.rule, "pass") for each, _, _ in verdicts]
    return {result.rule: [*anew, *repeated] for result, anew, repeated in verdicts}


@pytest.mark.timeout(600)  # of a busy machine
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
        wrong += [f"{rule}: nothing shows what is wrong" for failure in failures if not failure.excerpt]
    return wrong


def judged_by_all(ours: Server, exchanges: dict[str, list[Exchange]], rule: str) -> list[Result]:
    """What the rules say of a rule's fault.

    One that asks nothing that the fault changes is not asked again. What another one asks is answered from
    what was had before, if the fault leaves the requests alone or nothing is kept between them.
    """
    fault = FAULTS[rule]
    results = []
    asked_anew: list[Exchange] = []
    for name in OVER_HTTP:
        earlier = exchanges[name]
        if not any(changes(fault, exchange) for exchange in earlier):
            continue
        is_stateless = not any("/responses/" in exchange.line for exchange in earlier)
        if is_stateless:
            earlier = [*earlier, *asked_anew]
        elif "ask" in fault:
            earlier = []
        result, anew, _ = judged(ours, name, fault, earlier)
        if is_stateless:
            asked_anew += anew
        results.append(result)
    return results


def test_a_fault_of_a_websocket_is_named_by_its_rule_alone() -> None:
    def judged_by_all(rule: str) -> list[Result]:
        with minimal(FAULTS[rule], KEY) as url:
            return [judge(Peer(url, "minimal", KEY), name) for name in SOCKETS]

    with ThreadPoolExecutor(len(SOCKETS)) as threads:  # a judge waits most of the time
        verdicts = dict(zip(SOCKETS, threads.map(judged_by_all, SOCKETS), strict=True))
    assert not_named_alone(verdicts) == []


def test_a_stream_that_breaks_off_is_named_once() -> None:
    """One broken stream does not fail all rules over streams."""
    with minimal({"when": "$^", "breaks_off": True}) as url:
        peer = Peer(url, "minimal")
        failures = [rule for rule in OVER_HTTP if judge(peer, rule).verdict not in ("pass", "n/a")]
    assert failures == ["whole-frames"]
