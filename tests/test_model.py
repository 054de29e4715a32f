"""model.py: the laws of the forward pass, and sampling from distributions made by hand.

The checkpoints are those of parity.py; tests/checkpoint/test_parity.py compares their logits with those that
transformers computes. A law that promises the same bits allows no rounding.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from model import PAGE, Array, Batch, NumpyOps, Span, forward
from parity import CASES, N_PAGES, Ours, prefill, write
from sampling import Choice, Context, Sampling

ROUNDING = 2e-4
SIZES = [1, 31, 32, 33]
VARIED = [
    "llama-3.2-rope-parameters",
    "mistral-window",
    "qwen3-layer-types",
    "smollm3-untied-biases",
    "qwen3-moe-dense-layers",
    "gpt-oss",
]


@cache
def ours(name: str) -> Ours:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), CASES[name])
        return Ours(Path(folder))


def tokens(n: int, seed: int = 0) -> list[int]:
    return [int(i) for i in np.random.default_rng([n, seed]).integers(0, 96, n)]


def run(model: Ours, spans: Sequence[Span]) -> Array:
    logits: Array = forward(model.ops, model.weights, Batch(spans))
    return logits


def read(model: Ours, pages: Sequence[int], token_ids: Sequence[int], start: int = 0) -> Array:
    """Logits of the last token, (vocab_size,)."""
    logits: Array = run(model, [prefill(token_ids, start, pages)])[0]
    return logits


def alone(model: Ours, token_ids: Sequence[int]) -> Array:
    return read(model, range(N_PAGES // 2, N_PAGES), token_ids)


def one_by_one(token_ids: Sequence[int], start: int, pages: Sequence[int], n_wanted: int = 1) -> Span:
    return Span(0, pages, token_ids, start, n_wanted)


def written(model: Ours, pages: Sequence[int], n: int) -> Array:
    """Keys and values of the first n tokens, (n, n_layers, 2, n_kv_heads, head_dim)."""
    kv: Array = model.ops._kv[list(pages)].transpose(0, 3, 1, 2, 4, 5)
    return kv.reshape(-1, *kv.shape[2:])[:n].copy()


def near(a: NDArray[Any], b: NDArray[Any]) -> bool:
    return bool(np.abs(np.subtract(a, b, dtype=np.float64)).max() < ROUNDING)


# ---- Laws --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIED)
@pytest.mark.parametrize("size", SIZES)
def test_prefill_in_chunks_is_prefill_at_once(name: str, size: int) -> None:
    model, token_ids, kept, whole = ours(name), tokens(100), [7, 3], [4, 5]
    for start in range(0, 100, size):
        logits = read(model, kept, token_ids[start : start + size], start)
    assert np.array_equal(logits, read(model, whole, token_ids))
    assert np.array_equal(written(model, kept, 100), written(model, whole, 100))


@pytest.mark.parametrize("name", VARIED)
def test_rows_by_themselves_are_the_rows_of_as_many_steps(name: str) -> None:
    """What makes drafts exact, and what was taken from a sequence computable again: the same bits."""
    model, token_ids, n = ours(name), tokens(110), 40
    for pages in ([0, 1], [9, 2]):
        read(model, pages, token_ids[:n])
    expected = [run(model, [one_by_one(token_ids[i : i + 1], i, [0, 1])])[0] for i in range(n, 110)]
    at_once = run(model, [prefill([5] * 9, 0, [30]), one_by_one(token_ids[n:], n, [9, 2], n_wanted=70)])
    assert np.array_equal(at_once[1:], expected)
    assert np.array_equal(written(model, [0, 1], 110), written(model, [9, 2], 110))


@pytest.mark.parametrize("name", VARIED)
def test_prefill_and_decode_in_one_batch_give_the_same_bits_as_alone(name: str) -> None:
    model, lengths = ours(name), [1, 31, 32, 33, 64]
    starts = [0, 7, 0, 33, 40]
    tables = [[2 * i, 2 * i + 1] for i in range(5)]
    for pages, start in zip(tables, starts, strict=True):
        if start:
            read(model, pages, tokens(start))
    spans = [
        prefill(tokens(n), start, pages) for pages, n, start in zip(tables, lengths, starts, strict=True)
    ]
    expected = [run(model, [span])[0] for span in spans]
    kv = [written(model, span.pages, span.end) for span in spans]
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1]):
        logits = run(model, [spans[i] for i in order])
        assert np.array_equal(logits, [expected[i] for i in order])
        for i, span in enumerate(spans):
            assert np.array_equal(written(model, span.pages, span.end), kv[i])


@pytest.mark.parametrize("name", VARIED)
@pytest.mark.parametrize("n", [63, 64, 65, 125])
def test_the_same_bits_wherever_the_pages_lie(n: int, name: str) -> None:
    """In a row they are read at once, else one by one: the sums must not know."""
    model, prompt = ours(name), tokens(n)
    found = []
    for pages in ([0, 1, 2], [50, 10, 70], [8, 7, 6], [20, 21, 90]):
        prefill = read(model, pages, prompt[:40]), read(model, pages, prompt[40:], 40)
        decode = [run(model, [one_by_one([i], n + i, pages)])[0] for i in range(3)]
        found.append(np.array([*prefill, *decode]))
    assert all(np.array_equal(logits, found[0]) for logits in found)


@pytest.mark.parametrize("name", VARIED)
def test_memory_that_was_never_written_is_never_read(name: str) -> None:
    """np.empty may hold anything, a NaN too."""
    model, token_ids, pages = ours(name), tokens(80), [3, 1]
    model.ops._kv[pages] = np.nan
    read(model, pages, token_ids[:33])
    for position in range(33, 80):
        logits = run(model, [one_by_one(token_ids[position : position + 1], position, pages)])[0]
    assert near(logits, alone(model, token_ids))
    assert np.isnan(model.ops._kv[1, :, :, 80 - PAGE :]).all()


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
OPS: NumpyOps = ours("llama-2").ops
SEEDS = range(300)  # a token of probability 0.05 is missed by all of them with probability 2e-7


def pick(logits: Array, sampling: Sampling, output: Sequence[int] = (), prompt: Sequence[int] = ()) -> Choice:
    before = logits.copy()
    [choice] = OPS.pick(logits[None], [Context(sampling, prompt, output)])
    assert np.array_equal(logits, before)
    return choice


def drawn(logits: Array, sampling: Sampling, **context: Sequence[int]) -> list[int]:
    """What each seed draws."""
    return [pick(logits, replace(sampling, seed=seed), **context).token_id for seed in SEEDS]


# fmt: off
#   sampling                                    tokens that can come
KEPT = [
    ({},                                        {0, 1, 2, 3, 4}),
    ({"top_k": 2},                              {1, 3}),
    ({"top_p": 0.41},                           {1, 3}),  # the token that crosses the line is in
    ({"top_p": 0.71},                           {1, 3, 4}),
    ({"min_p": 0.13},                           {0, 1, 2, 3, 4} - {2}),  # below 0.13 * 0.4
    ({"top_k": 2, "top_p": 0.56},               {1}),  # 0.4 of the 0.7 that are left
    ({"min_p": 0.3, "top_p": 0.8},              {1, 3}),  # 0.7 of the 0.85 that are left
    ({"temperature": 2.0, "min_p": 0.55},       {1, 3, 4}),  # sqrt(0.15 / 0.4) = 0.61, sqrt(0.1 / 0.4) = 0.5
    ({"temperature": 1e-310},                   {1}),
]
# fmt: on


@pytest.mark.parametrize(("parameters", "expected"), KEPT)
def test_tokens_that_can_come(parameters: dict[str, Any], expected: set[int]) -> None:
    assert {*drawn(LOGITS, Sampling(**parameters))} == expected


@pytest.mark.parametrize("n", [*SIZES, 1000, 49152])
def test_filters_on_large_vocabularies(n: int) -> None:
    """Against sets that are built token by token, in float64."""
    rng = np.random.default_rng(n)
    logits = (3 * rng.standard_normal(n)).astype(np.float32)
    logits[rng.integers(n)] += 30  # an outlier
    for temperature, top_k, top_p, min_p in [(3.0, 20, 0.9, 0.0), (9.0, 0, 0.95, 0.01), (1.0, 7, 1.0, 0.2)]:
        p = np.exp(logits.astype(np.float64) / temperature)
        falling = [int(i) for i in np.argsort(-p, kind="stable") if p[i] >= min_p * p.max()][: top_k or n]
        nucleus, reached = set[int](), 0.0
        line = top_p * p[falling].sum()
        for token_id in falling:
            if reached < line:
                nucleus.add(token_id)
                reached += p[token_id]
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        came = {pick(logits, replace(sampling, seed=seed)).token_id for seed in range(40)}
        assert came <= nucleus
        assert len(came) >= min(3, len(nucleus))


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

# fmt: off
#   sampling                                           prompt  output        what the logits become
PENALISED = [
    ({"presence_penalty": 0.5},                        [4],    [0, 0, 3],    [2.5, 2, 1, 0, -1, -2]),
    ({"frequency_penalty": 0.5},                       [4],    [0, 0, 3],    [2, 2, 1, 0, -1, -2]),
    ({"presence_penalty": 2},                          [0, 1], [],           [3, 2, 1, 0.5, -1, -2]),
    ({"repetition_penalty": 2},                        [4, 4], [0, 0, 3],    [1.5, 2, 1, 0.25, -2, -2]),
    ({"repetition_penalty": 0.5},                      [4],    [2],          [3, 2, 2, 0.5, -0.5, -2]),
    ({"repetition_penalty": 2, "presence_penalty": 1}, [],     [0, 5],       [0.5, 2, 1, 0.5, -1, -5]),
    ({"logit_bias": {5: 4.5, 0: -2}},                  [],     [],           [1, 2, 1, 0.5, -1, 2.5]),
    ({"logit_bias": {1: 1}, "presence_penalty": 1},    [],     [1],          [3, 2, 1, 0.5, -1, -2]),
    ({"logit_bias": {5: 4.5}, "temperature": 0},       [],     [],           [3, 2, 1, 0.5, -1, 2.5]),
]
# fmt: on


@pytest.mark.parametrize(("parameters", "prompt", "output", "becomes"), PENALISED)
def test_penalties_and_bias(
    parameters: dict[str, Any], prompt: list[int], output: list[int], becomes: list[float]
) -> None:
    """They draw what the changed logits draw without them."""
    plain = Sampling(temperature=parameters.get("temperature", 1.0))
    changed = drawn(RAW, Sampling(**parameters), prompt=prompt, output=output)
    assert changed == drawn(np.array(becomes, np.float32), plain, output=output)


@pytest.mark.parametrize("n", [2, *SIZES[1:], 1000])
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
