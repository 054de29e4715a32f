"""A planted fault for every rule: behind a server that misbehaves by script its rule fails, and no other."""

import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from audit import checks_clients
from audit.checks import CHECKS
from audit.peer import Peer
from audit.session import Result, judge
from helpers.serving import Server, serve
from wire.conftest import ENDLESS, KEY
from wire.foreign import NO_FAULT, Exchange, Fault, changes, misbehaving

HERE = Path(__file__).parent
# Requests of probes.STREAMS.
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


@pytest.fixture(scope="module")
def ours() -> Iterator[Server]:
    with serve("--api-key", KEY) as server:
        yield server


def test_every_rule_has_a_fault() -> None:
    assert FAULTS.keys() == CHECKS.keys()


def test_the_readme_counts_the_rules() -> None:
    readme = (HERE.parent.parent / "README.md").read_text(encoding="utf-8")
    assert f"holds {len(CHECKS)} rules against" in readme


def judged(
    ours: Server, rule: str, fault: Fault, earlier: Iterable[Exchange] = ()
) -> tuple[Result, list[Exchange]]:
    """The verdict on a server with a fault, and what ours was asked for it."""
    with misbehaving(ours.url, fault, earlier) as between:
        return judge(Peer(between.url, "tiny", KEY, long=ENDLESS), rule), between.exchanges


@pytest.fixture
def exchanges(ours: Server) -> dict[str, list[Exchange]]:
    """What each rule asks, and what a server without a fault answers: the server between is not what fails.

    Backwards, because the work of a client that left must have ended before the rule that looks for it.
    """
    had = {}
    for rule in reversed(CHECKS):
        result, had[rule] = judged(ours, rule, NO_FAULT)
        assert result == Result(rule, "pass")
    return had


def test_a_fault_is_named_by_its_rule_alone(
    ours: Server, exchanges: dict[str, list[Exchange]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all rules the one that is about it fails, and those that the fault's row names with a reason.

    A rule that asks nothing that the fault changes is not asked again. What another one asks is answered from
    what was had before, if the fault leaves the requests alone or nothing is kept between them.
    """
    monkeypatch.setattr(checks_clients, "PAUSE_S", 0.05)
    monkeypatch.setattr(checks_clients, "PATIENCE_S", 0.5)
    wrong = []
    for rule, fault in FAULTS.items():
        asked_anew: list[Exchange] = []
        touched = [name for name in CHECKS if any(changes(fault, exchange) for exchange in exchanges[name])]
        results = []
        for name in touched:
            is_stateless = not any("/responses/" in exchange.line for exchange in exchanges[name])
            if is_stateless:
                result, anew = judged(ours, name, fault, [*exchanges[name], *asked_anew])
                asked_anew += anew
            elif "ask" in fault:
                result, _ = judged(ours, name, fault)
            else:
                result, _ = judged(ours, name, fault, exchanges[name])
            results.append(result)
        named = {result.rule for result in results if result.verdict == "fail"}
        if named != {rule, *fault.get("also", {})}:
            wrong.append(f"the fault of {rule} is named by {sorted(named)}")
        wrong += [f"the fault of {rule}: {result}" for result in results if result.verdict == "error"]
        wrong += [
            f"{rule}: no excerpt" for result in results if result.verdict == "fail" and not result.excerpt
        ]
    assert wrong == []
