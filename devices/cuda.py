"""The ops of model.py on a GPU: paged KV cache, CUDA graphs, steps launched ahead.

    Spans --launch()--> the numbers of a step --copy--> a CUDA graph, or kernels --copy--> --read()--> Choices

Authority: model.NumpyOps, op by op; CuPy's reference (https://docs.cupy.dev).

Rules of this file:
1. Nothing is allocated once a CudaOps is made. Values that change from step to step lie in device memory: a
   CUDA graph that was captured once serves for every step of its size.
2. Batch invariance: a row has the same bits in any batch (kernels.cu), so a step may be
   padded, and made by whichever kernels are fastest.
3. The host waits for the device in read() alone, and when a request comes whose mask, bias or counts the
   device does not have. Copies go from and to pinned memory.
4. An argument of a kernel is the array of its name: a buffer, a field of the step, of the layer or of the
   weights. Only arguments of other names are given one by one.

The name: cuda.py would hide the package `cuda`, which CuPy imports; as devices.cuda it does not.

Not here: arithmetic (kernels.cu), launches (kernels.py), which rows come next (scheduler.py).
"""

import importlib
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial, partialmethod
from typing import Any

import numpy as np

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
    PLAIN,
    QUERIES,
    DeviceArray,
    Kernels,
    Named,
    Shape,
    model_constants,
    shape_for,
)
from devices.step_memory import (
    Contexts,
    DeviceStep,
    HostMemory,
    Spans,
    StepMemory,
    bucket,
    flags_of,
    follow,
    is_prompt,
    read_choices,
    step_fields,
    step_layout,
    step_tiles,
    views,
)
from model import PAGE, Span, forward
from sampling import Choice, Context

log = logging.getLogger("gpu")

# ---- weights -----------------------------------------------------------------------------------------------


def on_device(weights: Weights, upload: Callable[[Any], Any]) -> Weights:
    """The same weights, each array uploaded."""
    layers = [
        Layer(**{name: upload(array) for name, array in vars(layer).items()}) for layer in weights.layers
    ]
    return Weights(upload(weights.embed), layers, upload(weights.norm), upload(weights.head))


def upload(cp: Any, array: Any) -> Any:
    """An array of the host on the device, floats in bfloat16; None, and what lies there already, as it is.

    The driver copies through pinned memory of its own, some megabytes. cupy.asarray() would allocate as many
    pinned bytes as the array has, and its pool would keep them.
    """
    if isinstance(array, Mxfp4):
        return Mxfp4(*(upload(cp, part) for part in array))
    if isinstance(array, list) or getattr(array, "dtype", None) == np.float32:
        array = bfloat16(array)
    if type(array) is not np.ndarray:
        return array
    on_device = cp.empty(array.shape, array.dtype)
    on_device.set(array)
    cp.cuda.get_current_stream().synchronize()  # it will be read on another stream
    return on_device


# ---- memory ------------------------------------------------------------------------------------------------

ANY_SIZE = 0  # key of the memory for steps with prompts; decoding has one for each bucket of rows
MAX_PARTS = 2**14  # places of `part`: 2 M tokens that the rows of a step attend to by splits


def buffer_shapes(config: Config, max_seq_len: int, max_batch: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """All that is allocated beside weights, KV cache and the numbers of steps: dtype and shape by name."""
    c, of = config, model_constants(config)
    wanted = bucket(max(2 * max_batch, 32))  # rows that a token may be chosen from: a sequence's, and drafts
    n = 2 * CudaOps.chunk + wanted  # rows of a step, at most: scheduler.MAX_CHUNKS, and what decodes
    n_experts, n_chosen, expert_dim = (of.get(name, 0) for name in ("N_EXPERTS", "N_CHOSEN", "EXPERT_DIM"))
    pairs = n * n_chosen  # a row and an expert that it has chosen
    tiles = -(-of["GROUP"] // QUERIES)  # that a row by itself needs for each key head
    parts = min(MAX_PARTS, wanted * bucket(-(-max_seq_len // of["SPLIT_KEYS"])))
    # fmt: off
    return {
        "x":           ("f4", (n, c.dim)),  # the residual stream
        "normed":      ("u2", (n, c.dim)),  # x normed, for more than NORMED_ROWS rows
        "qkv":         ("f4", (n, of["QKV_DIM"])),  # n_heads queries, n_kv_heads keys, n_kv_heads values
        "y":           ("u2", (n, c.n_heads * c.head_dim)),  # result of attention
        "h":           ("u2", (n, c.hidden_dim)),  # the hidden layer of the MLP
        "part":        ("f4", (parts, c.n_heads, of["PART_WIDTH"])),  # results of the splits of attention
        "n_done":      ("i4", (wanted * tiles, c.n_kv_heads)),  # splits in `part`; 0 after `attend`
        "raw":         ("f4", (wanted, c.vocab_size)),  # logits
        "best":        ("u8", (wanted,)),  # rank_of() the likeliest token (kernels.cu); 0 after `pick`
        "logits":      ("f4", (wanted, c.vocab_size)),  # after penalties, bias and mask, if there are any
        "masks":       ("u4", (wanted, of["MASK_WORDS"])),  # a bit a token, 1: structured output allows it
        # token, -1: the logits are not finite; its logprob; the MAX_TOP likeliest; their logprobs (float)
        "choices":     ("i4", (wanted, CHOICE_WIDTH)),
        "rope":        ("c8", (max_seq_len, c.head_dim // 2)),  # cos, sin of a pair of neighbours
        "page_tables": ("i4", (max_batch, -(-max_seq_len // PAGE))),  # i: the page of position PAGE * i
        "chosen":      ("i4", (max_batch,)),  # the token that the slot has chosen last
        "counts":      ("u4", (max_batch, c.vocab_size)),  # how often a token has come, see `count`
        "biases":      ("f4", (max_batch, c.vocab_size)),  # logit_bias
        "history":     ("i4", (max_seq_len,)),  # the tokens to count
        "scores":      ("f4", (n, n_experts)),  # of the router
        "experts":     ("i4", (pairs,)),  # of each pair
        "shares":      ("f4", (pairs,)),  # softmax of its score, over those of the row or over all experts
        "places":      ("i4", (pairs,)),  # place of the pair among the groups
        "pair_rows":   ("i4", (pairs,)),  # row of the pair that lies there
        "groups":      ("i4", (n_experts, GROUP_WIDTH)),  # expert; its first place; pairs, 0: no group
        "expert_x":    ("u2", (pairs, c.dim)),  # normed, by group
        "expert_h":    ("u2", (pairs, expert_dim)),  # by group
        "expert_y":    ("f4", (pairs, c.dim)),  # by group
    }
    # fmt: on


def room(config: Config, max_seq_len: int, max_batch: int) -> int:
    """Return the bytes that are left for pages, a tenth of the device apart; raises MemoryError."""
    free, total = importlib.import_module("cupy").cuda.Device().mem_info
    shapes = buffer_shapes(config, max_seq_len, max_batch).values()
    n_bytes = [math.prod(shape) * np.dtype(dtype).itemsize for dtype, shape in shapes]
    needed = n_weight_bytes(config) + sum(n_bytes)
    left = int(free - total // 10 - needed)
    if left < CudaOps.page_bytes(config):
        raise MemoryError(
            f"the GPU has {free / 1e9:.2f} GB left; weights and buffers take {needed / 1e9:.2f}, and"
            " the KV cache more: lower --max-batch or --max-model-len, or take a smaller model"
        )
    return left


def missing() -> str | None:
    """Say why no GPU can compute here; None if one can."""
    try:
        capability = int(importlib.import_module("cupy").cuda.Device().compute_capability)
    except ImportError:
        return "CuPy is not installed: pip install -e '.[cuda]'"
    except Exception as error:  # cupy.cuda.runtime.CUDARuntimeError: no driver, or one that is too old
        return f"CuPy finds no device: {error}"
    if capability < 80:
        return f"compute capability {capability / 10}; 8.0 or above is supported"
    return None


# ---- the ops -----------------------------------------------------------------------------------------------

# fmt: off
OPS = {"embed": "x", "qkv": "qkv", "attend": "y", "out": "x", "gate_up": "h", "down": "x", "experts": "x",
       "logits": "raw", "count": "counts", "pick": "choices"}  # and the buffer that has its numbers
#            matrix         of what is normed: weights of that
PRODUCTS = {
    "qkv":     ("wqkv",      "attn_norm"),
    "out":     ("wo",        ""),
    "gate_up": ("w_gate_up", "mlp_norm"),
    "down":    ("w_down",    ""),
    "logits":  ("head",      "norm"),
}
# fmt: on
NO_GRAPHS = "no CUDA graphs"


def plainly(op: str) -> str:
    return f"{op} by plain kernels"


def expert_matrices(w: Matrix) -> Named:
    """What a kernel takes of the experts' matrices: bfloat16, or blocks and scales."""
    if isinstance(w, Mxfp4):
        return {"w": None} | w._asdict()
    return {"w": w, "blocks": None, "scales": None}


@dataclass(eq=False)
class CudaOps:
    """NumpyOps on a device."""

    config: Config
    weights: Weights  # which may lie on the device already
    max_seq_len: int
    n_pages: int
    max_batch: int
    cp: Any = None  # the module cupy, or a stand-in for it
    # How it runs because something failed, and why: step_back(). As check.py has found, how far ops are from
    # their plain kernels.
    degraded: dict[str, str] = field(default_factory=dict)
    differences: dict[str, float] = field(default_factory=dict)
    kernels: Any = None  # of this model, if they are compiled already

    chunk = 256  # tokens of a prompt that are computed together
    n_ahead = 4  # steps that are launched after the one that is read next
    enough_blocks = 64  # of a product: an H100's 132 processors are no faster with fewer, larger blocks

    def __post_init__(self) -> None:
        c, cp = self.config, self.cp or importlib.import_module("cupy")
        self.cp = cp
        self.about = {"device": f"CUDA, {n_weight_bytes(c) / 1e6:.0f} MB of weights in bfloat16"}
        self._constants = of = model_constants(c)
        self._graphs: dict[tuple[int, ...], Any] = {}  # by DeviceStep[1:]
        # The device's copy of each slot: page table, logit_bias, counted output and its length
        self._page_tables: list[list[int]] = [[] for _ in range(self.max_batch)]
        # The step launched last, if the next may be like it: one of a row a sequence, without biases and
        # counts, for which `pick` makes the numbers of the next one
        self._decoding: tuple[Spans, StepMemory, DeviceStep] | None = None
        self._biased: list[Any] = [None] * self.max_batch
        self._counted: list[tuple[Any, int]] = [(None, 0)] * self.max_batch
        self._stream = cp.cuda.Stream(non_blocking=True)
        with self._stream:
            self.weights = on_device(self.weights, partial(upload, cp))
            shapes = buffer_shapes(c, self.max_seq_len, self.max_batch)
            self._buffers = {name: cp.zeros(shape, dtype) for name, (dtype, shape) in shapes.items()}
            self.max_wanted = len(self._buffers["choices"])
            self._buffers["rope"].set(rope_table(c.rope, c.head_dim, self.max_seq_len))
            # The KV cache. A page has (PAGE, head_pad) keys, as NumpyOps has them, but (head_pad, PAGE)
            # values: the product with them wants those of neighbouring tokens together (kernels.cu). The
            # padding of a head is 0 and stays 0.
            pool = self.n_pages, c.n_kv_heads, PAGE * of["HEAD_PAD"]
            self._keys, self._values = ([cp.zeros(pool, "u2") for _ in range(c.n_layers)] for _ in "kv")
            buckets = [1 << i for i in range(self.max_wanted.bit_length())]
            layouts = {n: step_layout(n, n, n) for n in buckets}  # steps of decoding
            rows = len(self._buffers["x"])
            layouts[ANY_SIZE] = step_layout(rows, self.max_wanted, rows * -(-of["GROUP"] // QUERIES))
            self._memory = {}
            for n, layout in layouts.items():
                numbers = cp.zeros(layout.itemsize, "u1")
                self._memory[n] = StepMemory(layout, numbers, views(layout, numbers), [])
            self._stream.synchronize()
            self.kernels = self.kernels or Kernels(cp, c)

    @staticmethod
    def pack(w: Any) -> Any:
        """Bring a matrix to the device as it is read: the host never holds more than one matrix."""
        return upload(importlib.import_module("cupy"), w)

    @staticmethod
    def page_bytes(config: Config) -> int:
        return 2 * 2 * config.n_layers * config.n_kv_heads * PAGE * int(model_constants(config)["HEAD_PAD"])

    def step_back(self, how: str, why: object) -> None:
        """Go on without what fails on this GPU: `how` is NO_GRAPHS or plainly(op).

        Raises RuntimeError if it fails without, too.
        """
        if how in self.degraded:
            raise RuntimeError(f"{how}: {why}")
        self.degraded[how], _, _ = str(why).partition("\n")
        self._graphs.clear()
        log.warning("%s: %s. Please report it: `python bench.py gpu-report`", how, self.degraded[how])

    # --- steps ----------------------------------------------------------------------------------------------

    def launch(self, spans: Spans, contexts: Contexts) -> HostMemory:
        """Begin a step. `contexts` has one for each wanted row, in the order of the rows."""
        with self._stream:
            host, batch = self._next_step(spans) or self._upload_step(spans, contexts)
            sizes = batch[1:]
            if sizes in self._graphs:  # of one step, and serves for every other with the same sizes
                self._graphs[sizes].launch(self._stream)
            else:
                self._compute(batch)
                if batch.comes_again and NO_GRAPHS not in self.degraded:
                    # Everything is loaded now: a capture must not do that.
                    try:
                        self._graphs[sizes] = self._capture(batch)
                    except Exception as error:
                        self.step_back(NO_GRAPHS, error)
            self._download_choices(host, batch.n_wanted)
        host.contexts = contexts
        return host

    def read(self, step: HostMemory) -> list[Choice]:
        """Wait for the step; return one choice for each of its contexts."""
        step.arrived.synchronize()
        choices = read_choices(step.choices, step.contexts)
        step.free.append(step)
        return choices

    def _next_step(self, spans: Spans) -> tuple[HostMemory, DeviceStep] | None:
        """The step whose numbers the device has made itself; None if these spans need others.

        A chained span follows the last step of its slot, so its Sampling is the same.
        """
        if self._decoding is None:
            return None
        before, memory, batch = self._decoding
        if not follow(spans, before, self._constants["SPLIT_KEYS"]):
            return None
        self._decoding = spans, memory, batch
        host = self._free_host_memory(memory)
        for span in spans:
            if len(span.pages) > len(self._page_tables[span.slot]):  # the same sequence's, so it only grows
                self._upload_page_table(span, host)
        return host, batch

    def _upload_step(self, spans: Spans, contexts: Contexts) -> tuple[HostMemory, DeviceStep]:
        """Copy a step's numbers to the device.

        A step of decoding is padded to a size that comes again, for its CUDA graph. One of whole prefill
        chunks and nothing else, as most steps of a long prompt are, comes again as it is.
        """
        n = sum(span.n_rows for span in spans)
        split, whole, n_splits = step_tiles(spans, self._constants, len(self._buffers["part"]))
        is_decode = not whole and len(split) == len(spans)
        size, sizes = ANY_SIZE, (n, len(contexts), len(split))
        if is_decode:
            size = bucket(n)
            sizes = size, size, size
        memory = self._memory[size]
        host = self._free_host_memory(memory)
        is_plain = not any(map(flags_of, contexts))
        advances = is_decode and n == len(contexts) == len(spans) and is_plain
        host.fill(step_fields(spans, contexts, advances) | {"tiles": split + whole})
        memory.numbers.set(host.numbers, self._stream)
        comes_again = is_decode or all(is_prompt(span) and span.n_rows == self.chunk for span in spans)
        batch = DeviceStep(memory.views, *sizes, len(whole), n_splits, is_decode, comes_again)
        self._upload_slots(spans, contexts, host, batch)
        self._decoding = None
        if advances:
            self._decoding = spans, memory, batch
        return host, batch

    def _free_host_memory(self, memory: StepMemory) -> HostMemory:
        if memory.free:
            return memory.free.pop()
        return HostMemory(self.cp, memory, self._buffers["page_tables"].shape)

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
            self._page_tables[span.slot] = list(span.pages)
            place = span.slot, slice(len(span.pages))
            host.page_tables[place] = span.pages
            self._buffers["page_tables"][place].set(host.page_tables[place], self._stream)

    def _upload_slots(self, spans: Spans, contexts: Contexts, host: HostMemory, batch: DeviceStep) -> None:
        """What slots keep from step to step, if the device does not have it yet; and the masks of a step.

        Masks are (vocab_size,) each, on the device MASK_WORDS words of 32 bits.
        """
        first = 0
        for span in spans:
            self._upload_page_table(span, host)
            if span.n_wanted:
                self._upload_context(span, contexts[first], batch)
                first += span.n_wanted
        if any(context.mask is not None for context in contexts):
            allowed = np.zeros((len(contexts), 32 * self._constants["MASK_WORDS"]), bool)
            for row, context in zip(allowed, contexts, strict=True):
                if context.mask is not None:
                    row[: len(context.mask)] = context.mask
            words = np.packbits(allowed, 1, "little").view(np.uint32)
            self._buffers["masks"][: len(words)].set(words, self._stream)

    def _upload_context(self, span: Span, context: Context, batch: DeviceStep) -> None:
        """Biases and counts of a span's slot, for the first of its wanted rows."""
        s, slot = context.sampling, span.slot
        flags = flags_of(context)
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
                self._buffers["history"][: len(tokens)].set(tokens, self._stream)
                self.count(batch, slot, len(context.prompt), len(tokens))
            if span.n_wanted == 1:  # `pick` counts what it chooses, if it is the only one
                self._counted[slot] = (context.output, context.n_output + 1)

    def _capture(self, batch: DeviceStep) -> Any:
        """The CUDA graph of a step."""
        self._stream.begin_capture()
        try:
            self._compute(batch)
        finally:
            graph = self._stream.end_capture()
        return graph

    def _compute(self, batch: DeviceStep) -> None:
        logits = forward(self, self.weights, batch)
        if batch.n_wanted:
            self.pick(logits, batch)

    # --- the ops --------------------------------------------------------------------------------------------

    def embed(self, batch: DeviceStep, weights: Weights) -> DeviceArray:
        self._launch("embed", "embed", (batch.n_rows,), batch, embed=weights.embed)
        return self._buffers["x"]

    def attend(self, qkv: DeviceArray, layer: Layer, i: int, batch: DeviceStep) -> DeviceArray:
        """Norm and rotate q and k, write k and v to the KV cache, attend."""
        n_split, n_whole, rows = batch.n_split_tiles, batch.n_whole_tiles, batch.n_rows
        n_kv_heads, y = self.config.n_kv_heads, self._buffers["y"]
        launch: Any = partial(
            self._launch,
            "attend",
            batch=batch,
            **vars(layer),
            keys=self._keys[i],
            values=self._values[i],
            max_pages=self._buffers["page_tables"].shape[1],
            window=self.config.windows[i] or 0,
            rotary=self.config.rotary[i],
        )
        if plainly("attend") in self.degraded:
            for name in ("rotate", "write_kv", "attend"):
                launch(name, (rows, n_kv_heads))
            return y
        if not batch.is_decode:
            launch("write_kv", (rows, n_kv_heads))
        if n_split:
            launch("attend", (batch.n_splits, n_kv_heads, n_split), writes=batch.is_decode)
        if n_whole:
            launch("attend_prompt", (n_whole, n_kv_heads), tiles=batch.views["tiles"][n_split:])
        return y

    def experts(self, x: DeviceArray, layer: Layer, batch: DeviceStep) -> None:
        """The pairs of a row and an expert are grouped by expert: a group is a product."""
        experts = self.config.experts
        assert experts is not None
        b, n = self._buffers, batch.n_rows
        n_pairs = n * experts.n_chosen
        n_groups = min(experts.n, n_pairs)
        router = -(-n // ANY_SHAPE.rows), -(-experts.n // ANY_SHAPE.columns)
        launch: Any = partial(self._launch, "experts", batch=batch, **vars(layer))
        launch("rms_norm", (n,), w=layer.mlp_norm, rows=None, y=b["normed"])
        launch("router", router)
        launch("route", (1,))
        launch("rms_norm", (n_pairs,), w=layer.mlp_norm, rows=b["pair_rows"], y=b["expert_x"])
        launch("expert_gate_up", (-(-experts.hidden_dim // 8), n_groups), **expert_matrices(layer.w_gate_up))
        launch("expert_down", (-(-self.config.dim // 8), n_groups), **expert_matrices(layer.w_down))
        launch("add_experts", (n,))

    def count(self, batch: DeviceStep, slot: int, n_prompt: int, n: int) -> None:
        self._launch("count", "count", (1,), batch, slot=slot, n_prompt=n_prompt, n=n)

    def pick(self, logits: DeviceArray, batch: DeviceStep) -> DeviceArray:
        self._launch("pick", "pick", (batch.n_wanted,), batch)
        return self._buffers["choices"]

    def _product(self, op: str, *arguments: Any) -> DeviceArray:
        """Launch a product. Its arguments are buffers, then the layer or all weights, and the batch.

        Its rows of x are normed before if they are more than NORMED_ROWS; fewer it norms itself.
        """
        *_, weights, batch = arguments
        n, rows, of = batch.n_rows, None, vars(weights)
        if op == "logits":
            n, rows = batch.n_wanted, batch.views["wanted"]
        matrix, norm = PRODUCTS[op]
        if norm and n > NORMED_ROWS:
            self._launch(op, "rms_norm", (n,), batch, w=of[norm], rows=rows, y=self._buffers["normed"])
        shape = shape_for(n, len(of[matrix]), self.enough_blocks)
        wide = {"gate_up": 2 * shape.pair_columns, "logits": shape.logits_columns}
        grid = -(-n // shape.rows), -(-len(of[matrix]) // wide.get(op, shape.columns))
        if n:
            self._launch(op, op, grid, batch, shape, **of, n_rows=n)
        return self._buffers[OPS[op]]

    qkv = partialmethod(_product, "qkv")
    out = partialmethod(_product, "out")
    gate_up = partialmethod(_product, "gate_up")
    down = partialmethod(_product, "down")
    logits = partialmethod(_product, "logits")

    def _launch(
        self,
        op: str,
        name: str,
        grid: tuple[int, ...],
        batch: DeviceStep,
        shape: Shape = ANY_SHAPE,
        **others: Any,
    ) -> None:
        """Launch a kernel of an op, fast or plain."""
        arguments = self._buffers | batch.views | {"n_rows": batch.n_rows} | others
        if plainly(op) in self.degraded:
            shape = PLAIN
        self.kernels.launch(name, grid, arguments, shape)
