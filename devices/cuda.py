"""The ops of model.py on a GPU: paged KV cache, CUDA graphs, steps launched ahead.

    Spans --launch()--> the numbers of a step --copy--> a CUDA graph, or kernels --copy--> --read()--> Choices

Authority: model.NumpyOps, op by op; CuPy's reference (https://docs.cupy.dev).

Rules of this file:
1. Nothing is allocated once a CudaOps is made. What changes from step to step lies in device memory: a CUDA
   graph that was captured once serves for every step of its size.
2. Batch invariance: every row has the same bits whatever it is computed with (kernels.cu), so a step may be
   padded, cut in parts, and made by whichever kernels are fastest.
3. The host waits for the device in read() alone; and where a request comes whose mask, bias or counts the
   device does not have. Copies go from and to pinned memory.

The name: cuda.py would hide the package `cuda`, which CuPy imports; as devices.cuda it does not.

Not here: arithmetic (kernels.cu), launches and PDL (kernels.py), which rows come next (scheduler.py).
"""

import importlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from checkpoint.config import Config
from checkpoint.rope import rope_table
from checkpoint.weights import Layer, Matrix, Mxfp4, Weights, bfloat16, n_weight_bytes
from devices.kernels import (
    ANY_SHAPE,
    BIASED,
    CHOICE_WIDTH,
    GROUP_WIDTH,
    NORMED_ROWS,
    PENALISED,
    QUERIES,
    DeviceArray,
    Kernels,
    check_sizes,
    group_size,
    head_pad,
    mask_words,
    open_driver,
    part_width,
    qkv_dim,
    shape_for,
    split_keys,
)
from devices.steps import (
    DeviceStep,
    HostMemory,
    PlacedStep,
    SlotSamplings,
    StepLayout,
    StepMemory,
    StepsInFlight,
    bucket,
    buckets,
    is_prompt,
    n_bytes,
    n_rows,
    pick_fields,
    place_spans,
    row_fields,
    step_tiles,
)
from model import PAGE, Span, forward
from sampling import Choice, Context

log = logging.getLogger("gpu")

# Environment variables that switch a feature off, where a driver is in doubt; each changes no bit.
NO_PDL = "LLMREF_NO_PDL"  # kernels do not start before the one ahead of them has ended
NO_GRAPHS = "LLMREF_NO_GRAPHS"  # steps are launched kernel by kernel


class OutOfMemory(MemoryError):
    """One line: what the device has, what the server needs, and which options change that."""


# ---- weights -----------------------------------------------------------------------------------------------


def on_device(weights: Weights, upload: Callable[[Any], DeviceArray]) -> Weights:
    """The same weights as device arrays; a tied head stays the same array as the embedding."""
    layers = []
    for layer in weights.layers:
        arrays = {field.name: getattr(layer, field.name) for field in fields(layer)}
        uploaded = {name: upload(array) for name, array in arrays.items() if array is not None}
        layers.append(replace(layer, **uploaded))
    embed, norm = upload(weights.embed), upload(weights.norm)
    if weights.head is weights.embed:
        return Weights(embed, layers, norm, embed)
    return Weights(embed, layers, norm, upload(weights.head))


def upload(cp: Any, array: Any) -> Any:
    """An array of the host in bfloat16 on the device; MXFP4 as it is."""
    if isinstance(array, Mxfp4):
        return Mxfp4(copy(cp, array.blocks), copy(cp, array.scales))
    return copy(cp, bfloat16(array))


def copy(cp: Any, numbers: NDArray[Any]) -> DeviceArray:
    """Numbers of the host, on the device.

    The driver copies through pinned memory of its own, some megabytes. cupy.asarray() would allocate as many
    pinned bytes as the array has, and its pool would keep them.
    """
    on_device = cp.empty(numbers.shape, numbers.dtype)
    on_device.set(numbers)
    cp.cuda.get_current_stream().synchronize()  # it will be read on another stream
    return on_device


# ---- memory ------------------------------------------------------------------------------------------------

ANY_SIZE = 0  # of the memory for steps that are not decoding; that for decoding is by bucket of rows


class StepLimits(NamedTuple):
    """How much a step may have of what; a larger step is made in parts."""

    rows: int
    split_rows: int  # rows with split attention
    wanted: int  # rows whose logits are wanted

    @classmethod
    def of(cls, max_batch: int) -> "StepLimits":
        n = bucket(max(max_batch, 32))
        return cls(max(2 * CudaOps.chunk + max_batch, n), n, n)


def buffer_shapes(config: Config, max_seq_len: int, max_batch: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """All that is allocated beside weights, KV cache and the numbers of steps: dtype and shape by name."""
    c, limits = config, StepLimits.of(max_batch)
    n_experts = n_chosen = expert_dim = 0
    if c.experts:
        n_experts, n_chosen, expert_dim = c.experts.n, c.experts.n_chosen, c.experts.hidden_dim
    pairs = limits.rows * n_chosen  # a row and an expert that it has chosen
    max_splits = bucket(-(-max_seq_len // split_keys(c)))
    # fmt: off
    return {
        "x":           ("f4", (limits.rows, c.dim)),  # the residual stream
        "normed":      ("u2", (limits.rows, c.dim)),
        "qkv":         ("f4", (limits.rows, qkv_dim(c))),
        "y":           ("u2", (limits.rows, c.n_heads * c.head_dim)),
        "h":           ("u2", (limits.rows, c.hidden_dim)),
        "part":        ("f4", (limits.split_rows, c.n_heads, max_splits, part_width(c))),
        "n_done":      ("i4", (limits.split_rows * tiles_a_row(c), c.n_kv_heads)),
        "raw":         ("f4", (limits.wanted, c.vocab_size)),  # logits
        "best":        ("u8", (limits.wanted,)),  # the likeliest token of each row, as kernels.cu ranks them
        "logits":      ("f4", (limits.wanted, c.vocab_size)),  # after penalties
        "masks":       ("u4", (limits.wanted, mask_words(c))),  # a bit a token
        "choices":     ("i4", (limits.wanted, CHOICE_WIDTH)),
        "rope":        ("c8", (max_seq_len, c.head_dim // 2)),
        "page_tables": ("i4", (max_batch, -(-max_seq_len // PAGE))),
        "chosen":      ("i4", (max_batch,)),
        "counts":      ("u4", (max_batch, c.vocab_size)),
        "biases":      ("f4", (max_batch, c.vocab_size)),
        "history":     ("i4", (max_seq_len,)),  # the tokens to count
        "scores":      ("f4", (limits.rows, n_experts)),
        "experts":     ("i4", (pairs,)),  # of each pair
        "shares":      ("f4", (pairs,)),
        "places":      ("i4", (pairs,)),
        "pair_rows":   ("i4", (pairs,)),
        "groups":      ("i4", (n_experts, GROUP_WIDTH)),
        "expert_x":    ("u2", (pairs, c.dim)),
        "expert_h":    ("u2", (pairs, expert_dim)),
        "expert_y":    ("f4", (pairs, c.dim)),
    }
    # fmt: on


def tiles_a_row(config: Config) -> int:
    """Tiles of queries that a row by itself needs for each key head."""
    return -(-group_size(config) // QUERIES)


def needed_bytes(config: Config, max_seq_len: int, n_pages: int, max_batch: int) -> dict[str, int]:
    """Bytes on the device, by what they are for."""
    shapes = buffer_shapes(config, max_seq_len, max_batch)
    return {
        "weights": n_weight_bytes(config),
        "pages": n_pages * CudaOps.page_bytes(config),
        "buffers": sum(n_bytes(*shape) for shape in shapes.values()),
    }


def room(config: Config, max_seq_len: int, max_batch: int, cp: Any = None) -> int:
    """Bytes that are left for pages, a tenth of the device apart."""
    if cp is None:
        cp = importlib.import_module("cupy")
    free, total = cp.cuda.Device().mem_info
    return int(free - total // 10 - sum(needed_bytes(config, max_seq_len, 0, max_batch).values()))


def missing() -> str | None:
    """Why there is no GPU to compute on; None where there is one."""
    try:
        cupy = importlib.import_module("cupy")
        n_devices = cupy.cuda.runtime.getDeviceCount()
    except ImportError:
        return "CuPy is not installed: pip install -e '.[cuda]'"
    except Exception as error:  # cupy.cuda.runtime.CUDARuntimeError: no driver, or one that is too old
        return f"CuPy finds no device: {error}"
    if not n_devices:
        return "CuPy finds no device"
    capability = int(cupy.cuda.Device().compute_capability)
    if capability < 80:
        return f"compute capability {capability / 10}; 8.0 or above is supported"
    return None


# ---- the ops -----------------------------------------------------------------------------------------------


def expert_arrays(w: Matrix) -> tuple[DeviceArray | None, DeviceArray | None, DeviceArray | None]:
    """What a kernel takes of the experts' matrices: bfloat16, or blocks and scales."""
    if isinstance(w, Mxfp4):
        return None, *w
    return w, None, None


class UploadedStep(NamedTuple):
    """A step whose numbers are on their way to the device."""

    memory: StepMemory
    host: HostMemory
    batch: DeviceStep


class DecodingStep(NamedTuple):
    """A step of one row a sequence, which needs neither biases nor counts."""

    slots: list[int]
    starts: list[int]  # position of each row
    longest: int  # tokens of the longest sequence
    uploaded: UploadedStep

    def is_before(self, spans: Sequence[Span]) -> bool:
        """Are these the same sequences one token later? Then their numbers are these, and one more.

        A chained span follows the last step of its slot, which is this one, so its Sampling is the same.
        """
        if [span.token_ids for span in spans].count(None) < len(spans):
            return False
        starts = [start + 1 for start in self.starts]
        return [span.slot for span in spans] == self.slots and [span.start for span in spans] == starts


class CudaOps:
    """NumpyOps on a device."""

    chunk = 256  # tokens of a prompt that are computed together
    kv_dtype = "bfloat16"
    n_ahead = 4  # steps that may be launched before the first of them is read
    enough_blocks = 64  # of a product: an H100's 132 processors do fewer, of a larger shape, no faster

    def __init__(
        self, config: Config, weights: Weights, max_seq_len: int, n_pages: int, max_batch: int, cp: Any = None
    ) -> None:
        """`weights` may lie on the device already. `cp`: the module cupy, or what stands in its place."""
        check_sizes(config)
        if cp is None:
            cp = importlib.import_module("cupy")
        self._cp = cp
        self.config = config
        self.max_seq_len = max_seq_len
        self.n_pages = n_pages
        self.max_batch = max_batch
        self.about = f"CUDA, {n_weight_bytes(config) / 1e6:.0f} MB of weights in bfloat16"
        self._limits = StepLimits.of(max_batch)
        self._group_size = group_size(config)
        self._split_keys = split_keys(config)
        self._uses_graphs = not os.environ.get(NO_GRAPHS)
        self._graphs: dict[tuple[int, ...], Any] = {}  # by DeviceStep.sizes; None: it cannot be captured
        # What the device has of each slot: page table, Sampling, logit_bias, counted output and its length
        self._page_tables: list[list[int]] = [[] for _ in range(max_batch)]
        self._samplings = SlotSamplings(max_batch)
        self._decoding: DecodingStep | None = None  # the step launched last, where the next may be like it
        self._biased: list[Any] = [None] * max_batch
        self._counted: list[tuple[Any, int]] = [(None, 0)] * max_batch
        self._stream = cp.cuda.Stream(non_blocking=True)
        with self._stream:
            try:
                self._allocate(weights)
            except cp.cuda.memory.OutOfMemoryError:
                raise OutOfMemory(self._memory_report()) from None
            driver = None
            if not os.environ.get(NO_PDL):
                driver = open_driver(cp)
            self._kernels = Kernels(cp, config, driver)
            if driver and not self._can_overlap(self._kernels):
                self._kernels = Kernels(cp, config)
            log.info("loading the kernels: some seconds where they have not been compiled before")
            self._kernels.load()

    @staticmethod
    def pack(w: Any) -> Any:
        """Bring a matrix to the device as it is read: the host never holds more than one of them."""
        cp = importlib.import_module("cupy")
        try:
            return upload(cp, w)
        except cp.cuda.memory.OutOfMemoryError:
            n_total = cp.cuda.Device().mem_info[1]
            raise OutOfMemory(
                f"The GPU has {n_total / 1e9:.2f} GB, and the weights alone find no room. "
                "Take a smaller model, end what else uses the GPU, or take --device cpu."
            ) from None

    @staticmethod
    def page_bytes(config: Config) -> int:
        return 2 * 2 * config.n_layers * config.n_kv_heads * PAGE * head_pad(config)

    # --- memory ---------------------------------------------------------------------------------------------

    def _allocate(self, weights: Weights) -> None:
        cp, c = self._cp, self.config

        def uploaded(array: Any) -> Any:
            numbers = array.blocks if isinstance(array, Mxfp4) else array
            if type(numbers) is np.ndarray:
                return upload(cp, array)
            return array  # it lies on the device already

        self.weights = on_device(weights, uploaded)
        shapes = buffer_shapes(c, self.max_seq_len, self.max_batch)
        self._buffers = {name: cp.zeros(shape, np.dtype(dtype)) for name, (dtype, shape) in shapes.items()}
        self._buffers["rope"].set(rope_table(c.rope, c.head_dim, self.max_seq_len))
        # The KV cache. A page has (PAGE, head_pad) keys, as NumpyOps has them, but (head_pad, PAGE) values:
        # the product with them wants those of neighbouring tokens together (kernels.cu). What pads a head is
        # 0 and stays so.
        pool = self.n_pages, c.n_kv_heads, PAGE * head_pad(c)
        self._keys = [cp.zeros(pool, np.uint16) for _ in range(c.n_layers)]
        self._values = [cp.zeros(pool, np.uint16) for _ in range(c.n_layers)]
        layouts = {n: StepLayout(n, n, n) for n in buckets(self._limits.split_rows)}  # steps of decoding
        rows = self._limits.rows
        layouts[ANY_SIZE] = StepLayout(rows, self._limits.wanted, rows * tiles_a_row(c))
        self._memory = {}
        for n, layout in layouts.items():
            numbers = cp.zeros(layout.n_bytes, np.uint8)
            self._memory[n] = StepMemory(layout, numbers, layout.views(numbers), [])
        self._stream.synchronize()

    def _memory_report(self) -> str:
        n_total = self._cp.cuda.Device().mem_info[1]
        needed = needed_bytes(self.config, self.max_seq_len, self.n_pages, self.max_batch)
        parts = ", ".join(f"{name} {n / 1e9:.2f}" for name, n in needed.items())
        n_needed = sum(needed.values())
        if n_needed > n_total:
            reason = f"{(n_needed - n_total) / 1e9:.2f} GB are missing"
        else:
            reason = "others use part of it"
        return (
            f"The GPU has {n_total / 1e9:.2f} GB and {n_needed / 1e9:.2f} GB are wanted ({parts}): {reason}. "
            "Lower --kv-memory, --max-batch or --max-model-len."
        )

    def _can_overlap(self, kernels: Kernels) -> bool:
        """Do this driver and CuPy take a CUDA graph of two kernels of which one starts early (PDL)?"""
        x, normed = self._buffers["x"], self._buffers["normed"]
        try:
            kernels.launch("rms_norm", ANY_SHAPE, (1,), self.weights.norm, x, None, normed)
            kernels.overlap = True
            self._stream.begin_capture()
            try:
                for _ in range(2):
                    kernels.launch("rms_norm", ANY_SHAPE, (1,), self.weights.norm, x, None, normed)
            finally:
                graph = self._stream.end_capture()
            graph.launch(self._stream)
            self._stream.synchronize()
        except Exception as error:
            log.warning("kernels do not overlap: %s", error)
            return False
        finally:
            kernels.overlap = False
        return True

    # --- steps ----------------------------------------------------------------------------------------------

    def launch(self, spans: Sequence[Span], contexts: Sequence[Context]) -> StepsInFlight:
        """Begin a step. `contexts`: of each wanted row, in the order of the rows."""
        in_flight: StepsInFlight = []
        first = 0
        with self._stream:
            if self._decoding is not None and self._decoding.is_before(spans):
                return [self._launch(self._upload_next(self._decoding, spans))]
            for part in self._parts(spans):
                n_wanted = sum(span.n_wanted for span in part)
                step = place_spans(part, contexts[first : first + n_wanted])
                in_flight.append(self._launch(self._upload_step(step)))
                first += n_wanted
        return in_flight

    def read(self, in_flight: StepsInFlight) -> list[list[Choice]]:
        """The choices of each span that wants any, in the order of the spans."""
        choices: list[list[Choice]] = []
        for memory, host in in_flight:
            host.arrived.synchronize()
            choices += host.read_choices()
            memory.free.append(host)
        return choices

    def _parts(self, spans: Sequence[Span]) -> Iterator[list[Span]]:
        """Spans that fit into the buffers together; rows do not depend on each other."""
        limits = self._limits
        part = list[Span]()
        n_part_rows = 0
        n_part_wanted = 0
        for span in spans:
            n = n_rows(span)
            if n > limits.rows or span.n_wanted > limits.wanted:
                raise ValueError(f"{n} rows, {span.n_wanted} of them wanted: at most {limits}")
            if n_part_rows + n > limits.rows or n_part_wanted + span.n_wanted > limits.wanted:
                yield part
                part = []
                n_part_rows = 0
                n_part_wanted = 0
            part.append(span)
            n_part_rows += n
            n_part_wanted += span.n_wanted
        yield part

    def _launch(self, uploaded: UploadedStep) -> tuple[StepMemory, HostMemory]:
        memory, host, batch = uploaded
        if batch.comes_again:
            self._replay(batch)
        else:
            self._compute(batch)
        self._download_choices(host, sum(host.n_choices))
        return memory, host

    def _upload_next(self, before: DecodingStep, spans: Sequence[Span]) -> UploadedStep:
        """Copy the numbers of the step that comes after another one, to the device."""
        memory, _, batch = before.uploaded
        host = self._free_host_memory(memory)
        for span in spans:
            if len(span.pages) > len(self._page_tables[span.slot]):  # the same sequence's, so it only grows
                self._upload_page_table(span, host)
        host.advance(before.uploaded.host, len(spans))
        memory.numbers.set(host.numbers, self._stream)
        longest = before.longest + 1
        batch = batch._replace(n_splits=bucket(-(-longest // self._split_keys)))
        uploaded = UploadedStep(memory, host, batch)
        starts = [span.start for span in spans]
        self._decoding = DecodingStep(before.slots, starts, longest, uploaded)
        return uploaded

    def _upload_step(self, step: PlacedStep) -> UploadedStep:
        """Copy a step's numbers to the device.

        A step of decoding is padded to a size that comes again, for its CUDA graph.
        """
        n_step_rows = step.n_rows
        tiles = step_tiles(step, self._group_size, self._limits.split_rows)
        n_splits = -(-tiles.longest // self._split_keys)
        is_decode = not tiles.whole and tiles.n_split == tiles.n_split_spans
        size = bucket(n_step_rows) if is_decode else ANY_SIZE
        memory = self._memory[size]
        host = self._free_host_memory(memory)
        self._upload_slots(step, host)
        host.fill(
            row_fields(step) | pick_fields(step, self._samplings) | {"tiles": tiles.split + tiles.whole}
        )
        host.expect_choices(step)
        memory.numbers.set(host.numbers, self._stream)
        if is_decode:
            n = bucket(n_step_rows)
            batch = DeviceStep(
                memory.views,
                n_rows=n,
                n_wanted=n,
                n_split_tiles=n,
                n_whole_tiles=0,
                n_splits=bucket(n_splits),
                is_decode=True,
                comes_again=True,
            )
        else:
            batch = DeviceStep(
                memory.views,
                n_rows=n_step_rows,
                n_wanted=sum(host.n_choices),
                n_split_tiles=tiles.n_split,
                n_whole_tiles=tiles.n_whole,
                n_splits=n_splits,
                is_decode=False,
                comes_again=self._is_of_whole_chunks(step),
            )
        uploaded = UploadedStep(memory, host, batch)
        self._decoding = None
        slots = [span.slot for span in step.spans]
        is_one_row_each = n_step_rows == len(step.contexts) == len(slots)
        if is_decode and is_one_row_each and not any(self._samplings.flags[slot] for slot in slots):
            starts = [span.start for span in step.spans]
            self._decoding = DecodingStep(slots, starts, tiles.longest, uploaded)
        return uploaded

    def _is_of_whole_chunks(self, step: PlacedStep) -> bool:
        """Does it compute whole prefill chunks and nothing else, as most steps of a long prompt do?"""
        return is_prompt(step.spans[0]) and step.sizes == [self.chunk] * len(step.sizes)

    def _free_host_memory(self, memory: StepMemory) -> HostMemory:
        if memory.free:
            return memory.free.pop()
        return HostMemory(self._cp, memory.layout, self._buffers["page_tables"].shape)

    def _download_choices(self, host: HostMemory, n_wanted: int) -> None:
        """Copy the choices to the host, as soon as they are made."""
        if n_wanted:
            choices = self._buffers["choices"][:n_wanted]
            choices.get(self._stream, out=host.choices[:n_wanted], blocking=False)
        host.arrived.record(self._stream)

    def _upload_page_table(self, span: Span, host: HostMemory) -> None:
        """Page tables grow at any time, so they are copied from pinned memory: a copy from any other would
        wait for the steps in flight.
        """
        if self._page_tables[span.slot] != span.pages:
            page_table = list(span.pages)
            self._page_tables[span.slot] = page_table
            row = host.page_tables[span.slot, : len(page_table)]
            row[:] = page_table
            self._buffers["page_tables"][span.slot, : len(page_table)].set(row, self._stream)

    def _upload_slots(self, step: PlacedStep, host: HostMemory) -> None:
        """What slots keep from step to step, where the device does not have it yet."""
        first = 0
        for span in step.spans:
            slot = span.slot
            self._upload_page_table(span, host)
            if span.n_wanted:
                context = step.contexts[first]
                first += span.n_wanted
                if self._samplings.samplings[slot] is not context.sampling:
                    self._samplings.update(slot, context.sampling)
                if self._samplings.flags[slot]:
                    self._upload_context(slot, context, span.n_wanted)
        masks = [context.mask for context in step.contexts]
        if any(mask is not None for mask in masks):
            self._upload_masks(masks)

    def _upload_masks(self, masks: Sequence[NDArray[np.bool_] | None]) -> None:
        """The masks of the wanted rows, (vocab_size,) each, as MASK_WORDS words of 32 bits."""
        padding = 32 * mask_words(self.config) - self.config.vocab_size
        everything = np.ones(self.config.vocab_size, bool)
        allowed = np.array([everything if mask is None else mask for mask in masks])
        bits = np.packbits(np.pad(allowed, ((0, 0), (0, padding))), 1, "little")
        self._buffers["masks"][: len(masks)].set(bits.view(np.uint32), self._stream)

    def _upload_context(self, slot: int, context: Context, n_wanted: int) -> None:
        """Biases and counts of a slot, for the first of its wanted rows."""
        s = context.sampling
        flags = self._samplings.flags[slot]
        if flags & BIASED and self._biased[slot] is not s.logit_bias:
            biases = np.zeros(self.config.vocab_size, np.float32)
            biases[list(s.logit_bias)] = list(s.logit_bias.values())
            self._buffers["biases"][slot].set(biases, self._stream)
            self._biased[slot] = s.logit_bias
        if flags & PENALISED:
            output, n_output = self._counted[slot]
            is_counted = output is context.output and n_output == context.n_output
            if not context.n_unread and not is_counted:
                tokens = np.concatenate([context.prompt, context.output]).astype(np.int32)
                history = self._buffers["history"]
                history[: len(tokens)].set(tokens, self._stream)
                arguments = history, self._buffers["counts"], slot, len(context.prompt), len(tokens)
                self._kernels.launch("count", ANY_SHAPE, (1,), *arguments)
            if n_wanted == 1:  # `pick` counts what it chooses, if it is the only one
                self._counted[slot] = (context.output, context.n_output + 1)

    def _replay(self, batch: DeviceStep) -> None:
        """A step of sizes that come again: as a CUDA graph, once one of them has gone by."""
        graph = self._graphs.get(batch.sizes)
        if graph:
            graph.launch(self._stream)
            return
        self._compute(batch)
        if self._uses_graphs and batch.sizes not in self._graphs:
            # Everything is loaded now: a capture must not do that.
            self._graphs[batch.sizes] = self._captured(batch)

    def _captured(self, batch: DeviceStep) -> Any:
        """The CUDA graph of a step; None where the driver does not take it: then kernels are launched."""
        self._kernels.overlap = True
        try:
            self._stream.begin_capture()
            try:
                self._compute(batch)
            finally:
                graph = self._stream.end_capture()
        except Exception as error:
            log.warning("no graph of %d rows: %s", batch.n_rows, error)
            return None
        finally:
            self._kernels.overlap = False
        return graph

    def _compute(self, batch: DeviceStep) -> None:
        logits = forward(self, self.weights, batch)
        if batch.n_wanted:
            self.pick(logits, batch)

    # --- the ops --------------------------------------------------------------------------------------------

    def embed(self, batch: DeviceStep, weights: Weights) -> DeviceArray:
        x, chosen = self._buffers["x"], self._buffers["chosen"]
        tokens, slots = batch.views["tokens"], batch.views["slots"]
        self._kernels.launch("embed", ANY_SHAPE, (batch.n_rows,), weights.embed, tokens, slots, chosen, x)
        return x

    def qkv(self, x: DeviceArray, layer: Layer, batch: DeviceStep) -> DeviceArray:
        qkv = self._buffers["qkv"]
        normed = self._norm(x, layer.attn_norm, None, batch.n_rows)
        arguments = layer.wqkv, layer.bqkv, layer.attn_norm, x, normed, qkv
        self._product("qkv", len(layer.wqkv), batch.n_rows, *arguments)
        return qkv

    def attend(self, qkv: DeviceArray, layer: Layer, i: int, batch: DeviceStep) -> DeviceArray:
        """Norm and rotate q and k, write k and v to the KV cache, attend."""
        c, b, views = self.config, self._buffers, batch.views
        page_tables, y = b["page_tables"], b["y"]
        cache = b["rope"], self._keys[i], self._values[i]
        max_pages = page_tables.shape[1]
        rotary = int(c.rotary[i])
        of_layer = max_pages, c.windows[i] or 0, rotary
        if not batch.is_decode:
            rows = batch.n_rows, c.n_kv_heads
            new = qkv, layer.k_norm, *cache, views["positions"], views["slots"], page_tables
            self._kernels.launch("write_kv", ANY_SHAPE, rows, *new, max_pages, rotary)
        if batch.n_split_tiles:
            splits = batch.n_splits, c.n_kv_heads, batch.n_split_tiles
            inputs = qkv, layer.q_norm, layer.k_norm, layer.sinks, *cache, views["tiles"], page_tables
            between_blocks = b["part"], b["n_done"]
            writes = int(batch.is_decode)
            self._kernels.launch("attend", ANY_SHAPE, splits, *inputs, *between_blocks, y, *of_layer, writes)
        if batch.n_whole_tiles:
            whole = batch.n_whole_tiles, c.n_kv_heads
            tiles = views["tiles"][batch.n_split_tiles :]
            arrays = qkv, layer.q_norm, layer.sinks, *cache, tiles, page_tables, y
            self._kernels.launch("attend_prompt", ANY_SHAPE, whole, *arrays, *of_layer)
        return y

    def out(self, x: DeviceArray, y: DeviceArray, layer: Layer, batch: DeviceStep) -> None:
        self._product("out", self.config.dim, batch.n_rows, layer.wo, layer.bo, y, x)

    def gate_up(self, x: DeviceArray, layer: Layer, batch: DeviceStep) -> DeviceArray:
        h = self._buffers["h"]
        normed = self._norm(x, layer.mlp_norm, None, batch.n_rows)
        arguments = layer.w_gate_up, layer.b_gate_up, layer.mlp_norm, x, normed, h
        self._product("gate_up", self.config.hidden_dim, batch.n_rows, *arguments, n_matrices=2)
        return h

    def down(self, x: DeviceArray, h: DeviceArray, layer: Layer, batch: DeviceStep) -> None:
        self._product("down", self.config.dim, batch.n_rows, layer.w_down, layer.b_down, h, x)

    def experts(self, x: DeviceArray, layer: Layer, batch: DeviceStep) -> None:
        """The pairs of a row and an expert are grouped by expert: a group is a product."""
        experts = self.config.experts
        assert experts is not None
        b, n = self._buffers, batch.n_rows
        n_pairs = n * experts.n_chosen
        launch = self._kernels.launch
        launch("rms_norm", ANY_SHAPE, (n,), layer.mlp_norm, x, None, b["normed"])
        router = -(-n // ANY_SHAPE.rows), -(-experts.n // ANY_SHAPE.columns)
        launch("router", ANY_SHAPE, router, layer.router, layer.b_router, b["normed"], b["scores"], n)
        routes = b["experts"], b["shares"], b["places"], b["pair_rows"], b["groups"]
        launch("route", ANY_SHAPE, (1,), b["scores"], *routes, n)
        launch("rms_norm", ANY_SHAPE, (n_pairs,), layer.mlp_norm, x, b["pair_rows"], b["expert_x"])
        n_groups = min(experts.n, n_pairs)
        gate_up = *expert_arrays(layer.w_gate_up), layer.b_gate_up, b["expert_x"], b["groups"], b["expert_h"]
        launch("expert_gate_up", ANY_SHAPE, (-(-experts.hidden_dim // 8), n_groups), *gate_up)
        down = *expert_arrays(layer.w_down), layer.b_down, b["expert_h"], b["groups"], b["expert_y"]
        launch("expert_down", ANY_SHAPE, (-(-self.config.dim // 8), n_groups), *down)
        launch("add_experts", ANY_SHAPE, (n,), b["shares"], b["places"], b["expert_y"], x)

    def logits(self, x: DeviceArray, weights: Weights, batch: DeviceStep) -> DeviceArray:
        raw = self._buffers["raw"]
        if batch.n_wanted:
            rows = batch.views["wanted"]
            normed = self._norm(x, weights.norm, rows, batch.n_wanted)
            arguments = weights.head, weights.norm, x, normed, rows, raw, self._buffers["best"]
            self._product("logits", len(weights.head), batch.n_wanted, *arguments)
        return raw

    def pick(self, logits: DeviceArray, batch: DeviceStep) -> None:
        b, views = self._buffers, batch.views
        of_row = views["pick_rows"], views["settings"], views["seeds"], b["masks"]
        of_slot = views["tokens"], b["counts"], b["biases"], b["chosen"]
        arguments = logits, b["best"], b["logits"], *of_row, *of_slot, b["choices"]
        self._kernels.launch("pick", ANY_SHAPE, (batch.n_wanted,), *arguments)

    def _norm(self, x: DeviceArray, w: DeviceArray, rows: DeviceArray | None, n: int) -> DeviceArray:
        """What products of more than NORMED_ROWS begin with; the others norm x themselves."""
        normed = self._buffers["normed"]
        if n > NORMED_ROWS:
            self._kernels.launch("rms_norm", ANY_SHAPE, (n,), w, x, rows, normed)
        return normed

    def _product(self, name: str, n_columns: int, n: int, *arguments: Any, n_matrices: int = 1) -> None:
        """n rows of a product; n_columns: of each matrix."""
        shape = shape_for(n, n_columns * n_matrices, self.enough_blocks)
        grid = -(-n // shape.rows), -(-n_columns // shape.columns_of(name))
        self._kernels.launch(name, shape, grid, *arguments, n)
