"""model.py: the laws of the forward pass, to the bit, and sampling from distributions made by hand.

tests/checkpoint/test_parity.py compares the logits of these checkpoints with those of transformers.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

from helpers.device_models import SAMPLINGS, sampling_of, tokens
from helpers.device_ops import sweep
from model import Array, Batch, NumpyOps, Span, forward
from parity import Ours, folder_of, prefill
from sampling import Choice, Context, Sampling, philox_uniform, pick_token

VARIED = ["mistral-window", "qwen3-moe-dense-layers", "gpt-oss", "phi-4-mini"]
MORE = ["llama-3.2-rope-parameters", "qwen3-layer-types", "smollm3-untied-biases", "granite-tied"]


@cache
def ours(name: str) -> Ours:
    with folder_of(name) as folder:
        return Ours(folder)


def run(model: Ours, spans: Sequence[Span]) -> Array:
    logits: Array = forward(model.ops, model.weights, Batch(spans))
    return logits


def written(model: Ours, pages: Sequence[int], n: int) -> Array:
    """Keys and values of the first n tokens, (n, n_layers, 2, n_kv_heads, head_dim)."""
    kv: Array = model.ops._kv[list(pages)].transpose(0, 3, 1, 2, 4, 5)
    return kv.reshape(-1, *kv.shape[2:])[:n].copy()


# ---- Laws --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sweep([*VARIED, *MORE], VARIED))
def test_rows_in_chunks_are_the_rows_of_as_many_steps(name: str) -> None:
    """What makes drafts exact, and what was taken from a sequence computable again.

    Beside a prompt of another sequence, before it or behind it in the batch. Wherever the pages lie: in a row
    they are read at once, else one by one, and the sums must not know; nor what was in them: np.empty may be
    anything, a NaN too.
    """
    model, token_ids = ours(name), tokens(110)

    def chunked(size: int, pages: list[int]) -> tuple[Array, Array]:
        company = prefill([5] * 9, 0, [30])
        model.ops._kv[pages] = np.nan
        chunks = [token_ids[start : start + size] for start in range(0, 110, size)]
        rows: list[Array] = []
        for i, chunk in enumerate(chunks):
            span = Span(0, pages, chunk, size * i, len(chunk))
            rows += [*run(model, [span, company])[:-1]] if i % 2 else [*run(model, [company, span])[1:]]
        return np.array(rows), written(model, pages, 110)

    logits, kv = chunked(1, [0, 1])
    for size, pages in ((31, [9, 2]), (32, [50, 10]), (33, [20, 21]), (63, [8, 7]), (110, [3, 70])):
        found, kept = chunked(size, pages)
        assert np.array_equal(found, logits)
        assert np.array_equal(kept, kv)


def test_untouched_pages_take_no_memory() -> None:
    """Bug: a huge page of memory is given as a whole when a byte of it is written, and a token has its place
    in every layer and head: 377 MB for the first token of a request. All of a page lies together."""
    model = ours("llama-2")
    strides, page = model.ops._kv.strides, model.ops._kv[0]
    assert page.flags.c_contiguous
    assert strides[0] == page.nbytes == NumpyOps.page_bytes(model.config)


# ---- Sampling ----------------------------------------------------------------------------------------------

P = np.array([0.1, 0.4, 0.05, 0.3, 0.15])
LOGITS = (np.log(P) + 7).astype(np.float32)
SEEDS = range(300)  # a token of probability 0.05 is missed by all of them with probability 2e-7


def pick(logits: Array, sampling: Sampling, output: Sequence[int] = (), prompt: Sequence[int] = ()) -> Choice:
    before = logits.copy()
    choice = pick_token(logits, Context(sampling, prompt, output))
    assert np.array_equal(logits, before)
    return choice


def drawn(logits: Array, sampling: Sampling, **context: Sequence[int]) -> list[int]:
    """What each seed draws."""
    return [pick(logits, replace(sampling, seed=seed), **context).token_id for seed in SEEDS]


@pytest.mark.parametrize(("parameters", "expected"), SAMPLINGS["kept"])
def test_tokens_that_can_come(parameters: dict[str, Any], expected: list[int]) -> None:
    assert sorted({*drawn(LOGITS, sampling_of(parameters))}) == expected


def exact_draw(logits: Array, s: Sampling, u: float) -> int:
    """The token by its definition: in float64, over the whole vocabulary, sorted."""
    p = np.exp((logits.astype(np.float64) - logits.max()) / s.temperature)
    falling = np.argsort(-p, kind="stable")
    kept = falling[p[falling] >= s.min_p][: s.top_k or None]
    reached = p[kept].cumsum()
    nucleus = kept[: 1 + np.searchsorted(reached[:-1], s.top_p * reached[-1])]
    ends = np.where(np.isin(np.arange(len(p)), nucleus), p, 0).cumsum()
    return int(np.searchsorted(ends, min(max(0, u), 0.999999) * ends[-1], side="right"))


@pytest.mark.parametrize("temperature", [0.1, 0.7, 1.0, 3.0])
@pytest.mark.parametrize("top_k", [0, 1, 40, 900])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.2])
@pytest.mark.parametrize("min_p", [0.0, 0.02])
def test_each_draw_is_by_the_definition(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    """Unless u, or top_p, is so close to the end of a token that float32 may put it on either side."""
    rng = np.random.default_rng(0)
    sampling = Sampling(temperature, top_p, top_k, min_p)
    for seed in range(settings().max_examples + 5):  # 10,080 rows in all, by `make check`
        logits = (4 * rng.standard_normal(rng.integers(950, 1100))).astype(np.float32)
        u = philox_uniform(seed, 0, 0)
        token_id = pick(logits, replace(sampling, seed=seed)).token_id
        if token_id != exact_draw(logits, sampling, u):
            sides = itertools.product((1 - 1e-6, 1 + 1e-6), (-1e-5, 1e-5))
            near = [exact_draw(logits, replace(sampling, top_p=min(1.0, top_p * e)), u + f) for e, f in sides]
            assert token_id in near


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("axis", ["seed", "choice", "position"])
def test_draws_follow_the_distribution(axis: str, temperature: float) -> None:
    """Chi-square of 2000 draws, 4 degrees of freedom: above 18.5 once in a thousand. The seeds are fixed."""
    n, p = 2000, P ** (1 / temperature)
    count = np.zeros(5)
    for i in range(n):
        seed, choice, position = (i if axis == name else 3 for name in ("seed", "choice", "position"))
        sampling = Sampling(temperature=temperature, seed=seed, choice=choice)
        count[pick(LOGITS, sampling, output=range(position)).token_id] += 1
    expected = n * p / p.sum()
    assert ((count - expected) ** 2 / expected).sum() < 18.5


RAW = np.array([3, 2, 1, 0.5, -1, -2], np.float32)


@pytest.mark.parametrize(("parameters", "prompt", "output", "becomes"), SAMPLINGS["penalised"])
def test_penalties_and_bias(
    parameters: dict[str, Any], prompt: list[int], output: list[int], becomes: list[float]
) -> None:
    """They draw what the changed logits draw without them."""
    plain = Sampling(temperature=parameters.get("temperature", 1.0))
    changed = drawn(RAW, sampling_of(parameters), prompt=prompt, output=output)
    assert changed == drawn(np.array(becomes, np.float32), plain, output=output)


@pytest.mark.parametrize("n", [2, 33, 1000])
def test_logprobs_of_all_tokens(n: int) -> None:
    logits = (4 * np.random.default_rng(n).standard_normal(n)).astype(np.float32)
    exact = logits - np.log(np.exp(logits, dtype=np.float64).sum())
    choice = pick(logits, Sampling(seed=n, n_top_logprobs=n))
    ids, logprobs = [list(column) for column in zip(*choice.top, strict=True)]
    assert sorted(ids) == [*range(n)]
    assert logprobs == sorted(logprobs, reverse=True)
    assert np.exp(logprobs).sum() == pytest.approx(1, abs=1e-5)
    assert logprobs == pytest.approx(exact[ids], abs=1e-5)
    assert choice.logprob == dict(choice.top)[choice.token_id]


def test_logprobs_are_the_models_own() -> None:
    """Before temperature, filters, penalties and bias: a banned token keeps its place among the top."""
    sampling = Sampling(0.3, top_k=2, presence_penalty=2, logit_bias={1: -100}, n_top_logprobs=3)
    choice = pick(LOGITS, sampling, output=[3])
    assert [token_id for token_id, _ in choice.top] == [1, 3, 4]
    assert [logprob for _, logprob in choice.top] == pytest.approx(np.log(P[[1, 3, 4]]), abs=1e-5)
    assert choice.logprob == pytest.approx(np.log(P[choice.token_id]), abs=1e-5)
