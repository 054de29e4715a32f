"""The ops of model.py on a GPU.

    Spans --launch()--> the numbers of a step --copy--> a graph, or kernels --copy--> --read()--> Choices

Authority: model.NumpyOps, op by op; CuPy's reference (https://docs.cupy.dev).

Rules of this file:
1. Nothing is allocated once a CudaOps is made. What changes from step to step lies in device memory: a graph
   that was captured once serves for every step of its size.
2. Every row has the same bits whatever it is computed with (kernels.cu), so a step may be padded, cut in
   parts, and made by whichever kernels are fastest.
3. The host waits for the device in read() alone; and where a request comes whose mask, bias or counts the
   device does not have.

The name: cuda.py would hide the package `cuda`, which CuPy imports.

Not here: arithmetic (kernels.cu), launches (kernels.py), which rows come next (engine.py).
"""

import importlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import numpy as np

from checkpoint.config import Config
from checkpoint.rope import rope_table
from checkpoint.weights import Layer, Weights, bfloat16, n_params
from devices.kernels import (
    ANY,
    CHOICE,
    LOGITS_COLUMNS,
    NORMED_ROWS,
    QUERIES,
    DeviceArray,
    Kernels,
    attend_threads,
    check_sizes,
    head_pad,
    open_driver,
    shape_for,
)
from devices.steps import (
    BIASED,
    PENALISED,
    DeviceStep,
    HostMemory,
    Placed,
    StepMemory,
    Table,
    Ticket,
    bucket,
    buckets,
    n_bytes,
    n_rows,
    placed,
    rows_of,
    rules_of,
    wanted_of,
)
from model import PAGE, Span, forward
from sampling import Choice, Context, Sampling

log = logging.getLogger("gpu")


class OutOfMemory(MemoryError):
    """One line: what the device has, what is wanted, and which options say so."""


# ---- Weights -----------------------------------------------------------------------------------------------


def on_device(weights: Weights, upload: Callable[[Any], DeviceArray]) -> Weights:
    """The same weights as device arrays; a tied head stays the same array as the embedding."""

    def every(part: Any) -> dict[str, Any]:
        arrays = {field.name: getattr(part, field.name) for field in fields(part) if field.name != "layers"}
        return {name: None if array is None else upload(array) for name, array in arrays.items()}

    tied = weights.head is weights.embed
    embed, norm = upload(weights.embed), upload(weights.norm)
    layers = [replace(layer, **every(layer)) for layer in weights.layers]
    return Weights(embed, layers, norm, embed if tied else upload(weights.head))


# ---- Memory ------------------------------------------------------------------------------------------------


class Limits(NamedTuple):
    """What a step may have of what; larger ones are made in parts."""

    rows: int
    split: int  # rows whose attention is shared out
    wanted: int

    @classmethod
    def of(cls, max_batch: int) -> "Limits":
        n = bucket(max(max_batch, 32))
        return cls(max(2 * CudaOps.chunk + max_batch, n), n, n)


def buffer_shapes(config: Config, max_seq_len: int, max_batch: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """All that is allocated beside weights, pages and the numbers of steps: dtype and shape by name."""
    c, limits = config, Limits.of(max_batch)
    n_q, n_qkv = c.n_heads * c.head_dim, (c.n_heads + 2 * c.n_kv_heads) * c.head_dim
    n_pieces = bucket(-(-max_seq_len // attend_threads(c)))
    return {
        "x": ("f4", (limits.rows, c.dim)),  # the residual stream
        "normed": ("u2", (limits.rows, c.dim)),
        "qkv": ("f4", (limits.rows, n_qkv)),
        "y": ("u2", (limits.rows, n_q)),
        "h": ("u2", (limits.rows, c.hidden_dim)),
        "part": ("f4", (limits.split, c.n_heads, n_pieces, c.head_dim + 2)),
        "n_done": ("i4", (limits.split * tiles_a_row(c), c.n_kv_heads)),
        "raw": ("f4", (limits.wanted, c.vocab_size)),
        "best": ("u8", (limits.wanted,)),  # of each row the likeliest token, as kernels.cu ranks them
        "logits": ("f4", (limits.wanted, c.vocab_size)),  # after penalties
        "masks": ("u4", (limits.wanted, -(-c.vocab_size // 32))),  # a bit a token
        "choices": ("i4", (limits.wanted, CHOICE)),
        "rope": ("c8", (max_seq_len, c.head_dim // 2)),
        "pages": ("i4", (max_batch, -(-max_seq_len // PAGE))),
        "chosen": ("i4", (max_batch,)),
        "counts": ("u4", (max_batch, c.vocab_size)),
        "biases": ("f4", (max_batch, c.vocab_size)),
        "history": ("i4", (max_seq_len,)),  # the tokens to count
    }


def tiles_a_row(config: Config) -> int:
    return -(-(config.n_heads // config.n_kv_heads) // QUERIES)


def needed(config: Config, max_seq_len: int, n_pages: int, max_batch: int) -> dict[str, int]:
    """Bytes on the device."""
    shapes = buffer_shapes(config, max_seq_len, max_batch)
    return {
        "weights": 2 * n_params(config),
        "pages": n_pages * CudaOps.page_bytes(config),
        "buffers": sum(n_bytes(*shape) for shape in shapes.values()),
    }


def room(config: Config, max_seq_len: int, max_batch: int, cp: Any = None) -> int:
    """Bytes that are left for pages, a tenth of the device apart."""
    free, total = (cp or importlib.import_module("cupy")).cuda.Device().mem_info
    return int(free - total // 10 - sum(needed(config, max_seq_len, 0, max_batch).values()))


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
    return None if capability >= 80 else f"compute capability {capability / 10}; 8.0 or above is supported"


# ---- The ops -----------------------------------------------------------------------------------------------


class CudaOps:
    """NumpyOps on a device."""

    pack = staticmethod(bfloat16)  # what weights.read_weights makes of a matrix for these ops
    chunk = 256  # tokens of a prompt that are computed together
    n_ahead = 4  # steps that may be launched before the first of them is read
    enough = 64  # blocks of the largest shape, of a product; an H100's 132 processors do fewer no faster
    chunk_invariant = True

    def __init__(
        self, config: Config, weights: Weights, max_seq_len: int, n_pages: int, max_batch: int, cp: Any = None
    ) -> None:
        """`weights` may lie on the device already. `cp`: the module cupy, or what stands in its place."""
        check_sizes(config)
        self._cp = cp = importlib.import_module("cupy") if cp is None else cp
        self.config, self.max_seq_len, self.n_pages, self.max_batch = config, max_seq_len, n_pages, max_batch
        self.about = f"CUDA, {2 * n_params(config) / 1e6:.0f} MB of weights in bfloat16"
        self._limits, self._group = Limits.of(max_batch), config.n_heads // config.n_kv_heads
        self._piece = attend_threads(config)  # keys that a block attends to at a time
        self._graphs: dict[tuple[int, int], Any] = {}  # by rows and pieces; None: it cannot be captured
        self._tables: list[list[int]] = [[] for _ in range(max_batch)]  # the pages of a slot, on the device
        self._counted: list[tuple[Any, int]] = [(None, 0)] * max_batch  # whose output a slot's counts hold
        self._biased: list[Any] = [None] * max_batch  # whose logit_bias a slot's biases hold
        self._samplings = [Sampling()] * max_batch  # of which a slot's rules are
        self._rules = [rules_of(s) for s in self._samplings]
        self._stream = cp.cuda.Stream(non_blocking=True)
        with self._stream:
            try:
                self._allocate(weights)
            except cp.cuda.memory.OutOfMemoryError:
                raise OutOfMemory(self._lack()) from None
            driver = open_driver(cp)
            self._kernels = Kernels(cp, config, driver)
            if driver and not self._can_overlap(self._kernels):
                self._kernels = Kernels(cp, config)
            log.info("loading the kernels: some seconds where they have not been compiled before")
            self._kernels.load()

    @staticmethod
    def page_bytes(config: Config) -> int:
        return 2 * 2 * config.n_layers * config.n_kv_heads * PAGE * head_pad(config)

    # --- memory ---------------------------------------------------------------------------------------------

    def _allocate(self, weights: Weights) -> None:
        cp, c = self._cp, self.config
        shapes = buffer_shapes(c, self.max_seq_len, self.max_batch)
        self.weights = on_device(weights, lambda a: cp.asarray(bfloat16(a)) if type(a) is np.ndarray else a)
        self._buffers = {name: cp.zeros(shape, np.dtype(dtype)) for name, (dtype, shape) in shapes.items()}
        self._buffers["rope"].set(rope_table(c.rope, c.head_dim, self.max_seq_len))
        # A page has (PAGE, head_pad) keys, as NumpyOps has them, but (head_pad, PAGE) values: their product
        # wants those of neighbouring tokens together (kernels.cu). What pads a head is 0 and stays so.
        pages = (self.n_pages, c.n_kv_heads, PAGE * head_pad(c))
        self._keys = [cp.zeros(pages, np.uint16) for _ in range(c.n_layers)]
        self._values = [cp.zeros(pages, np.uint16) for _ in range(c.n_layers)]
        sizes = {n: Table(n, n, n) for n in buckets(self._limits.split)}
        rows = self._limits.rows
        sizes[0] = Table(rows, self._limits.wanted, rows * tiles_a_row(c))  # 0: any step
        self._memory = {}
        for n, table in sizes.items():
            numbers = cp.zeros(table.n_bytes, np.uint8)
            self._memory[n] = StepMemory(table, numbers, table.views(numbers), [])
        self._stream.synchronize()

    def _lack(self) -> str:
        total = self._cp.cuda.Device().mem_info[1]
        wanted = needed(self.config, self.max_seq_len, self.n_pages, self.max_batch)
        parts = ", ".join(f"{name} {n / 1e9:.2f}" for name, n in wanted.items())
        in_all = sum(wanted.values())
        lacking = (
            f"{(in_all - total) / 1e9:.2f} GB are missing" if in_all > total else "others use part of it"
        )
        return (
            f"The GPU has {total / 1e9:.2f} GB and {in_all / 1e9:.2f} GB are wanted ({parts}): {lacking}. "
            "Lower --kv-memory, --max-batch or --max-model-len."
        )

    def _can_overlap(self, kernels: Kernels) -> bool:
        """Do this driver and CuPy take a graph of two kernels of which one starts early?"""
        x, normed = self._buffers["x"], self._buffers["normed"]
        try:
            kernels.launch("rms_norm", ANY, (1,), self.weights.norm, x, None, normed)
            kernels.overlap = True
            self._stream.begin_capture()
            try:
                for _ in range(2):
                    kernels.launch("rms_norm", ANY, (1,), self.weights.norm, x, None, normed)
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

    def launch(self, spans: Sequence[Span], contexts: Sequence[Context]) -> Ticket:
        """Begin a step. `contexts`: of each wanted row, in the order of the rows."""
        ticket, i = Ticket(), 0
        with self._stream:
            for part in self._parts(spans):
                n = sum(span.n_wanted for span in part)
                ticket.append(self._launch(placed(part, contexts[i : i + n])))
                i += n
        return ticket

    def read(self, ticket: Ticket) -> list[list[Choice]]:
        """What each span that wanted something got, in their order."""
        chosen: list[list[Choice]] = []
        for memory, host in ticket:
            host.arrived.synchronize()
            chosen += host.read()
            memory.free.append(host)
        if any(choice.token_id < 0 for choices in chosen for choice in choices):
            raise ArithmeticError("the model's logits are no finite numbers")
        return chosen

    def _parts(self, spans: Sequence[Span]) -> Iterator[list[Span]]:
        """Spans that fit into the buffers together; rows do not depend on each other."""
        part, rows, wanted, limits = list[Span](), 0, 0, self._limits
        for span in spans:
            n = n_rows(span)
            if n > limits.rows or span.n_wanted > limits.wanted:
                raise ValueError(f"{n} rows, {span.n_wanted} of them wanted: at most {limits}")
            rows, wanted = rows + n, wanted + span.n_wanted
            if rows > limits.rows or wanted > limits.wanted:
                yield part
                part, rows, wanted = [], n, span.n_wanted
            part.append(span)
        yield part

    def _launch(self, step: list[Placed]) -> tuple[StepMemory, HostMemory]:
        memory, host, batch = self._prepared(step)
        if batch.is_decode:
            self._replay(batch)
        else:
            self._compute(batch)
        self._collect(host, sum(host.n_choices))
        return memory, host

    def _prepared(self, step: list[Placed]) -> tuple[StepMemory, HostMemory, DeviceStep]:
        """Bring a step's numbers to the device."""
        parts: dict[bool, list[Placed]] = {True: [], False: []}
        for p in step:
            parts[not p.span.is_chunk and p.rows.stop <= self._limits.split].append(p)
        split, whole = parts[True], parts[False]
        n_rows, tiles = sum(len(p.rows) for p in step), self._tiles(split)
        is_decode = not whole and len(tiles) == len(split)
        memory = self._memory[bucket(n_rows) if is_decode else 0]
        pages = self._buffers["pages"].shape
        host = memory.free.pop() if memory.free else HostMemory(self._cp, memory.table, pages)
        self._bring(step, host)
        host.fill(tiles=tiles + self._tiles(whole), **rows_of(step), **wanted_of(step, self._rules))
        host.expect(step)
        memory.numbers.set(host.numbers, self._stream)
        n_pieces = max((-(-p.span.end // self._piece) for p in split), default=1)
        if is_decode:  # of a size that comes again
            n = bucket(n_rows)
            return memory, host, DeviceStep(memory.views, n, n, n, 0, bucket(n_pieces), True)
        n_wanted, n_whole = sum(host.n_choices), len(self._tiles(whole))
        return memory, host, DeviceStep(memory.views, n_rows, n_wanted, len(tiles), n_whole, n_pieces, False)

    def _collect(self, host: HostMemory, n_wanted: int) -> None:
        """Send for what was chosen."""
        if n_wanted:
            choices = self._buffers["choices"][:n_wanted]
            choices.get(self._stream, out=host.choices[:n_wanted], blocking=False)
        host.arrived.record(self._stream)

    def _tiles(self, step: list[Placed]) -> list[tuple[int, ...]]:
        """kernels.cu's tiles: QUERIES queries of a span and a key head each."""
        return [
            (p.rows.start, p.span.start, len(p.rows), first, p.span.slot)
            for p in step
            for first in range(0, len(p.rows) * self._group, QUERIES)
        ]

    def _bring(self, step: list[Placed], host: HostMemory) -> None:
        """What slots keep from step to step, where the device does not have it yet.

        Tables of pages grow at any time, so they are copied from memory that the device reads by itself: a
        copy from any other would wait for the steps in flight.
        """
        is_masked = False
        for span, contexts, _ in step:
            if self._tables[span.slot] != span.pages:
                self._tables[span.slot] = pages = list(span.pages)
                row = host.pages[span.slot, : len(pages)]
                row[:] = pages
                self._buffers["pages"][span.slot, : len(pages)].set(row, self._stream)
            if contexts:
                self._bring_context(span.slot, contexts)
                is_masked |= any(context.mask is not None for context in contexts)
        if is_masked:
            masks = [context.mask for p in step for context in p.contexts]
            allowed = [np.ones(self.config.vocab_size, bool) if mask is None else mask for mask in masks]
            bits = np.packbits(np.pad(np.array(allowed), ((0, 0), (0, -len(allowed[0]) % 32))), 1, "little")
            self._buffers["masks"][: len(masks)].set(bits.view(np.uint32), self._stream)

    def _bring_context(self, slot: int, contexts: Sequence[Context]) -> None:
        """What the choices of a slot depend on beside the logits."""
        context = contexts[0]
        s = context.sampling
        if self._samplings[slot] is not s:
            self._samplings[slot], self._rules[slot] = s, rules_of(s)
        flags = self._rules[slot].flags
        if flags & BIASED and self._biased[slot] is not s.logit_bias:
            biases = np.zeros(self.config.vocab_size, np.float32)
            biases[list(s.logit_bias)] = list(s.logit_bias.values())
            self._buffers["biases"][slot].set(biases, self._stream)
            self._biased[slot] = s.logit_bias
        if flags & PENALISED:
            output, n = self._counted[slot]
            if not context.n_unread and not (output is context.output and n == context.n_output):
                tokens = np.array([*context.prompt, *context.output], np.int32)
                self._buffers["history"][: len(tokens)].set(tokens, self._stream)
                arguments = self._buffers["history"], self._buffers["counts"], slot
                self._kernels.launch("count", ANY, (1,), *arguments, len(context.prompt), len(tokens))
            if len(contexts) == 1:  # `pick` counts what it chooses, if it is the only one
                self._counted[slot] = (context.output, context.n_output + 1)

    def _replay(self, batch: DeviceStep) -> None:
        """A step of decoding: as a graph, once one of its size has gone by."""
        key = batch.n_rows, batch.n_pieces
        if graph := self._graphs.get(key):
            graph.launch(self._stream)
            return
        self._compute(batch)
        if key not in self._graphs:  # everything is loaded now: a capture must not do that
            self._graphs[key] = self._captured(batch)

    def _captured(self, batch: DeviceStep) -> Any:
        """None where the driver does not take it: then such steps go on kernel by kernel."""
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
        b, views = self._buffers, batch.views
        arguments = weights.embed, views["tokens"], views["slots"], b["chosen"], b["x"]
        self._kernels.launch("embed", ANY, (batch.n_rows,), *arguments)
        return b["x"]

    def qkv(self, x: DeviceArray, layer: Layer, batch: DeviceStep) -> DeviceArray:
        normed = self._norm(x, layer.attn_norm, None, batch.n_rows)
        arguments = layer.wqkv, layer.bqkv, layer.attn_norm, x, normed, self._buffers["qkv"]
        self._product("qkv", len(layer.wqkv), 1, batch.n_rows, *arguments)
        return self._buffers["qkv"]

    def attend(self, qkv: DeviceArray, layer: Layer, i: int, batch: DeviceStep) -> DeviceArray:
        """Norm and rotate q and k, write k and v to the pages, attend."""
        c, b, views = self.config, self._buffers, batch.views
        keys, values, pages = self._keys[i], self._values[i], b["pages"]
        max_pages, rotary = pages.shape[1], int(c.rotary[i])
        of_layer = max_pages, c.windows[i] or 0, rotary
        if not batch.is_decode:
            arguments = qkv, layer.k_norm, b["rope"], keys, values, views["positions"], views["slots"], pages
            self._kernels.launch("keep", ANY, (batch.n_rows, c.n_kv_heads), *arguments, max_pages, rotary)
        if batch.n_split:
            grid = batch.n_pieces, c.n_kv_heads, batch.n_split
            inputs = qkv, layer.q_norm, layer.k_norm, b["rope"], keys, values, views["tiles"], pages
            outputs = b["part"], b["n_done"], b["y"]
            self._kernels.launch("attend", ANY, grid, *inputs, *outputs, *of_layer, int(batch.is_decode))
        if batch.n_whole:
            tiles = views["tiles"][batch.n_split :]
            whole = qkv, layer.q_norm, b["rope"], keys, values, tiles, pages, b["y"]
            self._kernels.launch("attend_prompt", ANY, (batch.n_whole, c.n_kv_heads), *whole, *of_layer)
        return b["y"]

    def out(self, x: DeviceArray, y: DeviceArray, layer: Layer, batch: DeviceStep) -> None:
        self._product("out", self.config.dim, 1, batch.n_rows, layer.wo, layer.bo, y, x)

    def gate_up(self, x: DeviceArray, layer: Layer, batch: DeviceStep) -> DeviceArray:
        normed = self._norm(x, layer.mlp_norm, None, batch.n_rows)
        arguments = layer.w_gate_up, layer.b_gate_up, layer.mlp_norm, x, normed, self._buffers["h"]
        self._product("gate_up", self.config.hidden_dim, 2, batch.n_rows, *arguments)
        return self._buffers["h"]

    def down(self, x: DeviceArray, h: DeviceArray, layer: Layer, batch: DeviceStep) -> None:
        self._product("down", self.config.dim, 1, batch.n_rows, layer.w_down, layer.b_down, h, x)

    def logits(self, x: DeviceArray, weights: Weights, batch: DeviceStep) -> DeviceArray:
        if batch.n_wanted:
            rows, raw = batch.views["wanted"], self._buffers["raw"]
            normed = self._norm(x, weights.norm, rows, batch.n_wanted)
            arguments = weights.head, weights.norm, x, normed, rows, raw, self._buffers["best"]
            self._product("logits", len(weights.head), 1, batch.n_wanted, *arguments)
        return self._buffers["raw"]

    def pick(self, logits: DeviceArray, batch: DeviceStep) -> None:
        b, views = self._buffers, batch.views
        settings = views["picked"], views["settings"], views["seeds"], b["masks"]
        slots = views["tokens"], b["counts"], b["biases"], b["chosen"]
        arguments = logits, b["best"], b["logits"], *settings, *slots, b["choices"]
        self._kernels.launch("pick", ANY, (batch.n_wanted,), *arguments)

    def _norm(self, x: DeviceArray, w: DeviceArray, rows: DeviceArray | None, n: int) -> DeviceArray:
        """What products of more than NORMED_ROWS begin with; the others norm x themselves."""
        if n > NORMED_ROWS:
            self._kernels.launch("rms_norm", ANY, (n,), w, x, rows, self._buffers["normed"])
        return self._buffers["normed"]

    def _product(self, name: str, n_columns: int, n_matrices: int, n: int, *arguments: Any) -> None:
        shape = shape_for(n, n_columns * n_matrices, self.enough)
        columns = LOGITS_COLUMNS if name == "logits" and shape.rows == 1 else -(-shape.columns // n_matrices)
        grid = -(-n // (16 * shape.rows)), -(-n_columns // (8 * columns))
        self._kernels.launch(name, shape, grid, *arguments, n)
