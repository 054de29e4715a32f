"""What a sequence says depends on its request alone: not on what is cached, on who else runs, on pages that
run out, on steps launched ahead, on drafts. All by ==, logprobs too: the bits.
"""

import asyncio
import math
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from dialects.families import DIALECTS
from dialects.structured_output import answer_grammar
from helpers.device_models import SAMPLINGS, sampling_of
from helpers.engines import Answer, WatchedEngine, alone, play, started, steps_of
from helpers.grammars import grammars_of
from model import PAGE
from parity import TINY
from request.tools import StructuredOutput
from sampling import Choice
from scheduler import Sequence
from tokenizer import Tokenizer

LENGTH = 6 * PAGE  # of the context: what the smallest pool holds
TOKENIZER = Tokenizer(TINY / "tokenizer.json")
TEXTS = [
    [(5 + 7 * i) % 2000 for i in range(320)],
    [5, 6, 7, 8] * 80,
    TOKENIZER.encode("The fox said: read the book, read the book, and the owl said: I have read it. " * 30),
]
EOS = 2041
WORDS: dict[str, Any] = {"type": "array", "items": {"enum": ["yes", "no"]}, "minItems": 3, "maxItems": 9}


class Asked(NamedTuple):
    """A request, and the number of steps after which its reader leaves."""

    text: int
    n_prompt: int
    max_tokens: int
    sampling: int  # row of tables/sampling.toml
    stop: frozenset[int] = frozenset()
    constrained: bool = False
    leaves: int | None = None

    def job(self) -> Sequence:
        sampling = replace(sampling_of(SAMPLINGS["disturbed"][self.sampling]), n_top_logprobs=2)
        prompt = TEXTS[self.text][: self.n_prompt]
        if not self.constrained:
            return Sequence(prompt, self.max_tokens, self.stop, sampling)
        spec = StructuredOutput("none", schema=WORDS)
        constraint = grammars_of().constraint(answer_grammar(spec, DIALECTS["hermes"], {}, "over"))
        return Sequence(prompt, self.max_tokens, self.stop | {EOS}, sampling, constraint)


@cache
def undisturbed(asked: Asked) -> Answer:
    """In an engine of its own: no company, no cache, no drafts, enough pages, one step after another."""
    with started(LENGTH) as engine:
        return alone(engine, asked.job())


async def said(engine: WatchedEngine, requests: list[Asked]) -> list[list[Choice]]:
    """All that their readers get, who ask at once."""
    async with engine.paused():
        readers = [asyncio.create_task(steps_of(engine, one.job(), one.leaves)) for one in requests]
    return [[token for step in await reader for token in step.tokens] for reader in readers]


requests = st.builds(
    Asked,
    text=st.sampled_from([0, 1, 2]),
    n_prompt=st.sampled_from([1, 5, 63, 64, 65, 127, 128, 129, 200, 256, 257, 300]),
    max_tokens=st.integers(1, 60),
    sampling=st.sampled_from(range(len(SAMPLINGS["disturbed"]))),
    stop=st.sampled_from([frozenset[int](), frozenset({6, 8, 700})]),
    constrained=st.sampled_from([False, False, True]),
    leaves=st.sampled_from([None, None, None, 1, 5]),
)


@settings(max_examples=settings().max_examples // 6)
@given(
    st.lists(requests, min_size=1, max_size=6),
    st.sampled_from([6, 9, 64]),
    st.sampled_from([0, 1, 3]),
    st.sampled_from([0, 1, 5]),
    st.sampled_from([1e-9, math.inf]),
)
def test_nothing_disturbs_a_sequence(
    asked: list[Asked], n_pages: int, n_ahead: int, speculate: int, step_s: float
) -> None:
    """The second time, with what the first has left in the cache. A reader that leaves got the beginning."""
    with started(LENGTH, n_pages, n_ahead, speculate, step_s) as engine:
        for _ in range(2):
            for one, tokens in zip(asked, play(said(engine, asked)), strict=True):
                expected = undisturbed(one._replace(leaves=None))
                assert expected.finish != "failed"
                assert tokens == expected.tokens[: len(tokens) if one.leaves else None]
