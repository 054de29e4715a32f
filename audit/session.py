"""One audit: what there is to be audited, and every rule asked of it, each with its verdict.

    Peer --look()--> paths, or NoReply         Peer, names of rules --judge_all()--> Result, Result, ...

    pass     the rule holds                     fail     it does not, and the excerpt shows it
    n/a      the server lacks what it is about  error    it could not be asked, and the reason says why
    flaky    one time it was this, another time that

Authority: xUnit's reports: an error is not a failure.

Rules of this file:
1. A rule that raises is an error of that rule alone: each one has its verdict, whatever the server does.
2. What is wrong before the first rule is told in one line, which names what failed: the name, the connection,
   TLS, HTTP, the key or the model. It is not a failure of a rule.

Not here: the rules, what is printed (report.py).
"""

import time
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple, get_args

from audit import agents, answers, chunks, clients, events, frames, refusals, stored, turns
from audit.http import NOT_THERE, Reply
from audit.peer import CUT, PATHS, STORY, Peer, judged
from audit.rules import OF_STREAMS, RULES, NoReply, NotApplicable, presumed
from audit.schema import Json

PROFILES = ("chat", "responses", "stateful", "agents", "websocket", "all")
GROUPS = (
    *OF_STREAMS,
    *("http", "clients", "answers", "agents", "stored", "background", "refusals", "websocket"),
)
MODULES = (
    frames,
    events,
    chunks,
    clients,
    answers,
    agents,
    stored,
    refusals,
    turns,
)  # whose import enters their rules
Verdict = Literal["pass", "fail", "flaky", "n/a", "error"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)


class Result(NamedTuple):
    rule: str  # key of RULES
    verdict: Verdict
    reason: str = ""  # what was expected, or why it does not apply or could not be asked
    excerpt: str = ""  # what shows it
    seconds: float = 0.0


def chosen(profile: str, patterns: Iterable[str]) -> list[str]:
    """Return the rules of a profile whose names match a pattern, if there are any; raises ValueError."""
    rules = sorted(RULES.values(), key=lambda rule: GROUPS.index(rule.group))
    names = [rule.name for rule in rules if profile in ("all", *rule.profiles.split())]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"no rule of the profile {profile!r} is called {pattern!r}: see --list")
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns or "*")]


def judge_all(peer: Peer, names: Iterable[str], n_times: int = 1) -> Iterator[Result]:
    """Yield the verdict on each rule; if all are asked several times, the newest of each."""
    known: dict[str, Result] = {}
    for _ in range(n_times):
        peer.replies.clear()  # ask again what several rules are about
        for name in names:
            started_at = time.monotonic()
            result = judge(peer, name)
            seconds = round(time.monotonic() - started_at, 3)
            known[name] = both(known.get(name, result), result)._replace(seconds=seconds)
            yield known[name]


def both(earlier: Result, later: Result) -> Result:
    if earlier.verdict == later.verdict:
        return later
    shown = later if later.reason else earlier
    return shown._replace(verdict="flaky", reason=f"{earlier.verdict}, then {later.verdict}: {shown.reason}")


def judge(peer: Peer, name: str) -> Result:
    peer.start()
    peer.shown = ""
    try:
        check(peer, name)
    except AssertionError as failure:
        return Result(name, "fail", str(failure), peer.shown)
    except NotApplicable as reason:
        return Result(name, "n/a", str(reason))
    except NoReply as reason:
        return Result(name, "error", str(reason))
    except Exception as error:  # a reply that no rule expected: rule 1
        return Result(name, "error", f"{type(error).__name__} in the rule itself: {error}")
    return Result(name, "pass")


def check(peer: Peer, name: str) -> None:
    """Check what the rule builds on, then the rule."""
    rule = RULES[name]
    for earlier in rule.after.split():
        with presumed(earlier):
            check(peer, earlier)
    peer.api = "responses"
    if "chat" in rule.profiles and "responses" not in rule.profiles:
        peer.api = "chat"
    if rule.group in OF_STREAMS:
        judged(rule, peer)
    elif rule.group == "websocket":
        with turns.connected(peer) as socket:
            rule.check(socket)
    elif rule.requests:
        refusals.expect_refused(peer, rule.requests)
    else:
        rule.check(peer)


# --- before the first rule ----------------------------------------------------------------------------------

ANY_MODEL = "default"  # asked for if none is listed: some servers have one model, and take any name
ENOUGH = 200  # tokens: long enough to be cancelled, left and resumed
# Members of a body that keep a model from ending early: none, vLLM's and SGLang's, and llama.cpp's.
LONG: list[Json] = [{}, {"ignore_eos": True}, {"ignore_eos": True, "min_tokens": ENOUGH}]


def look(peer: Peer, long: Json | None = None) -> list[str]:
    """Return the paths that are answered; raises NoReply if there is nothing that could be audited.

    The peer gets the first model that is listed, if it has none, and `long`, or what is found to make its
    answers long.
    """
    models = peer.ask("GET", "/models").json
    if not peer.model:
        listed = models.get("data") or models.get("models") or [{}]
        first = listed[0] if isinstance(listed, list) else {}
        peer.model = str(first.get("id") or ANY_MODEL) if isinstance(first, dict) else ANY_MODEL
    replies = {api: peer.reply(api=api, limit=CUT) for api in PATHS}
    apis = [api for api, reply in replies.items() if reply.status == 200 and reply.json]
    if not apis:
        raise NoReply(f"{nothing_served(peer, replies)}. {'; '.join(map(str, replies.values()))}")
    peer.long = what_makes_it_long(peer, apis[0]) if long is None else long
    return [PATHS[api] for api in apis]


def nothing_served(peer: Peer, replies: dict[str, Reply]) -> str:
    """Say why neither API answers."""
    statuses = {reply.status for reply in replies.values()}
    if statuses <= NOT_THERE:
        at_v1 = "" if peer.url.path.endswith("/v1") else f" (try {peer.url.geturl()}/v1)"
        return f"HTTP: no LLM server of these APIs{at_v1}"
    if statuses & {401, 403}:
        return "key: it is missing or wrong; give --api-key KEY"
    if peer.model == ANY_MODEL:
        return "model: which? Give --model NAME: the server lists none"
    return f"model: neither API answers for {peer.model!r}"


def what_makes_it_long(peer: Peer, api: str) -> Json:
    """Return the first of LONG with which the model writes enough; {} if none does."""
    for members in LONG:
        peer.start()
        usage = peer.reply(api=api, said=STORY, limit=ENOUGH, **members).json.get("usage") or {}
        if ENOUGH in (usage.get("output_tokens"), usage.get("completion_tokens")):
            return members
    return {}
