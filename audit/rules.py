'''What a rule is, and how it ends: it passes, or it raises one of three.

    @must                                     check("stored", peer) --> nothing: it holds
    def stored(peer: Peer) -> None:               AssertionError: the server breaks it
        """stored: GET gives what was answered    NotApplicable: the server lacks what it is about
                                                  NoReply: the rule could not be judged
        who wrote that behaviour down
        F12 https://where-it-is-written
        """
        assert ...

Authority: each rule has its own, in its docstring: names and title, a blank line, then who wrote the
behaviour down or relies on it; the next line has the ids of tests/BUGS.md and the link to that text, or to a
report of what happens without it. A function that is two rules may have two such pairs of lines. A rule
may have no function, but requests after another blank line: see exchanges.py.

Rules of this file:
1. A rule that flags correct behaviour is the worst defect: what only some clients need is not a "must".
2. A fault is named by its rule alone: what a rule builds on, and another one is about, is `presumed`.

Not here: the rules (frames.py, events.py, chunks.py, answers.py and so on), running them (session.py).
'''

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

Check = Callable[..., Any]


class Rule(NamedTuple):
    name: str
    group: str  # its suite in the report for CI
    profiles: str  # of PROFILES in session.py, with blanks between them
    strength: str  # must, should or advice
    title: str
    source: str  # who wrote that behaviour down, or who relies on it
    link: str  # that text, or a report of what happens without it
    bugs: str  # ids of tests/BUGS.md
    after: str  # names of the rules that it builds on
    requests: list[str]  # that must be refused
    check: Check  # is called with a Capture, a WebSocket or a Peer, as its group says


RULES: dict[str, Rule] = {}
OF_STREAMS = ("frames", "events", "chunks")  # groups


def rules_of(group: str, usual: str, before: str = "") -> list[Callable[..., Check]]:
    """Return the decorators @must, @should and @advice: they enter a function as a rule of these profiles.

    It comes after the rule `before` unless another one is named.

    The second of two names is a rule of chat completions, with their profile in place of the Responses API's.
    """

    def enter(strength: str, check: Check | None = None, profiles: str = usual, after: str = before) -> Check:
        if check is None:
            return partial(enter, strength, profiles=profiles, after=after)
        enter_rule(check.__doc__ or "", group, profiles, strength, after, check)
        return check

    # What suffers if a rule is broken. must: the specification, or an official SDK. should: some clients, and
    # OpenAI's own server keeps it. advice: no client, but people and proxies are better off with it.
    return [partial(enter, strength) for strength in ("must", "should", "advice")]


def enter_rule(text: str, group: str, profiles: str, strength: str, after: str, check: Check) -> None:
    """Enter a rule for each name that the text begins with."""
    beginning, authority, *requests = inspect.cleandoc(text).split("\n\n")
    names, _, title = " ".join(beginning.split()).partition(": ")
    rows = re.sub("\n +", " ", "".join(requests)).splitlines()
    sources = re.findall(r"(.+)\n(?:(.+) )?(\S+)", authority)  # (who, ids of bugs, link), for each name
    for name, (source, bugs, link) in zip(names.split(", "), sources * 2, strict=False):
        is_chat = name in names.split(", ")[1:]
        own = profiles.replace("responses", "chat") if is_chat else profiles
        of_api = [row for row in rows if names == name or row.startswith("chat") == is_chat]
        RULES[name] = Rule(name, group, own, strength, title, source, link, bugs, after, of_api, check)


# --- how a rule ends ----------------------------------------------------------------------------------------


class NotApplicable(Exception):
    """There is nothing to judge: the server lacks what the rule is about, and may."""


class NoReply(Exception):
    """No server is there, or the time is over. A reply that breaks off is an AssertionError."""


@contextlib.contextmanager
def presumed(name: str) -> Iterator[None]:
    """Leave a fault in this block to the rule that is about it."""
    try:
        yield
    except AssertionError as failure:
        raise NotApplicable(f"the rule {name} fails: {failure}") from failure
