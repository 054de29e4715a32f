"""A GPU that checks itself: each op's fast kernels beside its plain ones, before the first request comes.

    CudaOps --prove()--> the same, without what fails here: the fast kernels of an op, graphs

Wrong bits on a GPU look like a stupid model, which nobody would notice. So the first start on a GPU, a driver
and a CuPy takes some seconds for STEPS through the first layers of the loaded model. The tests of the kernels
cannot take the place of this, because they do not run on that GPU. A prompt with a known answer could not
either: it needs known weights, and would not say which op is wrong.

Authority: model.NumpyOps; plain.cu, which shares no code with kernels.cu.

Rules of this file:
1. The check calls launch() and read(), as the engine does: it has no launch path of its own.
2. An op is computed three times from the same numbers: by its fast kernels for the first sequence of a batch
   alone, by these for all, and by its plain ones, with whose numbers the step goes on. So one wrong op makes
   no other look wrong, and its fault is seen before a later rounding hides it.
3. Whole steps of a batch, by CUDA graphs, are held against those of a sequence alone, without graphs: one
   graph must serve for the steps after its own.
4. What fails is named in the log at every start, in the lines of the start and in /health, and something
   slower runs: CudaOps.step_back(). If that fails too, it raises, and the CPU serves (service/loading.py).
5. The verdict is kept in the cache until GPU, driver, CuPy, sizes of the model or the kernels change.

Not here: the kernels (kernels.cu, plain.cu), what an emulator can show without a GPU (tests/devices).
"""

import json
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from tqdm import tqdm

from checkpoint.weights import Mxfp4, unpacked
from devices.cuda import NO_GRAPHS, OPS, CudaOps, plainly
from devices.kernels import ANY_SHAPE, MAX_TOP, cache_file, options
from devices.step_memory import DeviceStep
from model import PAGE, NumpyOps, Span
from sampling import NO_TOKEN, Choice, Context, Sampling

# Rows of a sequence: prompt, decode, drafts, all of which are wanted; a prompt for all shapes of products,
# attention by splits, chained
STEPS = [12, 1, 4, 112, 1, 1, 1, 1]
TOKENS = [i % 90 for i in range(130)]  # the next ones are those that were chosen
FOR_NUMPY = 3  # steps: for a real model more rows would take it a minute
SLOTS = 4  # sequences of a batch, which have the same tokens; a power of two: no step is padded
N_LAYERS = 4  # among which are windows, layers without rotation and experts, if the model has any
PENALISED = Sampling(top_k=50, repetition_penalty=1.2, logit_bias={3: 2.0}, n_top_logprobs=MAX_TOP)
DRAWN = Sampling(top_k=50, top_p=0.95, n_top_logprobs=MAX_TOP)
NO_TOP = [(NO_TOKEN, np.nan)] * MAX_TOP  # of logits that are no numbers
LIMIT = 0.03  # see gaps(): four steps of bfloat16
ROWS = {"experts": 0.9}  # share of the rows that must be right: of a near tie another expert may be chosen
EXACT = "count", "pick"  # they add whole numbers
SIZES = "n_rows", "n_wanted", "n_split_tiles", "n_whole_tiles"  # of a step: each sequence has as many
NUMPY_LIMIT = 0.2  # of the median of logprobs: NumPy rounds nothing, and so may choose another expert


def run(ops: Any, n_slots: int, n_steps: int = len(STEPS)) -> list[list[Choice]]:
    """Return the choices of each step for SLOTS sequences, of which one alone stands for all.

    No step is read before the last is launched.
    """
    tickets = list[Any]()
    end = 0
    for n in tqdm(STEPS[:n_steps], "Checking kernels", leave=False, disable=None):
        n_wanted = 1 if n > 4 else n
        start, end = end, end + n
        tokens = TOKENS[start:end] or None
        context = Context(PENALISED if tokens else DRAWN, TOKENS[:start], TOKENS[start:end])
        spans = [Span(i, range(3 * i, 3 * i + 3), tokens, start, n_wanted) for i in range(n_slots)]
        tickets.append(ops.launch(spans, [context] * (n_wanted * n_slots)))
    return [ops.read(ticket) * (SLOTS // n_slots) for ticket in tickets]


def gaps(found: Any, expected: Any) -> Any:
    """Return the largest difference in each row, as a share of a number and its row's mean; NaN for a NaN."""
    found, expected = unpacked(found), unpacked(expected)
    size = np.abs(expected)
    return np.max(np.abs(found - expected) / (size + size.mean(-1, keepdims=True) + 1e-9), axis=-1)


def compare(ops: CudaOps, op: str, compute: Any, *arguments: Any) -> None:
    """Compute an op in three ways, and step back from its fast kernels if they are not right."""
    how, b = plainly(op), ops._buffers
    [batch] = [each for each in arguments if isinstance(each, DeviceStep)]
    first = batch._replace(**{name: getattr(batch, name) // SLOTS for name in SIZES})
    n = batch.n_wanted if op in ("logits", "pick") else batch.n_rows
    arrays = [b[OPS[op]][:n], b["best"], b["chosen"], b["counts"], *batch.views.values()]
    if op == "attend":
        arrays += ops._keys[:N_LAYERS] + ops._values[:N_LAYERS]
    before = [array.get() for array in arrays]

    def computed(step: DeviceStep) -> list[Any]:
        for array, numbers in zip(arrays, before, strict=True):
            array.set(numbers)
        compute(*(step if each is batch else each for each in arguments))
        return [array.get() for array in arrays]

    why = ""
    try:
        [alone, *_], found = computed(first), computed(batch)
    except Exception as error:
        why = repr(error)
    ops.degraded[how] = ""
    expected = computed(batch)
    del ops.degraded[how]
    if not why:
        of_rows, *others = map(gaps, found, expected)
        difference = float(np.max([np.quantile(of_rows, ROWS.get(op, 1)), *map(np.max, others)]))
        limit = LIMIT * (op not in EXACT)
        if not difference <= limit:  # it may be NaN
            why = f"it differs from them by {difference:.2g} of a number"
        elif limit and not np.array_equal(np.resize(alone[: n // SLOTS], alone.shape), found[0]):
            why = "a row has other bits in a batch"
        else:
            ops.differences[op] = max(difference, ops.differences.get(op, 0))
    if why:
        ops.step_back(how, why)
        delattr(ops, op)  # it needs no comparison any more


@dataclass
class OnHost:
    """Weights or a layer for NumPy, in float32: an array comes when it is asked for, so the host has one."""

    of: Any
    nbytes = 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.of, name)
        if name == "layers":
            return list(map(OnHost, found))
        if isinstance(found, tuple):
            return unpacked(Mxfp4(*(part.get() for part in found)))
        return None if found is None else unpacked(found.get())


def check(ops: CudaOps) -> None:
    """Step back from what fails, and note how far each op is from its plain kernels.

    Raises RuntimeError if plain kernels are not what NumPy is, or if stepping back does not help.
    """
    weights = replace(ops.weights, layers=ops.weights.layers[:N_LAYERS])
    small = partial(replace, ops, weights=weights, max_seq_len=3 * PAGE, n_pages=3 * SLOTS, max_batch=SLOTS)

    # 1) Each op of a batch's steps beside its plain kernels, and the first steps beside NumPy
    ops.degraded[NO_GRAPHS] = "not yet"
    beside = small()
    vars(beside).update({op: partial(compare, beside, op, getattr(beside, op)) for op in OPS})
    host: Any = OnHost(weights)
    numpy = NumpyOps(ops.config, host, 3 * PAGE, 3 * SLOTS, SLOTS)
    runs = run(beside, SLOTS)[:FOR_NUMPY], run(numpy, 1, FOR_NUMPY)
    tops: Any = [[choice.top or NO_TOP for choices in steps for choice in choices] for steps in runs]
    distance = np.median(np.abs(np.subtract(*tops)[..., 1]))
    if not distance <= NUMPY_LIMIT:
        raise RuntimeError(f"logprobs by plain kernels are {distance:.2g} from NumPy's")

    # 2) Whole steps of a batch by graphs; if they have other bits than a sequence alone, without graphs
    expected = run(small(), 1)
    del ops.degraded[NO_GRAPHS]
    while run(small(), SLOTS) != expected:
        ops.step_back(NO_GRAPHS, "with them a step has other bits")


def prove(ops: CudaOps, anew: bool) -> None:
    """Compile the kernels and check them, or recall the verdict. Raises what plain kernels raise."""
    with suppress(Exception):  # of which op, the check says
        ops.kernels.load()
    cp = ops.cp
    card = cp.cuda.runtime.getDeviceProperties(0)["name"].decode()
    versions = cp.cuda.runtime.driverGetVersion(), cp.__version__
    file = cache_file(card, *versions, options(ops.config, ANY_SHAPE))
    try:
        ops.differences, degraded = json.loads("" if anew else file.read_text())
        for how, why in degraded.items():
            ops.step_back(how, why)
    except (OSError, ValueError):
        check(ops)
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps([ops.differences, ops.degraded]))
    ops.about["kernels"] = (
        f"checked on {card}: {len(ops.differences)} ops, "
        f"largest difference {100 * max(ops.differences.values(), default=0):.1f} % of plain, "
        "same bits alone and in a batch"
    )
