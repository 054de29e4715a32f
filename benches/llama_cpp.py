"""llama.cpp as a contender on the processor: the file that it reads, how fast it is, how well it predicts.

    Weights, two formats --write_gguf()--> FILE --server()--> completions() --> Speeds
                                           FILE --losses()--> -log p of each token of a text

`pip install xllamacpp` brings it. Speeds are those of its server, which runs in this process. A server says
how probable its own words are, not those of a text, so losses come from the C functions that the same library
exports.

Authority: https://github.com/ggml-org/llama.cpp/blob/master/include/llama.h

Rules of this file:
1. Its formats are rounded by the `gguf` package, which is llama.cpp's own, not by checkpoint/blocks.py.

Not here: our side of the comparison (cpu.py), llama.cpp on a GPU (gpu_contenders.py).
"""

import ctypes
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benches.common import MAX_BATCH, Prompts, Run, Speeds, speeds
from checkpoint.config import Config
from checkpoint.weights import Weights
from tokenizer import Tokenizer

Formats = tuple[str, str]  # names of GGUF: of the layers, of the embedding, which is the head too

# --- the file -----------------------------------------------------------------------------------------------


def is_comparable(config: Config) -> bool:
    """Is llama.cpp here, and can its file be written? If not, stderr says why."""
    try:
        import xllamacpp  # noqa: F401
    except ImportError as error:
        print(f"no comparison ({error}): pip install xllamacpp brings llama.cpp", file=sys.stderr)
        return False
    if config.model_type != "llama":
        print(f"no comparison with llama.cpp: written for llama, not {config.model_type}", file=sys.stderr)
        return False
    if not config.tied or config.rope.type != "default" or config.n_heads * config.head_dim != config.dim:
        print("no comparison with llama.cpp: written for a tied head and plain rotary pairs", file=sys.stderr)
        return False
    return True


def write_gguf(
    path: Path, c: Config, weights: Weights, tokenizer: dict[str, Any], formats: tuple[str, str]
) -> None:
    """Write a Llama in two formats, of the layers and of the embedding; its rotary pairs lie as ours do."""
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


# --- speeds -------------------------------------------------------------------------------------------------


def server(file: Path, max_seq_len: int, n_threads: int) -> Any:
    """A server of the file, with a slot for each sequence of a batch."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.n_parallel = MAX_BATCH
    params.n_ctx = MAX_BATCH * max_seq_len
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = n_threads
    params.cache_ram_mib = 0  # no prompt of an earlier round
    params.verbosity = 0
    return xllamacpp.Server(params)


def completions(file: Path, max_seq_len: int, n_threads: int, tokenizer: Tokenizer) -> Run:
    """The completions of llama.cpp's server, in this process; a thread feeds each of its slots.

    The server lives for one run: the threads of servers that wait would take the time of whoever is measured.
    """

    def one(running: Any, prompt: list[int], n_new: int) -> list[tuple[float, str]]:
        pieces: list[tuple[float, str]] = []

        def on_chunk(chunk: Any) -> bool:
            pieces.append((time.perf_counter(), chunk["choices"][0]["text"]))
            return False  # go on

        greedy = {"temperature": 0, "samplers": [], "ignore_eos": True, "cache_prompt": False, "stream": True}
        running.handle_completions({"prompt": prompt, "n_predict": n_new} | greedy, on_chunk)
        return pieces[:n_new]  # the last chunk has no text, but the reason of the end

    def run(prompts: Prompts, n_new: int) -> Speeds:
        running = server(file, max_seq_len, n_threads)
        one(running, prompts[0][::-1], 4)  # another prompt, to warm up
        started = time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as pool:
            sequences = list(pool.map(lambda prompt: one(running, prompt, n_new), prompts))
        times = [[t for t, _ in pieces] for pieces in sequences]
        generated = tokenizer.encode("".join(text for _, text in sequences[0]))
        return speeds(prompts, started, times, generated)

    return run


# --- losses -------------------------------------------------------------------------------------------------


class Parameters(ctypes.Structure):
    """Those of a model or a context by their defaults; more bytes than any version of either has."""

    _fields_ = (("opaque", ctypes.c_byte * 4096),)


class TokenBatch(ctypes.Structure):
    """llama_batch; where a pointer is null llama.cpp fills in what a single sequence has."""

    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.c_void_p),  # (n_tokens,) int32
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.c_void_p),
        ("n_seq_id", ctypes.c_void_p),
        ("seq_id", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),  # (n_tokens,) int8: whether they are wanted
    )


OnLog = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
SILENT = OnLog(lambda *_: None)

# fmt: off
#  of llama.h                      result             arguments
FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "llama_log_set":              (None,              [OnLog, ctypes.c_void_p]),
    "llama_backend_init":         (None,              []),
    "llama_model_default_params": (Parameters,        []),
    "llama_model_load_from_file": (ctypes.c_void_p,   [ctypes.c_char_p, Parameters]),
    "llama_model_free":           (None,              [ctypes.c_void_p]),
    "llama_context_default_params": (Parameters,      []),
    "llama_init_from_model":      (ctypes.c_void_p,   [ctypes.c_void_p, Parameters]),
    "llama_free":                 (None,              [ctypes.c_void_p]),
    "llama_set_n_threads":        (None,              [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32]),
    "llama_get_memory":           (ctypes.c_void_p,   [ctypes.c_void_p]),
    "llama_memory_clear":         (None,              [ctypes.c_void_p, ctypes.c_bool]),
    "llama_decode":               (ctypes.c_int32,    [ctypes.c_void_p, TokenBatch]),
    "llama_get_logits":           (ctypes.POINTER(ctypes.c_float), [ctypes.c_void_p]),
}
# fmt: on


@cache
def library() -> Any:
    import xllamacpp

    functions = ctypes.CDLL(xllamacpp.xllamacpp.__file__)
    for name, (result, arguments) in FUNCTIONS.items():
        function = getattr(functions, name)
        function.restype = result
        function.argtypes = arguments
    functions.llama_log_set(SILENT, None)
    functions.llama_backend_init()
    return functions


def losses(
    file: Path,
    windows: Sequence[Sequence[int]],
    n_threads: int,
    vocab_size: int,
    window_losses: Callable[[NDArray[np.float32], Sequence[int]], NDArray[np.float64]],
) -> NDArray[np.float64]:
    """Those of all windows, none longer than 512 tokens, the context by default."""
    llama = library()
    model = llama.llama_model_load_from_file(str(file).encode(), llama.llama_model_default_params())
    context = llama.llama_init_from_model(model, llama.llama_context_default_params())
    llama.llama_set_n_threads(context, n_threads, n_threads)
    parts: list[NDArray[np.float64]] = []
    for window in windows:
        token_ids = np.array(window, np.int32)
        wanted = np.ones(len(window), np.int8)
        llama.llama_memory_clear(llama.llama_get_memory(context), True)
        batch = TokenBatch(n_tokens=len(window), token=token_ids.ctypes.data, logits=wanted.ctypes.data)
        if llama.llama_decode(context, batch):
            raise RuntimeError(f"llama.cpp cannot compute {file.name}")
        logits = np.ctypeslib.as_array(llama.llama_get_logits(context), (len(window), vocab_size))
        parts.append(window_losses(logits, window))
    llama.llama_free(context)
    llama.llama_model_free(model)
    return np.concatenate(parts)
