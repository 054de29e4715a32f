"""A whole LLM server in one file: read it from top to bottom, in half an hour.

    python course/nano.py tests/models/tiny

answers OpenAI(base_url="http://127.0.0.1:8001/v1", api_key="-").responses.create(input="Hello!").

    request JSON ─► prompt ─► token ids ─► logits ─► new token id ─► text ─► events ─► bytes

It serves POST /v1/responses, streamed and plain, from the directory of a Qwen3 model. It has one client at a
time, no tools, no background runs and no store, and it believes every request. The rest of this repository
is what it takes to get rid of these limits; each chapter of the course begins with one.
"""

import argparse
import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import jinja2.sandbox
import numpy as np
import safetensors
import tokenizers
import uvicorn
from numpy.typing import NDArray
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

Array = NDArray[Any]
Object = dict[str, Any]  # of JSON

# --- 1. Text and tokens -------------------------------------------------------------------------------------


class Tokenizer:
    """tokenizer.json and the chat template: messages to token ids, token ids to bytes."""

    def __init__(self, directory: Path) -> None:
        self.library = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        self.template = environment.from_string((directory / "chat_template.jinja").read_text())

    def encode(self, messages: list[Object]) -> list[int]:
        """Return the prompt: the messages as the model was trained to read them, up to its own turn."""
        prompt = self.template.render(messages=messages, add_generation_prompt=True)
        return self.library.encode(prompt, add_special_tokens=False).ids


# --- 2. Weights ---------------------------------------------------------------------------------------------


def read_weights(directory: Path) -> dict[str, Array]:
    """Return every tensor of model.safetensors by its name, in float32."""
    weights = {}
    for name, tensor in safetensors.deserialize((directory / "model.safetensors").read_bytes()):  # type: ignore[no-untyped-call]
        assert tensor["dtype"] == "BF16", f"expected bfloat16, got {tensor['dtype']} in {name}"
        halves = np.frombuffer(tensor["data"], np.uint16).astype(np.uint32)
        # A bfloat16 is the upper 16 bits of a float32.
        weights[name] = (halves << 16).view(np.float32).reshape(tensor["shape"])
    return weights


# --- 3. The forward pass ------------------------------------------------------------------------------------

# Token ids go in, and one number for each token of the vocabulary comes out: the higher, the likelier it
# comes next. Chapter 2 explains how; skip to section 4 if the formulas are new to you.


def softmax(x: Array) -> Array:
    """exp(x) / sum(exp(x)) over the last axis; the largest x is subtracted, so that exp stays finite."""
    exp = np.exp(x - x.max(-1, keepdims=True))
    return exp / exp.sum(-1, keepdims=True)  # type: ignore[no-any-return]


class Model:
    """Qwen3, a decoder-only transformer with grouped-query attention. https://arxiv.org/abs/2505.09388"""

    def __init__(self, directory: Path) -> None:
        c = json.loads((directory / "config.json").read_text())
        self.weights = read_weights(directory)
        self.head = "model.embed_tokens" if c["tie_word_embeddings"] else "lm_head"
        self.n_layers, self.head_dim = c["num_hidden_layers"], c["head_dim"]
        self.n_kv_heads = c["num_key_value_heads"]
        self.eps = c["rms_norm_eps"]
        self.max_len = c["max_position_embeddings"]
        self.ends = json.loads((directory / "generation_config.json").read_text())["eos_token_id"]
        # RoPE: pair i of a head turns by position / theta^(2i / head_dim). https://arxiv.org/abs/2104.09864
        speeds = c["rope_theta"] ** -(np.arange(0, self.head_dim, 2) / self.head_dim)
        angles = np.outer(np.arange(self.max_len), speeds)[:, None]  # (max_len, 1, head_dim/2), for all heads
        self.cos, self.sin = np.cos(angles, dtype=np.float32), np.sin(angles, dtype=np.float32)

    def norm(self, x: Array, name: str) -> Array:
        """x / sqrt(mean(x^2) + eps) * w, over the last axis. https://arxiv.org/abs/1910.07467"""
        normed: Array = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + self.eps)
        return normed * self.weights[name + ".weight"]

    def linear(self, x: Array, name: str) -> Array:
        """x W^T: (n, n_in), with W of shape (n_out, n_in) -> (n, n_out)"""
        return x @ self.weights[name + ".weight"].T

    def forward(self, token_ids: list[int], start: int, cache: Array) -> Array:
        """Return the logits after the last of these tokens, the first of which stands at position `start`.

        The keys and values of all tokens before it are in the cache; those of these tokens are added to it.
        """
        x = self.weights["model.embed_tokens.weight"][token_ids]  # (n, dim), the residual stream
        for i in range(self.n_layers):
            layer = f"model.layers.{i}."
            normed = self.norm(x, layer + "input_layernorm")
            x = x + self.attention(normed, layer + "self_attn.", start, cache[i])
            normed = self.norm(x, layer + "post_attention_layernorm")
            gate = self.linear(normed, layer + "mlp.gate_proj")
            up = self.linear(normed, layer + "mlp.up_proj")
            swiglu = gate / (1 + np.exp(-gate)) * up  # https://arxiv.org/abs/2002.05202
            x = x + self.linear(swiglu, layer + "mlp.down_proj")
        return self.linear(self.norm(x[-1], "model.norm"), self.head)  # (vocab_size,)

    def attention(self, x: Array, layer: str, start: int, cache: Array) -> Array:
        """softmax(q K^T / sqrt(head_dim)) V, each token over itself and all before it."""
        end = start + len(x)
        q, k, v = (self.linear(x, f"{layer}{name}_proj").reshape(len(x), -1, self.head_dim) for name in "qkv")
        cache[0, start:end] = self.rotate(self.norm(k, layer + "k_norm"), start, end)
        cache[1, start:end] = v
        keys, values = cache[:, :end]
        turned = self.rotate(self.norm(q, layer + "q_norm"), start, end)
        # Axes: n token, g key head, h query head of that key head, d head_dim, k key.
        queries = turned.reshape(len(x), self.n_kv_heads, -1, self.head_dim)
        scores = np.einsum("nghd,kgd->ghnk", queries, keys) / np.sqrt(np.float32(self.head_dim))
        is_later = np.arange(end) > np.arange(start, end)[:, None]  # (n, k): the causal mask
        scores[:, :, is_later] = -np.inf
        mixed = np.einsum("ghnk,kgd->nghd", softmax(scores), values)
        return self.linear(mixed.reshape(len(x), -1), layer + "o_proj")

    def rotate(self, x: Array, start: int, end: int) -> Array:
        """Turn each pair of a head, (i, i + head_dim/2), by the angle of its position."""
        a, b = np.split(x, 2, -1)
        cos, sin = self.cos[start:end], self.sin[start:end]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


# --- 4. Sampling --------------------------------------------------------------------------------------------


def generate(model: Model, prompt: list[int], body: Object, limit: int) -> Iterator[int]:
    """Yield one new token id after another, the one that ends the turn too."""
    random = np.random.default_rng(body.get("seed"))
    shape = (model.n_layers, 2, len(prompt) + limit, model.n_kv_heads, model.head_dim)
    cache = np.zeros(shape, np.float32)  # (layer, keys or values, position, head, number)
    token_ids, position = prompt, 0
    for _ in range(limit):
        logits = model.forward(token_ids, position, cache)
        position += len(token_ids)
        if body["temperature"]:
            chances = softmax(logits.astype(np.float64) / body["temperature"])
            token = int(random.choice(len(chances), p=chances))
        else:
            token = int(logits.argmax())
        yield token
        if token in model.ends:
            return
        token_ids = [token]


# --- 5. From tokens to channels -----------------------------------------------------------------------------


class Answer:
    """Turns token ids into text, never half a character; `channel` says what it is: reasoning or answer.

    Newlines beside <think> and </think> belong to neither: they are held until more text comes.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.channel = "answer"
        self.is_after_marker = False
        self.open_ids: list[int] = []  # tokens that end inside a character
        self.held = ""  # newlines
        self.n_tokens = self.n_reasoning_tokens = 0

    def feed(self, token_id: int) -> list[str]:
        """Return the texts that a token completes."""
        self.n_tokens += 1
        marker = self.tokenizer.library.id_to_token(token_id)
        if marker in ("<think>", "</think>"):
            self.channel = "reasoning" if marker == "<think>" else "answer"
            self.is_after_marker = True
            self.held = ""
            self.n_reasoning_tokens += 1
            return []
        self.n_reasoning_tokens += self.channel == "reasoning"
        self.open_ids.append(token_id)
        text = self.tokenizer.library.decode(self.open_ids)
        if text.endswith("\ufffd"):  # what half a character is decoded to
            return []
        self.open_ids = []
        if self.is_after_marker:
            text = text.lstrip("\n")
            self.is_after_marker = not text
        whole = text.rstrip("\n")
        if not whole:
            self.held += text
            return []
        said = [piece for piece in (self.held, whole) if piece]
        self.held = text[len(whole) :]
        return said


# --- 6. Events ----------------------------------------------------------------------------------------------

#  channel       id, item, its part; the name of its delta events is the part's type
# fmt: off
ITEMS: Object = {
    "reasoning": ("rs",  {"type": "reasoning", "summary": []},      {"type": "reasoning_text"}),
    "answer":    ("msg", {"type": "message", "role": "assistant"},
                  {"type": "output_text", "annotations": [], "logprobs": []})
}
# fmt: on


class Builder:
    """Makes the events of one response: each opens, grows or closes an item, and carries its number."""

    def __init__(self, response: Object) -> None:
        self.response = response | {"status": "in_progress", "output": []}
        self.n_events = 0
        self.channel = ""  # the channel of the open item; "": none is open
        self.item: Object = {}
        self.part: Object = {}

    def event(self, kind: str, **members: Any) -> Object:
        self.n_events += 1
        return {"type": f"response.{kind}", "sequence_number": self.n_events - 1} | members

    def of_response(self, kind: str) -> Object:
        return self.event(kind, response=dict(self.response))

    def of_item(self, kind: str) -> Object:
        return self.event(kind, output_index=len(self.response["output"]), item=self.item)

    def of_part(self, kind: str, **members: Any) -> Object:
        index = len(self.response["output"])
        return self.event(kind, item_id=self.item["id"], output_index=index, content_index=0, **members)

    def of_text(self, kind: str, **members: Any) -> Object:
        if "logprobs" in self.part:
            members["logprobs"] = []
        return self.of_part(f"{self.part['type']}.{kind}", **members)

    def say(self, channel: str, text: str) -> Iterator[Object]:
        """Yield the events of one more piece of text."""
        if channel != self.channel:
            yield from self.close("completed")
            yield from self.open(channel)
        self.part = self.part | {"text": self.part["text"] + text}
        yield self.of_text("delta", delta=text)

    def open(self, channel: str) -> Iterator[Object]:
        prefix, item, part = ITEMS[channel]
        self.channel = channel
        self.item = item | {"id": f"{prefix}_{secrets.token_hex(16)}", "status": "in_progress", "content": []}
        self.part = part | {"text": ""}
        yield self.of_item("output_item.added")
        yield self.of_part("content_part.added", part=self.part)

    def close(self, status: str) -> Iterator[Object]:
        """Yield the three events that close the open item, if one is open."""
        if self.channel:
            self.channel = ""
            yield self.of_text("done", text=self.part["text"])
            yield self.of_part("content_part.done", part=self.part)
            self.item = self.item | {"status": status, "content": [self.part]}
            yield self.of_item("output_item.done")
            self.response["output"] = [*self.response["output"], self.item]


def frame(event: Object) -> bytes:
    """Return the bytes of an event. https://html.spec.whatwg.org/multipage/server-sent-events.html"""
    return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode()


# --- 7. The server ------------------------------------------------------------------------------------------

# Of a request, what the response repeats.
PARAMETERS = ("temperature", "instructions", "max_output_tokens", "metadata")
RESPONSE = json.loads("""{
    "object": "response", "error": null, "incomplete_details": null, "completed_at": null, "usage": null,
    "temperature": 1, "top_p": 1.0, "instructions": null, "max_output_tokens": null, "metadata": {},
    "presence_penalty": 0.0, "frequency_penalty": 0.0, "top_logprobs": 0, "parallel_tool_calls": true,
    "tool_choice": "auto", "tools": [], "max_tool_calls": null, "previous_response_id": null, "store": false,
    "background": false, "truncation": "disabled", "reasoning": {"effort": null, "summary": null},
    "text": {"format": {"type": "text"}}, "service_tier": "default", "safety_identifier": null,
    "prompt_cache_key": null
}""")


def messages_of(body: Object) -> list[Object]:
    """Return the conversation of `instructions` and `input`, a text or a list of messages of text."""
    given = body["input"]
    messages = given if isinstance(given, list) else [{"role": "user", "content": given}]
    system = [{"role": "system", "content": body["instructions"]}] if body["instructions"] else []
    return system + messages


class Server:
    """One model, one request at a time."""

    def __init__(self, directory: Path) -> None:
        self.name = directory.resolve().name
        self.model = Model(directory)
        self.tokenizer = Tokenizer(directory)
        self.turn = asyncio.Lock()

    async def create_response(self, http: Request) -> Response:
        body = RESPONSE | await http.json()
        events = self.events(body, self.tokenizer.encode(messages_of(body)))
        if body.get("stream"):
            return StreamingResponse(self.frames(events), media_type="text/event-stream")
        async for event in events:
            last = event
        return JSONResponse(last["response"])  # the last event holds the whole response

    async def frames(self, events: AsyncIterator[Object]) -> AsyncIterator[bytes]:
        async for event in events:
            yield frame(event)
        yield b"data: [DONE]\n\n"

    async def events(self, body: Object, prompt: list[int]) -> AsyncIterator[Object]:
        """Yield the events of a response, as its tokens come."""
        given = {name: body[name] for name in PARAMETERS}
        own = {"id": f"resp_{secrets.token_hex(16)}", "created_at": int(time.time()), "model": self.name}
        builder = Builder(RESPONSE | given | own)
        answer = Answer(self.tokenizer)
        limit = min(body["max_output_tokens"] or 4096, self.model.max_len - len(prompt))
        async with self.turn:
            yield builder.of_response("created")
            yield builder.of_response("in_progress")
            token_id = -1
            for token_id in generate(self.model, prompt, body, limit):
                for text in answer.feed(token_id):
                    for event in builder.say(answer.channel, text):
                        yield event
                await asyncio.sleep(0)  # the bytes leave before the next token is computed
        ending: Object = {"status": "completed", "completed_at": int(time.time())}
        if token_id not in self.model.ends:
            ending = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        for event in builder.close(ending["status"]):
            yield event
        builder.response |= ending | {"usage": usage(len(prompt), answer)}
        yield builder.of_response(ending["status"])


def usage(n_prompt: int, answer: Answer) -> Object:
    """Return what a response has cost, in tokens."""
    return {
        "input_tokens": n_prompt,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": answer.n_tokens,
        "output_tokens_details": {"reasoning_tokens": answer.n_reasoning_tokens},
        "total_tokens": n_prompt + answer.n_tokens,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--port", type=int, default=8001)
    args = parser.parse_args()
    route = Route("/v1/responses", Server(args.directory).create_response, methods=["POST"])
    uvicorn.run(Starlette(routes=[route]), port=args.port)
