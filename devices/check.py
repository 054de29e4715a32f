"""A GPU that checks itself: each fast kernel beside its plain one and NumPy, before the first request comes.

    CudaOps --prove()--> the same, without what fails here: the fast kernels of an op, early launches, graphs

Wrong bits on a GPU look like a stupid model, which nobody would notice. So the first start on a GPU, a driver
and a CuPy takes some seconds for steps of random tokens through the first layers of the loaded model.
The tests of the kernels cannot take the place of this, because they do not run on that GPU. A prompt with a
known answer could not either: it needs known weights, and would not say which op is wrong.

Authority: model.NumpyOps; plain.cu, which shares no code with kernels.cu.

Rules of this file:
1. The check calls launch() and read(), as the engine does: it has no launch path of its own.
2. We compare what comes out of steps: logprobs and tokens, these to the bit. Only if they differ, all is
   made plain and one thing after another fast again, so what fails has a name. A fault in bits that later
   rounding to bfloat16 removes is not seen.
3. What fails is said in a line of the log, at the start and in /health, and something slower runs. If that
   fails too, prove() raises, and the caller takes the CPU (service/loading.py).
4. The verdict is kept in the cache until GPU, driver, CuPy, sizes of the model or code of devices/ change.

Not here: the kernels (kernels.cu, plain.cu), what an emulator can show without a GPU (tests/devices).
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np

from checkpoint.default_model import HubError
from checkpoint.weights import Mxfp4, unpacked
from devices.cuda import NO_EARLY, NO_GRAPHS, OPS, CudaOps, on_device, plainly
from devices.kernels import ANY_SHAPE, MAX_TOP, cache_file, options
from model import PAGE, NumpyOps, Span
from sampling import Choice, Context, Sampling

DRAWN = Sampling(seed=7, top_k=50, top_p=0.95, min_p=0.01, n_top_logprobs=MAX_TOP)
PENALISED = Sampling(seed=7, repetition_penalty=1.2, logit_bias={3: 2.0}, n_top_logprobs=MAX_TOP)
# fmt: off
STEPS = [
    # positions, wanted, sampling
    (0, 12,      1,      PENALISED),  # a chunk of a prompt
    (12, 13,     1,      PENALISED),  # decoding
    (13, 16,     3,      DRAWN),      # with two drafts
    (16, 139,    1,      PENALISED),  # of three sequences: more rows than a block of any product has
    (139, 140,   1,      DRAWN),      # attention by splits
    (140, 141,   1,      DRAWN),      # from here on the token that was chosen last
    (141, 142,   1,      DRAWN),
    (142, 143,   1,      DRAWN),
]
# fmt: on
LAST_GIVEN = 139  # the position after which the token that was chosen last follows
N_PAGES = 3  # of each sequence
N_GIVEN = 7  # choices before that, whose tokens are given
N_COMPARED = 5  # likeliest tokens of each
LIMIT = 0.5  # of the difference of a logprob from that of the plain kernels
NUMPY_LIMIT = 0.2  # of the median from NumPy: it rounds nothing, and so may choose another expert
MAX_OTHERS = 2  # tokens: a draw is another if it was near the next one's share
N_LAYERS = 4  # among which are windows, layers without rotation and experts, if the model has any
EVERYTHING = [NO_EARLY, NO_GRAPHS, *map(plainly, OPS)]  # ways to step back, in the order of their check


def run(ops: Any, slots: Sequence[int] = (0,), are_chained: bool = False) -> list[list[Choice]]:
    """Return the choices of the steps, for slots with the same tokens; chained: the last ones ahead.

    By default a sequence is alone, and each step is read before the next one.
    """
    length = min(STEPS[-1][1], ops.max_seq_len, ops.n_pages * PAGE)
    token_ids = np.random.default_rng(0).integers(0, ops.config.vocab_size, length).tolist()
    found: list[list[Choice]] = [[] for _ in slots]
    tickets = list[Any]()
    steps = [step for step in STEPS if step[1] <= length]
    for n, (start, end, n_wanted, sampling) in enumerate(steps, 1):
        spans = list[Span]()
        n_unread = max(0, start - LAST_GIVEN)
        for slot, choices in zip(slots, found, strict=True):
            tokens = token_ids[start:end]
            if start > LAST_GIVEN:
                tokens = None if are_chained else [choices[-1].token_id]
            pages = [slot * N_PAGES + i for i in range(-(-end // PAGE))]
            spans.append(Span(slot, pages, tokens, start, n_wanted))
        contexts = [Context(sampling, token_ids[:start], [], None, n_unread)] * (n_wanted * len(slots))
        tickets.append(ops.launch(spans, contexts))
        while tickets and (not are_chained or start < LAST_GIVEN or n == len(steps)):
            for choices, new in zip(found, ops.read(tickets.pop(0)), strict=True):
                choices += new
    return found


def gaps(found: list[Choice], expected: list[Choice]) -> list[float]:
    """Return how far the likeliest logprobs are from the expected ones; infinitely if they are no numbers."""
    distances = list[float]()
    for choice, other in zip(found[:N_GIVEN], expected, strict=False):
        logprobs = dict(choice.top) if choice.token_id >= 0 else {}
        distances += [abs(logprobs.get(i, np.inf) - logprob) for i, logprob in other.top[:N_COMPARED]]
    return distances


@contextmanager
def without(ops: CudaOps, *fast: str) -> Iterator[None]:
    kept, ops.degraded = ops.degraded, ops.degraded | dict.fromkeys(fast, "")
    ops._graphs.clear()  # they launch what was fast when they were captured
    try:
        yield
    finally:
        ops.degraded = kept
        ops._graphs.clear()


def by_plain_kernels(ops: CudaOps) -> list[Choice]:
    """Return the choices of the steps by plain kernels alone, each launched directly."""
    with without(ops, *EVERYTHING):
        [choices] = run(ops)
    return choices


def flaw(ops: CudaOps, plain: list[Choice]) -> tuple[str, float]:
    """Say what is wrong with the tokens of a chained batch, "" if nothing, and how far logprobs are off."""
    slots = range(min(3, ops.max_batch, ops.n_pages // N_PAGES) or 1)
    difference = np.inf
    try:
        with without(ops, NO_GRAPHS):
            alone = run(ops)
        batch = run(ops, slots, are_chained=True)
    except Exception as error:
        return f"it raises {error!r}", difference
    difference = max(gaps(alone[0], plain))
    n_others = sum(a.token_id != b.token_id for a, b in zip(alone[0][:N_GIVEN], plain, strict=False))
    if not difference <= LIMIT or n_others > MAX_OTHERS:
        return f"a logprob is {difference:.2g} off, {n_others} tokens of {N_GIVEN} are others", difference
    return "" if batch == alone * len(slots) else "tokens have other bits in a batch", difference


def download(array: Any) -> Any:
    if isinstance(array, tuple):  # Mxfp4
        return unpacked(Mxfp4(*(part.get() for part in array)))
    return None if array is None else unpacked(array.get())


def check(ops: CudaOps) -> float:
    """Step back from what is not what plain kernels are; return how far logprobs are from theirs.

    Raises RuntimeError if plain kernels are not what NumPy is.
    """
    weights, ops.weights = ops.weights, replace(ops.weights, layers=ops.weights.layers[:N_LAYERS])
    plain = by_plain_kernels(ops)
    numpy = NumpyOps(ops.config, on_device(ops.weights, download), ops.max_seq_len, 1, 1)
    difference = np.median(gaps(run(numpy)[0], plain))
    if not difference <= NUMPY_LIMIT:
        raise RuntimeError(f"logprobs by plain kernels are {difference:.2g} from NumPy's")
    why, largest = flaw(ops, plain)
    if why:  # all of it is made plain, then one thing after another is fast again
        fast = [how for how in EVERYTHING if how not in ops.degraded]
        while fast:
            how = fast.pop()
            with without(ops, *fast):
                why, _ = flaw(ops, plain)
            if why:
                ops.step_back(how, why)
        why, largest = flaw(ops, plain)
        if why:
            raise RuntimeError(why)
    ops.weights = weights
    ops._graphs.clear()
    return largest


def prove(ops: CudaOps, anew: bool = False) -> None:
    """Compile the kernels and check them, or recall the verdict; raises what the plain kernels raise."""
    cp = ops._cp
    name = cp.cuda.runtime.getDeviceProperties(0)["name"].decode()
    facts = name, cp.cuda.runtime.driverGetVersion(), cp.__version__, options(ops.config, ANY_SHAPE)
    try:
        ops._kernels.load()
    except Exception as error:
        for op in OPS:
            ops.step_back(plainly(op), error)
    verdict: dict[str, Any] = {}
    with suppress(OSError, ValueError, HubError):
        file = cache_file(*facts)
        if not anew:
            verdict = json.loads(file.read_text())
    for how, why in verdict.get("degraded", {}).items():
        ops.step_back(how, why)
    if not verdict:
        largest = check(ops)
        about = f"checked on {name}: logprobs within {largest:.1g} of plain kernels', same bits in a batch"
        verdict = {"about": about, "degraded": ops.degraded}
        with suppress(OSError, HubError):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(verdict))
    ops.about["kernels"] = verdict["about"]
