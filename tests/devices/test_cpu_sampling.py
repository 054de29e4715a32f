"""devices/cpu_sampling.py: the tokens of sampling.pick_token(), alone and in any batch."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

pytest.importorskip("numba", reason="pip install -e '.[fast]' brings Numba")

from test_cpu import ops

from devices.cpu_sampling import RUN, run_maxima, weighed
from helpers.device_models import SAMPLINGS, same, sampling_of
from model import PAGE, Array, Batch, Span, forward
from sampling import NO_TOKEN, Choice, Context, Sampling, apply_temperature, pick_token

N_ROWS = 8  # that share their logits
ASKED = [
    sampling_of(row)
    for table in ("picked", "picked_of_many", "disturbed")
    for row in SAMPLINGS[table]
    if not row.get("logit_bias")  # of a token that a small vocabulary has not
]
SIZES = [20, RUN - 1, RUN, RUN + 1, 1000, 2048, 49_152]


@cache
def of_the_model() -> Array:
    """The logits that a model has after each token of a prompt."""
    tokens = np.random.default_rng(0).integers(0, 2048, 2 * PAGE).tolist()
    logits: Array = forward(ops(), ops().weights, Batch([Span(0, [0, 1], tokens, 0, len(tokens))]))
    return logits


def logits_of(kind: str, rng: np.random.Generator) -> Array:
    n = int(rng.choice(SIZES))
    if kind == "a model's":
        return np.array(rng.choice(of_the_model()), np.float32)
    x = rng.normal(0, 3, n)
    if kind == "nearly flat":
        x /= 30
    elif kind == "ties":
        x = np.round(x)
    elif kind == "equal":
        x[:] = 7
    elif kind == "peaked":
        x = 10 * x + 100
    elif kind == "few tokens":
        x[1 + rng.permutation(n - 1)[: n * 9 // 10]] = -np.inf
    return x.astype(np.float32)


def contexts_of(n_tokens: int, rng: np.random.Generator) -> Iterator[Context]:
    for _ in range(N_ROWS):
        sampling = replace(ASKED[rng.integers(len(ASKED))], seed=int(rng.integers(2**40)))
        mask = None
        if rng.random() < 0.2:
            mask = rng.random(n_tokens) < 0.3
            mask[0] = True
        yield Context(sampling, [1, 2, 2], [2, 3], mask)


KINDS = ["a model's", "noise", "nearly flat", "ties", "equal", "peaked", "few tokens"]
ROUNDS = [(8, 0), pytest.param(180, 1, marks=pytest.mark.sweep)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "seed"), ROUNDS)
def test_the_same_tokens_as_the_spec(kind: str, n: int, seed: int) -> None:
    """The sweep has 7 * 180 * 8 = 10,080 rows."""
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    for _ in range(n):
        logits = logits_of(kind, rng)
        contexts = list(contexts_of(len(logits), rng))
        found = ops().pick(np.tile(logits, (N_ROWS, 1)), contexts)
        for got, context in zip(found, contexts, strict=True):
            assert same(got, pick_token(logits, context), 1e-5)


def test_the_same_bits_as_the_spec() -> None:
    for kind in KINDS:
        logits = logits_of(kind, np.random.default_rng(3))
        for temperature in (1e-30, 0.2, 1.0, 3.0):
            probs, _ = weighed(logits, run_maxima(logits), np.float32(temperature), np.float32(-np.inf))
            assert np.array_equal(probs, apply_temperature(logits, temperature))


@pytest.mark.parametrize("n_threads", [1, 2])
def test_a_row_has_the_same_bits_in_any_batch(n_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(7)
    logits = rng.normal(0, 3, (len(ASKED), 5000)).astype(np.float32)
    contexts = [Context(sampling, [1, 2, 2], [2, 3]) for sampling in ASKED]
    alone = [ops().pick(logits[i : i + 1], [context])[0] for i, context in enumerate(contexts)]
    monkeypatch.setattr(ops(), "_n_threads", n_threads)
    monkeypatch.setattr(ops(), "_small", 0)
    order = rng.permutation(len(ASKED))
    together = ops().pick(logits[order], [contexts[i] for i in order])
    assert together == [alone[i] for i in order]


NAN, INF = np.float32(np.nan), np.float32(np.inf)
FREE, GREEDY = Context(Sampling(top_p=0.9, n_top_logprobs=3), [], []), Context(Sampling(0), [], [])
NOTHING_ALLOWED = np.zeros(1000, np.bool_)


@pytest.mark.parametrize("place", [0, 500, 999])
@pytest.mark.parametrize("worst", [NAN, -NAN, INF])
def test_no_token_is_chosen_by_logits_that_are_no_numbers(worst: np.float32, place: int) -> None:
    """A NaN of either sign: what a processor makes of inf - inf has a minus."""
    logits = np.zeros((3, 1000), np.float32)
    logits[0, place] = logits[2, place] = worst
    only_the_last = Context(Sampling(), [], [], np.arange(1000) == 999)
    found = ops().pick(logits, [FREE, GREEDY, only_the_last])
    assert found == [Choice(NO_TOKEN), Choice(0), Choice(NO_TOKEN)]
    assert [pick_token(logits[0], context) for context in (FREE, only_the_last)] == [Choice(NO_TOKEN)] * 2


@pytest.mark.parametrize("context", [FREE, GREEDY])
def test_no_token_is_chosen_if_none_is_allowed(context: Context) -> None:
    """Bug: token 0 was, by greedy decoding; a draw ended in an IndexError."""
    zeros = np.zeros((1, 1000), np.float32)
    for logits, asked in ((zeros - INF, context), (zeros, context._replace(mask=NOTHING_ALLOWED))):
        assert ops().pick(logits, [asked]) == [pick_token(logits[0], asked)] == [Choice(NO_TOKEN)]
