"""model.py: the forward pass against a slow one in float64, its laws, and sampling from distributions made by
hand.

The checkpoints are parity.py's. Their logits are some units large, and float32 leaves about 5e-5 of them
open; ROUNDING allows 2e-4. Where a law promises the same bits, it allows nothing.
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

from checkpoint.rope import rope_table
from checkpoint.weights import Layer
from model import PAGE, Array, Batch, NumpyOps, Span, forward
from parity import CASES, N_PAGES, Ours, prefill, write
from sampling import Choice, Context, Sampling, draw

Vector = NDArray[np.float64]

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


# ---- The slow one ------------------------------------------------------------------------------------------


class Oracle:
    """One token after another, one head after another, one pair after another, in float64."""

    def __init__(self, model: Ours, n: int) -> None:
        self.config, self.weights = model.config, model.weights
        self.rope = rope_table(model.config.rope, model.config.head_dim, n).astype(np.complex128)
        self.keys: list[list[Vector]] = [
            [] for _ in self.weights.layers
        ]  # a layer, a position: (n_kv_heads, head_dim)
        self.values: list[list[Vector]] = [[] for _ in self.weights.layers]

    def read(self, token_ids: Sequence[int]) -> Vector:
        """Logits of every position, (len(token_ids), vocab_size)."""
        return np.array([self.step(token_id, position) for position, token_id in enumerate(token_ids)])

    def step(self, token_id: int, position: int) -> Vector:
        x = self.weights.embed[token_id].astype(np.float64)
        for i, layer in enumerate(self.weights.layers):
            x += linear(layer.wo, self.attention(i, layer, self.norm(x, layer.attn_norm), position), layer.bo)
            normed = self.norm(x, layer.mlp_norm)
            if layer.router is None:
                x += self.mlp(normed, layer.w_gate_up, layer.b_gate_up, layer.w_down, layer.b_down)
            else:
                x += self.experts(normed, layer)
        return linear(self.weights.head, self.norm(x, self.weights.norm), None)

    def mlp(self, x: Vector, w_gate_up: Any, b_gate_up: Any, w_down: Any, b_down: Any) -> Vector:
        gate, up = np.split(linear(w_gate_up, x, b_gate_up), 2)
        experts = self.config.experts
        if experts and experts.limit is not None:
            gate, up = gate.clip(None, experts.limit), up.clip(-experts.limit, experts.limit)
            return linear(w_down, gate / (1 + np.exp(-experts.alpha * gate)) * (up + 1), b_down)
        return linear(w_down, gate / (1 + np.exp(-gate)) * up, b_down)

    def experts(self, x: Vector, layer: Layer) -> Vector:
        """Every expert computes; a weight is 0 where it was not chosen."""
        experts = self.config.experts
        assert experts is not None
        router: Any = layer.router
        scores = np.exp(linear(router, x, layer.b_router))
        weights = np.where(scores >= np.sort(scores)[-experts.n_chosen], scores, 0)
        weights /= weights.sum() if experts.normalised else scores.sum()
        y = np.zeros_like(x)
        for e, weight in enumerate(weights):
            b_gate_up, b_down = (None if b is None else b[e] for b in (layer.b_gate_up, layer.b_down))
            y += weight * self.mlp(x, layer.w_gate_up[e], b_gate_up, layer.w_down[e], b_down)
        return y

    def attention(self, i: int, layer: Layer, x: Vector, position: int) -> Vector:
        c = self.config
        heads = linear(layer.wqkv, x, layer.bqkv).reshape(-1, c.head_dim)
        n_qk = c.n_heads + c.n_kv_heads
        for h in range(n_qk):
            weight = layer.q_norm if h < c.n_heads else layer.k_norm
            if weight is not None:
                heads[h] = self.norm(heads[h], weight)
            if c.rotary[i]:
                self.rotate(heads[h], position)
        self.keys[i].append(heads[c.n_heads : n_qk])
        self.values[i].append(heads[n_qk:])
        sinks = np.full(c.n_heads, -np.inf) if layer.sinks is None else layer.sinks
        return np.concatenate([self.attend(i, h, heads[h], sinks[h], position) for h in range(c.n_heads)])

    def rotate(self, head: Vector, position: int) -> None:
        for pair in range(len(head) // 2):
            turned = complex(head[2 * pair], head[2 * pair + 1]) * self.rope[position, pair]
            head[2 * pair], head[2 * pair + 1] = turned.real, turned.imag

    def attend(self, i: int, h: int, q: Vector, sink: float, position: int) -> Vector:
        window, kv = self.config.windows[i], h * self.config.n_kv_heads // self.config.n_heads
        seen = [p for p in range(position + 1) if window is None or p > position - window]
        scores = np.array([np.exp(q @ self.keys[i][p][kv] / np.sqrt(len(q))) for p in seen])
        total = scores.sum() + np.exp(np.float64(sink))
        y: Vector = sum(s * self.values[i][p][kv] for s, p in zip(scores, seen, strict=True)) / total
        return y

    def norm(self, x: Vector, weight: Array) -> Vector:
        y: Vector = x / np.sqrt((x * x).mean() + self.config.norm_eps) * weight
        return y


def linear(w: Array, x: Vector, b: Array | None) -> Vector:
    y: Vector = w.astype(np.float64) @ x
    return y if b is None else y + b


@pytest.mark.parametrize("name", CASES)
def test_oracle(name: str) -> None:
    model, token_ids = ours(name), tokens(33)
    assert near(model.logits(token_ids, range(33)), Oracle(model, 33).read(token_ids))


@pytest.mark.parametrize("n", SIZES)
def test_oracle_in_one_prefill(n: int) -> None:
    for name in VARIED:
        assert near(alone(ours(name), tokens(n)), Oracle(ours(name), n).read(tokens(n))[-1])


def test_oracle_with_outliers() -> None:
    """Real models have channels and tokens some hundred times as large as the others (arXiv 2402.17762)."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), CASES["llama-biases"])
        model = Ours(Path(folder))
    model.weights.embed[:, 5] *= 300
    model.weights.embed[tokens(33)[0]] *= 300
    model.weights.layers[1].w_gate_up[:7] *= -100  # exp(-gate) is infinite in float32: the gate is shut
    oracle = Oracle(model, 33)
    with np.errstate(over="ignore"):
        expected = oracle.read(tokens(33))
    assert near(model.logits(tokens(33), range(33)), expected)


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
@pytest.mark.parametrize("n", SIZES)
def test_decode_gives_the_same_bits_alone_and_in_a_batch_of(n: int, name: str) -> None:
    model = ours(name)
    prompts = [tokens(3 + i, seed=i) for i in range(n)]  # all of different length
    for i, prompt in enumerate(prompts):
        read(model, [i], prompt[:-1])
    spans = [one_by_one(prompt[-1:], len(prompt) - 1, [i]) for i, prompt in enumerate(prompts)]
    expected = [run(model, [span])[0] for span in spans]
    assert np.array_equal(run(model, spans), expected)


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


def test_logits_are_those_of_the_wanted_rows_in_their_order() -> None:
    model = ours("llama-2")
    spans = [
        prefill(tokens(n), 0, [i])._replace(n_wanted=int(n != 31)) for i, n in enumerate((33, 31, 1, 32))
    ]
    expected = [alone(model, tokens(n)) for n in (33, 1, 32)]
    assert np.array_equal(run(model, spans), expected)
    nothing = run(model, [spans[1]])
    assert nothing.shape == (0, 96)


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


def test_untouched_pages_are_no_memory() -> None:
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
    ({"top_k": 1},                              {1}),
    ({"top_k": 2},                              {1, 3}),
    ({"top_k": 4},                              {0, 1, 3, 4}),
    ({"top_k": 5},                              {0, 1, 2, 3, 4}),
    ({"top_k": 99},                             {0, 1, 2, 3, 4}),
    ({"top_p": 1e-9},                           {1}),
    ({"top_p": 0.39},                           {1}),
    ({"top_p": 0.41},                           {1, 3}),  # the token that crosses the line is in
    ({"top_p": 0.69},                           {1, 3}),
    ({"top_p": 0.71},                           {1, 3, 4}),
    ({"top_p": 0.86},                           {0, 1, 3, 4}),
    ({"top_p": 0.96},                           {0, 1, 2, 3, 4}),
    ({"min_p": 0.13},                           {0, 1, 2, 3, 4} - {2}),  # below 0.13 * 0.4
    ({"min_p": 0.3},                            {1, 3, 4}),
    ({"min_p": 0.7},                            {1, 3}),
    ({"min_p": 1.0},                            {1}),
    ({"top_k": 2, "top_p": 0.56},               {1}),  # 0.4 of the 0.7 that are left
    ({"top_k": 2, "top_p": 0.58},               {1, 3}),
    ({"min_p": 0.3, "top_p": 0.8},              {1, 3}),  # 0.7 of the 0.85 that are left
    ({"top_k": 4, "min_p": 0.3},                {1, 3, 4}),
    ({"temperature": 2.0, "min_p": 0.55},       {1, 3, 4}),  # sqrt(0.15 / 0.4) = 0.61, sqrt(0.1 / 0.4) = 0.5
    ({"temperature": 0.5, "top_p": 0.54},       {1}),  # 0.16 of 0.285
    ({"temperature": 0.0, "top_p": 0.99},       {1}),
    ({"temperature": 1e-310},                   {1}),
]
# fmt: on


@pytest.mark.parametrize(("parameters", "expected"), KEPT)
def test_tokens_that_can_come(parameters: dict[str, Any], expected: set[int]) -> None:
    assert {*drawn(LOGITS, Sampling(**parameters))} == expected


def test_equal_tokens_are_kept_or_dropped_together() -> None:
    logits = np.array([1, 2, 2, 2, 0], np.float32)
    assert {*drawn(logits, Sampling(top_k=2))} == {1, 2, 3}
    assert {*drawn(logits, Sampling(top_p=0.3))} == {1, 2, 3}
    assert {*drawn(logits, Sampling(min_p=1.0))} == {1, 2, 3}
    assert pick(logits, Sampling(temperature=0)).token_id == 1  # greedy takes the first


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


def test_neighbouring_seeds_choices_and_positions_are_independent() -> None:
    """Chi-square of 2000 pairs among 4 equal tokens, 15 degrees of freedom: above 37.7 once in a thousand."""
    logits, start = np.zeros(4, np.float32), (5, 0, 9)  # seed, choice, position
    for step in [(1, 0, 0), (0, 1, 0), (0, 0, 1)]:
        count = np.zeros((4, 4))
        for i in range(2000):
            seed, choice, position = np.add(start, (7 * i, 0, 0)).tolist()
            first = pick(logits, Sampling(seed=seed, choice=choice), output=range(position)).token_id
            seed, choice, position = np.add(start, np.add((7 * i, 0, 0), step)).tolist()
            second = pick(logits, Sampling(seed=seed, choice=choice), output=range(position)).token_id
            count[first, second] += 1
        assert ((count - 125) ** 2 / 125).sum() < 37.7


@pytest.mark.parametrize("n", SIZES)
def test_a_draw_does_not_depend_on_the_other_rows(n: int) -> None:
    rng = np.random.default_rng(n)
    logits = rng.standard_normal((n, 96)).astype(np.float32)
    contexts = [
        Context(Sampling(seed=i % 5, choice=i % 3, temperature=i % 4 / 2, top_p=0.9), (), range(i % 7))
        for i in range(n)
    ]
    together = OPS.pick(logits, contexts)
    assert together == [OPS.pick(logits[i : i + 1], [contexts[i]])[0] for i in range(n)]
    assert together == OPS.pick(logits[::-1], contexts[::-1])[::-1]


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 2**64 - 1])
def test_a_seed_is_any_integer(seed: int) -> None:
    texts = [
        [pick(LOGITS, Sampling(seed=s), output=range(i)).token_id for i in range(60)]
        for s in (seed, seed, seed + 1)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_the_ends_of_a_draw() -> None:
    """A token without probability is never drawn: not the first by 0, not the last by the largest below 1."""
    p = np.array([0.0, 0.3, 0.0, 0.7, 0.0])
    assert draw(p, 0.0) == 1
    assert draw(p, np.nextafter(1, 0)) == 3
    assert draw(np.full(1000, 0.1), np.nextafter(1, 0)) == 999


RAW = np.array([3, 2, 1, 0.5, -1, -2], np.float32)

# fmt: off
#   sampling                                           prompt  output        what the logits become
PENALISED = [
    ({"presence_penalty": 0.5},                        [4],    [0, 0, 3],    [2.5, 2, 1, 0, -1, -2]),
    ({"frequency_penalty": 0.5},                       [4],    [0, 0, 3],    [2, 2, 1, 0, -1, -2]),
    ({"presence_penalty": 1, "frequency_penalty": 2},  [4],    [0, 0, 3],    [-2, 2, 1, -2.5, -1, -2]),
    ({"presence_penalty": -2, "frequency_penalty": 1}, [],     [5, 5, 1],    [3, 3, 1, 0.5, -1, -2]),
    ({"presence_penalty": 2},                          [0, 1], [],           [3, 2, 1, 0.5, -1, -2]),
    ({"repetition_penalty": 2},                        [4, 4], [0, 0, 3],    [1.5, 2, 1, 0.25, -2, -2]),
    ({"repetition_penalty": 0.5},                      [4],    [2],          [3, 2, 2, 0.5, -0.5, -2]),
    ({"repetition_penalty": 2, "presence_penalty": 1}, [],     [0, 5],       [0.5, 2, 1, 0.5, -1, -5]),
    ({"logit_bias": {5: 4.5, 0: -2}},                  [],     [],           [1, 2, 1, 0.5, -1, 2.5]),
    ({"logit_bias": {1: 1}, "presence_penalty": 1},    [],     [1],          [3, 2, 1, 0.5, -1, -2]),
    ({"logit_bias": {5: 4.5}, "temperature": 0},       [],     [],           [3, 2, 1, 0.5, -1, 2.5]),
    ({"logit_bias": {5: 5.5}, "temperature": 0},       [],     [],           [3, 2, 1, 0.5, -1, 3.5]),
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


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_a_bias_of_100_forces_and_of_minus_100_bans(temperature: float) -> None:
    """https://platform.openai.com/docs/api-reference/chat/create#chat-create-logit_bias"""
    assert {*drawn(LOGITS, Sampling(temperature, logit_bias={2: 100}))} == {2}
    assert 1 not in drawn(LOGITS, Sampling(temperature, logit_bias={1: -100}))
    assert {*drawn(LOGITS, Sampling(temperature, logit_bias=dict.fromkeys([0, 1, 2, 3], -100)))} == {4}


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


def test_as_many_logprobs_as_asked_for() -> None:
    greedy = Sampling(temperature=0)
    assert pick(LOGITS, greedy) == Choice(1, None, ())
    assert pick(LOGITS, replace(greedy, n_top_logprobs=0)).top == ()
    assert pick(LOGITS, replace(greedy, n_top_logprobs=0)).logprob == pytest.approx(np.log(0.4), abs=1e-5)
    assert [len(pick(LOGITS, replace(greedy, n_top_logprobs=n)).top) for n in range(6)] == [*range(6)]


def test_logprobs_of_extreme_logits() -> None:
    logits = np.array([1e4, -1e4, 1e4, -np.inf], np.float32)
    choice = pick(logits, Sampling(n_top_logprobs=4))
    assert choice.token_id in (0, 2)
    assert [logprob for _, logprob in choice.top] == pytest.approx(
        [-np.log(2)] * 2 + [-2e4 - np.log(2), -np.inf]
    )
