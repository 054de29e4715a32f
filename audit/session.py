"""One audit: what there is to be audited, and every rule asked of it, each with its verdict.

    Peer --look()--> paths, or NoReply         Peer, names of rules --judge_all()--> Result, ...

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
from collections.abc import Iterator, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from typing import Any, NamedTuple

# Importing these enters their rules.
from audit import agents, answers, isolation, messages, recording, stored, turns  # noqa: F401
from audit.http import NOT_THERE
from audit.peer import CUT, PATHS, STORY, Peer, judged
from audit.rules import OF_STREAMS, RULES, NoReply, NotApplicable, presumed
from audit.schema import Json, Typed
from audit.stream import of_chunks

N_SHOWN = 4  # exchanges of a verdict
PROFILES = ("chat", "responses", "messages", "stateful", "agents", "websocket", "all")


class Result(NamedTuple):
    rule: str  # key of RULES
    verdict: str  # pass, fail, flaky, n/a or error
    reason: str = ""  # what was expected, or why it does not apply or could not be asked
    excerpt: str = ""  # of the last reply, what shows it
    exchanges: Sequence[Json] = ()  # the last ones of the rule, as they can be repeated
    seconds: float = 0.0


def chosen(profile: str, patterns: list[str]) -> list[str]:
    """Return the rules of a profile whose names match a pattern, if there are any; raises ValueError."""
    names = [name for name, rule in RULES.items() if profile in ("all", *rule.profiles.split())]
    matching = [name for name in names if any(fnmatch(name, pattern) for pattern in patterns or "*")]
    if not matching:
        raise ValueError(f"no rule of the profile {profile} is called {' or '.join(patterns)}: see --list")
    return matching


def judge_all(peer: Peer, names: list[str], n_times: int) -> Iterator[Result]:
    """Yield the verdict on each rule; it is flaky if it is another one each of several times."""
    replies: list[Any] = [{} for _ in range(n_times)]  # each time asks anew what several rules are about
    for name in names:
        started_at = time.monotonic()
        results = []
        for peer.replies in replies:
            results.append(judge(peer, name))
        verdicts = [result.verdict for result in results]
        result = max(results, key=lambda result: result.verdict != "pass")  # the first that shows something
        if len({*verdicts}) > 1:
            result = result._replace(verdict="flaky", reason=f"{', '.join(verdicts)}: {result.reason}")
        yield result._replace(seconds=round(time.monotonic() - started_at, 3))


def judge(peer: Peer, name: str) -> Result:
    peer.start()
    peer.exchanges.clear()
    peer.show()
    try:
        check(peer, name)
    except AssertionError as failure:
        verdict, reason = "fail", str(failure) or f"expected: {RULES[name].title}"
    except NotApplicable as error:
        return Result(name, "n/a", str(error))
    except Exception as error:  # NoReply, or what a reply that no rule expected makes of a rule: rule 1
        verdict, reason = "error", f"{type(error).__name__}: {error}"
    else:
        return Result(name, "pass")
    exchanges = [
        {"asked": one.asked, "reply": one.received.decode("utf-8", "backslashreplace")}
        for one in peer.exchanges[-N_SHOWN:]
    ]
    return Result(name, verdict, reason, peer.shown, exchanges)


def check(peer: Peer, name: str) -> None:
    """Check what the rule builds on, then the rule."""
    rule = RULES[name]
    own = [api for api in PATHS if api in rule.profiles] or ["responses"]
    for earlier in rule.after.split():
        of_this_api = f"{own[0]}-{earlier}"
        with presumed(earlier):
            check(peer, of_this_api if of_this_api in RULES else earlier)
    peer.api = own[0]
    if rule.group in OF_STREAMS:
        judged(rule, peer)
    elif rule.group == "websocket":
        with turns.connected(peer) as socket:
            rule.check(socket)
    elif rule.requests:
        rule.check(peer, rule)
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
        listed = [model.id for model in models]
        layer = f"model: no API answers for {peer.model}; --model may be {', '.join(listed) or 'wrong'}."
        if statuses <= NOT_THERE and (not listed or peer.model in listed):
            layer = "HTTP: no LLM server of these APIs; is it the right URL, with its /v1?"
        if statuses & {401, 403}:
            layer = "key: it is missing or wrong; give --api-key KEY"
        raise NoReply(f"{layer} {'; '.join(map(str, replies.values()))}")
    with suppress(NoReply):  # a slow server has no long answer in time, and its other rules are judged
        for members in LONG:
            peer.start()
            told = of_chunks([peer.reply(api=apis[0], said=STORY, limit=ENOUGH, **members).json])
            if told.n_output == ENOUGH:
                peer.long = members
                break
    return [PATHS[api] for api in apis]
