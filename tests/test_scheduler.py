"""scheduler.py without an engine and without a model: sequences in, what the next step computes out.

The steps of these tests run nowhere: finish() says what they have chosen. What holds in every order of
events is in explore.py; here is what it leaves open, such as whose turn it is and how many rows a step has.
"""

from typing import Any

import numpy as np
import pytest

from helpers.tables import table
from model import PAGE
from sampling import NO_TOKEN, Choice, Sampling
from scheduler import Scheduled, Scheduler, Sequence, prompt_lookup

CHUNK = PAGE
GREEDY = Sampling(temperature=0)
STOP = 9
TABLES = table("scheduler")


def scheduler(n_pages: int = 64, max_batch: int = 4, speculate: int = 0, max_wanted: int = 1000) -> Scheduler:
    return Scheduler(n_pages, max_batch, CHUNK, speculate, max_wanted)


def sequence(n_prompt: int, max_tokens: int = 500, first: int = 100, **fields: Any) -> Sequence:
    """Its prompt is of consecutive token ids: those with another `first` share no page."""
    prompt = list(range(first, first + n_prompt))
    return Sequence(prompt, max_tokens, frozenset([STOP]), GREEDY, **fields)


def added(to: Scheduler, *sequences: Sequence) -> None:
    for one in sequences:
        to.add(one)


def rows(batch: list[Scheduled]) -> list[tuple[Sequence, int, int]]:
    """What a step computes of each sequence: tokens from start to end."""
    return [(scheduled.sequence, scheduled.span.start, scheduled.span.end) for scheduled in batch]


def finish(to: Scheduler, batch: list[Scheduled], *token_ids: int) -> None:
    """The step is read; each row that chooses has chosen the next of these tokens, or 7."""
    rest = iter(token_ids)
    for scheduled in batch:
        to.postprocess(scheduled, [Choice(next(rest, 7)) for _ in scheduled.contexts])


def step(of: Scheduler, *token_ids: int) -> list[tuple[Sequence, int, int]]:
    """Schedule a step and read it, with the masks that have come."""
    for one in of.running:
        if one.constraint is not None and one.mask is None:
            one.mask = one.constraint.mask(one.output)
    batch = of.schedule()
    finish(of, batch, *token_ids)
    return rows(batch)


# --- decode and prefill -------------------------------------------------------------------------------------


def test_the_example_of_the_theory() -> None:
    s, a, b = scheduler(), sequence(200), sequence(5, first=500)
    s.add(b)
    step(s)
    s.add(a)
    for expected, n_output in (
        ([(b, 5, 6), (a, 0, 128)], 0),
        ([(b, 6, 7), (a, 128, 200)], 1),
        ([(b, 7, 8), (a, 200, 201)], 2),
    ):
        assert (step(s), len(a.output)) == (expected, n_output)


@pytest.mark.parametrize(("lengths", "computed"), TABLES["shares"])
def test_prompts_share_the_budget(lengths: list[int], computed: list[int]) -> None:
    s, prompts = scheduler(), [sequence(n, first=1000 * i) for i, n in enumerate(lengths)]
    added(s, *prompts)
    step(s)
    assert [one.n_computed for one in prompts] == computed


@pytest.mark.parametrize(("max_rows", "n_rows"), TABLES["beside_decoding"])
def test_a_prompt_beside_decoding_has_the_rows_that_there_is_time_for(max_rows: int, n_rows: int) -> None:
    s, a, b = scheduler(), sequence(300), sequence(5, first=900)
    s.add(b)
    finish(s, s.schedule(max_rows=max_rows))
    s.add(a)
    assert rows(s.schedule(max_rows=max_rows)) == [(b, 5, 6), (a, 0, n_rows)]


def test_a_page_that_is_computed_bit_by_bit_is_waited_for_and_shared() -> None:
    """If two have one prompt, the second waits for each page; the first does not wait for itself."""
    s, decoding = scheduler(), sequence(1, first=900)
    s.add(decoding)
    step(s)
    a, b = sequence(2 * PAGE + 1), sequence(2 * PAGE + 1)
    added(s, a, b)
    in_flight: list[list[Scheduled]] = []
    while not b.n_unread:
        in_flight.append(s.schedule(in_flight, max_rows=21))
        if len(in_flight) > 2:
            finish(s, in_flight.pop(0))
    assert (a.n_cached, b.n_cached) == (0, 2 * PAGE)
    assert a.page_table[:2] == b.page_table[:2]


# --- owners -------------------------------------------------------------------------------------------------


def owned(owner: str, n: int, n_prompt: int = 5) -> list[Sequence]:
    """Sequences of one owner, which share no page."""
    return [sequence(n_prompt, first=1000 + 500 * i, owner=owner) for i in range(n)]


def test_when_pages_run_out_the_owner_with_most_gives_way() -> None:
    """B is the youngest: A, whose answers fill the pool, drove it out."""
    s = scheduler(n_pages=7)
    old, young = owned("A", 2, PAGE + PAGE // 2)
    (victim,) = owned("B", 1, PAGE - 1)
    added(s, old, young)
    step(s)
    s.add(victim)
    while s.counts["preemptions"] == 0:
        step(s)
    names = {old: "A, old", young: "A, young", victim: "B"}
    assert [names[one] for one in s.running] == ["A, old", "B"]


def test_prompts_of_owners_are_computed_in_turn() -> None:
    """Three prompts of A: B and C do not wait for all of them. Once begun, a prompt is done first."""
    s = scheduler(max_batch=5)
    added(s, *owned("A", 3, n_prompt=6 * CHUNK), *owned("B", 1, 6 * CHUNK), *owned("C", 1, 6 * CHUNK))
    turns = ["".join(one.owner for one, _, _ in step(s)) for _ in range(9)]
    assert turns == ["B"] * 3 + ["BC"] * 3 + ["BCA"] * 3  # those before the last one decode


def test_a_long_prompt_goes_on_beside_short_ones() -> None:
    s, long = scheduler(n_pages=200, max_batch=20), sequence(900, first=20_000)
    s.add(long)
    for i in range(13):
        s.add(sequence(2 * CHUNK, 1, first=200 * i))
        step(s)
    assert long.n_computed >= 13 * CHUNK


# --- drafts and masks ---------------------------------------------------------------------------------------


def repeating(s: Scheduler, n_prompt: int = 40) -> Sequence:
    """A running sequence with its first token: after 1 comes 2, after 2 comes 3, after 3 comes 1."""
    prompt = [1 + i % 3 for i in range(n_prompt)]  # the last of 40 is 1
    one = Sequence(prompt, 100, frozenset([STOP]), GREEDY)
    s.add(one)
    while not one.output:
        step(s, 2)
    return one


@pytest.mark.parametrize("drafts", [0, 4])
def test_logits_that_are_not_numbers_end_their_sequence_alone(drafts: int) -> None:
    """All that were in the step failed."""
    s = scheduler(speculate=drafts)
    a, b = repeating(s), sequence(5, first=1000)
    s.add(b)
    batch = s.schedule()
    s.postprocess(batch[0], [Choice(3), *[Choice(NO_TOKEN)] * 4][-len(batch[0].contexts) :])
    finish(s, batch[1:])
    assert (a.finish, a.slot, s.running, b.output) == ("failed", None, [b], [7])


def test_fewer_drafts_while_they_are_wrong() -> None:
    s = scheduler(speculate=4)
    repeating(s)
    n_drafts = []
    for token_ids in ([8], [1], [2], [8, 1], [2, 8, 1], [2, 8, 1, 2, 8]):
        (scheduled,) = batch = s.schedule()
        n_drafts.append(len(scheduled.drafts))
        finish(s, batch, *token_ids)
    assert n_drafts == [4, 0, 0, 1, 2, 4]


def test_no_step_is_chained_to_one_with_drafts() -> None:
    """Bug: if there was no more room for drafts it was, as if all of them were right."""
    s, other = scheduler(speculate=4, max_wanted=2), sequence(5, first=1000)
    repeating(s)
    step = s.schedule()
    assert len(step[0].drafts) == 1
    s.add(other)
    assert rows(s.schedule([step])) == [(other, 0, 5)]


@pytest.mark.parametrize(("n_prompt", "n_pages", "n_drafts"), [(61, 2, 2), (61, 3, 8), (64, 2, 8)])
def test_a_draft_takes_no_page_that_another_may_need(n_prompt: int, n_pages: int, n_drafts: int) -> None:
    """After 62 tokens a page has room for two. Of the free pages one is left to each that runs.

    Bug: after 65 tokens, whose second page was still to be taken, there were -1 places, and seven drafts.
    """
    s = scheduler(n_pages=n_pages, speculate=8)
    repeating(s, n_prompt)
    (scheduled,) = s.schedule()
    assert len(scheduled.drafts) == n_drafts


@pytest.mark.parametrize(("token_ids", "n", "expected"), TABLES["drafts"])
def test_drafts_are_what_followed_the_last_time(token_ids: list[int], n: int, expected: list[int]) -> None:
    assert prompt_lookup(np.array(token_ids, np.int64), n) == expected
