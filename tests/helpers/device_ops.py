"""One layer of a model, op by op: on a device, in NumPy, and what the two are compared by.

tables/devices.toml --both()--> Both: the same random weights for CudaOps (or PlainOps) and for NumpyOps
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from checkpoint.config import Config, Experts
from checkpoint.rope import Rope
from checkpoint.weights import Layer, Mxfp4, Weights, bfloat16, layer_parts, unpacked
from devices.cuda import OPS, CudaOps, on_device, plainly
from devices.step_memory import DeviceStep
from helpers.emulator import Emulator
from helpers.tables import table
from model import Array, Batch, NumpyOps, Span
from sampling import Choice, Context, Sampling


def sweep(values: Iterable[Any], first: Collection[Any]) -> list[Any]:
    """The values to parametrize a test with; `make check` has those that are not among the first."""
    found = []
    for value in values:
        arguments = value if isinstance(value, tuple) else (value,)
        found.append(value if value in first else pytest.param(*arguments, marks=pytest.mark.sweep))
    return found


TABLES = table("devices")
MAX_SEQ_LEN: int = TABLES["base"]["max_seq_len"]


def config(experts: Any = None, **changes: Any) -> Config:
    """Return a config of one layer; the members of `experts` are those of checkpoint.config.Experts."""
    values = {"rope": Rope(10_000.0), "windows": (None,)} | TABLES["base"] | changes
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return Config(**values, experts=experts and Experts(**{"layers": (True,), "limit": None} | experts))


CONFIGS, MIXTURES, OTHERS, MODELS = (
    {name: config(TABLES["experts_of"].get(name), **row) for name, row in TABLES[kind].items()}
    for kind in ("dense", "mixtures", "others", "real")
)


def shapes_of(c: Config, i: int) -> dict[str, tuple[int, ...]]:
    """The shape of each field of layer i that the model has."""
    experts: Any = c.experts and c.experts._replace(mxfp4=False)
    parts = layer_parts(replace(c, experts=experts), i)
    shapes: dict[str, tuple[int, ...]] = {}
    for part in parts:
        n_rows, *columns = part.shape
        if part.transposed:
            columns.reverse()
        n_before = shapes.get(part.field, (0,))[0]
        shapes[part.field] = (n_before + n_rows, *columns)
    for field in {part.field for part in parts if part.expert}:
        n_rows, n_columns = shapes[field]
        shapes[field] = experts.n, n_rows // experts.n, n_columns
    return shapes


def random_weights(c: Config) -> Weights:
    """Weights of any size, of the same numbers each time: in bfloat16, of experts in MXFP4."""
    rng = np.random.default_rng(3)
    noise = rng.standard_normal(2**20 - 3, np.float32)  # repeated, each time from another column on

    def field(shape: tuple[int, ...]) -> Any:
        if len(shape) == 1:  # no bias is 0, no norm weight 1
            return bfloat16(rng.uniform(0.5, 1.5, shape).astype(np.float32))
        if len(shape) == 3 and c.experts and c.experts.mxfp4:
            *rows, n_in = shape
            blocks = rng.integers(0, 256, (*rows, n_in // 32, 16), np.uint8)
            return Mxfp4(blocks, np.full((*rows, n_in // 32), 121, np.uint8))  # a number is some 2 * 2^-6
        return np.resize(bfloat16(noise * np.float32(shape[-1] ** -0.5)), shape)

    layers = []
    for i in range(c.n_layers):
        layers.append(Layer(**{name: field(shape) for name, shape in shapes_of(c, i).items()}))
    embed, head = (field((c.vocab_size, c.dim)) for _ in range(2))
    return Weights(embed, layers, field((c.dim,)), head)


class PlainOps(CudaOps):
    """CudaOps whose ops all run by the plain kernels of plain.cu: each number by a thread of its own."""

    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        self.degraded |= dict.fromkeys(map(plainly, OPS), "for a test")


PAGES = [9, 2, 14, 0, 7]


def span(slot: int, start: int, n: int, tile: bool, pages: Sequence[int] = PAGES) -> Span:
    """A chunk of a prompt, which makes a tile, or rows that are all wanted."""
    return Span(slot, pages, [0] * n, start, 0 if tile else n)


def best(row: Array) -> int:
    """kernels.cu's rank of the likeliest token: its logit in an order of integers, then what comes first."""
    if not row.max() <= np.finfo(np.float32).max:  # no number, or infinite
        return 2**64 - 1
    bits = int(np.float32(row.max() + np.float32(0)).view(np.uint32))  # -0 becomes 0
    bits = 2**32 - 1 - bits if bits >> 31 else bits | 1 << 31
    return bits << 32 | 2**32 - 1 - int(row.argmax())


def noise(*shape: int) -> Array:
    """Normal, with a channel and a row some hundred times as large as the others."""
    x = np.random.default_rng(shape).standard_normal(shape, np.float32)
    x[:, 5 % shape[1]] *= 300
    x[shape[0] // 2] *= 100
    return x


class Both:
    """The same model for the two ops."""

    def __init__(self, c: Config, order: int, check: bool, ops: type[CudaOps], enough_blocks: int) -> None:
        weights = random_weights(c)
        self.weights = on_device(weights, lambda array: None if array is None else unpacked(array))
        self.config = c
        self.cuda = ops(c, weights, MAX_SEQ_LEN, n_pages=16, max_batch=4, cp=Emulator(order, check))
        self.cuda.enough_blocks = enough_blocks
        self.numpy = NumpyOps(c, self.weights, MAX_SEQ_LEN, n_pages=16, max_batch=4)
        self.layer, self.device_layer = self.weights.layers[0], self.cuda.weights.layers[0]

    def batch(self, n_rows: int, wanted: Sequence[int] = ()) -> Any:
        """A batch of rows for the ops that look at no page."""
        views = {"wanted": self.cuda.cp.asarray(np.array(wanted, np.int32))}
        return DeviceStep(views, n_rows, len(wanted), 0, 0, 1, False, False)

    def put(self, name: str, values: Array) -> Any:
        """Values in the first rows of a buffer."""
        buffer = self.cuda._buffers[name]
        host = buffer.get()
        host[: len(values)] = bfloat16(values) if buffer.dtype == np.uint16 else values
        buffer.set(host)
        return buffer

    def got(self, name: str, n_rows: int) -> Array:
        values = self.cuda._buffers[name].get()[:n_rows]
        return unpacked(values) if values.dtype == np.uint16 else values  # type: ignore[no-any-return]

    def qkv_noise(self, n: int, seed: int = 0) -> Array:
        shape = n, (self.config.n_heads + 2 * self.config.n_kv_heads) * self.config.head_dim
        return np.random.default_rng(seed).standard_normal(shape, np.float32)

    def attend(self, spans: list[Span], qkv: Array) -> Array:
        """CudaOps.attend for rows of the spans one after another, (n_rows, n_heads * head_dim)."""
        contexts = [Context(Sampling(), [], [])] * sum(span.n_wanted for span in spans)
        with self.cuda._stream:
            host, batch = self.cuda._upload_step(spans, contexts)
            self.cuda.attend(self.put("qkv", qkv), self.device_layer, 0, batch)
            y = self.got("y", len(qkv))
        host.free.append(host)
        return y

    def inputs(self, n: int) -> tuple[Array, Array, Array]:
        """n rows of x, of what attention gives, and of the hidden layer."""
        c = self.config
        return noise(n, c.dim), noise(n, c.n_heads * c.head_dim), noise(n, c.hidden_dim)

    def products(self, x: Array, y: Array, h: Array) -> dict[str, Array]:
        """What each product makes of the same rows, in a mixture its experts too; logits of the first 32."""
        n, cuda, layer = len(x), self.cuda, self.device_layer
        batch = self.batch(n, range(min(n, 32)))
        device_x = self.put("x", x)
        cuda.qkv(device_x, layer, batch)
        cuda.logits(device_x, cuda.weights, batch)
        got = {"qkv": self.got("qkv", n), "logits": self.got("raw", min(n, 32))}
        cuda.out(device_x, self.put("y", y), layer, batch)
        got["out"] = self.got("x", n)
        self.put("x", x)
        if self.config.experts:
            cuda.experts(device_x, layer, batch)
            return got | {"experts": self.got("x", n)}
        cuda.gate_up(device_x, layer, batch)
        got["gate_up"] = self.got("h", n)
        cuda.down(device_x, self.put("h", h), layer, batch)
        return got | {"down": self.got("x", n)}

    def attended(self, n: int) -> list[Array]:
        """Attention of n tokens as a prompt, then of one, then of four; and what is in the pages then."""
        qkv, pools = self.qkv_noise(n + 5), (self.cuda._keys[0], self.cuda._values[0])
        with self.cuda._stream:
            for pool in pools:  # others have been here
                pool.set(np.zeros(pool.shape, np.uint16))
        prompt = self.attend([span(1, 0, n, True)], qkv[:n])
        token = self.attend([span(1, n, 1, False)], qkv[n : n + 1])
        some = self.attend([span(1, n + 1, 4, False)], qkv[n + 1 :])
        kept = [unpacked(pool.get()) for pool in pools]
        return [np.concatenate([prompt, token, some]), *kept]

    def pick(self, raw: Array, contexts: Sequence[Context]) -> list[Choice]:
        """CudaOps.pick for rows of logits, each a span of its own."""
        spans = [Span(slot, [0], [0], 0, 1) for slot in range(len(raw))]
        with self.cuda._stream:
            host, batch = self.cuda._upload_step(spans, contexts)
            self.put("best", np.array([best(row) for row in raw], np.uint64))
            self.cuda.pick(self.put("raw", raw), batch)
            host.contexts = contexts
            self.cuda._download_choices(host, len(raw))
        return self.cuda.read(host)

    def run_every_kernel(self, n_prompt: int = 66) -> None:
        """Decode far behind the prompt, after zeros: attention goes over several splits of the keys."""
        for pool in (self.cuda._keys[0], self.cuda._values[0]):
            pool.set(np.zeros(pool.shape, np.uint16))
        prompt = Span(0, PAGES, [1] * n_prompt, 0, 1)
        drafts = Span(1, [3, 4, 5], [5, 6, 7], 0, 3)
        penalised = Sampling(top_k=5, top_p=0.9, presence_penalty=1.0, logit_bias={3: 1.0}, n_top_logprobs=2)
        mask = np.arange(33) % 2 == 0
        contexts = [Context(penalised, [1, 2], [3], mask)] * 4
        first = self.cuda.read(self.cuda.launch([prompt, drafts], contexts))
        assert len(first) == 1 + 3
        output = [first[0].token_id]
        for i in range(3):
            chained = Span(0, PAGES, None, 140 + i, 1)
            step = self.cuda.launch([chained], [Context(penalised, [1], output, None, 1 + i)])
            assert all(0 <= choice.token_id < 33 for choice in self.cuda.read(step))
        all_rows = len(self.cuda._buffers["x"])  # to the end of the buffers
        self.cuda.qkv(self.cuda._buffers["x"], self.device_layer, self.batch(all_rows))
        self.got("qkv", all_rows)
        several = [Span(slot, [8 + slot], [1] * 6, 0, 0) for slot in range(3)]
        for spans, self.cuda.enough_blocks in ((several, 2), (several[:2], 1), (several, 1)):
            self.cuda.read(self.cuda.launch(spans, []))  # SOME_ROWS, FEW_ROWS, SOME_WIDE


@lru_cache(maxsize=2)  # of the models below a large one takes some 60 MB
def both(
    name: str, order: int, check: bool = False, ops: type[CudaOps] = CudaOps, enough_blocks: int = 64
) -> Both:
    return Both((CONFIGS | MIXTURES | OTHERS)[name], order, check, ops, enough_blocks)


def near(got: Array, expected: Array, tolerance: float = 4e-3) -> bool:
    """By rows: as far as the rounding of factors carries."""
    distance = np.linalg.norm(got - expected, axis=-1)
    return bool((distance <= tolerance * np.linalg.norm(expected, axis=-1) + 1e-6).all())


def difference(got: Any, right: Any, share: float = 0.02) -> str:
    """Return the first number that is not right, and how many are not."""
    apart = ~np.isclose(got, right, rtol=share, atol=share * np.abs(right).mean())
    for row, column in np.argwhere(apart)[:1].tolist():
        numbers = f"{got[row][column]:.7g}, not {right[row][column]:.7g}"
        return f"row {row}, column {column}: {numbers}; of {apart.size} numbers {apart.sum()} differ"
    return "no difference"


def spans_of(n_rows: int) -> Batch:
    return Batch([Span(0, range(16), [0] * n_rows, 0, 0)])


def nearly_the_same(got: Array, expected: Array, share: float = 0.02) -> bool:
    """Numbers that were rounded: within a step of bfloat16, and nearly all of them equal."""
    return near(got, expected, 2**-8) and float((got != expected).mean()) <= share


def attended_alike(fast: list[Array], plain: list[Array]) -> bool:
    """To up to 32 keys, to more of them; and what was kept."""
    kept = all(nearly_the_same(*pools, 1e-3) for pools in zip(fast[1:], plain[1:], strict=True))
    return kept and nearly_the_same(fast[0][:32], plain[0][:32]) and near(fast[0], plain[0], 5e-3)
