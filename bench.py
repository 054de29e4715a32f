"""How fast, beside others: the same weights, the same prompts, the same machine, the same minutes.

    python bench.py cpu      MEASUREMENTS x contenders --run()--> Speeds --median--> a table in Markdown
    python bench.py store    background responses through the registry and back, and the memory they take
    python bench.py parse    what the parser of the output costs, in every dialect
    python bench.py server   streams held at once, beside a bare Starlette app that sends the same bytes
    python bench.py relay    a scripted worker in another process, asked directly and through server.py

`cpu` compares the engine with transformers in float32 (https://github.com/huggingface/transformers), which
`pip install -e '.[parity]'` brings, with llama.cpp in float16 (https://github.com/ggml-org/llama.cpp), which
`pip install xllamacpp` brings, and with itself on NumPy where cpu.py serves it; what is missing is named.

Rules of this file:
1. The ratio is the result. The contenders take turns in each round: where the machine is busy for a while, it
   is busy for all of them. A number is the median of the rounds.
2. What is measured is what runs: `engine` is Engine.generate with all that is around the model, `forward` the
   forward pass and the choice of a token alone. All are greedy, and the table says if they said the same.
3. A measurement is a row of a table, a contender a column. What only this engine does stands in a table of
   its own, beside the same without it.

Not here: how good what is said is.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from datetime import date
from functools import partial
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

import numpy as np
import threadpoolctl
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

import answers
import hub
import params
import responses
import sse
from api import Api, encode_event
from background import EventLog, Producer, Registry
from channels import Delta, Dialect, Finish, Parser, Piece, Usage
from chat import ChatTemplate
from dialects import DIALECTS
from dialects import find as find_dialect
from engine import Engine, Job, Step
from front import Keys, make_app
from grammar import Grammars
from model import PAGE, Choice, Context, NumpyOps, Sampling, Span
from server import bind, protocol
from store import Limits, Row, Store
from tokenizer import Tokenizer
from weights import Config, Weights, read_config, read_json, read_weights
from worker import LocalWorker

Prompts = list[list[int]]
GREEDY = Sampling(temperature=0)
MAX_BATCH = 8


class Speeds(NamedTuple):
    """Of one run: tokens a second, and what was said first."""

    prefill: float
    decode: float
    said: list[int]  # by the first sequence


class Measurement(NamedTuple):
    """A run of `batch` prompts of n_prompt tokens, and which of its speeds counts."""

    n_prompt: int
    batch: int
    n_new: int | None  # None: what --new says
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

Run = Callable[[Prompts, int], Speeds]  # (prompts of one length, tokens to say after each)


def speeds(prompts: Prompts, started: float, token_times: list[list[float]], said: list[int]) -> Speeds:
    """Prefill lasts until each sequence has its first token; decoding is all that comes after it."""
    first, last = max(times[0] for times in token_times), max(times[-1] for times in token_times)
    n_decoded = sum(t > first for times in token_times for t in times)
    n_prompt = sum(map(len, prompts))
    return Speeds(n_prompt / (first - started), n_decoded / max(last - first, 1e-9), said)


# --- contenders ---------------------------------------------------------------------------------------------


def cpu_ops() -> type[NumpyOps]:
    """What the server computes with."""
    try:
        from cpu import FastOps
    except ImportError as error:
        print(f"no compiled products ({error}): pip install -e '.[fast]' brings them", file=sys.stderr)
        return NumpyOps
    return FastOps


def with_pages(ops: type[NumpyOps], config: Config, weights: Weights, max_seq_len: int) -> NumpyOps:
    """With pages for all sequences of a batch."""
    return ops(config, weights, max_seq_len, MAX_BATCH * -(-max_seq_len // PAGE), MAX_BATCH)


def engine_run(engine: Engine) -> Run:
    """Engine.generate, as the server calls it."""

    async def one(prompt: list[int], n_new: int) -> list[tuple[float, int]]:
        async with aclosing(engine.generate(Job(prompt, n_new, frozenset(), GREEDY))) as steps:
            return [(time.perf_counter(), token.token_id) async for step in steps for token in step.tokens]

    async def all_of(prompts: Prompts, n_new: int) -> Speeds:
        started = time.perf_counter()
        tokens = await asyncio.gather(*(one(prompt, n_new) for prompt in prompts))
        times = [[t for t, _ in sequence] for sequence in tokens]
        return speeds(prompts, started, times, [token_id for _, token_id in tokens[0]])

    return lambda prompts, n_new: asyncio.run(all_of(prompts, n_new))


def forward_run(ops: NumpyOps) -> Run:
    """The forward pass and the choice of the tokens, one step after another."""

    def run(prompts: Prompts, n_new: int) -> Speeds:
        size = ops.n_pages // len(prompts)
        said: Prompts = [[] for _ in prompts]
        times, started = [], time.perf_counter()
        for n in range(n_new):
            start = len(prompts[0]) + n - 1 if n else 0
            spans = [
                Span(i, range(i * size, (i + 1) * size), output[-1:] or prompt, start, 1, tile=not output)
                for i, (prompt, output) in enumerate(zip(prompts, said, strict=True))
            ]
            contexts = [Context(GREEDY, prompt, out) for prompt, out in zip(prompts, said, strict=True)]
            for output, [choice] in zip(said, ops.read(ops.launch(spans, contexts)), strict=True):
                output.append(choice.token_id)
            times.append(time.perf_counter())
        return speeds(prompts, started, [times] * len(prompts), said[0])

    return run


def transformers_run(model: Any, attention: str) -> Run:
    """The same steps with their model and their cache; `generate` is slower by what it checks around them."""
    import torch

    def run(prompts: Prompts, n_new: int) -> Speeds:
        with torch.inference_mode():
            return steps(prompts, n_new)

    def steps(prompts: Prompts, n_new: int) -> Speeds:
        model.set_attn_implementation(attention)
        said, times, cache, started = [], [], None, time.perf_counter()
        token_ids = torch.tensor(prompts)  # (batch, n_tokens)
        for _ in range(n_new):
            output = model(token_ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, token_ids = output.past_key_values, output.logits[:, -1:].argmax(-1)
            said.append(int(token_ids[0, 0]))
            times.append(time.perf_counter())
        return speeds(prompts, started, [times] * len(prompts), said)

    return run


def transformers_model(directory: Path, n_threads: int) -> Any:
    """Their model of the same files, float32; None where they are not installed."""
    try:
        import torch
        import transformers
    except ImportError as error:
        print(f"no comparison ({error}): pip install -e '.[parity]' brings it", file=sys.stderr)
        return None
    torch.set_num_threads(n_threads)
    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def llama_cpp_run(server: Any, tokenizer: Tokenizer) -> Run:
    """Their server's completions, in this process: a thread a sequence, as it has slots."""

    def one(prompt: list[int], n_new: int) -> list[tuple[float, str]]:
        pieces: list[tuple[float, str]] = []

        def on_chunk(chunk: Any) -> bool:
            pieces.append((time.perf_counter(), chunk["choices"][0]["text"]))
            return False  # go on

        greedy = {"temperature": 0, "samplers": [], "ignore_eos": True, "cache_prompt": False, "stream": True}
        server.handle_completions({"prompt": prompt, "n_predict": n_new} | greedy, on_chunk)
        return pieces[:n_new]  # the last chunk says why it ends

    def run(prompts: Prompts, n_new: int) -> Speeds:
        started = time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as pool:
            sequences = list(pool.map(lambda prompt: one(prompt, n_new), prompts))
        times = [[t for t, _ in pieces] for pieces in sequences]
        said = tokenizer.encode("".join(text for _, text in sequences[0]))
        return speeds(prompts, started, times, said)

    return run


def llama_cpp_server(directory: Path, config: Config, gguf: Path, max_seq_len: int, n_threads: int) -> Any:
    """Theirs of the same weights, as a file of float16; None where it is not installed or not a Llama."""
    try:
        import xllamacpp
    except ImportError as error:
        print(f"no comparison ({error}): pip install xllamacpp brings llama.cpp", file=sys.stderr)
        return None
    if config.model_type != "llama":
        print(f"no comparison with llama.cpp: written for llama, not {config.model_type}", file=sys.stderr)
        return None
    write_gguf(gguf, config, read_weights(directory, config), read_json(directory / "tokenizer.json"))
    params = xllamacpp.CommonParams()
    params.model.path = str(gguf)
    params.n_parallel = max(m.batch for m in MEASUREMENTS.values())
    params.n_ctx = params.n_parallel * max_seq_len
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = n_threads
    params.cache_ram_mib = 0  # no prompt of an earlier round
    params.verbosity = 0
    return xllamacpp.Server(params)


def write_gguf(path: Path, c: Config, weights: Weights, tokenizer: dict[str, Any]) -> None:
    """https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; rotary pairs are adjacent there as here."""
    from gguf import GGUFWriter, LlamaFileType, TokenType

    writer = GGUFWriter(path, "llama")
    writer.add_file_type(LlamaFileType.MOSTLY_F16)
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
        writer.add_tensor(f"{name}.weight", array if array.ndim == 1 else array.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# --- cpu ----------------------------------------------------------------------------------------------------


def cpu(args: argparse.Namespace) -> None:
    with threadpoolctl.threadpool_limits(args.threads, user_api="blas"), TemporaryDirectory() as folder:
        write(compare(args, Path(folder)), args.out)


def compare(args: argparse.Namespace, folder: Path) -> list[str]:
    directory = hub.find(args.model)
    config = read_config(directory)
    tokenizer = Tokenizer(directory / "tokenizer.json")
    max_seq_len = min(config.max_seq_len, 256 + args.new)
    ops = cpu_ops()
    weights = read_weights(directory, config, ops.pack)
    engine = Engine(with_pages(ops, config, weights, max_seq_len))
    forward = forward_run(with_pages(ops, config, weights, max_seq_len))
    contenders = {"engine": engine_run(engine), "forward": forward}
    if ops is not NumpyOps:
        spec = with_pages(NumpyOps, config, read_weights(directory, config), max_seq_len)
        contenders["forward, NumPy"] = forward_run(spec)
    if server := llama_cpp_server(directory, config, folder / "f16.gguf", max_seq_len, args.threads):
        contenders["llama.cpp F16"] = llama_cpp_run(server, tokenizer)
    if model := transformers_model(directory, args.threads):
        for attention in ("eager", "sdpa"):
            contenders[f"transformers {attention}"] = transformers_run(model, attention)
    found = measure(contenders, tokenizer, args.new, args.repeat)
    engine.close()
    ours = own(ops, config, weights, tokenizer, args)
    about = f"{directory.name}, {engine.about}"
    return [*setting(about, args), "", *table(found, list(contenders)), "", *ours, ""]


Found = dict[str, dict[str, list[Speeds]]]  # measurement -> contender -> a run a round


def measure(contenders: dict[str, Run], tokenizer: Tokenizer, n_new: int, repeat: int) -> Found:
    """All runs; a round before the first warms up and does not count."""
    found: Found = {name: {contender: [] for contender in contenders} for name in MEASUREMENTS}
    for number in range(repeat + 1):
        for name, m in MEASUREMENTS.items():
            for contender, run in contenders.items():
                result = run(prompts(tokenizer, m.batch, m.n_prompt), m.n_new or n_new)
                if number:
                    found[name][contender].append(result)
                shown = f"{m.speed(result):8.1f} tok/s" if number else "warm"
                print(f"round {number}/{repeat}  {name:20} {contender:20} {shown}", file=sys.stderr)
    return found


def prompts(tokenizer: Tokenizer, batch: int, n_prompt: int) -> Prompts:
    """Pieces of this file's own prose."""
    assert __doc__
    token_ids = tokenizer.encode(__doc__ * (1 + batch * n_prompt // 256))
    return [token_ids[i * n_prompt : (i + 1) * n_prompt] for i in range(batch)]


def setting(about: str, args: argparse.Namespace) -> Iterator[str]:
    """What a number means nothing without."""
    used = [name for name in ("numpy", "numba", "torch", "transformers", "xllamacpp") if name in sys.modules]
    versions = ", ".join(f"{name} {version(name)}" for name in used)
    yield f"{date.today()}, {about}, {args.new} tokens decoded a sequence,"
    yield f"{cpu_name()}, {os.cpu_count()} cores, {args.threads} threads,"
    yield f"Python {platform.python_version()}, {versions}."


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    named = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def table(found: Found, contenders: Sequence[str]) -> Iterator[str]:
    """Medians, how many times as fast the engine is as each of the others, and what a batch brings."""
    others = [name for name in contenders if name not in OURS]
    n_rounds = len(next(iter(found.values()))[contenders[0]])
    columns = [*contenders, *(f"engine / {name}" for name in others), *(["same words"] if others else [])]
    yield f"| tokens/s, median of {n_rounds} | " + " | ".join(columns) + " |"
    yield "|---" * (len(columns) + 1) + "|"
    medians = {
        name: [median(map(MEASUREMENTS[name].speed, runs[who])) for who in contenders]
        for name, runs in found.items()
    }
    for name, values in medians.items():
        cells = [f"{value:.1f}" for value in values]
        cells += [f"{values[0] / values[contenders.index(who)]:.2f}" for who in others]
        said = {tuple(runs[0].said) for runs in found[name].values()}
        cells += [("yes" if len(said) == 1 else "no")] if others else []
        yield f"| {name} | " + " | ".join(cells) + " |"
    one, eight = medians["decode, batch 1"], medians["decode, batch 8"]
    gains = [f"{many / alone:.2f}" for alone, many in zip(one, eight, strict=True)]
    yield "| batch 8 / batch 1 | " + " | ".join([*gains, *[""] * (len(columns) - len(contenders))]) + " |"


# --- what only this engine does -----------------------------------------------------------------------------

N_TURN, N_MORE, N_SPECULATE = 1000, 30, 4


def own(
    ops: type[NumpyOps], config: Config, weights: Weights, tokenizer: Tokenizer, args: argparse.Namespace
) -> Iterator[str]:
    """A table: a second turn until its first token, decoding in company and with drafts."""
    n_new, repeat = args.new, args.repeat
    length = min(config.max_seq_len, N_TURN + 2 * n_new + N_MORE)
    engine = Engine(with_pages(ops, config, weights, length))
    drafting = Engine(with_pages(ops, config, weights, length), speculate=N_SPECULATE)
    prose = prompts(tokenizer, 1, N_TURN)[0]
    copied = prose[:120] * 2 + prose[:20]
    found: dict[str, list[tuple[float, float]]] = {}
    for number in range(repeat + 1):
        turn = [number, *prose[1:]]  # another beginning: nothing of it is known
        second = [*turn, *engine_run(engine)([turn], n_new).said, *prose[:N_MORE]]
        cold, cached = (
            engine_run(engine)([[first, *second[1:]]], 1).prefill for first in (99 + number, number)
        )
        few, many = (engine_run(engine)(prompts(tokenizer, n, 32), n_new).decode for n in (1, MAX_BATCH))
        plain, drafted = (engine_run(e)([copied], n_new).decode for e in (engine, drafting))
        for name, pair in {
            f"prefill of a second turn, {len(second)} tokens: cold, cached": (cold, cached),
            f"decode: batch 1, batch {MAX_BATCH}": (few, many),
            f"decode of a text that repeats: plain, --speculate {N_SPECULATE}": (plain, drafted),
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


# --- store --------------------------------------------------------------------------------------------------

N_DELTAS = 64  # tokens of one response: a frame each, and eight around them


def store(args: argparse.Namespace) -> None:
    with TemporaryDirectory() as folder:
        lines = asyncio.run(store_run(Path(folder) / "store.db", args.responses))
    directory = hub.find(args.model)
    config = read_config(directory)
    ops = cpu_ops()
    engine = Engine(with_pages(ops, config, read_weights(directory, config, ops.pack), 256))
    rate = engine_run(engine)(prompts(Tokenizer(directory / "tokenizer.json"), 8, 32), N_DELTAS).decode
    engine.close()
    report = [
        f"{date.today()}, {args.responses} background responses of {N_DELTAS} tokens, stored in a file,",
        f"{cpu_name()}, {os.cpu_count()} cores, Python {platform.python_version()}.",
        "",
        "| what | how much |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in lines.items()),
        f"| {directory.name}, decode, batch 8 | {rate:.0f} tokens/s |",
        "",
    ]
    write(report, args.out)


async def store_run(path: Path, n_responses: int) -> dict[str, str]:
    """Events appended and written, events read back, and the resident memory on the way."""
    database = Store(str(path), Limits())
    registry = Registry(database, encode_event)
    ids, memory, started = [], {}, time.perf_counter()
    for n in range(1, n_responses + 1):
        row, producer = scripted(f"resp_{n}")
        ids.append(row.id)
        events = await registry.submit(row, producer)
        async with aclosing(events.read()) as frames:
            n_events = len([frame async for frame in frames])
        if n in (n_responses // 10, n_responses):
            memory[n] = resident_mb()
            print(f"{n}/{n_responses} responses, {memory[n]:.0f} MB resident", file=sys.stderr)
    appended, started = time.perf_counter() - started, time.perf_counter()
    for id_ in ids:
        again = await registry.events(id_)
        assert again
        async with aclosing(again.read()) as frames:
            assert len([frame async for frame in frames]) == n_events
    replayed = time.perf_counter() - started
    await registry.close(persistent=True)
    database.close()
    n_all = n_responses * n_events
    at = {f"resident memory after {n} responses": f"{mb:.0f} MB" for n, mb in memory.items()}
    return {
        "appended and written": f"{n_all / appended:.0f} events/s",
        "replayed": f"{n_all / replayed:.0f} events/s",
    } | at


def scripted(id: str) -> tuple[Row, Producer]:
    """A response whose tokens are already there."""
    request = params.from_responses({"model": "bench", "input": "hi", "background": True}, {})
    head = {"id": id, "object": "response", "created_at": 0, "model": "bench"} | request.echo
    builder = responses.Builder(head, answers.new_id)

    async def fill(events: EventLog) -> None:
        events.extend(builder.run())
        for _ in range(N_DELTAS):
            events.extend(builder.feed(Delta("final", " token")))
            await asyncio.sleep(0)  # as tokens come: one by one
        events.extend(builder.finish(Finish("stop", Usage(8, N_DELTAS)), 0))

    row = Row(id, time.time(), None, True, True, True, {}, [], head)
    return row, Producer(lambda: builder.start(queued=True), fill, lambda *_: [])


def resident_mb(pid: int | str = "self") -> float:
    """Of a process; 0 where /proc does not say."""
    status = Path(f"/proc/{pid}/status")
    lines = status.read_text(encoding="utf-8").splitlines() if status.exists() else []
    return sum(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1e3


# --- parse --------------------------------------------------------------------------------------------------

PIECE = 4  # characters a token, about
STREAM = 1000  # tokens a second, of one response: more than most engines give it


def parse(args: argparse.Namespace) -> None:
    rows = [(name, pieces_per_s(name, args, False), pieces_per_s(name, args, True)) for name in DIALECTS]
    report = [
        f"{date.today()}, a turn of {args.pieces} pieces: half of it reasoning, then text and a call,",
        f"{cpu_name()}, processor time of one thread, Python {platform.python_version()}.",
        "",
        f"| pieces/s, median of {args.repeat} | markers are tokens | share of {STREAM} tok/s "
        "| markers are spelled | share |",
        "|---|---|---|---|---|",
        *(
            f"| {name} | {tokens:.0f} | {STREAM / tokens:.1%} | {spelled:.0f} | {STREAM / spelled:.1%} |"
            for name, tokens, spelled in rows
        ),
        "",
    ]
    write(report, args.out)


def pieces_per_s(name: str, args: argparse.Namespace, spelled: bool) -> float:
    row = DIALECTS[name]
    dialect = find_dialect(row, () if spelled else row.markers, "".join(row.markers), tools=True)
    pieces, speeds = turn(dialect, args.pieces), []
    for _ in range(args.repeat):
        parser = Parser(dialect, dialect.start, stop=["STOP"], schemas={"f": {}})
        started = time.process_time()  # what it costs, however busy the machine is with other things
        n_outputs = sum(len(parser.feed(piece)) for piece in pieces) + len(parser.close(cut=False))
        speeds.append(len(pieces) / (time.process_time() - started))
        assert n_outputs > len(pieces) // 2, "the parser has lost its way"
    return median(speeds)


def turn(dialect: Dialect, n_pieces: int) -> list[Piece]:
    """As the forms of the dialect write it; its markers are pieces of their own, or text like all else."""
    forms, quarter = dialect.forms, "So, some <b>words</b>.\n" * (n_pieces // 4 * PIECE // 23)
    text = (forms.before or "").replace("TEXT", quarter)
    arguments = {"json": json.dumps({"a": quarter}), "xml": f"<parameter=a>\n{quarter}\n</parameter>\n"}
    call = forms.call.replace("NAME", "f").replace("ARGUMENTS", arguments[forms.arguments])
    whole = (2 * quarter).join(forms.thought) + text + call.join(forms.calls)
    cut = re.split("(" + "|".join(map(re.escape, dialect.tokens)) + ")", whole) if dialect.tokens else [whole]
    pieces: list[Piece] = []
    for unit in cut:
        is_marker = unit in dialect.tokens
        texts = [unit] if is_marker else [unit[i : i + PIECE] for i in range(0, len(unit), PIECE)]
        pieces += (Piece(text, text if is_marker else "") for text in texts)
    return pieces


# --- server -------------------------------------------------------------------------------------------------

TICK_S = 1.0  # of the paced engine: all streams get a token then, as the sequences of a batch do
N_TICKS = 5
N_WARM = 2  # of them, while streams are still being opened
# streams: tokens of each when nothing paces them
STREAMS = {1: 2000, 50: 100, 500: 20}


class Script:
    """An engine that says a token over and over: one a tick, whose milliseconds are the seed; 0: at once."""

    alive = True

    def __init__(self, config: Config, token_id: int) -> None:
        self.config = config
        self.max_seq_len = config.max_seq_len
        self._step = Step([Choice(token_id, -1.0)])

    async def generate(self, job: Job) -> AsyncGenerator[Step]:
        for n_left in range(job.max_tokens - 1, -1, -1):
            await tick(job.sampling.seed)
            yield self._step if n_left else self._step._replace(finish="length")

    def counts(self) -> dict[str, int]:
        return {}


async def tick(ms: int) -> None:
    """Wait for the next of the moments that all processes of this machine agree on."""
    await asyncio.sleep(ms / 1e3 - time.monotonic() % (ms / 1e3) if ms else 0)


def ours(directory: Path) -> ASGIApp:
    config, vocabulary = read_config(directory), directory / "tokenizer.json"
    tokenizer = Tokenizer(vocabulary)
    engine = cast(Engine, Script(config, tokenizer.encode(" a")[0]))
    grammars = Grammars(vocabulary, config.vocab_size, config.eos_token_ids)
    worker = LocalWorker(engine, tokenizer, ChatTemplate.load(directory), grammars)
    registry = Registry(Store(":memory:", Limits()), encode_event)
    return make_app(Api(worker, None, registry, {}, ["bench"], bytes(32)), Keys([]), max(STREAMS) + 1)


def bare(frames: Sequence[bytes]) -> ASGIApp:
    """The frames that ours has sent, the deltas among them in time."""

    async def stream(http: HttpRequest) -> Response:
        body = await http.json()

        async def paced() -> AsyncGenerator[bytes]:
            n_left = body["max_output_tokens"]
            for frame in frames:
                if DELTA in frame:
                    if not n_left:
                        continue
                    n_left -= 1
                    await tick(body["seed"])
                yield frame

        return StreamingResponse(paced(), media_type="text/event-stream")

    return Starlette(routes=[Route("/v1/responses", stream, methods=["POST"])])


def listen(make: Callable[[Any], ASGIApp], what: Any, told: Connection) -> None:
    """In a process of its own: serve what `make` makes of `what`, and tell the port."""
    config = uvicorn.Config(
        make(what), http=protocol(60), log_level="warning", access_log=False, lifespan="off"
    )
    listener = bind("127.0.0.1", 0)
    told.send(listener.getsockname()[1])
    uvicorn.Server(config).run(sockets=[listener])


class Running(NamedTuple):
    port: int
    pid: int


@contextmanager
def running(make: Callable[[Any], ASGIApp], what: Any) -> Iterator[Running]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=listen, args=(make, what, there))
    process.start()
    try:
        assert process.pid
        yield Running(here.recv(), process.pid)
    finally:
        process.kill()
        process.join()


DELTA = b"event: response.output_text.delta\n"


class Heard(NamedTuple):
    """Of one stream."""

    body: bytes
    late: list[float]  # seconds from a tick to the arrival of its delta


async def listener(port: int, n_tokens: int, paced: bool, enough: asyncio.Event | None = None) -> Heard:
    """Read a stream to its end, or, once it has begun, until there is `enough`."""
    body = {"model": "bench", "input": "hi", "stream": True, "max_output_tokens": n_tokens}
    body["seed"] = round(1e3 * TICK_S) if paced else 0
    raw = json.dumps(body).encode()
    head = "POST /v1/responses HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
    chunks, late = [], []
    while chunk := await reader.read(2**16):
        late += [time.monotonic() % TICK_S] * chunk.count(DELTA)
        chunks.append(chunk)
        if enough and late:
            await enough.wait()
            break
    writer.close()
    return Heard(b"".join(chunks), late)


class Rate(NamedTuple):
    """Of many streams at once."""

    events_s: float
    cpu_us: float  # of the server, an event
    late_ms: list[float]  # each delta


async def hear(server: Running, n_streams: int, n_tokens: int, paced: bool) -> Rate:
    started, cpu_started = time.perf_counter(), cpu_s(server.pid)
    heard = await asyncio.gather(*(listener(server.port, n_tokens, paced) for _ in range(n_streams)))
    seconds, cpu_seconds = time.perf_counter() - started, cpu_s(server.pid) - cpu_started
    n_events = sum(each.body.count(b"event: ") for each in heard)
    late_ms = [1e3 * late for each in heard for late in each.late[N_WARM:]]
    return Rate(n_events / seconds, 1e6 * cpu_seconds / n_events, late_ms)


def cpu_s(pid: int) -> float:
    """What a process has used; 0 where /proc does not say."""
    stat = Path(f"/proc/{pid}/stat")
    fields = stat.read_text(encoding="utf-8").rpartition(")")[2].split() if stat.exists() else ["0"] * 13
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def held(server: Running, n_streams: int) -> tuple[float, float, float]:
    """Resident memory in MB: before, while so many streams are open, and when they are closed."""
    before, enough = resident_mb(server.pid), asyncio.Event()
    streams = [asyncio.create_task(listener(server.port, 1000, True, enough)) for _ in range(n_streams)]
    await asyncio.sleep(3 * TICK_S)
    during = resident_mb(server.pid)
    enough.set()
    await asyncio.gather(*streams)
    await asyncio.sleep(2 * TICK_S)
    return before, during, resident_mb(server.pid)


def server(args: argparse.Namespace) -> None:
    directory = hub.find(args.model)
    found: dict[int, list[list[float]]] = {n: [] for n in STREAMS}
    with running(ours, directory) as here:
        longest = asyncio.run(listener(here.port, max(STREAMS.values()), paced=False)).body
        with running(bare, frames_of(longest)) as there:
            for number in range(args.repeat + 1):
                for n_streams, n_tokens in STREAMS.items():
                    row = [*measured(here, n_streams, n_tokens), *measured(there, n_streams, n_tokens)]
                    found[n_streams] += [row] * bool(number)
                    print(f"round {number}/{args.repeat}  {n_streams:3} streams  {row}", file=sys.stderr)
    with running(ours, directory) as fresh:
        asyncio.run(hear(fresh, 1, N_TICKS, paced=False))
        memory = asyncio.run(held(fresh, max(STREAMS)))
    lines = [
        f"{date.today()}, streams of {directory.name} with an engine that only says a token,",
        f"{cpu_name()}, {os.cpu_count()} cores, Python {platform.python_version()}, median of {args.repeat}.",
        "",
        "| streams | events/s | bare | ratio | CPU an event | bare | median late | bare | p99 late | bare |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(server_row(n, rows) for n, rows in found.items()),
        "",
        f"Late: from the tick of all streams ({TICK_S:g} s) to the arrival of the delta. "
        f"Resident memory: {memory[0]:.0f} MB,",
        f"with {max(STREAMS)} streams held {memory[1]:.0f} MB, when they had left {memory[2]:.0f} MB.",
        "",
    ]
    write(lines, args.out)


def measured(server: Running, n_streams: int, n_tokens: int) -> tuple[float, float, float, float]:
    """Events a second and CPU of each in µs, with nothing to wait for; how late in ms with a tick."""
    fast = asyncio.run(hear(server, n_streams, n_tokens, paced=False))
    late_ms = asyncio.run(hear(server, n_streams, N_TICKS, paced=True)).late_ms
    return fast.events_s, fast.cpu_us, median(late_ms), quantiles(late_ms, n=100)[98]


def server_row(n_streams: int, rows: list[list[float]]) -> str:
    medians = [median(column) for column in zip(*rows, strict=True)]
    (speed, cpu, late, latest), (bare_speed, bare_cpu, bare_late, bare_latest) = medians[:4], medians[4:]
    numbers = [str(n_streams), f"{speed:.0f}", f"{bare_speed:.0f}", f"{speed / bare_speed:.2f}"]
    cpus = [f"{us:.0f} µs" for us in (cpu, bare_cpu)]
    times = [f"{ms:.1f} ms" for ms in (late, bare_late, latest, bare_latest)]
    return "| " + " | ".join([*numbers, *cpus, *times]) + " |"


def frames_of(reply: bytes) -> list[bytes]:
    """The frames in a reply with Transfer-Encoding: chunked: a chunk each."""
    rest, frames = reply.partition(b"\r\n\r\n")[2], []
    while size := int(rest[: rest.index(b"\r\n")], 16):
        begin = rest.index(b"\r\n") + 2
        frames.append(rest[begin : begin + size])
        rest = rest[begin + size + 2 :]
    return frames


# --- relay --------------------------------------------------------------------------------------------------

# A contender is a way to the same worker, which writes the time into each of its deltas: the clock of all
# processes is one, CLOCK_MONOTONIC. A client reads the times where they arrive, whatever is around them.
WAYS = {"direct": "/v1/chat/completions", "chat": "/v1/chat/completions", "responses": "/v1/responses"}
WRITTEN_AT = re.compile(rb'"(?:content|delta)":"(\d+\.\d+) ')
N_STREAMS = 32


class Load(NamedTuple):
    """What the worker is asked to write."""

    n_events: int
    pace_s: float  # between two of them


async def worker_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One request to the worker: as many frames as its message says."""
    request = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"content-length: *(\d+)", request, re.IGNORECASE)
    head = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nConnection: close\r\n\r\n"
    if length is None:
        writer.write(head % b"application/json" + b'{"object":"list","data":[{"id":"bench"}]}')
    else:
        body = json.loads(await reader.readexactly(int(length[1])))
        load = Load(*json.loads(body["messages"][0]["content"]))
        writer.write(head % b"text/event-stream")
        chunk = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "bench"}
        frame = sse.encode(sse.dumps(chunk | {"choices": [{"index": 0, "delta": {"content": "%.6f token"}}]}))
        for n in range(load.n_events):
            if n and load.pace_s:
                await asyncio.sleep(load.pace_s)
            writer.write(frame % time.perf_counter())
            await writer.drain()
        end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
        writer.write(sse.encode(sse.dumps(chunk | end)) + sse.DONE)
    await writer.drain()
    writer.close()


async def worker_process() -> None:
    listening = await asyncio.start_server(worker_connection, "127.0.0.1", 0)
    print(f"listening http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", flush=True)
    await listening.serve_forever()


@contextlib.contextmanager
def started(*command: str) -> Iterator[str]:
    """A process of this folder that announces its URL."""
    folder = Path(__file__).parent
    with subprocess.Popen(
        [sys.executable, *command], cwd=folder, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout
            yield next(line.split()[1] for line in process.stdout if line.startswith("listening"))
        finally:
            process.kill()


async def times(url: str, path: str, load: Load) -> list[tuple[float, float]]:
    """When each delta was written, and when it was here."""
    found = []
    text = json.dumps(load)
    asked = {"model": "bench", "stream": True, "store": False, "input": text}
    body = json.dumps(asked | {"messages": [{"role": "user", "content": text}]}).encode()
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port, limit=2**26)
    head = f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    async for line in reader:
        if written := WRITTEN_AT.search(line):
            found.append((float(written[1]), time.perf_counter()))
        if line.startswith((b"data: [DONE]", b"event: response.output_text.done")):
            break
    writer.close()
    return found


async def first_event(url: str, path: str, _: int) -> float:
    """Milliseconds from the request to the first delta."""
    asked_at = time.perf_counter()
    return 1e3 * ((await times(url, path, Load(1, 0)))[0][1] - asked_at)


async def latency(url: str, path: str, n_events: int) -> float:
    """Milliseconds from the worker's write to the client's read, the median of a stream of 200 events/s."""
    found = await times(url, path, Load(n_events // 40, 0.005))
    return 1e3 * median(here - written for written, here in found)


async def rate(url: str, path: str, n_events: int, n_streams: int = 1) -> float:
    """Events a second, of all streams together."""
    load = Load(n_events // n_streams, 0)
    asked_at = time.perf_counter()
    found = await asyncio.gather(*(times(url, path, load) for _ in range(n_streams)))
    return sum(map(len, found)) / (max(pairs[-1][1] for pairs in found) - asked_at)


async def before_the_second(url: str, path: str, _: int) -> float:
    """1 if the client had the worker's first frame before the second was written."""
    (_written, first_here), (second_written, _here) = await times(url, path, Load(2, 0.1))
    return float(first_here < second_written)


# fmt: off
RELAYED: dict[str, Callable[[str, str, int], Any]] = {
    "first event, ms":                                first_event,
    "an event, ms":                                   latency,
    "events/s":                                       rate,
    f"events/s, {N_STREAMS} streams":                 partial(rate, n_streams=N_STREAMS),
    "first one is here before the second is written": before_the_second,
}
# fmt: on


def relay(args: argparse.Namespace) -> None:
    found: dict[str, dict[str, list[float]]] = {name: {way: [] for way in WAYS} for name in RELAYED}
    with (
        started("bench.py", "worker") as direct,
        started("server.py", "--upstream", direct + "/v1", "--port", "0", "--log-level", "warning") as front,
    ):
        for number in range(args.repeat + 1):  # the first round warms up
            for name, measured in RELAYED.items():
                for way, path in WAYS.items():
                    value = asyncio.run(measured(direct if way == "direct" else front, path, args.events))
                    found[name][way] += [value] if number else []
            print(f"round {number}/{args.repeat}", file=sys.stderr)
    lines = [
        f"{date.today()}, a scripted worker, asked directly and through `server.py --upstream`,",
        f"{cpu_name()}, {os.cpu_count()} cores,",
        f"Python {platform.python_version()}, httpx2 {version('httpx2')}, uvicorn {version('uvicorn')}.",
        "",
        f"| median of {args.repeat} | direct | chat | responses | chat / direct | responses / direct |",
        "|---|---|---|---|---|---|",
        *(relayed_row(name, [median(values) for values in ways.values()]) for name, ways in found.items()),
        "",
    ]
    write(lines, args.out)


def relayed_row(name: str, medians: list[float]) -> str:
    if RELAYED[name] is before_the_second:
        return f"| {name} | " + " | ".join("yes" if m == 1 else "no" for m in medians) + " | | |"
    cells = [f"{m:.0f}" if m > 100 else f"{m:.2f}" for m in medians]
    ratios = [f"{m / medians[0]:.2f}" for m in medians[1:]]
    return f"| {name} | " + " | ".join(cells + ratios) + " |"


# --- the command line ---------------------------------------------------------------------------------------


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Measure speeds, beside others.")
    commands = parser.add_subparsers(required=True, metavar="WHAT")
    add = commands.add_parser("store", help="events kept and read back, and the memory it takes")
    add.set_defaults(run=store)
    add.add_argument("--responses", type=int, default=10_000, metavar="N", help="how many (default: 10000)")
    common(add)
    add = commands.add_parser("parse", help="pieces of output a second, in every dialect")
    add.set_defaults(run=parse)
    add.add_argument("--pieces", type=int, default=20_000, metavar="N", help="of a turn (default: 20000)")
    add.add_argument("--repeat", type=int, default=5, metavar="N", help="rounds (default: 5)")
    add.add_argument("--out", type=Path, metavar="FILE", help="write the table there too")
    add = commands.add_parser("server", help="events/s, latency and memory of many streams")
    add.set_defaults(run=server)
    common(add)
    add.add_argument("--repeat", type=int, default=5, metavar="N", help="rounds (default: 5)")
    add = commands.add_parser("relay", help="what it costs to ask through --upstream")
    add.set_defaults(run=relay)
    add.add_argument("--repeat", type=int, default=5, metavar="N", help="rounds (default: 5)")
    add.add_argument("--events", type=int, default=8000, metavar="N", help="in a stream (default: 8000)")
    add.add_argument("--out", type=Path, metavar="FILE", help="write the table there too")
    add = commands.add_parser("worker", help="the worker that `relay` asks")
    add.set_defaults(run=lambda _: asyncio.run(worker_process()))
    add = commands.add_parser("cpu", help="prefill and decoding of the model, beside transformers")
    add.set_defaults(run=cpu)
    common(add)
    add.add_argument("--repeat", type=int, default=5, metavar="N", help="rounds (default: 5)")
    add.add_argument("--new", type=int, default=64, metavar="N", help="tokens to decode (default: 64)")
    add.add_argument("--threads", type=int, default=os.cpu_count(), metavar="N", help="default: all cores")
    return parser


def common(add: argparse.ArgumentParser) -> None:
    add.add_argument("--model", metavar="DIR|ID", help="as of server.py; without it, the default model")
    add.add_argument("--out", type=Path, metavar="FILE", help="write the table there too")


def write(lines: Iterable[str], out: Path | None) -> None:
    """To stdout, and to a file where one is named."""
    report = "\n".join(lines)
    print(report, end="")
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(report, encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments().parse_args(argv)
    args.run(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
