"""gpt-oss from its checkpoint to the events: a tiny one that says what it is taught, over the real server.

Every weight is random but the head's. A random transformer makes another hidden state of every text, and the
head is what least squares finds to make the next token of each state the one that was taught: fewer positions
than numbers in a state have an exact solution. So an answer comes only if the template, the tokenizer, the
weights (MXFP4 too) and the forward pass are all right; and harmony's channels must become reasoning,
preambles, calls and text. The tokenizer is tiny's with the tokens of harmony.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from checkpoint.config import parse_config
from checkpoint.weights import all_parts, read_weights
from engine import Engine
from helpers.scripted import GRAMMARS, ScriptedEngine
from helpers.serving import TINY, Json, Server, serve
from model import PAGE, Array, Batch, NumpyOps, Span, forward
from parity import random_tensor, write_tensors
from request import params
from request.template import ChatTemplate
from tokenizer import Tokenizer
from worker import LocalWorker

MARKERS = ["<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>", "<|message|>", "<|call|>"]
N_TEXT = 2048  # tokens of tiny's tokenizer; the markers come after them
ENDS = [N_TEXT + MARKERS.index(marker) for marker in ("<|return|>", "<|call|>")]
DIM = 512  # more than all answers have tokens
YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 128, "beta_fast": 32.0,
        "beta_slow": 1.0, "truncate": False}  # fmt: skip
CONFIG: Json = {
    "model_type": "gpt_oss", "vocab_size": N_TEXT + len(MARKERS), "hidden_size": DIM, "intermediate_size": 96,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32,
    "num_local_experts": 5, "num_experts_per_tok": 3, "max_position_embeddings": 2048, "rope_theta": 150_000,
    "sliding_window": 40,  # shorter than any prompt
    "rope_scaling": YARN, "swiglu_limit": 7.0, "quantization_config": {"quant_method": "mxfp4"},
    "eos_token_id": ENDS[0],
}  # fmt: skip

QUESTION = "What is the weather in Oslo?"
SUM = "What is 2+2?"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Json = {"type": "function", "name": "get_weather", "description": "The weather", "parameters": CITY}
NEXT = "<|end|><|start|>assistant"
ARGUMENTS = '{"city": "Oslo"}'
THOUGHTS = {"low": "Sum.", "medium": "2 plus 2, so add.", "high": "Two and two. Count: 3, 4. So it is 4."}
ANSWERS = {"low": "4", "medium": "It is 4.", "high": "2 plus 2 is 4."}
ASKED: list[Json] = [{"role": "user", "content": QUESTION}]
PREAMBLE = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]}
TURN: list[Json] = [
    *ASKED,
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "I must look."}]},
    PREAMBLE,
    {"type": "function_call", "call_id": "call_1", "name": "get_weather", "arguments": ARGUMENTS},
    {"type": "function_call_output", "call_id": "call_1", "output": "9 degrees"},
]


def thought(text: str) -> str:
    return f"<|channel|>analysis<|message|>{text}{NEXT}"


def final(text: str) -> str:
    return f"<|channel|>final<|message|>{text}<|return|>"


CALL = f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>"
LOOKING = thought("I must look.") + f"<|channel|>commentary<|message|>I look.{NEXT}" + CALL
TURNS: list[tuple[Json, str]] = [
    ({"input": ASKED, "tools": [WEATHER]}, LOOKING),
    ({"input": TURN, "tools": [WEATHER]}, thought("9 is cold.") + final("It is 9 degrees in Oslo.")),
]
for effort in THOUGHTS:
    body = {"input": SUM, "reasoning": {"effort": effort}}
    TURNS.append((body, thought(THOUGHTS[effort]) + final(ANSWERS[effort])))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("gpt-oss") / "tiny-gpt-oss"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ENDS, "temperature": 0.0}))
    shutil.copy(Path(__file__).parent / "templates" / "harmony.jinja", directory / "chat_template.jinja")
    tokenizer = json.loads((TINY / "tokenizer.json").read_text(encoding="utf-8"))
    like = tokenizer["added_tokens"][0]
    for number, marker in enumerate(MARKERS, N_TEXT):
        tokenizer["added_tokens"].append(like | {"id": number, "content": marker})
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    parts = all_parts(parse_config(CONFIG, {}))
    tensors = {part.name: random_tensor(part.name, part.shape) for part in parts}
    write_tensors(directory / "model.safetensors", tensors, "BF16")
    tensors["lm_head.weight"] = taught_head(directory)
    write_tensors(directory / "model.safetensors", tensors, "BF16")
    return directory


def taught_head(directory: Path) -> Array:
    """Return the head by which each prompt of TURNS is followed by its answer. (vocab_size, DIM)"""
    config = parse_config(CONFIG, {})
    weights = read_weights(directory, config)
    weights.head = np.eye(DIM, dtype=np.float32)  # then the logits are the hidden state
    tokenizer = Tokenizer(directory / "tokenizer.json")
    engine = cast(Engine, ScriptedEngine(tokenizer, []))
    worker = LocalWorker(engine, tokenizer, ChatTemplate.load(directory), GRAMMARS)
    states: list[Array] = []
    wanted: list[int] = []
    for body, text in TURNS:
        prompt = worker._prepare(params.from_responses({"model": "m"} | body, {})).token_ids
        answer = tokenizer.encode(text)
        ops = NumpyOps(config, weights, config.max_seq_len, config.max_seq_len // PAGE, 1)
        span = Span(0, range(config.max_seq_len // PAGE), prompt + answer[:-1], 0, len(answer))
        states.append(forward(ops, weights, Batch([span])))
        wanted += answer
    assert len(wanted) < DIM, f"{len(wanted)} tokens are taught, {DIM - 1} can be"
    targets = np.zeros((len(wanted), config.vocab_size))
    targets[np.arange(len(wanted)), wanted] = 10
    head, *_ = np.linalg.lstsq(np.concatenate(states).astype(np.float64), targets)
    return np.ascontiguousarray(head.T, np.float32)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    with serve("--speculate", "4", model=model) as server:
        yield server


def said(response: Any) -> list[tuple[str, ...]]:
    """What its items say."""
    found: list[tuple[str, ...]] = []
    for item in response.output:
        if item.type == "function_call":
            found.append((item.type, item.name, item.arguments))
        else:
            found.append((item.type, "".join(part.text for part in item.content)))
    return found


@pytest.mark.parametrize("effort", THOUGHTS)
def test_reasoning_effort(server: Server, effort: Any) -> None:
    with server.sdk() as client:
        response = client.responses.create(model="default", input=SUM, reasoning={"effort": effort})
        asked: Any = [{"role": "user", "content": SUM}]
        chat = client.chat.completions.create(model="default", messages=asked, reasoning_effort=effort)
    assert said(response) == [("reasoning", THOUGHTS[effort]), ("message", ANSWERS[effort])]
    message: Any = chat.choices[0].message
    assert (message.reasoning_content, message.content) == (THOUGHTS[effort], ANSWERS[effort])


def test_a_preamble_a_call_and_a_chain_with_its_reasoning(server: Server) -> None:
    """By the chain, and by all items given back."""
    tools: Any = [WEATHER]
    with server.sdk() as client:
        first = client.responses.create(model="default", input=cast(Any, ASKED), tools=tools)
        call: Any = first.output[2]
        assert said(first)[:2] == [("reasoning", "I must look."), ("message", "I look.")]
        assert (call.name, call.arguments) == ("get_weather", ARGUMENTS)
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "9 degrees"}
        given_back: Any = [*ASKED, *(item.model_dump(exclude_none=True) for item in first.output), result]
        for more in ({"previous_response_id": first.id, "input": [result]}, {"input": given_back}):
            answer: Any = client.responses.create(model="default", tools=tools, **more)
            assert said(answer) == [("reasoning", "9 is cold."), ("message", "It is 9 degrees in Oslo.")]
