"""How near the memory's limit the engine decodes on a GPU, and others beside it, on the same random weights.

    shape --checkpoint()--> files --CELLS x contenders--> seconds --table()--> tokens/s and % of the floor

Each contender reads the same bfloat16 files, is warm before it is timed, and decodes greedily past any end of
sequence. `transformers` is timed eager, with a static cache and a compiled forward pass, and by its own
continuous batching; `compiled loop` is the shortest decoder that torch.compile makes fast, in the manner of
gpt-fast (https://github.com/meta-pytorch/gpt-fast); llama.cpp is timed by its own `llama-bench`, where that
is on the PATH. Each runs as its documentation says it runs fastest. `plain kernels` is our engine with a
thread for each number: against it one sees what the fast kernels bring.

Rules of this file:
1. The floor of a step is the bytes that it must read (weights once, keys and values of every sequence) over
   the bandwidth that a kernel which only reads reaches here, in the same run.
2. Decoding is the time of n_new tokens less the time of one, so that a prompt's reading never counts.
3. Weights are random and never zeros: a product of zeros is faster.

Not here: whether the answers are right (tests/gpu).
"""

import argparse
import gc
import shutil
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import date
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from benches.common import Prompts, engine_run, write
from engine import Engine
from gpu import CudaOps
from model import PAGE
from plain import PlainOps
from weights import Config, read_config, read_weights

# fmt: off
#  shape            architecture          its config.json, as the model of that name has it
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-0.6b":   ("Qwen3ForCausalLM",  {
        "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151_936, "tie_word_embeddings": True,
        "rope_theta": 1e6, "max_position_embeddings": 40_960}),
    "qwen2.5-0.5b": ("Qwen2ForCausalLM",  {
        "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
        "intermediate_size": 4864, "vocab_size": 151_936, "tie_word_embeddings": True,
        "rope_theta": 1e6, "max_position_embeddings": 32_768}),
    "smollm2-135m": ("LlamaForCausalLM",  {
        "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "intermediate_size": 1536, "vocab_size": 49_152, "tie_word_embeddings": True,
        "rope_theta": 1e5, "max_position_embeddings": 8192}),
    "llama-3-8b":   ("LlamaForCausalLM",  {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 14_336, "vocab_size": 128_256, "tie_word_embeddings": False,
        "rope_theta": 5e5, "max_position_embeddings": 8192}),
}
# fmt: on


class Cell(NamedTuple):
    """What is timed: sequences side by side, tokens of each prompt, tokens to decode; 1: until the first."""

    batch: int
    n_prompt: int
    n_new: int


DECODE = [Cell(batch, context, 128) for context in (256, 4096) for batch in (1, 4, 16, 64)]
FIRST = [Cell(1, n_prompt, 1) for n_prompt in (128, 512, 2048)]
ONE_SEQUENCE = [cell for cell in DECODE if cell.batch == 1]
SHORT = [Cell(1, 256, 128)]
WARM_UPS, ROUNDS = 1, 3

Run = Callable[[Prompts, int], None]  # (prompts, tokens to say after each): back when they are said
Found = dict[tuple[str, Cell], float]  # median seconds


class Contender(NamedTuple):
    """Somebody who can decode, and the cells that are worth the minutes it takes to compile for them."""

    start: Callable[[Path], Callable[[Cell], Run]]  # reads the files once; a cell is a cell's own
    cells: list[Cell]


# --- ours ---------------------------------------------------------------------------------------------------


class PlainForward(PlainOps):
    """The forward pass by plain kernels; one thread that goes through the vocabulary would hide it."""

    pick = CudaOps.pick


def engine(directory: Path, ops: type[CudaOps] = CudaOps) -> Callable[[Cell], Run]:
    """Engine.generate, as the server calls it, all around the model included."""
    config = read_config(directory)
    max_batch, length = max(cell.batch for cell in DECODE), max(sum(cell[1:]) for cell in DECODE) + 1
    n_pages = max_batch * -(-length // PAGE)
    weights = read_weights(directory, config, CudaOps.pack)
    ours = Engine(ops(config, weights, length, n_pages, max_batch))
    run = engine_run(ours)

    def timed_run(prompts: Prompts, n_new: int) -> None:
        run(prompts, n_new)

    weakref.finalize(timed_run, ours.close)  # its thread would keep the card's memory from the others
    return lambda cell: timed_run


# --- transformers -------------------------------------------------------------------------------------------


def model_of(directory: Path) -> Any:
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    return model.to(device()).eval()


def device() -> str:
    """The GPU; a dry run on a machine without one takes the processor."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def generated(directory: Path, **settings: Any) -> Callable[[Cell], Run]:
    """model.generate, greedy, for exactly so many tokens."""
    import torch

    model = model_of(directory)

    def run(prompts: Prompts, n_new: int) -> None:
        token_ids = torch.tensor(prompts, device=model.device)
        with torch.inference_mode():
            model.generate(
                token_ids,
                attention_mask=torch.ones_like(token_ids),
                do_sample=False,
                min_new_tokens=n_new,
                max_new_tokens=n_new,
                pad_token_id=0,
                **settings,
            )
        synchronize()

    return lambda cell: run


def continuous(directory: Path) -> Callable[[Cell], Run]:
    """generate_batch: pages, CUDA graphs and a scheduler, as transformers 5 has them."""
    import transformers

    model = model_of(directory)

    def run(prompts: Prompts, n_new: int) -> None:
        settings = transformers.GenerationConfig(
            max_new_tokens=n_new, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        done = model.generate_batch(prompts, generation_config=settings, persistent_manager=True)
        lengths = [len(result.generated_tokens) for result in done.values()]
        if lengths != [n_new] * len(prompts):  # it reports failures in its log alone
            raise RuntimeError(f"expected {n_new} tokens for each of {len(prompts)} prompts, got {lengths}")
        synchronize()

    def start(cell: Cell) -> Run:
        model.destroy_cached_continuous_batching_manager()  # it is sized for what it is first asked
        return run

    return start


def synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


# --- a compiled loop ----------------------------------------------------------------------------------------


def compiled_loop(directory: Path) -> Callable[[Cell], Run]:
    """Static keys and values, one compiled step, CUDA graphs by torch.compile; prompts in one pass."""
    import torch

    torch.set_float32_matmul_precision("high")
    model, config = model_of(directory), read_config(directory)

    def start(cell: Cell) -> Run:
        decoder = compiled_decoder(model, config, cell)
        step = torch.compile(decoder, mode="reduce-overhead", fullgraph=True)

        def run(prompts: Prompts, n_new: int) -> None:
            n_prompt = len(prompts[0])
            with torch.inference_mode():
                token_ids = torch.tensor(prompts, device=device())
                token_ids = decoder(token_ids, torch.arange(n_prompt, device=device()))
                position = torch.tensor([n_prompt], device=device())
                for _ in range(n_new - 1):
                    token_ids = step(token_ids.clone(), position)
                    position += 1
            synchronize()

        return run

    return start


def compiled_decoder(causal: Any, config: Config, cell: Cell) -> Any:
    """The forward pass in torch, over the model's own modules: (batch, n) token ids to (batch, 1)."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention, silu

    model, head = causal.model, causal.lm_head  # a tied head is the embedding already
    length = -(-(cell.n_prompt + cell.n_new) // 64) * 64  # masks are read by whole vectors
    room = (cell.batch, config.n_kv_heads, length, config.head_dim)
    kept = [(zeros(room), zeros(room)) for _ in range(config.n_layers)]
    visible = torch.ones(length, length, dtype=torch.bool, device=device()).tril()
    for tensor in (visible, *(tensor for pair in kept for tensor in pair)):
        torch._dynamo.mark_static_address(tensor)  # what a step changes may be in a CUDA graph only then

    def rotated(x: Any, cos: Any, sin: Any) -> Any:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    def attended(q: Any, keys: Any, values: Any, mask: Any) -> Any:
        if q.shape[2] > 1:
            return scaled_dot_product_attention(q, keys, values, mask, enable_gqa=True)
        q = q.unflatten(1, (config.n_kv_heads, -1)).squeeze(3)  # one token: heads as queries, keys read once
        return scaled_dot_product_attention(q, keys, values, mask).flatten(1, 2).unsqueeze(2)

    def decoder(token_ids: Any, positions: Any) -> Any:
        x = model.embed_tokens(token_ids)
        cos, sin = (t[:, None] for t in model.rotary_emb(x, positions[None]))
        for layer, (keys, values) in zip(model.layers, kept, strict=True):
            a, normed = layer.self_attn, layer.input_layernorm(x)
            q, k, v = (
                p(normed).unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
                for p in (a.q_proj, a.k_proj, a.v_proj)
            )
            if config.qk_norm:
                q, k = a.q_norm(q), a.k_norm(k)
            keys[:, :, positions] = rotated(k, cos, sin)
            values[:, :, positions] = v
            y = attended(rotated(q, cos, sin), keys, values, visible[positions])
            x = x + a.o_proj(y.transpose(1, 2).flatten(2))
            m, normed = layer.mlp, layer.post_attention_layernorm(x)
            x = x + m.down_proj(silu(m.gate_proj(normed)) * m.up_proj(normed))
        return head(model.norm(x[:, -1:])).argmax(-1)

    return decoder


def zeros(shape: Sequence[int]) -> Any:
    import torch

    return torch.zeros(shape, dtype=torch.bfloat16, device=device())


# fmt: off
CONTENDERS = {
    #                                    start                                                cells
    "engine":                  Contender(engine,                                              DECODE + FIRST),
    "plain kernels":           Contender(partial(engine, ops=PlainForward),                   SHORT),
    "transformers eager":      Contender(generated,                                           DECODE + FIRST),
    "transformers compiled":   Contender(partial(generated, cache_implementation="static"),   ONE_SEQUENCE),
    "transformers continuous": Contender(continuous,                                          DECODE),
    "compiled loop":           Contender(compiled_loop,                                       ONE_SEQUENCE),
}
# fmt: on


# --- the floor ----------------------------------------------------------------------------------------------

READ = r"""
extern "C" __global__ void read_all(const uint4* x, size_t n, unsigned* out) {
  unsigned seen = 0;
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
    uint4 v = x[i];
    seen ^= v.x ^ v.y ^ v.z ^ v.w;
  }
  if (seen == 0x9e3779b9u) *out = seen;  // never, as good as; without it nothing would be read
}
"""


def read_bandwidth(n_bytes: int = 4 * 2**30) -> float:
    """Bytes a second of a kernel that only reads: the limit of decoding on this card."""
    import cupy

    x = cupy.arange(n_bytes // 4, dtype=cupy.uint32) * cupy.uint32(2_654_435_761)  # no two alike
    out, kernel = cupy.zeros(1, cupy.uint32), cupy.RawKernel(READ, "read_all")
    n_blocks = 8 * cupy.cuda.Device().attributes["MultiProcessorCount"]
    times = []
    for _ in range(WARM_UPS + 10):
        began, ended = cupy.cuda.Event(), cupy.cuda.Event()
        began.record()
        kernel((n_blocks,), (512,), (x, cupy.uint64(n_bytes // 16), out))
        ended.record()
        ended.synchronize()
        times.append(cupy.cuda.get_elapsed_time(began, ended) / 1e3)
    return n_bytes / float(median(times[WARM_UPS:]))


def step_bytes(config: Config, cell: Cell) -> int:
    """What a decoding step reads at least, in bfloat16: every weight, of the embedding only the head; all
    keys and values, at the middle of the run.
    """
    embedding = 0 if config.tied else config.vocab_size * config.dim
    kept = 2 * config.n_layers * config.n_kv_heads * config.head_dim * (cell.n_prompt + cell.n_new // 2)
    return 2 * (config.n_params - embedding + cell.batch * kept)


# --- measuring ----------------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> None:
    """The table for one shape."""
    bandwidth, deadline = read_bandwidth(), time.monotonic() + 60 * args.minutes
    with TemporaryDirectory() as folder:
        directory = checkpoint(args.shape, Path(folder))
        config, found = read_config(directory), Found()
        for name in CONTENDERS:
            measure(name, directory, config.vocab_size, found, deadline)
    lines = [*setting(args.shape, bandwidth), "", *decode_table(config, found, bandwidth), ""]
    write([*lines, *first_table(found), "", *llama_bench(args.gguf), ""], args.out)


def measure(name: str, directory: Path, vocab_size: int, found: Found, deadline: float) -> None:
    """Time one contender in its cells; what it cannot do is said, and is a gap in the table."""
    start, cells = CONTENDERS[name]
    try:
        at = start(directory)
    except Exception as error:
        print(f"{name:24} {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)
        return
    for cell in cells:
        if time.monotonic() > deadline and name != "engine":
            print(f"out of time: {name} {cell} was not run", file=sys.stderr)
            continue
        try:
            found[name, cell] = seconds(at(cell), cell, vocab_size)
            rate = cell.batch * max(cell.n_new - 1, 1) / found[name, cell]
            print(f"{name:24} {cell}  {rate:10.1f} tok/s", file=sys.stderr)
        except Exception as error:
            print(f"{name:24} {cell}  {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)
            release()
    del at, start  # or it would keep the card's memory
    release()


def seconds(run: Run, cell: Cell, vocab_size: int) -> float:
    """Of decoding, or until the first token."""
    if cell.n_new == 1:  # a prompt that has been read before would come out of a prefix cache
        return timed(run, lambda: random_prompts(cell, vocab_size), 1)
    prompts = random_prompts(cell, vocab_size)
    return timed(run, lambda: prompts, cell.n_new) - timed(run, lambda: prompts, 1)


def timed(run: Run, prompts: Callable[[], Prompts], n_new: int) -> float:
    """Median seconds of a run, warm."""
    times = []
    for _ in range(WARM_UPS + ROUNDS):
        given, started = prompts(), time.perf_counter()
        run(given, n_new)
        times.append(time.perf_counter() - started)
    return median(times[WARM_UPS:])


def release() -> None:
    """Give the memory of the last contender back to the card."""
    gc.collect()
    with suppress(ImportError):
        import torch

        torch.compiler.reset()
        torch.cuda.empty_cache()
    with suppress(ImportError):
        import cupy

        cupy.get_default_memory_pool().free_all_blocks()


def checkpoint(shape: str, folder: Path) -> Path:
    """Random weights of a real shape, as files that all contenders read."""
    import torch
    import transformers

    architecture, fields = SHAPES[shape]
    cls = getattr(transformers, architecture)
    torch.manual_seed(0)
    with torch.device(device()):
        model = cls(cls.config_class(**fields)).to(torch.bfloat16)
    model.save_pretrained(folder)
    del model
    release()
    return folder


def random_prompts(cell: Cell, vocab_size: int) -> Prompts:
    import numpy as np

    rng = np.random.default_rng()
    return [[int(i) for i in rng.integers(0, vocab_size, cell.n_prompt)] for _ in range(cell.batch)]


def llama_bench(gguf: Path | None) -> list[str]:
    """What llama.cpp says of itself, on a GGUF file of the same shape."""
    program = shutil.which("llama-bench")
    if not program or not gguf:
        return ["llama.cpp was not run: it needs `llama-bench` on the PATH and --gguf FILE."]
    command = [program, "-m", str(gguf), "-ngl", "99", "-p", "512", "-n", "128", "-o", "md"]
    return ["llama.cpp, by its own llama-bench:", "", subprocess.check_output(command, text=True).strip()]


# --- the report ---------------------------------------------------------------------------------------------


def setting(shape: str, bandwidth: float) -> Iterator[str]:
    import cupy

    card = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    yield f"{date.today()}, {card}, random weights of the shape of {shape} in bfloat16, greedy,"
    yield f"a kernel that only reads reaches {bandwidth / 1e9:.0f} GB/s,"
    versions = []
    for name in ("cupy-cuda13x", "cupy-cuda12x", "torch", "transformers"):
        with suppress(PackageNotFoundError):
            versions.append(f"{name} {version(name)}")
    yield ", ".join(versions) + "."


def decode_table(config: Config, found: Found, bandwidth: float) -> Iterator[str]:
    """tokens/s of all sequences together; the engine's share of the floor; how many times the best peer."""
    others = [name for name in CONTENDERS if name != "engine"]
    yield (
        "| batch, context | floor, tokens/s | engine | % of floor | "
        + " | ".join(others)
        + " | engine / best |"
    )
    yield "|---" * (len(others) + 5) + "|"
    for cell in DECODE:
        rates = {
            name: cell.batch * (cell.n_new - 1) / found[name, cell]
            for name in CONTENDERS
            if (name, cell) in found
        }
        floor = cell.batch * bandwidth / step_bytes(config, cell)
        best = max((rates[name] for name in rates.keys() - {"engine", "plain kernels"}), default=None)
        ours = rates.get("engine")
        cells = [
            f"{cell.batch}, {cell.n_prompt}",
            f"{floor:.0f}",
            shown(ours),
            shown(ours and 100 * ours / floor),
            *(shown(rates.get(name)) for name in others),
            f"{ours / best:.2f}" if ours and best else "–",
        ]
        yield "| " + " | ".join(cells) + " |"


def first_table(found: Found) -> Iterator[str]:
    """Milliseconds to the first token."""
    yield "| ms to the first token | engine | transformers eager |"
    yield "|---|---|---|"
    for cell in FIRST:
        times = [found.get((name, cell)) for name in ("engine", "transformers eager")]
        yield f"| prompt of {cell.n_prompt} | " + " | ".join(shown(t and 1e3 * t) for t in times) + " |"


def shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def options(add: argparse.ArgumentParser) -> None:
    add.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b", help="default: qwen3-0.6b")
    add.add_argument(
        "--minutes", type=float, default=9, help="begin nothing of others after these (default: 9)"
    )
    add.add_argument("--gguf", type=Path, metavar="FILE", help="the same shape, for llama.cpp's llama-bench")
