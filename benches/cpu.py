"""Prefill and decoding on the processor, beside others: the same weights, prompts, machine and minutes.

    MEASUREMENTS x contenders --run()--> Speeds --median--> a table in Markdown

The others are transformers in float32 (https://github.com/huggingface/transformers), which
`pip install -e '.[parity]'` brings, llama.cpp (https://github.com/ggml-org/llama.cpp) in the format of
--weights, which `pip install xllamacpp` brings, and NumpyOps where devices/cpu.py serves; one that is missing
is named.

Rules of this file:
1. What is measured is what serves: `engine` is Engine.generate, `forward` is the forward pass and the choice
   of a token alone. All are greedy, and the table says whether they generate the same tokens.
2. What only this engine does (prefix caching, drafts) has a table of its own, beside the same without it.

Not here: how long an HTTP request takes (server.py).
"""

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from importlib.metadata import version
from pathlib import Path
from pydoc_data.topics import topics
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import threadpoolctl

from benches.common import (
    GREEDY,
    MAX_BATCH,
    Prompts,
    Run,
    Speeds,
    cpu_name,
    engine_run,
    model_option,
    prompts,
    repeat_option,
    speeds,
    with_pages,
    write,
)
from checkpoint import hub
from checkpoint.config import Config, read_config, read_json
from checkpoint.weights import Weights, read_weights
from engine import Engine
from model import Batch, NumpyOps, Span, forward
from sampling import Context
from service.loading import cpu_ops, packs
from service.steps import Steps
from tokenizer import Tokenizer


class Measurement(NamedTuple):
    """What to run, and which of the two speeds counts."""

    n_prompt: int
    batch: int
    n_new: int | None  # tokens to generate; None: as --new says
    speed: Callable[[Speeds], float]


# fmt: off
#  tokens/s                         n_prompt  batch  n_new  speed
MEASUREMENTS = {
    "prefill, 128 tokens": Measurement(128,   1,     1,     lambda speeds: speeds.prefill),
    "decode, batch 1":     Measurement(32,    1,     None,  lambda speeds: speeds.decode),
    "decode, batch 8":     Measurement(32,    8,     None,  lambda speeds: speeds.decode),
}
# fmt: on

OURS = ("engine", "forward")

# fmt: off
#  --weights    llama.cpp's format for the same: of the layers, of the embedding, which is the head too
PEERS = {
    "bfloat16": ("F16",  "F16"),
    "int8":     ("Q8_0", "Q8_0"),
    "int4":     ("Q4_1", "Q8_0"),
}
# fmt: on
LLAMA_CPP = "llama.cpp"  # rounds otherwise, so its tokens may be others


def forward_run(ops: NumpyOps) -> Run:
    """The forward pass and the choice of the tokens, one step after another."""

    def run(prompts: Prompts, n_new: int) -> Speeds:
        n_pages = ops.n_pages // len(prompts)  # of each sequence
        outputs: Prompts = [[] for _ in prompts]
        times: list[float] = []
        started = time.perf_counter()
        for n in range(n_new):
            spans: list[Span] = []
            for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
                pages = range(i * n_pages, (i + 1) * n_pages)
                if n == 0:
                    spans.append(Span(i, pages, prompt, 0, 1, is_chunk=True))
                else:
                    spans.append(Span(i, pages, output[-1:], len(prompt) + n - 1, 1, is_chunk=False))
            pairs = zip(prompts, outputs, strict=True)
            contexts = [Context(GREEDY, prompt, output) for prompt, output in pairs]
            for output, [choice] in zip(outputs, ops.read(ops.launch(spans, contexts)), strict=True):
                output.append(choice.token_id)
            times.append(time.perf_counter())
        return speeds(prompts, started, [times] * len(prompts), outputs[0])

    return run


def transformers_run(model: Any, attention: str) -> Run:
    """The same steps with their model and their cache; their `generate` adds checks, and is slower."""
    import torch

    def run(prompts: Prompts, n_new: int) -> Speeds:
        with torch.inference_mode():
            return steps(prompts, n_new)

    def steps(prompts: Prompts, n_new: int) -> Speeds:
        model.set_attn_implementation(attention)
        generated: list[int] = []  # by the first sequence
        times: list[float] = []
        cache = None
        token_ids = torch.tensor(prompts)  # (batch, n_tokens)
        started = time.perf_counter()
        for _ in range(n_new):
            output = model(token_ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = output.past_key_values
            token_ids = output.logits[:, -1:].argmax(-1)
            generated.append(int(token_ids[0, 0]))
            times.append(time.perf_counter())
        return speeds(prompts, started, [times] * len(prompts), generated)

    return run


def transformers_model(directory: Path, n_threads: int) -> Any:
    """Load the same files as a model of transformers, float32; None where it is not installed."""
    try:
        import torch
        import transformers
    except ImportError as error:
        print(f"no comparison ({error}): pip install -e '.[parity]' brings it", file=sys.stderr)
        return None
    torch.set_num_threads(n_threads)
    transformers.utils.logging.disable_progress_bar()
    where: dict[str, Any] = {}
    if (directory / "model.gguf").is_file():
        where["gguf_file"] = "model.gguf"
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **where)


def llama_cpp_run(server: Any, tokenizer: Tokenizer) -> Run:
    """The completions of llama.cpp's server, in this process; a thread feeds each of its slots."""

    def one(prompt: list[int], n_new: int) -> list[tuple[float, str]]:
        pieces: list[tuple[float, str]] = []

        def on_chunk(chunk: Any) -> bool:
            pieces.append((time.perf_counter(), chunk["choices"][0]["text"]))
            return False  # go on

        greedy = {"temperature": 0, "samplers": [], "ignore_eos": True, "cache_prompt": False, "stream": True}
        server.handle_completions({"prompt": prompt, "n_predict": n_new} | greedy, on_chunk)
        return pieces[:n_new]  # the last chunk has no text, but the reason of the end

    def run(prompts: Prompts, n_new: int) -> Speeds:
        started = time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as pool:
            sequences = list(pool.map(lambda prompt: one(prompt, n_new), prompts))
        times = [[t for t, _ in pieces] for pieces in sequences]
        generated = tokenizer.encode("".join(text for _, text in sequences[0]))
        return speeds(prompts, started, times, generated)

    return run


def llama_cpp_server(
    directory: Path, config: Config, gguf: Path, max_seq_len: int, n_threads: int, formats: tuple[str, str]
) -> Any:
    """Serve the same weights with llama.cpp; None where it is missing, or no Llama is served."""
    try:
        import xllamacpp
    except ImportError as error:
        print(f"no comparison ({error}): pip install xllamacpp brings llama.cpp", file=sys.stderr)
        return None
    if config.model_type != "llama":
        print(f"no comparison with llama.cpp: written for llama, not {config.model_type}", file=sys.stderr)
        return None
    tokenizer = read_json(directory / "tokenizer.json")
    write_gguf(gguf, config, read_weights(directory, config), tokenizer, formats)
    params = xllamacpp.CommonParams()
    params.model.path = str(gguf)
    params.n_parallel = max(m.batch for m in MEASUREMENTS.values())
    params.n_ctx = params.n_parallel * max_seq_len
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = n_threads
    params.cache_ram_mib = 0  # no prompt of an earlier round
    params.verbosity = 0
    return xllamacpp.Server(params)


def write_gguf(
    path: Path, c: Config, weights: Weights, tokenizer: dict[str, Any], formats: tuple[str, str]
) -> None:
    """Write a GGUF file, whose rotary pairs are adjacent as ours are.

    https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
    """
    from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quantize

    writer = GGUFWriter(path, "llama")
    writer.add_context_length(c.max_seq_len)
    writer.add_embedding_length(c.dim)
    writer.add_block_count(c.n_layers)
    writer.add_feed_forward_length(c.hidden_dim)
    writer.add_head_count(c.n_heads)
    writer.add_head_count_kv(c.n_kv_heads)
    writer.add_rope_dimension_count(c.head_dim)
    writer.add_rope_freq_base(c.rope.theta)
    writer.add_layer_norm_rms_eps(c.norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    vocabulary = tokenizer["model"]["vocab"]
    special = {token["content"] for token in tokenizer["added_tokens"]}
    writer.add_token_list(sorted(vocabulary, key=lambda token: vocabulary[token]))
    kinds = {token: TokenType.CONTROL if token in special else TokenType.NORMAL for token in vocabulary}
    writer.add_token_types([kinds[token] for token in sorted(vocabulary, key=lambda t: vocabulary[t])])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    tensors = {"token_embd": weights.embed, "output_norm": weights.norm}
    n_q, n_kv = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    for i, layer in enumerate(weights.layers):
        parts = {"attn_norm": layer.attn_norm, "attn_output": layer.wo, "ffn_norm": layer.mlp_norm}
        parts["ffn_down"] = layer.w_down
        parts["ffn_gate"], parts["ffn_up"] = np.split(layer.w_gate_up, 2)
        parts["attn_q"], parts["attn_k"], parts["attn_v"] = np.split(layer.wqkv, [n_q, n_q + n_kv])
        tensors |= {f"blk.{i}.{name}": array for name, array in parts.items()}
    for name, array in tensors.items():
        if array.ndim == 1:
            writer.add_tensor(f"{name}.weight", array)
        else:
            kind = GGMLQuantizationType[formats[name == "token_embd"]]
            writer.add_tensor(f"{name}.weight", quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def run(args: argparse.Namespace) -> None:
    if args.shape:
        from benches import shapes  # needs Numba

        write(shapes.report(args), args.out)
        return
    with threadpoolctl.threadpool_limits(args.threads, user_api="blas"), TemporaryDirectory() as folder:
        write(compare(args, Path(folder)), args.out)


def compare(args: argparse.Namespace, folder: Path) -> list[str]:
    directory = hub.find(args.model)
    config = read_config(directory)
    tokenizer = Tokenizer(directory / "tokenizer.json")
    max_seq_len = min(config.max_seq_len, 256 + args.new)
    ops = cpu_ops()
    weights = read_weights(directory, config, *packs(ops, config, args.weights))
    formats = PEERS[args.weights or "bfloat16"]
    engine = Engine(with_pages(ops, config, weights, max_seq_len))
    forward = forward_run(with_pages(ops, config, weights, max_seq_len))
    contenders = {"engine": engine_run(engine), "forward": forward}
    if ops is not NumpyOps:
        spec = with_pages(NumpyOps, config, read_weights(directory, config), max_seq_len)
        contenders["forward, NumPy"] = forward_run(spec)
    if server := llama_cpp_server(
        directory, config, folder / "made.gguf", max_seq_len, args.threads, formats
    ):
        contenders[f"{LLAMA_CPP} {formats[0]}"] = llama_cpp_run(server, tokenizer)
    if model := transformers_model(directory, args.threads):
        for attention in ("eager", "sdpa"):
            contenders[f"transformers {attention}"] = transformers_run(model, attention)
    results = measure(contenders, tokenizer, args.new, args.repeat)
    engine.close()
    features = feature_table(ops, config, weights, tokenizer, args)
    losses: Iterable[str] = ()
    if args.perplexity:
        losses = perplexity_table(directory, config, tokenizer)
    about = f"{directory.name}, {engine.about}"
    return [*setting(about, args), "", *table(results, list(contenders)), "", *features, "", *losses, ""]


Results = dict[str, dict[str, list[Speeds]]]  # measurement -> contender -> a run a round


def measure(contenders: dict[str, Run], tokenizer: Tokenizer, n_new: int, repeat: int) -> Results:
    """Run everything `repeat` times; a round before the first warms up and does not count."""
    results: Results = {name: {contender: [] for contender in contenders} for name in MEASUREMENTS}
    for number in range(repeat + 1):
        for name, m in MEASUREMENTS.items():
            for contender, run in contenders.items():
                result = run(prompts(tokenizer, m.batch, m.n_prompt, number), m.n_new or n_new)
                if number:
                    results[name][contender].append(result)
                speed = f"{m.speed(result):8.1f} tok/s"
                print(f"round {number}/{repeat}  {name:20} {contender:20} {speed}", file=sys.stderr)
    return results


def setting(about: str, args: argparse.Namespace) -> Iterator[str]:
    """Model, machine and versions, without which no figure means anything."""
    used = [name for name in ("numpy", "numba", "torch", "transformers", "xllamacpp") if name in sys.modules]
    versions = ", ".join(f"{name} {version(name)}" for name in used)
    yield f"{date.today()}, {about}, {args.new} tokens decoded a sequence,"
    yield f"{cpu_name()}, {os.cpu_count()} cores, {args.threads} threads,"
    yield f"Python {platform.python_version()}, {versions}."


def table(results: Results, contenders: Sequence[str]) -> Iterator[str]:
    """The medians: those of others with the ratio engine / other, then what a batch of 8 brings.

    The last column says whether all contenders in float32 generated the same tokens.
    """
    n_rounds = len(next(iter(results.values()))[contenders[0]])
    yield f"| tokens/s, median of {n_rounds} (engine / it) | {' | '.join(contenders)} | same tokens |"
    yield "|---" * (len(contenders) + 2) + "|"
    medians = {
        name: {who: median(map(MEASUREMENTS[name].speed, runs[who])) for who in contenders}
        for name, runs in results.items()
    }
    for name, values in medians.items():
        ours = values[OURS[0]]
        cells: list[str] = []
        for who, value in values.items():
            cell = f"{value:.1f}"
            if who not in OURS:
                cell += f" ({ours / value:.2f})"
            cells.append(cell)
        generated = {tuple(runs[0].said) for who, runs in results[name].items() if LLAMA_CPP not in who}
        same = "yes" if len(generated) == 1 else "no"
        yield f"| {name} | {' | '.join(cells)} | {same} |"
    one = medians["decode, batch 1"]
    eight = medians["decode, batch 8"]
    yield f"| batch 8 / batch 1 | {' | '.join(f'{eight[who] / one[who]:.2f}' for who in contenders)} | |"


# --- what only this engine does -----------------------------------------------------------------------------

N_TURN = 1000  # tokens of a first turn
N_MORE = 30  # tokens that the user adds in the second
N_SPECULATE = 4  # drafts a step


def feature_table(
    ops: type[NumpyOps], config: Config, weights: Weights, tokenizer: Tokenizer, args: argparse.Namespace
) -> Iterator[str]:
    """What prefix caching, batching and speculative decoding bring."""
    n_new, repeat = args.new, args.repeat
    length = min(config.max_seq_len, N_TURN + 2 * n_new + N_MORE)
    engine = Engine(with_pages(ops, config, weights, length))
    steps = Steps(engine, tokenizer.token_bytes)
    drafting = Engine(with_pages(ops, config, weights, length), speculate=N_SPECULATE)
    prose = prompts(tokenizer, 1, N_TURN)[0]
    copied = prose[:120] * 2 + prose[:20]
    found: dict[str, list[tuple[float, float]]] = {}
    for number in range(repeat + 1):
        engine.observer = None
        [turn] = prompts(tokenizer, 1, N_TURN, number)
        second = [*turn, *engine_run(engine)([turn], n_new).said, *prose[:N_MORE]]
        cold, cached = (
            engine_run(engine)([[first, *second[1:]]], 1).prefill for first in (99 + number, number)
        )
        few, many = (engine_run(engine)(prompts(tokenizer, n, 32), n_new).decode for n in (1, MAX_BATCH))
        plain, drafted = (engine_run(e)([copied], n_new).decode for e in (engine, drafting))
        engine.observer = steps.observe
        watched = engine_run(engine)(prompts(tokenizer, MAX_BATCH, 32), n_new).decode
        for name, pair in {
            f"prefill of a second turn, {len(second)} tokens: cold, cached": (cold, cached),
            f"decode: batch 1, batch {MAX_BATCH}": (few, many),
            f"decode of a text that repeats: plain, --speculate {N_SPECULATE}": (plain, drafted),
            f"decode, batch {MAX_BATCH}: plain, --debug-steps": (many, watched),
        }.items():
            print(f"round {number}/{repeat}  {name}  {pair[0]:.1f}, {pair[1]:.1f} tok/s", file=sys.stderr)
            found.setdefault(name, []).extend([pair] if number else [])
    counts = drafting.counts()
    engine.close()
    drafting.close()
    yield f"| tokens/s, median of {repeat} | without | with | ratio |"
    yield "|---|---|---|---|"
    for name, pairs in found.items():
        without, with_it = (median(column) for column in zip(*pairs, strict=True))
        yield f"| {name} | {without:.1f} | {with_it:.1f} | {with_it / without:.2f} |"
    yield ""
    yield f"Of {counts['drafted']} drafts {counts['accepted']} were accepted."


# --- what rounding the weights costs ------------------------------------------------------------------------

N_TEXT = 4096  # tokens


def perplexity(ops: NumpyOps, weights: Weights, token_ids: Sequence[int]) -> float:
    """exp of the mean of -log p over the tokens of a text, each after all before it."""
    losses: list[float] = []
    for start in range(0, len(token_ids), 128):
        part = token_ids[start : start + 128]
        span = Span(0, range(ops.n_pages), part, start, len(part), is_chunk=True)
        logits = forward(ops, weights, Batch([span])).astype(np.float64)
        targets = token_ids[start + 1 : start + len(part) + 1]
        for row, target in zip(logits, targets, strict=False):  # nothing comes after the last
            largest = row.max()
            losses.append(largest + np.log(np.exp(row - largest).sum()) - row[target])
    return float(np.exp(np.mean(losses)))


def perplexity_table(directory: Path, config: Config, tokenizer: Tokenizer) -> Iterator[str]:
    """Of the language reference that comes with Python."""
    ops = cpu_ops()
    if ops is NumpyOps:
        return
    text = "\n".join(topics.values())[: 20 * N_TEXT]
    token_ids = tokenizer.encode(text)[: min(N_TEXT, config.max_seq_len)]
    yield f"| perplexity of {len(token_ids)} tokens | as in the file | {' | '.join(PEERS)} |"
    yield "|---" * (2 + len(PEERS)) + "|"
    cells: list[str] = []
    for name in (None, *PEERS):
        weights = read_weights(directory, config, *packs(ops, config, name))
        cells.append(f"{perplexity(with_pages(ops, config, weights, N_TEXT), weights, token_ids):.4f}")
    yield f"| {directory.name} | {' | '.join(cells)} |"


def options(add: argparse.ArgumentParser) -> None:
    model_option(add)
    repeat_option(add)
    add.add_argument("--weights", choices=PEERS, help="as of server.py; llama.cpp gets the like")
    add.add_argument("--perplexity", action="store_true", help="what each of --weights loses; minutes")
    shapes = "gpt-oss-20b or qwen3-30b-a3b: random weights of that shape, with as many layers as memory holds"
    add.add_argument("--shape", choices=("gpt-oss-20b", "qwen3-30b-a3b"), metavar="NAME", help=shapes)
    add.add_argument(
        "--memory", type=float, default=0, metavar="GB", help="of --shape (default: 3/4 of the free)"
    )
    add.add_argument("--new", type=int, default=64, metavar="N", help="tokens to decode (default: 64)")
    add.add_argument("--threads", type=int, default=os.cpu_count(), metavar="N", help="default: all cores")
