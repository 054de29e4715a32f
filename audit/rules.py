'''What a rule is, and how it ends: it passes, or it raises one of three.

    @must("stored")                           RULES["stored"].check(peer) --> nothing: it holds
    def stored(peer):                             Failed: the server breaks it, and the excerpt shows it
        """GET gives what was answered            NotApplicable: the server lacks what it is about
                                                  NoReply: the rule could not be judged
        who wrote that behaviour down
        F12 https://where-it-is-written
        """

Authority: each rule has its own, in its docstring: the title, a blank line, then who wrote the behaviour down
or relies on it; the next line has the ids of tests/BUGS.md and the link to that text, or to a report of what
happens without it. A function that is a rule of both APIs may have two such pairs of lines, one for each.

Rules of this file:
1. A rule that flags correct behaviour is the worst defect: what only some clients need is no "must".
2. A fault is named by its rule alone: what a rule builds on, and another one is about, is `presumed`.

Not here: the rules (frames.py, events.py, chunks.py, clients.py and so on), running them (session.py).
'''

import contextlib
import inspect
import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

# What suffers if a rule is broken. must: the specification, or an official SDK. should: some clients, and
# OpenAI's own server keeps it. advice: no client, but people and proxies are better off with it.
Strength = Literal["must", "should", "advice"]
Check = Callable[..., Any]  # is called with a Peer; a rule on one stream with a Capture, see stream.py


class Rule(NamedTuple):
    name: str
    group: str
    profiles: str  # of PROFILES in session.py, with blanks between them
    strength: Strength
    title: str
    source: str  # who wrote that behaviour down, or who relies on it
    link: str  # that text, or a report of what happens without it
    bugs: str  # ids of tests/BUGS.md
    after: str  # names of the rules that it builds on
    check: Check


RULES: dict[str, Rule] = {}


def rules_of(
    group: str,
    profiles: str,
    bind: Callable[[Check, str], Check] = lambda check, profiles: check,
    rules: dict[str, Rule] = RULES,
) -> list[Callable[..., Callable[[Check], Check]]]:
    """Return the decorators @must, @should and @advice, which enter a function as a rule of this group.

    They take the names of the rules that it is; one that begins with "chat-" is a rule of that API. `bind`
    makes what is called with a Peer of the function and the profiles of a rule.
    """
    return [partial(entering, group, profiles, bind, rules, strength) for strength in get_args(Strength)]


def entering(
    group: str,
    of_group: str,
    bind: Callable[[Check, str], Check],
    rules: dict[str, Rule],
    strength: Strength,
    *names: str,
    profiles: str = "",
    after: str = "",
) -> Callable[[Check], Check]:
    def enter(check: Check) -> Check:
        title, _, authority = inspect.cleandoc(check.__doc__ or "").partition("\n\n")
        lines = authority.splitlines()
        for place, name in enumerate(names):
            source, link = lines[2 * place : 2 * place + 2] or lines[:2]
            bugs, _, url = link.rpartition(" ")
            own = profiles or of_group
            if name.startswith("chat-"):
                own = own.replace("responses", "chat")
            title = " ".join(title.split())
            rules[name] = Rule(name, group, own, strength, title, source, url, bugs, after, bind(check, own))
        return check

    return enter


# --- how a rule ends ----------------------------------------------------------------------------------------


class NotApplicable(Exception):
    """The server lacks what the rule is about, and may."""


class Failed(AssertionError):
    """The server breaks the rule; the excerpt shows it."""

    def __init__(self, message: str, excerpt: object) -> None:
        self.message = message
        self.excerpt = str(excerpt)
        if isinstance(excerpt, dict | list):
            self.excerpt = json.dumps(excerpt, ensure_ascii=False, default=str)
        super().__init__(f"{message}\n{self.excerpt}")


class NoReply(Exception):
    """No server is there, or the time is over. A reply that breaks off is Failed."""


def expect(holds: object, message: str, excerpt: object) -> None:
    if not holds:
        raise Failed(message, excerpt)


@contextlib.contextmanager
def presumed(name: str) -> Iterator[None]:
    """Leave a fault in this block to the rule that is about it."""
    try:
        yield
    except Failed as failure:
        raise NotApplicable(f"the rule {name} fails: {failure.message}") from failure


def check(name: str, peer: object) -> None:
    """Check what the rule builds on, then the rule."""
    for earlier in RULES[name].after.split():
        with presumed(earlier):
            check(earlier, peer)
    RULES[name].check(peer)
