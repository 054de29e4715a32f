"""Every order of events that a small scheduler can meet: model checking of scheduler.py and pages.py.

    python tests/explore.py                   all CASES to their ends; --large N: N states of LARGE ones too
    python tests/explore.py --bugs [WORD ..]  plant bugs of mutants.toml and explored.toml, tell their stories

A fault of a scheduler is an order of events: a client leaves between two tokens, a page is freed while a step
is in flight. Tests with examples try the orders that somebody thought of. Here a World holds the Scheduler, a
few requests, and a device that remembers, for each place of the KV cache, which text was computed there. In
each state a few things may happen next (World.actions). We do each of them in a copy of the state, see
whether all laws hold, and go on from every state that is new. The search is breadth first, so the first story
that breaks a law is the shortest one. It is told in words; here release() does not count:

    1. a0 arrives with the prompt [1, 2, 3]
    2. a step is launched: rows 0 to 2 of a0
    3. leave a0: page 0 counts 1 users, and 0 page tables have it

Why this ends, and soon: pages have two tokens, prompts a handful, and answers are scripted. And states that
differ in names alone are one (World.key): pages are numbered as they are met, slots are left out, and so is
what no sequence may read again; of requests or owners that are alike, the first comes first.

A law says what must hold in a state, or after an action. "Whoever can run does" is a law for each step, so no
state has to remember who has waited for how long.

Authority: Clarke, Grumberg, Peled: Model Checking. The laws are the rules and invariants of scheduler.py.
"""

import argparse
import sys
import time
import tomllib
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from copy import copy
from itertools import count, pairwise, starmap
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))  # the server's modules

from helpers.tables import table
from mutants import ROOT, Mutant, mutants, mutated
from sampling import Choice, Sampling

PAGE = 2  # tokens of a page, in place of 64
STOP, OTHER = 9, 7  # tokens: one ends an answer, the other follows a text that no script has
PLANTED = tomllib.loads((ROOT / "tests" / "explored.toml").read_text(encoding="utf-8"))
GREEDY = Sampling(temperature=0)

Text = tuple[Any, ...]  # its owner, whose keys and values they are, then its tokens
Action = tuple[str, int]  # a method of World, and the request that it is about
Path_ = tuple[Any, ...]  # how a state was met: (the path before, an action), or ()


class Asked(NamedTuple):
    """A request, and what the model will say to it."""

    owner: str
    prompt: list[int]
    answer: list[int]  # it ends with STOP, or because of max_tokens
    masked: bool = False  # structured output

    @property
    def text(self) -> Text:
        return (self.owner, *self.prompt, *self.answer)


class Case(NamedTuple):
    requests: list[Asked]
    n_pages: int
    max_batch: int = 2
    can_fail: bool = False  # a step may
    speculate: int = 0
    chunk: int = PAGE


def cases(name: str) -> dict[str, Case]:
    """Return those of a part of tables/explore.toml, by their labels."""
    rows = table("explore")[name].items()
    return {label: Case(**row | {"requests": [*starmap(Asked, row["requests"])]}) for label, row in rows}


CASES, LARGE = cases("cases"), cases("large")


COPY = {kind: kind.copy for kind in (list, dict, set, OrderedDict, Counter)} | {count: copy}


def copied(old: Any) -> Any:
    """Return a copy of an object, whose lists, dictionaries and counters are its own."""
    new = object.__new__(type(old))
    new.__dict__.update(vars(old))
    for name, value in vars(old).items():
        if copy_of := COPY.get(type(value)):
            new.__dict__[name] = copy_of(value)
    return new


# --- the state ----------------------------------------------------------------------------------------------


class World:
    """A scheduler and all around it."""

    def __init__(self, case: Case, module: Any) -> None:
        self.case, self.module = case, module
        sizes = case.n_pages, case.max_batch, case.chunk, case.speculate, case.max_batch
        self.scheduler = module.Scheduler(*sizes)
        self.sequences: list[Any] = [None] * len(case.requests)  # None: it has not come
        self.left: set[int] = set()  # those whose client has left, or whose step has failed
        self.in_flight: list[list[Any]] = []
        self.memory: dict[tuple[int, int], Text] = {}  # (page, place): the text computed there
        self.newest: dict[int, int] = {}  # the token that a slot chose last
        self.told: list[str] = []  # what the last action did
        self.script = {one.text[:n]: one.text[n] for one in case.requests for n in range(2, len(one.text))}

    def copy(self) -> "World":
        """Return a copy that shares nothing that changes, with the same numbers of sequences."""
        new: World = copied(self)
        new.sequences = [one and copied(one) for one in self.sequences]
        twins = list(zip(self.sequences, new.sequences, strict=True))
        tables = {id(old.page_table): twin.page_table for old, twin in twins if old}  # spans have them too
        new.scheduler = copied(self.scheduler)
        new.scheduler.pool = copied(self.scheduler.pool)
        new.scheduler.waiting = [new.sequences[one.number] for one in self.scheduler.waiting]
        new.scheduler.running = [new.sequences[one.number] for one in self.scheduler.running]

        def twin_of(x: Any) -> Any:
            span = x.span._replace(pages=tables.get(id(x.span.pages), x.span.pages))
            return x._replace(sequence=new.sequences[x.sequence.number], span=span)

        new.in_flight = [[twin_of(x) for x in step] for step in self.in_flight]
        return new

    def key(self) -> int:
        """Return a number that all states share that go on alike."""
        scheduler, pool = self.scheduler, self.scheduler.pool
        pages = [page for one in scheduler.running for page in one.page_table]
        names = {page: name for name, page in enumerate(dict.fromkeys([*pages, *pool._free]))}
        turns = sorted(scheduler._last_turn.values())

        def of_one(one: Any) -> tuple[Any, ...]:
            own = one.n_computed, one.n_unread, len(one.output), one.mask, one.max_drafts
            return *own, *(names.get(page, -1) for page in one.page_table)

        sequences = [one and of_one(one) for one in self.sequences]
        parts = [
            (one.number for one in scheduler.waiting),
            (one.number for one in scheduler.running),
            ((owner, turns.index(turn)) for owner, turn in sorted(scheduler._last_turn.items())),
            sequences,
            sorted(self.left),
            sorted((names.get(page, -1), digest) for page, digest in pool._hash_of.items()),
            (tuple((x.sequence.number, x.span.start, x.span.end) for x in step) for step in self.in_flight),
        ]
        return hash(tuple(map(tuple, parts)))

    # --- what may happen ------------------------------------------------------------------------------------

    def actions(self) -> Iterator[Action]:
        """Yield what may happen next. Of those that are alike the first comes first."""
        requests = self.case.requests
        here = {one.owner for one in self.sequences if one}
        for number, (one, asked) in enumerate(zip(self.sequences, requests, strict=True)):
            if one is None:
                earlier = [i for i in range(number) if requests[i][1:] == asked[1:]]
                is_first = all(self.sequences[i] for i in earlier if requests[i].owner == asked.owner)
                if is_first and {requests[i].owner for i in earlier} <= here | {asked.owner}:
                    yield "arrive", number
            elif not one.finish and number not in self.left:
                yield "leave", number
                if one.awaits_mask and one.slot is not None:
                    yield "mask", number
        if len(self.in_flight) < 2:
            yield "launch", -1
        if self.in_flight:
            yield "read", -1
            if self.case.can_fail:
                yield "fail", -1

    def do(self, action: Action) -> None:
        """Do it, and see whether the laws hold; raises AssertionError, and what the scheduler raises."""
        self.told = []
        getattr(self, action[0])(action[1])
        self.check()
        self.scheduler.left.clear()  # as the engine does

    def arrive(self, number: int) -> None:
        asked = self.case.requests[number]
        max_tokens = len(asked.answer) + (asked.answer[-1] == STOP)
        one = self.module.Sequence([*asked.prompt], max_tokens, frozenset([STOP]), GREEDY, owner=asked.owner)
        one.constraint = "masks that come by an action" if asked.masked else None
        one.number, one.arrival = number, sum(map(bool, self.sequences))
        self.sequences[number] = one
        self.scheduler.add(one)
        self.told.append(f"{name(one)} arrives with the prompt {asked.prompt}")

    def leave(self, number: int) -> None:
        self.left.add(number)
        self.scheduler.remove(self.sequences[number])
        self.told.append(f"{name(self.sequences[number])} leaves")

    def mask(self, number: int) -> None:
        one = self.sequences[number]
        one.mask = len(one.output) + 1  # stands for the mask after this output
        self.told.append(f"the mask of {name(one)} comes")

    def launch(self, _: int) -> None:
        running = [*self.scheduler.running]
        batch = self.scheduler.schedule(self.in_flight)
        self.check_step(batch, running)
        if batch:
            self.in_flight.append(batch)
        rows = [f"rows {x.span.start} to {x.span.end - 1} of {name(x.sequence)}" for x in batch]
        self.told.append(f"a step is launched: {', '.join(rows)}" if rows else "no step can be launched yet")

    def read(self, _: int) -> None:
        self.told.append("the oldest step is read")
        for x in self.in_flight.pop(0):
            self.scheduler.postprocess(x, [Choice(token_id) for token_id in self.compute(x)])
            self.told.append(f"{name(x.sequence)} has said {x.sequence.output}")

    def fail(self, _: int) -> None:
        self.told.append("the oldest step fails")
        for x in self.in_flight.pop(0):
            if x.sequence.slot is not None:
                self.leave(x.sequence.number)

    def compute(self, x: Any) -> list[int]:
        """Run a sequence's share of a step, as late as a device may; return the tokens that it chooses."""
        one, span = x.sequence, x.span
        page, place = divmod(span.start - 1, PAGE)
        text: Text = self.memory.get((span.pages[page], place), ()) if span.start else (one.owner,)
        texts = []
        token_ids = [self.newest.get(span.slot, OTHER)] if span.token_ids is None else span.token_ids
        for position, token_id in enumerate(token_ids, span.start):
            text = (*text, token_id)
            self.memory[span.pages[position // PAGE], position % PAGE] = text
            texts.append(text)
        right = self.case.requests[one.number].text
        n_rows = min(span.end - len(x.drafts), len(right) - 1) if one.slot is not None else 0
        for row in range(n_rows):
            got = self.memory.get((span.pages[row // PAGE], row % PAGE))
            assert got == right[: row + 2], f"row {row} of {name(one)} is {got}, expected {right[: row + 2]}"
        chosen = [self.script.get(text, OTHER) for text in texts[len(texts) - span.n_wanted :]]
        if chosen:
            self.newest[span.slot] = chosen[-1]
        return chosen

    # --- the laws -------------------------------------------------------------------------------------------

    def check(self) -> None:
        """See whether the laws of a state hold."""
        scheduler, pool = self.scheduler, self.scheduler.pool
        users = Counter(page for one in self.sequences if one for page in one.page_table)
        for page, n in enumerate(pool._n_users):
            assert n == users[page], f"page {page} counts {n} users, and {users[page]} page tables have it"
            assert (page in pool._free) != (page in users), f"page {page} is free and in use, or neither"
        slots = [*scheduler._free_slots, *(one.slot for one in scheduler.running)]
        assert sorted(slots) == [*range(self.case.max_batch)], f"the slots are {slots}"
        assert dict(map(reversed, pool._hash_of.items())) == pool._page_of, "a page is found twice"
        for page, digest in pool._hash_of.items():
            text = self.memory.get((page, PAGE - 1), ())
            assert digest == self.digest(text), f"page {page} is found for another text than {text}"
        order = [*scheduler.running, *scheduler.waiting]
        arrivals = sorted((one.owner, i, one.arrival) for i, one in enumerate(order))
        for (owner, _, a), (other, _, b) in pairwise(arrivals):
            assert owner != other or a < b, f"the sequences of {owner} are not in the order of their arrival"
        for one in filter(None, self.sequences):
            answer = self.case.requests[one.number].answer
            assert one.output == answer[: len(one.output)], f"{name(one)} says {one.output}, alone {answer}"
            is_whole = one.output == answer
            assert is_whole == bool(one.finish), f"{name(one)} ends after {one.output}, or does not"
            is_out = one.finish or one.number in self.left
            assert (one in order) != bool(is_out), f"{name(one)} is lost, or does not leave"
            assert one in scheduler.running or not one.page_table, f"{name(one)} has pages, and does not run"

    def check_step(self, batch: list[Any], before: list[Any]) -> None:
        """See whether the laws of a step hold that has been scheduled; `before`: those that ran."""
        running, waiting = self.scheduler.running, self.scheduler.waiting
        owners, in_batch = Counter(one.owner for one in running), [x.sequence for x in batch]
        pages = Counter[Text]()
        for x in batch:
            one = x.sequence
            for context in x.contexts:
                has_mask = not one.constraint or context.mask == len(one.output) + context.n_unread + 1
                assert has_mask, f"{name(one)} chooses without the mask of its output"
            is_needed = x.span.end < len(one.prompt) + one.max_tokens
            assert is_needed, f"{name(one)} computes a row after which nothing comes"
            end = (x.span.start // PAGE + 1) * PAGE
            if x.is_prefill and end < one.n_tokens:  # the page of the last token is for one alone
                pages[self.case.requests[one.number].text[: end + 1]] += 1
        assert max(pages.values(), default=0) < 2, "a page of a prompt is computed twice in a step"
        for one in before:
            if one.slot is None:
                assert one in self.scheduler.left, f"the constraint of {name(one)} goes on"
                assert not self.in_flight, f"{name(one)} is preempted while a step is in flight"
                is_of_use = {each.owner for each in running} - {each.owner for each in before}
                assert one.preempted_for == "pages" or is_of_use, f"{name(one)} gives way for nothing"
        for one in running:
            fewer = [each for each in waiting if owners[each.owner] + 1 < owners[one.owner]]
            assert one in before or not fewer, f"{name(one)} goes before {[*map(name, fewer)]}"
            others = [each for each in running if each is not one]
            is_known = one in before or not others or owners[one.owner] > 1 or self.case.speculate
            assert is_known or self.has_room(one, others), f"{name(one)} is let in, and has no room to grow"
        if not self.in_flight:  # whoever can run does
            idle = [one for one in running if one not in in_batch and not one.awaits_mask]
            are_prompts = all(one.is_prefilling for one in idle)
            assert are_prompts, f"of {[*map(name, idle)]} one decodes, not in this step"
            assert batch or not idle, "nothing is computed, although a sequence could run"
            assert running or not waiting, "nothing runs, and a sequence waits"
            youngest = {one.owner: one for one in running}  # an older one would wait behind it
            for one in youngest.values():
                others = [each for each in running if each is not one]
                for newcomer in waiting if owners[one.owner] > 1 else []:
                    is_right = owners[newcomer.owner] or not self.has_room(newcomer, others)
                    assert is_right, f"{name(newcomer)} waits, and would have room without {name(one)}"

    def has_room(self, newcomer: Any, others: list[Any]) -> bool:
        """Return whether it could run beside the others, with a page more for each of them."""
        held = {page for each in others for page in each.page_table}
        n_more = sum(max(0, each.n_tokens // PAGE + 1 - len(each.page_table)) + 1 for each in others)
        n_pages: int = len(held) + n_more + newcomer.n_tokens // PAGE + 1
        return n_pages <= self.case.n_pages

    def digest(self, text: Text) -> bytes:
        """Return the prefix hash of a text, for its owner."""
        known = self.module.__dict__.setdefault("digests of texts", {})
        if text not in known:
            found = self.module.root_hash(text[0]) if text else b""
            for start in range(1, len(text), PAGE):
                found = self.module.prefix_hash(found, text[start : start + PAGE])
            known[text] = found
        return bytes(known[text])


def name(one: Any) -> str:
    return f"{one.owner}{one.number}"


# --- the search ---------------------------------------------------------------------------------------------


class Explored(NamedTuple):
    n_states: int
    n_left: int  # states that were met and not gone on from; 0: all have been seen
    depth: int
    story: list[str]  # the shortest that breaks a law, a line for each action; []: none does
    seconds: float  # of a processor


def explore(case: Case, max_states: int = 10**9, bug: Mutant | None = None) -> Explored:
    """Visit all states, breadth first, until there are so many, or a law is broken."""
    began, module = time.process_time(), loaded(bug)
    start = World(case, module)
    seen = {start.key()}
    todo: deque[tuple[World, Path_]] = deque([(start, ())])
    path: Path_ = ()
    while todo and len(seen) < max_states:
        world, path = todo.popleft()
        for action in [*world.actions()]:
            then, longer = world.copy(), (path, action)
            try:
                then.do(action)
            except Exception as error:
                lines = story(case, path, module)
                about = name(world.sequences[action[1]]) if action[0] in ("leave", "mask") else ""
                lines.append(f"{action[0]} {about}: {error!r}")
                return Explored(len(seen), len(todo), len(lines), lines, time.process_time() - began)
            if (key := then.key()) not in seen:
                seen.add(key)
                todo.append((then, longer))
    return Explored(len(seen), len(todo), len(actions_of(path)), [], time.process_time() - began)


def actions_of(path: Path_) -> list[Action]:
    return [*actions_of(path[0]), path[1]] if path else []


def story(case: Case, path: Path_, module: ModuleType) -> list[str]:
    """Return what each action of a path does, in a line each."""
    world, lines = World(case, module), []
    for action in actions_of(path):
        world.do(action)
        lines.append(" / ".join(world.told))
    return lines


def explored(n_large: int = 0) -> Iterator[Explored]:
    """Explore all CASES to their ends, and so many states of each of LARGE; raises AssertionError."""
    chosen = {**CASES, **(LARGE if n_large else {})}
    limits = [n_large if label in LARGE else 10**9 for label in chosen]
    with ProcessPoolExecutor() as pool:
        for label, found in zip(chosen, pool.map(explore, chosen.values(), limits), strict=True):
            assert not found.story, "\n".join([label, *found.story])
            left, rate = f"{found.n_left} not gone on from", found.n_states / found.seconds
            line = f"{label:8} {found.n_states:7} states, {left}, depth {found.depth}, {rate:.0f} a second"
            print(line, flush=True)
            yield found


# --- planted bugs -------------------------------------------------------------------------------------------


def bugs() -> list[Mutant]:
    """Return the mutants of scheduler and pages in mutants.toml, then those of explored.toml."""
    planted = [Mutant(**row) for row in PLANTED["bug"]]
    return [mutant for mutant in mutants() if mutant.module in ("scheduler", "pages")] + planted


def loaded(bug: Mutant | None) -> ModuleType:
    """Return a scheduler module of its own, with small pages, and with a bug in it or in its pages."""
    before = {each: __import__(each) for each in ("pages", "scheduler")}
    try:
        for each in before:
            text = (ROOT / f"{each}.py").read_text(encoding="utf-8")
            sys.modules[each] = module = ModuleType(each)
            exec(mutated(bug) if bug and bug.module == each else text, vars(module))
    finally:
        sys.modules |= before
    vars(module)["PAGE"] = PAGE
    return module


def found(bug: Mutant, label: str = "") -> tuple[str, list[str]]:
    """Return the first case that shows a bug, or try this one alone, and the shortest story."""
    for each in [label] if label else CASES:
        if lines := explore(CASES[each], 10_000, bug).story:
            return each, lines
    return "", []


def main() -> int:
    parser = argparse.ArgumentParser(description="Try every order of events in a small scheduler.")
    parser.add_argument("--large", type=int, default=0, metavar="N", help="states of each of LARGE")
    parser.add_argument("--bugs", nargs="*", metavar="WORD", help="plant bugs with these words in them")
    args = parser.parse_args()
    if args.bugs is None:
        print(sum(found.n_states for found in explored(args.large)), "states; no law is broken")
        return 0
    chosen = [bug for bug in bugs() if all(word in bug.undoes for word in args.bugs)]
    with ProcessPoolExecutor() as pool:
        for bug, (label, lines) in zip(chosen, pool.map(found, chosen), strict=True):
            print(f"\n{bug.undoes}:", f"{len(lines)} actions in '{label}'" if lines else "not found")
            print(*(f"  {n}. {line}" for n, line in enumerate(lines, 1)), sep="\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
