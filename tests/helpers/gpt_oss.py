"""A tiny gpt-oss that says what it is taught: a checkpoint in the published layout, MXFP4 included.

    turns: body of a request -> text of the answer --write_model()--> a directory that the server loads

Every weight is random but the head's. A random transformer makes another hidden state of every text, and the
head is what least squares finds to make the next token of each state the one that was taught: fewer positions
than numbers in a state have an exact solution. So no training is needed, and each part of the model counts:
an error in any of them, and the model says something else.

The tokenizer is tiny's with the tokens of harmony, the chat template tests/templates/harmony.jinja.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

from checkpoint.config import parse_config
from checkpoint.weights import all_parts, read_weights
from engine import Engine
from helpers.scripted import GRAMMARS, ScriptedEngine
from helpers.serving import TINY
from model import PAGE, Array, Batch, NumpyOps, Span, forward
from parity import random_tensor, write_tensors
from request import params
from request.template import ChatTemplate
from tokenizer import Tokenizer
from worker import LocalWorker

MARKERS = ["<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>", "<|message|>", "<|call|>"]
N_TEXT = 2048  # tokens of tiny's tokenizer; the markers come behind them
TEMPLATE = Path(__file__).parents[1] / "templates" / "harmony.jinja"
DIM = 512  # more than all answers have tokens
CONFIG: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "vocab_size": N_TEXT + len(MARKERS),
    "hidden_size": DIM,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_local_experts": 5,
    "num_experts_per_tok": 3,
    "sliding_window": 40,  # shorter than any prompt
    "max_position_embeddings": 2048,
    "rope_theta": 150_000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
    "swiglu_limit": 7.0,
    "quantization_config": {"quant_method": "mxfp4"},
    "eos_token_id": N_TEXT + MARKERS.index("<|return|>"),
}
ENDS = [N_TEXT + MARKERS.index(marker) for marker in ("<|return|>", "<|call|>")]


def write_model(directory: Path, turns: Mapping[str, str]) -> None:
    """`turns`: the body of a request to /v1/responses, as JSON, and what the model answers."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ENDS, "temperature": 0.0}))
    shutil.copy(TEMPLATE, directory / "chat_template.jinja")
    tokenizer = json.loads((TINY / "tokenizer.json").read_text(encoding="utf-8"))
    like = tokenizer["added_tokens"][0]
    for number, marker in enumerate(MARKERS, N_TEXT):
        tokenizer["added_tokens"].append(like | {"id": number, "content": marker})
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))

    config = parse_config(CONFIG, {})
    tensors = {part.name: random_tensor(part.name, part.shape) for part in all_parts(config)}
    write_tensors(directory / "model.safetensors", tensors, "BF16")
    taught = [sequence(directory, json.loads(body), answer) for body, answer in turns.items()]
    tensors["lm_head.weight"] = head_for(directory, taught)
    write_tensors(directory / "model.safetensors", tensors, "BF16")


def sequence(directory: Path, body: dict[str, Any], answer: str) -> tuple[list[int], list[int]]:
    """The token ids of the prompt, as the server will make it, and of the answer."""
    tokenizer = Tokenizer(directory / "tokenizer.json")
    engine = cast(Engine, ScriptedEngine(tokenizer, []))
    worker = LocalWorker(engine, tokenizer, ChatTemplate.load(directory), GRAMMARS)
    request = params.from_responses({"model": "m"} | body, {})
    prompt = worker._prepare(request)  # without asking whether its grammar compiles
    return prompt.token_ids, tokenizer.encode(answer)


def head_for(directory: Path, taught: list[tuple[list[int], list[int]]]) -> Array:
    """The head by which each of these prompts is followed by its answer. (vocab_size, DIM)"""
    config = parse_config(CONFIG, {})
    weights = read_weights(directory, config)
    weights.head = np.eye(DIM, dtype=np.float32)  # then the logits are the hidden state
    states: list[Array] = []
    wanted: list[int] = []
    for prompt, answer in taught:
        ops = NumpyOps(config, weights, config.max_seq_len, config.max_seq_len // PAGE, 1)
        token_ids = prompt + answer[:-1]
        span = Span(0, range(config.max_seq_len // PAGE), token_ids, 0, len(answer))
        states.append(forward(ops, weights, Batch([span])))
        wanted += answer
    all_states = np.concatenate(states).astype(np.float64)  # (n, DIM)
    assert len(all_states) < DIM, f"{len(all_states)} tokens are taught, {DIM - 1} can be"
    targets = np.zeros((len(wanted), config.vocab_size))
    targets[np.arange(len(wanted)), wanted] = 10
    head, *_ = np.linalg.lstsq(all_states, targets)
    return np.ascontiguousarray(head.T, np.float32)
