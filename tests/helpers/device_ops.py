"""One layer of a model, op by op: on a device, in NumPy, and what the two are compared by.

    config --both()--> Both: the same random weights for CudaOps (or PlainOps) and for NumpyOps

Used by tests/devices on the emulator, and by tests/gpu on a GPU.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from checkpoint.config import Config, Experts
from checkpoint.rope import Rope
from checkpoint.weights import Layer, Mxfp4, Weights, bfloat16, decoded_mxfp4
from devices.cuda import CudaOps
from devices.steps import DeviceStep
from helpers.emulator import Emulator
from model import Array, Batch, NumpyOps, Span
from sampling import Choice, Context, Sampling

MAX_SEQ_LEN = 400


def sweep(values: Iterable[Any], first: Collection[Any]) -> list[Any]:
    """The values to parametrize a test with. Those that are not among the first are left to `make check`.

    What costs the most is that g++ compiles each shape of each model: the first ones are those of which each
    takes a way through the kernels that no other takes.
    """
    missing = [value for value in first if value not in values]
    assert not missing, missing
    return [value if value in first else _left_to_the_sweep(value) for value in values]


def _left_to_the_sweep(value: Any) -> Any:
    arguments = value if isinstance(value, tuple) else (value,)
    return pytest.param(*arguments, marks=pytest.mark.sweep)


def config(**changes: Any) -> Config:
    values: dict[str, Any] = {
        "model_type": "qwen3",
        "dim": 1000,
        "n_layers": 1,
        "n_heads": 6,
        "n_kv_heads": 2,
        "head_dim": 20,
        "hidden_dim": 264,
        "vocab_size": 1001,
        "max_seq_len": MAX_SEQ_LEN,
        "norm_eps": 1e-5,
        "rope": Rope(10_000.0),
        "windows": (None,),
        "rotary": (True,),
        "tied": False,
        "qkv_bias": True,
        "o_bias": True,
        "mlp_bias": True,
        "qk_norm": True,
        "eos_token_ids": (),
        "generation": {},
    }
    return Config(**values | changes)


# fmt: off
CONFIGS = {
    "grouped":    config(),
    "plain":      config(qkv_bias=False, o_bias=False, mlp_bias=False, qk_norm=False, rotary=(False,)),
    "window":     config(windows=(37,), qk_norm=False),
    "sinks":      config(windows=(37,), qk_norm=False, sinks=True),
    "many-heads": config(dim=40, hidden_dim=8, n_heads=18, n_kv_heads=1, head_dim=4, vocab_size=33),
    "large-head": config(dim=40, hidden_dim=8, n_heads=2, n_kv_heads=2, head_dim=136, vocab_size=33),
    # sizes of SmolLM2-135M and Qwen2.5-0.5B
    "uneven":     config(dim=576, hidden_dim=4864, n_heads=14, head_dim=64, vocab_size=896, mlp_bias=False),
}
LONG = config(dim=1288, hidden_dim=8, n_heads=2, n_kv_heads=1, head_dim=4, vocab_size=33)
MIXTURES = {
    "mxfp4": config(
        model_type="gpt_oss", dim=320, n_heads=2, n_kv_heads=1, head_dim=4, vocab_size=33, sinks=True,
        experts=Experts(11, 3, 64, (True,), normalised=True, has_biases=True, limit=1.5, alpha=1.702,
                        mxfp4=True)),
    "experts": config(
        model_type="qwen3_moe", dim=40, n_heads=2, n_kv_heads=1, head_dim=4, vocab_size=33,
        experts=Experts(37, 5, 24, (True,), normalised=False, has_biases=False, limit=None, alpha=1.0,
                        mxfp4=False)),
}
MANY_TOKENS = config(dim=8, hidden_dim=8, n_heads=2, n_kv_heads=1, head_dim=4, vocab_size=70_001)
# fmt: on


def random_mlp(cp: Any, c: Config, i: int, array: Callable[..., Any]) -> dict[str, Any]:
    """The MLP of layer i, or its experts."""

    def mxfp4(n: int, n_out: int, n_in: int) -> Mxfp4:
        blocks = array(n, n_out, n_in // 4).view(np.uint8).reshape(n, n_out, n_in // 32, 16)
        scales = cp.empty((n, n_out, n_in // 32), np.uint8)
        scales[...] = 121  # a number is some 2 * 2^-6
        return Mxfp4(blocks, scales)

    experts = c.experts
    if experts is None or not experts.layers[i]:
        return {
            "w_gate_up": array(2 * c.hidden_dim, c.dim),
            "w_down": array(c.dim, c.hidden_dim),
            "b_gate_up": array(2 * c.hidden_dim) if c.mlp_bias else None,
            "b_down": array(c.dim) if c.mlp_bias else None,
        }
    matrices = mxfp4 if experts.mxfp4 else array
    return {
        "router": array(experts.n, c.dim),
        "b_router": array(experts.n) if experts.has_biases else None,
        "w_gate_up": matrices(experts.n, 2 * experts.hidden_dim, c.dim),
        "w_down": matrices(experts.n, c.dim, experts.hidden_dim),
        "b_gate_up": array(experts.n, 2 * experts.hidden_dim) if experts.has_biases else None,
        "b_down": array(experts.n, c.dim) if experts.has_biases else None,
    }


def random_weights(cp: Any, config: Config, seed: int = 0) -> Weights:
    """Weights of any size, made on the device in seconds: for measuring. Random, for zeros are faster."""
    n = 1 << 22
    noise = np.random.default_rng(seed).standard_normal(n, np.float32)
    blocks: dict[float, Any] = {}

    def array(*shape: int) -> Any:
        scale = shape[-1] ** -0.5 if len(shape) > 1 else 1.0
        if scale not in blocks:
            blocks[scale] = cp.asarray(bfloat16(noise * np.float32(scale)))
        flat = cp.empty(int(np.prod(shape)), np.uint16)
        for begin in range(0, len(flat), n - 8):  # the next block begins with other numbers
            m = min(n - 8, len(flat) - begin)
            flat[begin : begin + m] = blocks[scale][:m]
        return flat.reshape(shape)

    def ones(n: int) -> Any:
        return cp.asarray(bfloat16(np.ones(n, np.float32)))

    c = config
    n_q, n_qkv = c.n_heads * c.head_dim, (c.n_heads + 2 * c.n_kv_heads) * c.head_dim

    layers = [
        Layer(
            attn_norm=ones(c.dim),
            wqkv=array(n_qkv, c.dim),
            wo=array(c.dim, n_q),
            mlp_norm=ones(c.dim),
            bqkv=array(n_qkv) if c.qkv_bias else None,
            bo=array(c.dim) if c.o_bias else None,
            q_norm=ones(c.head_dim) if c.qk_norm else None,
            k_norm=ones(c.head_dim) if c.qk_norm else None,
            sinks=array(c.n_heads) if c.sinks else None,
            **random_mlp(cp, c, i, array),
        )
        for i in range(c.n_layers)
    ]
    embed = array(c.vocab_size, c.dim)
    head = embed if c.tied else array(c.vocab_size, c.dim)
    cp.cuda.get_current_stream().synchronize()  # they will be read on another one
    return Weights(embed, layers, ones(c.dim), head)


def widened(array: Any) -> Any:
    """bfloat16, seen as uint16, as float32."""
    return (array.astype(np.uint32) << 16).view(np.float32)


def rounded(array: Array) -> Array:
    return widened(bfloat16(array))  # type: ignore[no-any-return]


class Both:
    """The same model for the two ops."""

    def __init__(self, c: Config, order: int, check: bool, ops: type[CudaOps], enough_blocks: int) -> None:
        rng = np.random.default_rng(1)
        cp = Emulator(order, check)
        device = random_weights(cp, c)
        on_host: dict[int, Array] = {}

        def host(array: Any) -> Any:
            if array is None:
                return None
            if isinstance(array, Mxfp4):
                blocks, scales = (part.get() for part in array)  # type: ignore[attr-defined]
                return decoded_mxfp4(Mxfp4(blocks, scales))
            if id(array) not in on_host:
                values = widened(array.get())
                if values.ndim == 1:  # no bias is 0, no norm weight 1
                    values = rounded(rng.uniform(0.5, 1.5, len(values)).astype(np.float32))
                    array.set(bfloat16(values))
                on_host[id(array)] = values
            return on_host[id(array)]

        layers = [Layer(**{name: host(a) for name, a in vars(layer).items()}) for layer in device.layers]
        self.weights = Weights(host(device.embed), layers, host(device.norm), host(device.head))
        self.config = c
        self.cuda = ops(c, device, MAX_SEQ_LEN, n_pages=16, max_batch=4, cp=cp)
        self.cuda.enough_blocks = enough_blocks
        self.numpy = NumpyOps(c, self.weights, MAX_SEQ_LEN, n_pages=16, max_batch=4)
        self.layer, self.device_layer = self.weights.layers[0], self.cuda.weights.layers[0]

    def batch(self, n_rows: int, wanted: Sequence[int] = ()) -> Any:
        """A batch of rows for the ops that look at no page."""
        views = {"wanted": self.cuda._cp.asarray(np.array(wanted, np.int32))}
        return DeviceStep(views, ([], []), n_rows, len(wanted), 0, 0, 1, False, False)

    def put(self, name: str, values: Array) -> Any:
        """Values in the first rows of a buffer."""
        buffer = self.cuda._buffers[name]
        host = buffer.get()
        host[: len(values)] = bfloat16(values) if buffer.dtype == np.uint16 else values
        buffer.set(host)
        return buffer

    def got(self, name: str, n_rows: int) -> Array:
        values = self.cuda._buffers[name].get()[:n_rows]
        return widened(values) if values.dtype == np.uint16 else values  # type: ignore[no-any-return]


@lru_cache(maxsize=2)  # of the models below a large one takes some 60 MB
def both(
    name: str, order: int, check: bool = False, ops: type[CudaOps] = CudaOps, enough_blocks: int = 64
) -> Both:
    return Both(
        (CONFIGS | MIXTURES | {"long": LONG, "many-tokens": MANY_TOKENS})[name],
        order,
        check,
        ops,
        enough_blocks,
    )


def noise(*shape: int) -> Array:
    """Normal, with a channel and a row some hundred times as large as the others."""
    x = np.random.default_rng(shape).standard_normal(shape, np.float32)
    x[:, 5 % shape[1]] *= 300
    x[shape[0] // 2] *= 100
    return x


def near(got: Array, expected: Array, tolerance: float = 4e-3) -> bool:
    """By rows: as far as the rounding of factors carries."""
    distance = np.linalg.norm(got - expected, axis=-1)
    return bool((distance <= tolerance * np.linalg.norm(expected, axis=-1) + 1e-6).all())


def spans_of(n_rows: int) -> Batch:
    """Rows of one prompt."""
    return Batch([Span(0, range(16), [0] * n_rows, 0, 0)])


def best(row: Array) -> int:
    """kernels.cu's rank of the likeliest token: its logit in an order of integers, then what comes first."""
    if not row.max() <= np.finfo(np.float32).max:  # no number, or infinite
        return 2**64 - 1
    bits = int(np.float32(row.max() + np.float32(0)).view(np.uint32))  # -0 becomes 0
    bits = 2**32 - 1 - bits if bits >> 31 else bits | 1 << 31
    return bits << 32 | 2**32 - 1 - int(row.argmax())


PAGES = [9, 2, 14, 0, 7]


def attend(m: Both, spans: list[Span], qkv: Array) -> Array:
    """CudaOps.attend for rows of the spans one after another, (n_rows, n_heads * head_dim)."""
    contexts = [Context(Sampling(), [], [])] * sum(span.n_wanted for span in spans)
    with m.cuda._stream:
        host, batch = m.cuda._upload_step(spans, contexts)
        m.cuda.attend(m.put("qkv", qkv), m.device_layer, 0, batch)
        y = m.got("y", len(qkv))
    host.free.append(host)
    return y


def span(slot: int, start: int, n: int, tile: bool, pages: Sequence[int] = PAGES) -> Span:
    """A chunk of a prompt, which makes a tile, or rows that are all wanted."""
    return Span(slot, pages, [0] * n, start, 0 if tile else n)


def qkv_noise(m: Both, n: int, seed: int = 0) -> Array:
    c = m.config
    return np.random.default_rng(seed).standard_normal(
        (n, (c.n_heads + 2 * c.n_kv_heads) * c.head_dim), np.float32
    )


# fmt: off
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "n_top_logprobs": 5},
    {},
    {"n_top_logprobs": 0},
    {"n_top_logprobs": 20},
    {"temperature": 0.1},
    {"temperature": 1e-30},
    {"temperature": 2.0},
    {"top_k": 1}, {"top_k": 7}, {"top_k": 1000}, {"top_k": 5000},
    {"top_p": 0.0}, {"top_p": 0.5}, {"top_p": 0.9}, {"top_p": 0.999},
    {"min_p": 0.1}, {"min_p": 1.0},
    {"temperature": 0.7, "top_k": 50, "top_p": 0.8, "min_p": 0.01},
    {"presence_penalty": 1.5}, {"frequency_penalty": 0.7}, {"repetition_penalty": 1.3},
    {"temperature": 0.0, "presence_penalty": -2.0, "frequency_penalty": 1.1, "repetition_penalty": 0.8},
    {"logit_bias": {7: 100.0, 8: -100.0}}, {"temperature": 0.0, "logit_bias": {1000: 50.0}},
]
# fmt: on


def pick(m: Both, raw: Array, contexts: Sequence[Context], slot: int = 2) -> list[Choice]:
    """CudaOps.pick for rows of logits, each a span of its own."""
    picked: list[Choice] = []
    for row, context in zip(raw, contexts, strict=True):
        with m.cuda._stream:
            host, batch = m.cuda._upload_step([Span(slot, [0], [0], 0, 1)], [context])
            m.put("best", np.array([best(row)], np.uint64))
            m.cuda.pick(m.put("raw", row[None]), batch)
            host.expected = batch.expected
            m.cuda._download_choices(host, 1)
        [[choice]] = m.cuda.read(host)
        picked.append(choice)
    return picked


def same(got: Choice, expected: Choice) -> bool:
    if got.logprob is None or expected.logprob is None:
        return got == expected
    logprobs = [
        (got.logprob, expected.logprob),
        *zip([p for _, p in got.top], [p for _, p in expected.top], strict=True),
    ]
    ids = [i for i, _ in got.top] == [i for i, _ in expected.top]
    return ids and got.token_id == expected.token_id and all(abs(a - b) < 1e-4 for a, b in logprobs)


def run_every_kernel(m: Both, n_prompt: int = 140) -> None:
    prompt = Span(0, PAGES, [1] * n_prompt, 0, 1)
    drafts = Span(1, [3, 4, 5], [5, 6, 7], 0, 3)
    penalised = Sampling(top_k=5, top_p=0.9, presence_penalty=1.0, logit_bias={3: 1.0}, n_top_logprobs=2)
    mask = np.arange(33) % 2 == 0
    contexts = [Context(penalised, [1, 2], [3], mask)] * 4
    first = m.cuda.read(m.cuda.launch([prompt, drafts], contexts))
    assert [len(choices) for choices in first] == [1, 3]
    output = [first[0][0].token_id]
    steps = [
        m.cuda.launch(
            [Span(0, PAGES, None, n_prompt + i, 1)],
            [Context(penalised, [1], output, None, 1 + i)],
        )
        for i in range(3)
    ]
    assert all(0 <= choice.token_id < 33 for step in steps for [choice] in m.cuda.read(step))
    all_rows = len(m.cuda._buffers["x"])  # to the end of the buffers
    m.cuda.qkv(m.cuda._buffers["x"], m.device_layer, m.batch(all_rows))
    m.got("qkv", all_rows)
    several = [Span(slot, [8 + slot], [1] * 6, 0, 0) for slot in range(3)]
    m.cuda.read(m.cuda.launch(several[:2], []))  # FEW_ROWS
    m.cuda.read(m.cuda.launch(several, []))  # SOME_WIDE
    m.cuda.enough_blocks = 2
    m.cuda.read(m.cuda.launch(several, []))  # SOME_ROWS
    m.cuda.enough_blocks = 1


STEP = 2**-8  # of bfloat16: from a number to the next one, at most


def nearly_the_same(got: Array, expected: Array, share: float = 0.02) -> bool:
    """Numbers that were rounded: within a step, and nearly all of them equal."""
    return near(got, expected, STEP) and float((got != expected).mean()) <= share


def products(m: Both, n: int) -> dict[str, Array]:
    """What each product makes of the same n rows."""
    c, batch = m.config, m.batch(n, wanted(n))
    m.cuda.qkv(m.put("x", noise(n, c.dim)), m.device_layer, batch)
    m.cuda.gate_up(m.cuda._buffers["x"], m.device_layer, batch)
    m.cuda.logits(m.cuda._buffers["x"], m.cuda.weights, batch)
    got = {"qkv": m.got("qkv", n), "gate_up": m.got("h", n), "logits": m.got("raw", len(wanted(n)))}
    m.cuda.out(m.cuda._buffers["x"], m.put("y", noise(n, c.n_heads * c.head_dim)), m.device_layer, batch)
    got["out"] = m.got("x", n)
    m.cuda.down(m.put("x", noise(n, c.dim)), m.put("h", noise(n, c.hidden_dim)), m.device_layer, batch)
    return got | {"down": m.got("x", n)}


def wanted(n: int) -> list[int]:
    return [n - 1, 0, n // 2]


def attended(m: Both, n: int) -> list[Array]:
    """Attention of n tokens as a prompt, then of one, then of four; and what is in the pages then."""
    qkv, pools = qkv_noise(m, n + 5), (m.cuda._keys[0], m.cuda._values[0])
    with m.cuda._stream:
        for pool in pools:  # others have been here
            pool.set(np.zeros(pool.shape, np.uint16))
    prompt = attend(m, [span(1, 0, n, True)], qkv[:n])
    token = attend(m, [span(1, n, 1, False)], qkv[n : n + 1])
    some = attend(m, [span(1, n + 1, 4, False)], qkv[n + 1 :])
    kept = [widened(pool.get()) for pool in pools]
    return [np.concatenate([prompt, token, some]), *kept]


def attended_alike(fast: list[Array], plain: list[Array]) -> bool:
    """To up to 32 keys, to more of them; and what was kept."""
    kept = all(nearly_the_same(*pools, 1e-3) for pools in zip(fast[1:], plain[1:], strict=True))
    return kept and nearly_the_same(fast[0][:32], plain[0][:32]) and near(fast[0], plain[0], 5e-3)


SIZES = "dim", "hidden_dim", "n_heads", "n_kv_heads", "head_dim", "vocab_size"
# fmt: off
MODELS = {
    name: config(**dict(zip(SIZES, sizes, strict=True)))
    for name, sizes in {
        "Qwen3-0.6B":   (1024,  3072, 16, 8, 128, 151936),
        "Qwen2.5-0.5B": ( 896,  4864, 14, 2,  64, 151936),
        "SmolLM2-135M": ( 576,  1536,  9, 3,  64,  49152),
        "Llama-3-8B":   (4096, 14336, 32, 8, 128, 128256),
    }.items()
} | {
    "Qwen3-30B-A3B": config(
        model_type="qwen3_moe", dim=2048, hidden_dim=6144, n_heads=32, n_kv_heads=4, head_dim=128,
        vocab_size=151936,
        experts=Experts(128, 8, 768, (True,), normalised=True, has_biases=False, limit=None, alpha=1.702,
                        mxfp4=False)),
    "gpt-oss-20b": config(
        model_type="gpt_oss", dim=2880, hidden_dim=2880, n_heads=64, n_kv_heads=8, head_dim=64,
        vocab_size=201088, windows=(128,), qk_norm=False, sinks=True,
        experts=Experts(32, 4, 2880, (True,), normalised=True, has_biases=True, limit=7.0, alpha=1.702,
                        mxfp4=True)),
}
# fmt: on
