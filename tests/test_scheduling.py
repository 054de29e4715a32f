"""What a sequence says depends on its request alone: not on what is cached, on who else runs, on pages that
run out, on steps launched ahead, on drafts. All by ==, logprobs too: the bits.
"""

import asyncio
import math
from contextlib import aclosing
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dialects.families import DIALECTS
from dialects.matchers import Constraint, Grammars
from dialects.structured_output import answer_grammar
from engine import Engine
from helpers.engines import (
    Answer,
    Watch,
    alone,
    endless,
    play,
    started,
    steps_of,
    stepwise,
    together,
)
from model import PAGE
from parity import TINY
from request.tools import StructuredOutput
from sampling import Choice, Sampling
from scheduler import Sequence
from tokenizer import Tokenizer

LENGTH = 6 * PAGE  # of the context: what the smallest pool holds
TOKENIZER = Tokenizer(TINY / "tokenizer.json")
SCHEMA: dict[str, Any] = {"type": "array", "items": {"enum": ["yes", "no"]}, "minItems": 3, "maxItems": 9}
TEXTS = [
    [(5 + 7 * i) % 2000 for i in range(320)],
    [5, 6, 7, 8] * 80,
    TOKENIZER.encode("The fox said: read the book, read the book, and the owl said: I have read it. " * 30),
]


class Asked(NamedTuple):
    """A request, and the number of steps after which its reader leaves."""

    text: int
    n_prompt: int
    max_tokens: int
    sampling: tuple[tuple[str, Any], ...]
    stop: frozenset[int] = frozenset()
    constrained: bool = False
    leaves: int | None = None

    def job(self) -> Sequence:
        sampling: Any = {k: dict(v) if k == "logit_bias" else v for k, v in self.sampling}
        prompt = TEXTS[self.text][: self.n_prompt]
        constraint = array_of_words() if self.constrained else None
        stop = self.stop | {2041} if self.constrained else self.stop
        return Sequence(prompt, self.max_tokens, stop, Sampling(**sampling), constraint)


GRAMMARS = Grammars(TINY / "tokenizer.json", 2048, (2041,))


def array_of_words() -> Constraint:
    spec = StructuredOutput("none", schema=SCHEMA)
    return GRAMMARS.constraint(answer_grammar(spec, DIALECTS["hermes"], {}, "over"))


class Setting(NamedTuple):
    """An engine, and what may disturb a sequence in it."""

    n_pages: int = 256
    n_ahead: int = 0
    speculate: int = 0
    step_s: float = math.inf


@cache
def undisturbed(asked: Asked) -> Answer:
    """In an engine of its own: no company, no cache, no drafts, enough pages, one step after another."""
    with started(Watch(), LENGTH) as engine:
        return alone(engine, asked.job())


async def said(engine: Engine, asked: Asked) -> list[Choice]:
    """All that its reader gets; if the reader stays, it is what is said undisturbed."""
    tokens = list[Choice]()
    n = 0
    async with aclosing(stepwise(engine, asked.job())) as steps:
        async for step in steps:
            tokens += step.tokens
            n += 1
            if n == asked.leaves:
                break
    return tokens


def check(asked: Asked, tokens: list[Choice]) -> None:
    expected = undisturbed(asked._replace(leaves=None))
    assert expected.finish != "failed"
    assert tokens == (expected.tokens if asked.leaves is None else expected.tokens[: len(tokens)])


SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 0.0, "presence_penalty": 1.0, "frequency_penalty": 0.4},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.5, "top_k": 40, "seed": 7, "choice": 1},
    {"temperature": 1.0, "min_p": 0.2, "seed": 9, "logit_bias": ((7, 4.0), (8, 3.0))},
]
requests = st.builds(
    Asked,
    text=st.sampled_from([0, 1, 2]),
    n_prompt=st.sampled_from([1, 5, 63, 64, 65, 127, 128, 129, 200, 256, 257, 300]),
    max_tokens=st.integers(1, 60),
    sampling=st.sampled_from([tuple({**s, "n_top_logprobs": 2}.items()) for s in SAMPLINGS]),
    stop=st.sampled_from([frozenset[int](), frozenset({6, 8, 700})]),
    constrained=st.sampled_from([False, False, True]),
    leaves=st.sampled_from([None, None, None, 1, 5]),
)
disturbances = st.builds(
    Setting,
    n_pages=st.sampled_from([6, 9, 64]),
    n_ahead=st.sampled_from([0, 1, 3]),
    speculate=st.sampled_from([0, 1, 5]),
    step_s=st.sampled_from([1e-9, math.inf]),
)


@settings(max_examples=16)
@given(st.lists(requests, min_size=1, max_size=6), disturbances)
def test_nothing_disturbs_a_sequence(asked: list[Asked], setting: Setting) -> None:
    """The second time, with what the first has left in the cache."""
    watch = Watch()
    with started(watch, LENGTH, *setting) as engine:

        async def main() -> list[list[Choice]]:
            async with watch.paused(engine):
                readers = [asyncio.ensure_future(said(engine, one)) for one in asked]
            return list(await asyncio.gather(*readers))

        for _ in range(2):
            for one, tokens in zip(asked, play(main(), "all answers"), strict=True):
                check(one, tokens)


# ---- Steps launched ahead ----------------------------------------------------------------------------------


def test_steps_are_launched_before_those_before_them_are_read() -> None:
    """Three steps more than needed: when the stop token is read, they are under way."""
    full = endless(20, 30)
    with started(Watch()) as engine:
        expected = alone(engine, full)
    stopping = replace(full, stop_token_ids=frozenset(expected.ids[9:10]))
    n_said = expected.ids.index(expected.ids[9]) + 1
    with started(watch := Watch(), n_ahead=3) as engine:
        assert alone(engine, stopping) == Answer(expected.tokens[:n_said], "stop", "")
    assert len(watch.steps) == n_said + 3


# ---- Drafts ------------------------------------------------------------------------------------------------


def test_drafts_are_accepted_when_the_text_repeats() -> None:
    asked = replace(endless(20, 200), prompt=TEXTS[2][:200])
    with started(Watch(), speculate=5) as engine:
        steps = play(steps_of(engine, asked), "an answer with drafts")
        counts = engine.counts()
    assert counts["accepted"] > 100
    assert counts["drafted"] < 2 * counts["accepted"]
    assert max(len(step.tokens) for step in steps) == 6  # they come as one step
    assert counts["steps"] == 1 + 200 - counts["accepted"]  # two chunks, and one step less a draft


@pytest.mark.parametrize("n_ahead", [0, 3])
def test_a_prompt_that_comes_four_times_at_once_is_read_once(n_ahead: int) -> None:
    """Nine of its ten pages are shared, so that 20 pages serve all four together."""
    with started(watch := Watch(), n_pages=20, n_ahead=n_ahead) as engine:
        answers = together(engine, watch, [endless(640, 30)] * 4)
        assert engine.counts()["cached_tokens"] == 3 * 9 * PAGE
    assert len({str(answer) for answer in answers}) == 1
    assert max(step.n_running for step in watch.steps) == 4
