"""The plain kernels against NumpyOps, and each fast one against its plain one, on the emulator.

A plain kernel and a fast one round to bfloat16 at the same places, so what differs is the order of sums in
float32, and, where a sum comes out at the edge of a rounding, one step of bfloat16. Hence the bounds, each a
few times what was seen:

    products                          1e-6 of a row's norm; NumPy's float32 is 4e-3 away
    products of rows that are normed  3e-4: of some thousand normed numbers one is rounded the other way
    what is rounded itself            a step, 2^-8, in at most 2 numbers of 100
    attention to up to 32 keys        the same; to more 5e-3: shares are rounded below another greatest score
    choices                           none

Not here: the fast kernels against NumPy (test_kernels.py), a real GPU (tests/gpu).
"""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import emulator
from emulator import Emulator
from engine import Job
from engines import QUESTIONS, alone, job, tiny
from gpu import CudaOps
from kernels import ANY, CODE, signatures
from model import PAGE, Array, Batch, Context, NumpyOps, Sampling, Span, _pick
from plain import PlainOps
from test_gpu import (
    VARIED,
    apart,
    by_steps,
    choices,
    engine_of,
    made,
    made_on,
    page,
    pages,
    rows,
    tile,
    tokens,
)
from test_kernels import (
    CONFIGS,
    SAMPLINGS,
    Both,
    attend,
    both,
    near,
    noise,
    pick,
    qkv_noise,
    rounded,
    run_every_kernel,
    same,
    span,
    spans_of,
    widened,
)

pytestmark = pytest.mark.skipif(emulator.MISSING is not None, reason=str(emulator.MISSING))

STEP = 2**-8  # of bfloat16: from a number to the next one, at most


def pair(name: str) -> tuple[Both, Both]:
    """A model with the fast kernels, and with the plain ones."""
    return both(name, 0), both(name, 0, ops=PlainOps)


def together(got: Sequence[Array], tolerance: float) -> bool:
    """By rows: what the fast kernel says and what the plain one says."""
    fast, plain = got
    return near(fast, plain, tolerance)


def nearly_the_same(got: Sequence[Array], share: float = 0.02) -> bool:
    """Numbers that were rounded: within a step, and nearly all of them equal."""
    fast, plain = got
    return together(got, STEP) and float((fast != plain).mean()) <= share


# ---- Kernel by kernel --------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 31, 32, 33])
@pytest.mark.parametrize("name", ["grouped", "plain"])
def test_products(name: str, n: int) -> None:
    fast, plain = pair(name)
    c, numpy, spans = plain.config, plain.numpy, spans_of(n)
    x, y, h = noise(n, c.dim), noise(n, c.n_heads * c.head_dim), noise(n, c.hidden_dim)
    got: dict[str, list[Array]] = {"qkv": [], "h": [], "out": [], "down": [], "raw": []}
    wanted = [n - 1, 0, n // 2]
    for m in (fast, plain):
        m.cuda.qkv(m.put("x", x), m.device_layer, m.batch(n))
        got["qkv"].append(m.got("qkv", n))
        m.cuda.gate_up(m.cuda._buffers["x"], m.device_layer, m.batch(n))
        got["h"].append(m.got("h", n))
        m.cuda.logits(m.cuda._buffers["x"], m.cuda.weights, m.batch(n, wanted))
        got["raw"].append(m.got("raw", 3))
        m.cuda.out(m.put("x", x), m.put("y", y), m.device_layer, m.batch(n))
        got["out"].append(m.got("x", n))
        m.cuda.down(m.put("x", x), m.put("h", h), m.device_layer, m.batch(n))
        got["down"].append(m.got("x", n))
    assert near(got["qkv"][1], numpy.qkv(x, plain.layer, spans))
    assert near(got["h"][1], numpy.gate_up(x, plain.layer, spans), 8e-3)
    assert near(got["raw"][1], numpy._rms_norm(x[wanted], plain.weights.norm) @ plain.weights.head.T)
    for op, inputs in (("out", y), ("down", h)):
        expected = x.copy()
        getattr(numpy, op)(expected, rounded(inputs), plain.layer, spans)
        assert near(got[op][1], expected, 1e-6)
        assert together(got[op], 1e-6)
    assert together(got["qkv"], 3e-4)
    assert together(got["raw"], 3e-4)
    assert nearly_the_same(got["h"])


@pytest.mark.parametrize("n", [1, 31, 32, 33])
def test_norm(n: int) -> None:
    fast, plain = pair("grouped")
    x = noise(n, fast.config.dim)
    which = np.arange(n, dtype=np.int32)[::-1].copy()
    for order in (None, which):
        got = []
        for m in (fast, plain):
            chosen = None if order is None else m.cuda._cp.asarray(order)
            device_x, w, normed = m.put("x", x), m.device_layer.attn_norm, m.cuda._buffers["normed"]
            if m is plain:
                m.cuda._norm(device_x, w, chosen, n)
            else:  # the kernel itself: products of one tile of rows do without
                m.cuda._kernels.launch("rms_norm", ANY, (-(-n // 8),), w, device_x, chosen, normed, n)
            got.append(m.got("normed", n))
        expected = plain.numpy._rms_norm(x if order is None else x[order], plain.layer.attn_norm)
        assert near(got[1], expected, STEP)
        assert nearly_the_same(got, 1e-3)


@pytest.mark.parametrize("name", CONFIGS)
def test_attend(name: str) -> None:
    """A prompt, a token, some at once: queries that see one key, 31, 32, 33, and those of several pieces."""
    fast, plain = pair(name)
    for length in (30, 131):
        qkv = qkv_noise(plain, length + 5)
        expected = plain.numpy.attend(qkv.copy(), plain.layer, 0, Batch([span(1, 0, length + 5, True)]))
        got = []
        for m in (fast, plain):
            prompt = attend(m, [span(1, 0, length, True)], qkv[:length])
            token = attend(m, [span(1, length, 1, False)], qkv[length : length + 1])
            some = attend(m, [span(1, length + 1, 4, False)], qkv[length + 1 :])
            got.append(np.concatenate([prompt, token, some]))
        assert near(got[1], expected, 8e-3)
        assert nearly_the_same([y[:32] for y in got])
        assert together(got, 5e-3)
        for pool in ("_keys", "_values"):
            kept = [widened(getattr(m.cuda, pool)[0].get()) for m in (fast, plain)]
            assert nearly_the_same(kept, 1e-3)


@pytest.mark.parametrize("changes", SAMPLINGS, ids=str)
def test_pick(changes: dict[str, Any]) -> None:
    fast, plain = pair("grouped")
    raw = np.random.default_rng(7).normal(0, 3, (6, 1001)).astype(np.float32)
    raw[1, :900] = -np.inf
    raw[2] *= 20
    raw[5, 5:9] = raw[5].max() + 1  # equals, which NumPy lists in no order
    contexts = [
        Context(Sampling(**changes | {"seed": seed}), [3, 3, 500], [4, 17, 4][: seed % 4])
        for seed in range(6)
    ]
    got = pick(plain, raw, contexts)
    assert all(map(same, got, pick(fast, raw, contexts)))
    assert all(map(same, got[:5], map(_pick, raw, contexts)))


def test_pick_under_a_mask_and_from_no_numbers() -> None:
    _, plain = pair("grouped")
    raw = np.random.default_rng(6).normal(0, 3, 1001).astype(np.float32)
    mask = np.arange(1001) % 7 == 0
    for temperature in (0.0, 1.0):
        context = Context(Sampling(temperature=temperature), [], [], mask)
        assert pick(plain, raw[None], [context])[0] == _pick(raw, context)
    for worst, allowed in ((np.nan, None), (np.inf, None), (0.0, np.zeros(1001, bool))):
        raw[1000] = worst
        with pytest.raises(ArithmeticError, match="no finite numbers"):
            pick(plain, raw[None], [Context(Sampling(), [], [], allowed)])


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("name", ["many-heads", "large-head"])
def test_no_plain_kernel_races_or_leaves_its_arrays(name: str, order: int) -> None:
    run_every_kernel(both(name, order, True, PlainOps), 35)


# ---- All together ------------------------------------------------------------------------------------------


def test_every_op_is_plain() -> None:
    """NumpyOps has no op that is left to a fast kernel; these are launched to see whether kernels overlap."""
    ops = made_on(Emulator(), VARIED[0], PlainOps)
    by_steps(ops, [tile(tokens(40)), rows([3], 40), rows([4, 5], 41, n_wanted=2)])
    launched = {kernel.name for kernel in ops._cp.kernels}
    plain = {name for name in signatures(CODE.read_text()) if name.startswith("plain_")}
    assert launched == plain | {"rms_norm"}
    assert re.findall("^// ---- (.*?) -+$", CODE.read_text(), re.MULTILINE)[0] == "Plain"


def test_the_same_tokens_as_with_numpy() -> None:
    """tests/models/tiny, greedy: answers, and a long prompt, which comes from the pages the second time."""
    config, weights = tiny().config, tiny().weights
    long = [token for question in QUESTIONS for token in job(question).prompt]
    jobs = [job(question, 12) for question in QUESTIONS[:3]]
    jobs += [Job(long, 12, frozenset(), Sampling(temperature=0))] * 2
    answers = []
    for kind in (NumpyOps, CudaOps, PlainOps):
        ops = kind(config, weights, 256, 16, 4, *([] if kind is NumpyOps else [Emulator()]))
        with engine_of(ops) as engine:
            answers.append([alone(engine, j).ids for j in jobs])
            assert engine.counts()["cached_tokens"] == len(long) // PAGE * PAGE
    assert answers[0] == answers[1] == answers[2]
    assert answers[2][3] == answers[2][4]
    assert len({tuple(ids) for ids in answers[2]}) == 4


@pytest.mark.parametrize("name", VARIED)
def test_the_same_logprobs_whichever_way_a_prompt_is_read(name: str) -> None:
    """To the bit: whole, in chunks, row by row, from another's page; and near those of the fast kernels."""
    ops, token_ids = made_on(Emulator(), name, PlainOps), tokens(90)
    [whole] = by_steps(ops, [tile(token_ids)])
    ways = {
        "one by one": [rows(token_ids[i : i + 1], i, 1, n_wanted=i == 89) for i in range(90)],
        "in chunks": [tile(token_ids[:64], 0, 2, 0), tile(token_ids[64:], 64, 2)],
        "rows, then a tile": [rows(token_ids[:7], 0, 3, 0), tile(token_ids[7:], 7, 3)],
        "cached": [Span(4, [pages(0)[0], 12], token_ids[PAGE:], PAGE, 1, tile=True)],
    }
    for way, spans in ways.items():
        assert [choices(ops, [span]) for span in spans][-1] == [[whole]], way
    for slot in (1, 2, 3):
        assert [page(ops, number) for number in pages(slot)] == [page(ops, number) for number in pages(0)]
    assert apart([whole], by_steps(made(name), [tile(token_ids)])) < 0.05
