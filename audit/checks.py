"""CHECKS: all rules for a live server, one table made of those of each group.

    Peer --CHECKS[name].run()--> nothing, or Failed, or NotApplicable

Authority: each rule names who wrote the behaviour down, and has a link.

Rules of this file:
1. There is one list, run by `python -m audit URL` and by `pytest tests/wire`.
2. A rule that flags correct behaviour is the worst defect: what only some clients need is no "must".

Not here: what finds the faults (checks_*.py, rules.py), running them (session.py), reports (reports.py).
"""

from functools import partial

from audit import (
    checks_agents,
    checks_answers,
    checks_background,
    checks_clients,
    checks_refusals,
    checks_stored,
    checks_streams,
    checks_websocket,
    rules,
)
from audit.probes import Check

KINDS = {"": "frames", "responses": "events", "chat": "chunks"}  # kind of rules.RULES -> group


def of_stream(name: str, rule: rules.Rule) -> Check:
    """The rule over every stream of its kind that the server makes."""
    profiles = rule.kind or "chat responses"
    run = partial(checks_streams.judged, name)
    return Check(run, profiles, rule.strength, rule.bugs, rule.title, rule.source, rule.link)


def streams_of(kind: str) -> dict[str, Check]:
    return {name: of_stream(name, rule) for name, rule in rules.RULES.items() if rule.kind == kind}


GROUPS: dict[str, dict[str, Check]] = {
    **{group: streams_of(kind) for kind, group in KINDS.items()},
    "http": checks_streams.CHECKS,
    "clients": checks_clients.CHECKS,
    "answers": checks_answers.CHECKS,
    "agents": checks_agents.CHECKS,
    "stored": checks_stored.CHECKS,
    "background": checks_background.CHECKS,
    "refusals": checks_refusals.CHECKS,
    "websocket": checks_websocket.CHECKS,
}
CHECKS = {name: check for group in GROUPS.values() for name, check in group.items()}
PROFILES = ("chat", "responses", "stateful", "agents", "websocket", "all")
