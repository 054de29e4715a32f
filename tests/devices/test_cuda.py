"""cuda.py and kernels.cu as a whole, on the emulator: NumpyOps within rounding; the laws of test_model.py."""

import asyncio
import sys
from contextlib import closing
from dataclasses import replace
from types import ModuleType
from typing import Any, cast

import numpy as np
import pytest

from checkpoint.config import UnsupportedModel, parse_config
from devices import cuda, kernels
from devices.cuda import CudaOps
from engine import Engine
from helpers import device_models, emulator
from helpers.device_models import BITS, VARIED, apart, by_steps, choices, model_of, ops_of, rows, tokens
from helpers.device_ops import TABLES, PlainOps, sweep
from helpers.emulator import Emulator
from helpers.engines import alone, play, steps_of, tiny
from model import PAGE, NumpyOps
from parity import CASES, config_json
from sampling import Context, Sampling
from scheduler import Sequence

pytestmark = pytest.mark.skipif(emulator.MISSING is not None, reason=str(emulator.MISSING))
FEW = [VARIED[0], VARIED[2]]  # dense, and a mixture
SIZES = device_models.MAX_SEQ_LEN, device_models.N_PAGES, device_models.MAX_BATCH


@pytest.mark.parametrize("name", sweep(CASES, FEW))
def test_logprobs_are_those_of_numpy(name: str) -> None:
    """As near as bfloat16 between the kernels allows; NumPy with another config.json is farther away."""
    model, token_ids, case = model_of(name), tokens(40), CASES[name]
    other = parse_config(config_json(case._replace(changes=case.changes | case.otherwise)), {})
    n_wanted = 32 if model.config.experts else 1
    first = rows(token_ids[:33], n_wanted=n_wanted)
    spans = [first, rows(token_ids[33:34], 33), rows(token_ids[34:], 34, n_wanted=3)]
    specs = [NumpyOps(c, model.weights, *SIZES) for c in (model.config, other)]
    right, wrong = (by_steps(spec, spans, device_models.BITS_OF_ALL) for spec in specs)
    answers = by_steps(ops_of(name), spans), wrong
    by_row = np.array([[apart([a], [b]) for a, b in zip(some, right, strict=True)] for some in answers])
    if model.config.experts:  # rounding may turn a near tie of the router, and that row says something else
        distance, otherwise = np.median(by_row, 1)
    else:
        distance, otherwise = np.sqrt(np.mean(by_row**2, 1))
    assert distance < 0.2  # of logprobs that spread over 10 to 20
    assert distance < otherwise / 5


WAYS = [(CudaOps, VARIED[0], 1), *((ops, name, 64) for name in VARIED for ops in (CudaOps, PlainOps))]


@pytest.mark.parametrize(("kind", "name", "enough"), sweep(WAYS, [WAYS[2], WAYS[5]]))
def test_the_same_logprobs_whichever_way_a_prompt_is_read(kind: Any, name: str, enough: int) -> None:
    """The law of a prompt, to the bit: prefill = decode, chunked = whole, cached = cold, in pages as well."""
    ops = device_models.ops_on(Emulator(), name, kind)
    ops.enough_blocks = enough
    token_ids = tokens(70)
    [whole] = by_steps(ops, [rows(token_ids)])
    ways = [
        [rows(token_ids[i : i + 1], i, 1, n_wanted=i == 69) for i in range(70)],
        [rows(token_ids[:64], 0, 2, 0), rows(token_ids[64:], 64, 2)],
        [rows(token_ids[i : i + 33], i, 3, n_wanted=i == 66) for i in (0, 33, 66)],
        [rows(token_ids[:7], 0, 4, 0), rows(token_ids[7:], 7, 4)],  # rows, then a tile
    ]
    for slot, spans in enumerate(ways, 1):
        assert by_steps(ops, spans)[-1] == whole
        assert device_models.kept(ops, slot) == device_models.kept(ops, 0)
    cached = rows(token_ids[PAGE:], PAGE, 5)._replace(pages=[device_models.pages(0)[0], 12])
    assert by_steps(ops, [cached]) == [whole]


def test_graphs_change_nothing_and_are_few() -> None:
    """A step of decoding is a graph from the second of its size on."""
    ops, plain = ops_of(VARIED[0]), ops_of(VARIED[0])
    plain.step_back(cuda.NO_GRAPHS, "for a test")
    for n in (1, 2, 3, 5):
        decode = [rows([7 + slot], 0, slot) for slot in range(n)]
        for _ in range(3):
            assert choices(ops, decode) == choices(plain, decode)
    assert sorted(sizes[0] for sizes in ops._graphs) == [1, 2, 4, 8]
    # of three steps of a size one kernel by kernel, and one to be captured
    assert 3 * ops.cp.n_launches == 2 * plain.cp.n_launches


DRAWN = Sampling(seed=3, n_top_logprobs=3)
PENALISED = Sampling(0, repetition_penalty=1.5, frequency_penalty=0.5, logit_bias={5: 3.0})


@pytest.mark.parametrize("sampling", [DRAWN, PENALISED])
def test_a_step_after_its_like_is_the_same_numbers_and_one_more(sampling: Sampling) -> None:
    """As if each were made anew: over a page's end, a split's, and beside others that leave and come."""
    runs = []
    for anew in (False, True):
        ops = ops_of(VARIED[0])
        got = []
        for n_slots, first in ((3, 60), (2, 70), (3, 0)):
            outputs = [[5] * (1 + slot) for slot in range(n_slots)]
            tickets = []
            for n in range(9):
                spans = []
                for slot in range(n_slots):
                    span = rows(None if n else [7 + slot], first + slot + n, slot)
                    spans.append(span._replace(pages=span.pages[: span.start // PAGE + 1]))
                if anew:
                    ops._decoding = None
                contexts = [Context(sampling, [1, 2], output, n_unread=n) for output in outputs]
                tickets.append(ops.launch(spans, contexts))
            got += [ops.read(ticket) for ticket in tickets]
        runs.append(got)
        assert (ops._decoding is not None) == (sampling is DRAWN)  # biases and counts are looked at each time
    assert runs[0] == runs[1]


def test_splits_for_which_there_is_no_place_are_computed_by_one_block() -> None:
    """`part` is not as large as all sequences of a batch at their longest would need."""
    ops, prompt = ops_of(VARIED[0]), tokens(127)
    for slot in range(3):
        by_steps(ops, [rows(prompt, 0, slot, 0)])
    spans = [rows([7], 127, 0), rows([8], 5, 1), rows([9, 10], 100, 2, 2)]
    expected = choices(ops, spans)
    for n_parts in (3, 1, 0):
        ops._buffers["part"] = ops._buffers["part"][:n_parts]
        assert choices(ops, spans) == expected


def test_nothing_is_allocated_once_it_is_made() -> None:
    ops = ops_of(VARIED[0])
    free = ops.cp.free
    for _ in range(3):
        by_steps(ops, [rows(tokens(40)), rows([3], 40), rows([4, 5], 41, n_wanted=2)])
    assert ops.cp.free == free
    assert all(len(memory.free) <= 1 for memory in ops._memory.values())


def test_the_engine_gives_the_same_bits_whatever_happens_around() -> None:
    """Drafts, company, preemption, a known beginning: 18 tokens, with the bits of 20 logits each.

    Without drafts steps are launched ahead, and the emulator reads late: what a step has in the host's memory
    must not be used again before.
    """
    model, packed = device_models.both_of(VARIED[2])
    drawn, penalised = replace(BITS, temperature=1, seed=3), replace(PENALISED, n_top_logprobs=20)
    asked = (70, BITS), (3, drawn), (66, penalised)
    jobs = [Sequence(tokens(n, n), 6, frozenset(), sampling) for n, sampling in asked]

    async def together(engine: Any) -> list[Any]:
        answers = await asyncio.gather(*[steps_of(engine, job) for job in jobs])
        return [[token for step in steps for token in step.tokens] for steps in answers]

    runs = []
    for n_pages, speculate, is_alone in ((24, 0, True), (4, 3, False)):
        ops = CudaOps(model.config, packed, SIZES[0], n_pages, SIZES[2], cp=Emulator())
        with closing(Engine(ops, speculate)) as engine:
            runs.append([alone(engine, job).tokens for job in jobs] if is_alone else play(together(engine)))
        assert engine.counts()["free_pages"] == n_pages
    assert runs[0] == runs[1]


def test_sizes_that_no_kernel_takes() -> None:
    says = "dim is 44; supported on a GPU: multiples of 8, up to 10000. --device cpu takes it"
    with pytest.raises(UnsupportedModel, match=says):
        kernels.check_sizes(replace(tiny().config, dim=44))
    with pytest.raises(UnsupportedModel, match=r"head_dim is 264; .* multiples of 2, up to 256"):
        kernels.check_sizes(replace(tiny().config, head_dim=264))


@pytest.mark.skipif(cuda.missing() is None, reason="there is a GPU")
def test_a_gpu_that_is_missing_is_named() -> None:
    from service import loading  # here: tests/gpu uses this file where not all of it is installed

    with pytest.raises(ValueError, match="--device cuda: CuPy"):
        loading.ops_of("cuda")
    assert loading.ops_of("auto") == loading.ops_of("cpu")


def test_room_is_what_weights_and_buffers_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    model, cp = model_of(VARIED[0]), Emulator(memory=10**8)
    monkeypatch.setitem(sys.modules, "cupy", cast("ModuleType", cp))
    max_seq_len, _, max_batch = SIZES
    n_pages = cuda.room(model.config, max_seq_len, max_batch) // CudaOps.page_bytes(model.config)
    CudaOps(model.config, model.weights, max_seq_len, n_pages, max_batch, cp)
    assert 0 <= cp.free < cp.total // 8
    monkeypatch.setitem(sys.modules, "cupy", cast("ModuleType", Emulator(memory=10**4)))
    with pytest.raises(MemoryError, match=r"has 0\.00 GB left; .* lower --max-batch or"):
        cuda.room(model.config, max_seq_len, max_batch)


def test_a_matrix_goes_to_the_device_in_bfloat16_as_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", cast("ModuleType", Emulator()))
    for array in (np.full((1, 2), 0x3F80, np.uint16), np.full((1, 2), 1.0, np.float32)):
        on_device = CudaOps.pack(array)
        assert type(on_device) is emulator.Array
        assert on_device.get().tolist() == [[0x3F80, 0x3F80]]


@pytest.mark.parametrize(("n_rows", "n_columns", "shape"), TABLES["shapes"])
def test_the_shape_of_a_product_leaves_no_processor_idle(n_rows: int, n_columns: int, shape: str) -> None:
    assert kernels.shape_for(n_rows, n_columns, CudaOps.enough_blocks) == getattr(kernels, shape)


def test_all_shapes_are_loaded_before_the_first_step() -> None:
    """A shape that no step had needed was compiled when the first long prompt came, and it waited."""
    loaded = ops_of(VARIED[0]).kernels
    loaded.load()
    cp = loaded._modules[kernels.ANY_SHAPE].emulator
    asked_for = {id(kernel.module) for kernel in cp.kernels}
    assert asked_for >= {id(loaded._modules[shape]) for shape in kernels.SHAPES}
