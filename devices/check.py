"""A GPU that checks itself: each op's fast kernels beside its plain ones, before the first request comes.

    CudaOps --prove()--> the same, without what fails here: the fast kernels of an op, graphs

Wrong bits on a GPU look like a stupid model, which nobody would notice. So the first start on a GPU, a driver
and a CuPy takes some seconds for STEPS through the first layers of the loaded model. The tests of the kernels
cannot take the place of this, because they do not run on that GPU. A prompt with a known answer could not
either: it needs known weights, and would not say which op is wrong.

Authority: model.NumpyOps; plain.cu, which shares no code with kernels.cu.

Rules of this file:
1. The check calls launch() and read(), as the engine does: it has no launch path of its own.
2. Fast kernels and plain ones get the same numbers, and a step goes on with those that the plain ones make:
   one wrong op does not make the next ones look wrong. A sequence alone needs no such check, for it has the
   bits that it has in a batch. Whether a batch and a CUDA graph keep the bits is seen
   in the tokens and logprobs of whole steps: a fault that later rounding to bfloat16 removes is not seen.
3. What fails is said in a line of the log, at the start and in /health, and something slower runs. If that
   fails too, prove() raises, and the caller takes the CPU (service/loading.py).
4. The verdict is kept in the cache until GPU, driver, CuPy, sizes of the model or the kernels change.

Not here: the kernels (kernels.cu, plain.cu), what an emulator can show without a GPU (tests/devices).
"""

import json
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from tqdm import tqdm

from checkpoint.weights import Mxfp4, unpacked
from devices.cuda import NO_GRAPHS, OPS, CudaOps, on_device, plainly
from devices.kernels import ANY_SHAPE, MAX_TOP, cache_file, options
from model import PAGE, NumpyOps, Span
from sampling import Choice, Context, Sampling

# fmt: off
#         prompt, decode, drafts, of a batch: all shapes of products; attention by splits; chained
STEPS = [(12, 1), (1, 1), (4, 4), (112, 1), (1, 1), (1, 1), (1, 1), (1, 1)]  # rows of a sequence; wanted ones
# fmt: on
TOKENS = [i % 90 for i in range(130)]  # the next ones are those that were chosen
FOR_NUMPY = 3  # steps: for a real model more rows would take it a minute
SLOTS = 3  # sequences of a batch, which have the same tokens
N_LAYERS = 4  # among which are windows, layers without rotation and experts, if the model has any
PENALISED = Sampling(top_k=50, repetition_penalty=1.2, logit_bias={3: 2.0}, n_top_logprobs=MAX_TOP)
DRAWN = Sampling(top_k=50, top_p=0.95, n_top_logprobs=MAX_TOP)
LIMIT = 0.03  # see gap(): four steps of bfloat16
OTHER_BITS = "tokens have other bits in a batch or a CUDA graph"
NUMPY_LIMIT = 0.2  # of the median of logprobs: NumPy rounds nothing, and so may choose another expert


def run(ops: Any, n_slots: int, n_steps: int = len(STEPS)) -> list[list[list[Choice]]]:
    """Return the choices of each slot in each step; no step is read before the last is launched."""
    tickets = list[Any]()
    end = 0
    for n, n_wanted in tqdm(STEPS[:n_steps], "Checking kernels", leave=False, disable=None):
        start, end = end, end + n
        tokens = TOKENS[start:end] or None
        context = Context(PENALISED if tokens else DRAWN, TOKENS[:end], [])
        spans = [Span(i, range(3 * i, 3 * i + 3), tokens, start, n_wanted) for i in range(n_slots)]
        tickets.append(ops.launch(spans, [context] * (n_wanted * n_slots)))
    return list(map(ops.read, tickets))


def gap(found: Any, expected: Any) -> float:
    """Return the largest difference of a number, as a share of it and of its row's mean."""
    found, expected = unpacked(found), unpacked(expected)
    size = np.abs(expected)
    return float(np.max(np.abs(found - expected) / (size + size.mean(-1, keepdims=True) + 1e-9)))


def compare(ops: CudaOps, differences: dict[str, float], op: str, compute: Any, *arguments: Any) -> None:
    """Compute an op by its fast kernels, and again by its plain ones, with whose numbers the step goes on."""
    how, b = plainly(op), ops._buffers
    if how in ops.degraded:
        compute(*arguments)
        return
    arrays: list[Any] = [b[OPS[op]], b["x"], b["best"], b["counts"]]
    arrays += ops._keys[:N_LAYERS] + ops._values[:N_LAYERS]
    arrays += [memory.numbers for memory in ops._memory.values()]
    before = [array.get() for array in arrays]
    why = ""
    try:
        compute(*arguments)
        found = [array.get() for array in arrays]
    except Exception as error:
        found, why = [], repr(error)
    for array, values in zip(arrays, before, strict=True):
        array.set(values)
    ops.degraded[how] = ""
    compute(*arguments)
    del ops.degraded[how]
    expected = [array.get() for array in arrays]
    difference = max(map(gap, found, expected), default=np.inf)
    if difference <= LIMIT * (op != "pick"):  # which is exact: it adds whole numbers
        differences[op] = max(difference, differences.get(op, 0))
    else:
        ops.step_back(how, why or f"{difference:.2g} of a number is other than by plain kernels")


def download(array: Any) -> Any:
    if isinstance(array, tuple):
        return unpacked(Mxfp4(*(part.get() for part in array)))
    return None if array is None else unpacked(array.get())


def check(ops: CudaOps) -> dict[str, float]:
    """Step back from what is not what plain kernels are; return how far each op is from these.

    Raises RuntimeError if plain kernels are not what NumPy is, or if stepping back does not help.
    """
    weights = replace(ops.weights, layers=ops.weights.layers[:N_LAYERS])
    sizes = ops.config, weights, 3 * PAGE, 3 * SLOTS, SLOTS
    differences = dict[str, float]()

    # 1) Each op of a batch's steps by its plain kernels, and the first steps by NumPy
    beside = CudaOps(*sizes, ops._cp)
    beside._kernels, beside.degraded = ops._kernels, ops.degraded
    compared = {op: partial(compare, beside, differences, op, getattr(beside, op)) for op in OPS}
    vars(beside).update(compared, _run_step=beside._compute)  # which launches no graph
    numpy = NumpyOps(ops.config, on_device(weights, download), *sizes[2:])
    tops = list[Any]()
    for steps in (run(beside, SLOTS)[:FOR_NUMPY], run(numpy, 1, FOR_NUMPY)):
        tops.append([choice.top for choices, *_ in steps for choice in choices])
    distance = np.median(np.abs(np.subtract(*tops)[..., 1]))
    if not distance <= NUMPY_LIMIT:
        raise RuntimeError(f"logprobs by plain kernels are {distance:.2g} from NumPy's")

    # 2) Whole steps of a batch, by graphs; if they have other bits than a sequence alone: without what?
    for how in ("", NO_GRAPHS, *map(plainly, OPS)):
        whole = CudaOps(*sizes, ops._cp)
        whole._kernels, whole.degraded = ops._kernels, ops.degraded | {how: OTHER_BITS}
        batch = run(whole, SLOTS)
        vars(whole).update(_run_step=whole._compute)
        if batch == [spans * SLOTS for spans in run(whole, 1)]:
            break
    else:
        raise RuntimeError(OTHER_BITS)
    ops.degraded |= whole.degraded
    ops.degraded.pop("", None)
    return differences


def prove(ops: CudaOps, anew: bool = False) -> dict[str, float]:
    """Compile the kernels and check them, or recall the verdict; return each op's distance from plain ones.

    Raises what plain kernels raise.
    """
    with suppress(Exception):  # of which op, the check says
        ops._kernels.load()
    cp = ops._cp
    card = cp.cuda.runtime.getDeviceProperties(0)["name"].decode()
    facts = card, cp.cuda.runtime.driverGetVersion(), cp.__version__, options(ops.config, ANY_SHAPE)
    try:
        differences, degraded = json.loads("" if anew else cache_file(*facts).read_text())
    except (OSError, ValueError):
        differences, degraded = check(ops), ops.degraded
        with suppress(OSError, ValueError):
            file = cache_file(*facts)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps([differences, degraded]))
    ops.degraded |= degraded
    ops.about["kernels"] = (
        f"checked on {card}: {len(differences)} ops, "
        f"largest difference {max(differences.values(), default=0.0):.1%} of plain, "
        "same bits alone and in a batch"
    )
    return differences  # type: ignore[no-any-return]
