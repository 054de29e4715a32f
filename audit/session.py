"""One audit: what there is to be audited, and every rule asked of it, each with its verdict.

    Peer --look()--> paths, or NoReply         Peer, names of rules --judge_all()--> [Result, ...]

    pass     the rule holds                     fail     it does not, and the excerpt shows it
    n/a      the server lacks what it is about  error    it could not be asked, and the reason says why
    flaky    one time it was this, another time that

Authority: xUnit's reports: an error is not a failure.

Rules of this file:
1. A rule that raises is an error of that rule alone: each one has its verdict, whatever the server does.
2. What is wrong before the first rule is told in one line, which names what failed: the name, the connection,
   TLS, HTTP, the key or the model. It is not a failure of a rule.

Not here: the rules, what is printed (__main__.py).
"""

import time
from fnmatch import fnmatch
from typing import NamedTuple

# Importing these enters their rules.
from audit import agents, answers, chunks, events, frames, refusals, stored, turns  # noqa: F401
from audit.http import NOT_THERE
from audit.peer import CUT, PATHS, STORY, Peer, judged
from audit.rules import OF_STREAMS, RULES, NoReply, NotApplicable, presumed
from audit.schema import Json, Typed
from audit.stream import of_chunks

PROFILES = ("chat", "responses", "stateful", "agents", "websocket", "all")


class Result(NamedTuple):
    rule: str  # key of RULES
    verdict: str  # pass, fail, flaky, n/a or error
    reason: str = ""  # what was expected, or why it does not apply or could not be asked
    excerpt: str = ""  # what shows it
    seconds: float = 0.0


def chosen(profile: str, patterns: list[str]) -> list[str]:
    """Return the rules of a profile whose names match a pattern, if there are any; raises ValueError."""
    names = [name for name, rule in RULES.items() if profile in ("all", *rule.profiles.split())]
    matching = [name for name in names if any(fnmatch(name, pattern) for pattern in patterns or "*")]
    if not matching:
        raise ValueError(f"no rule of the profile {profile!r} is called {patterns}: see --list")
    return matching


def judge_all(peer: Peer, names: list[str], n_times: int) -> list[Result]:
    """Return the verdict on each rule; if all are asked several times, the newest, or that they differ."""
    known: dict[str, Result] = {}
    for _ in range(n_times):
        peer.replies.clear()  # ask again what several rules are about
        for name in names:
            started_at = time.monotonic()
            result = judge(peer, name)
            earlier = known.get(name, result)
            if earlier.verdict != result.verdict:
                reason = f"{earlier.verdict}, then {result.verdict}: {earlier.reason}{result.reason}"
                result = Result(name, "flaky", reason, earlier.excerpt or result.excerpt)
            known[name] = result._replace(seconds=round(time.monotonic() - started_at, 3))
    return [*known.values()]


def judge(peer: Peer, name: str) -> Result:
    peer.start()
    peer.shown = ""
    try:
        check(peer, name)
    except AssertionError as failure:
        return Result(name, "fail", str(failure) or f"expected: {RULES[name].title}", peer.shown)
    except NotApplicable as reason:
        return Result(name, "n/a", str(reason))
    except Exception as error:  # NoReply, or what a reply that no rule expected makes of a rule: rule 1
        return Result(name, "error", f"{type(error).__name__}: {error}")
    return Result(name, "pass")


def check(peer: Peer, name: str) -> None:
    """Check what the rule builds on, then the rule."""
    rule = RULES[name]
    api = "chat" if "chat" in rule.profiles and "responses" not in rule.profiles else "responses"
    for earlier in rule.after.split():
        of_this_api = f"{api}-{earlier}"
        with presumed(earlier):
            check(peer, of_this_api if of_this_api in RULES else earlier)
    peer.api = api
    if rule.group in OF_STREAMS:
        judged(rule, peer)
    elif rule.group == "websocket":
        with turns.connected(peer) as socket:
            rule.check(socket)
    elif rule.requests:
        refusals.expect_refused(peer, rule)
    else:
        rule.check(peer)


# --- before the first rule ----------------------------------------------------------------------------------

ENOUGH = 200  # tokens: long enough to be cancelled, left and resumed
# Members of a body that keep a model from ending early: none, vLLM's and SGLang's, and llama.cpp's.
LONG: list[Json] = [{}, {"ignore_eos": True}, {"ignore_eos": True, "min_tokens": ENOUGH}]


def look(peer: Peer) -> list[str]:
    """Return the paths that are answered; raises NoReply if there is nothing that could be audited.

    The peer gets the first model that is listed, if it has none, and what is found to make its answers long.
    """
    models = Typed(peer.ask("GET", "/models").json, "models").data
    # If none is listed, any name will do: some servers have one model.
    peer.model = peer.model or (models[0].id if models else "default")
    replies = {api: peer.reply(api=api, limit=CUT) for api in PATHS}
    apis = [api for api, reply in replies.items() if reply.status == 200 and reply.json]
    if not apis:
        statuses = {reply.status for reply in replies.values()}
        layer = f"model: neither API answers for {peer.model!r}; is it the right --model?"
        if statuses <= NOT_THERE:
            layer = "HTTP: no LLM server of these APIs; is it the right URL, with its /v1?"
        elif statuses & {401, 403}:
            layer = "key: it is missing or wrong; give --api-key KEY"
        raise NoReply(f"{layer} {'; '.join(map(str, replies.values()))}")
    for members in LONG:
        peer.start()
        told = of_chunks([peer.reply(api=apis[0], said=STORY, limit=ENOUGH, **members).json])
        if told.n_output == ENOUGH:
            peer.long = members
            break
    return [PATHS[api] for api in apis]
