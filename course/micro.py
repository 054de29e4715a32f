"""A whole LLM server on one page of plain Python: read it from top to bottom in ten minutes.

    python3 course/micro.py tests/models/tiny

answers OpenAI(base_url="http://127.0.0.1:8001/v1", api_key="-").responses.create(model="", input="Hello!").

    request JSON ─► prompt ─► token ids ─► logits ─► new token id ─► text ─► events ─► bytes

It is slow, serves one client at a time, and believes every request. The rest of this repository ends that.
"""
import cmath, codecs, json, random, re, secrets, sys, time
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import groupby, pairwise
from math import exp, inf, sqrt
from operator import add, itemgetter, mul
from pathlib import Path
from typing import Any

DIRECTORY = Path(sys.argv[1] if sys.argv[1:] else "tests/models/tiny")
CONFIG = json.loads((DIRECTORY / "config.json").read_bytes())
TOKENIZER = json.loads((DIRECTORY / "tokenizer.json").read_bytes())
ENDS = json.loads((DIRECTORY / "generation_config.json").read_bytes())["eos_token_id"]
Row = list[float]  # one number for each dimension of the model, of a head, or for each token

# --- 1. Text to tokens --------------------------------------------------------------------------------------
# The vocabulary spells its tokens in GPT-2's alphabet, which has a printable letter for each byte.
VISIBLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
OTHERS = [byte for byte in range(0x100) if byte not in VISIBLE]
LETTERS = [chr(byte if byte in VISIBLE else 0x100 + OTHERS.index(byte)) for byte in range(0x100)]
IDS = TOKENIZER["model"]["vocab"]
MARKERS = {token["content"]: token["id"] for token in TOKENIZER["added_tokens"]}
BYTES = {token_id: bytes(map(LETTERS.index, letters)) for letters, token_id in IDS.items()}
# A word, a digit, punctuation, or blanks: no token crosses from one into the next.
WORD = re.compile(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|(?:[^\w\r\n]|_)?[^\W\d_]+|\d"
                  r"| ?(?:[^\w\s]|_)+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")

def encode(text: str) -> list[int]:
    """Byte-pair encoding: join the neighbours whose token has the lowest id, until no two make a token."""
    ids = []
    for word in WORD.findall(text):
        parts = [LETTERS[byte] for byte in word.encode()]
        while len(parts) > 1:
            token, i = min((IDS.get(a + b, inf), i) for i, (a, b) in enumerate(pairwise(parts)))
            if token == inf:
                break
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        ids += [IDS[part] for part in parts]
    return ids

def encode_chat(messages: list[Any]) -> list[int]:
    """Write messages as the model was trained to read them; encode() makes no marker of a user's text."""
    ids, start, end = [], MARKERS["<|im_start|>"], MARKERS["<|im_end|>"]
    for message in messages:
        content = message["content"]
        text = content if isinstance(content, str) else "".join(part["text"] for part in content)
        ids += [start, *encode(f"{message['role']}\n{text}"), end, *encode("\n")]
    return [*ids, start, *encode("assistant\n")]

# --- 2. The forward pass ------------------------------------------------------------------------------------
def read_weights(file: bytes) -> dict[str, Any]:
    """Return each tensor of a safetensors file by its name: a list of numbers, or a list of rows."""
    weights, start = {}, 8 + int.from_bytes(file[:8], "little")
    for name, tensor in json.loads(file[8:start]).items():
        if name != "__metadata__":
            begin, end = tensor["data_offsets"]
            halves = file[start + begin : start + end]  # a bfloat16 is the upper half of a float32
            floats = bytearray(2 * len(halves))
            floats[2::4], floats[3::4] = halves[::2], halves[1::2]
            weights[name] = memoryview(floats).cast("f", tensor["shape"]).tolist()
    return weights

WEIGHTS = read_weights((DIRECTORY / "model.safetensors").read_bytes())
HEAD = "model.embed_tokens" if CONFIG["tie_word_embeddings"] else "lm_head"
N_LAYERS, N_KV_HEADS, D = (CONFIG[name] for name in ("num_hidden_layers", "num_key_value_heads", "head_dim"))
SPEEDS = [CONFIG["rope_theta"] ** (-2 * i / D) for i in range(D // 2)]

def dot(a: Iterable[float], b: Iterable[float]) -> float:
    return float(sum(map(mul, a, b)))

def linear(x: Row, name: str) -> Row:
    """W x: the dot product of x with each row of W"""
    return [dot(row, x) for row in WEIGHTS[name + ".weight"]]

def norm(x: Row, name: str) -> Row:
    """x / sqrt(mean(x^2) + eps) * w: https://arxiv.org/abs/1910.07467"""
    root = sqrt(dot(x, x) / len(x) + CONFIG["rms_norm_eps"])
    return [a / root * w for a, w in zip(x, WEIGHTS[name + ".weight"], strict=True)]

def softmax(x: Row) -> Row:
    """exp(x) / sum(exp(x)); we subtract the largest x first, so that exp stays finite."""
    largest = max(x)
    exps = [exp(a - largest) for a in x]
    total = sum(exps)
    return [e / total for e in exps]

def rotate(x: Row, position: int) -> Row:
    """RoPE, x[i] + j x[i + D/2] turned by position * SPEEDS[i]: https://arxiv.org/abs/2104.09864"""
    pairs = zip(map(complex, x[: D // 2], x[D // 2 :]), SPEEDS, strict=True)
    turned = [pair * cmath.rect(1, position * speed) for pair, speed in pairs]
    return [z.real for z in turned] + [z.imag for z in turned]

def attention(q: Row, keys: list[Row], values: list[Row]) -> Row:
    """softmax(q K^T / sqrt(D)) V: https://arxiv.org/abs/1706.03762"""
    shares = softmax([dot(q, k) / sqrt(D) for k in keys])
    return [dot(shares, column) for column in zip(*values, strict=True)]

def new_cache(n_tokens: int) -> list[Any]:
    return [[([], []) for _ in range(N_KV_HEADS)] for _ in range(N_LAYERS)]  # keys and values: both will grow

def forward(tokens: list[int], start: int, cache: list[Any]) -> Row:
    """Return the logits after these tokens, the first of them at `start`, and add to the cache."""
    for position, token in enumerate(tokens, start):
        x = WEIGHTS["model.embed_tokens.weight"][token]  # the residual stream
        for i, key_heads in enumerate(cache):
            layer = f"model.layers.{i}."
            normed = norm(x, layer + "input_layernorm")
            qkv = (linear(normed, f"{layer}self_attn.{name}_proj") for name in "qkv")
            q, k, v = ([row[h : h + D] for h in range(0, len(row), D)] for row in qkv)  # cut into heads
            mixed, n_shared = [], len(q) // len(k)  # so many query heads share a key head
            for n, (keys, values) in enumerate(key_heads):
                keys.append(rotate(norm(k[n], layer + "self_attn.k_norm"), position))
                values.append(v[n])
                for row in q[n * n_shared : (n + 1) * n_shared]:
                    mixed += attention(rotate(norm(row, layer + "self_attn.q_norm"), position), keys, values)
            x = [*map(add, x, linear(mixed, layer + "self_attn.o_proj"))]
            normed = norm(x, layer + "post_attention_layernorm")
            gate, up = (linear(normed, f"{layer}mlp.{name}_proj") for name in ("gate", "up"))
            h = [g / (1 + exp(-g)) * u for g, u in zip(gate, up, strict=True)]  # arxiv.org/abs/2002.05202
            x = [*map(add, x, linear(h, layer + "mlp.down_proj"))]
    return linear(norm(x, "model.norm"), HEAD)  # a logit a token: the higher, the likelier it is the next

# --- 3. Sampling --------------------------------------------------------------------------------------------
def generate(prompt: list[int], limit: int, temperature: float, seed: int | None) -> Iterator[int]:
    """Yield one new token after another; the last one ends the turn, unless the limit cuts it."""
    tokens, position, dice = prompt, 0, random.Random(seed)
    cache = new_cache(len(prompt) + max(limit, 0))
    for _ in range(limit):
        logits = forward(tokens, position, cache)
        position += len(tokens)
        token = max(range(len(logits)), key=logits.__getitem__)
        if temperature:
            [token] = dice.choices(range(len(logits)), softmax([logit / temperature for logit in logits]))
        yield token
        if token in ENDS:
            return
        tokens = [token]

# --- 4. Tokens to text --------------------------------------------------------------------------------------
CHANNEL_AFTER = {MARKERS["<think>"]: "reasoning", MARKERS["</think>"]: "message"}
BYTES |= {t["id"]: b"" if t["special"] else t["content"].encode() for t in TOKENIZER["added_tokens"]}
BYTES |= dict.fromkeys(CHANNEL_AFTER, b"")  # no client sees these two

class Answer:
    """Turn tokens into pairs of a channel and a text, without the newlines on either side of a marker."""
    def __init__(self, tokens: Iterable[int]) -> None:
        self.tokens, self.is_cut, self.channels = tokens, False, list[str]()  # `channels`: that of each token

    def __iter__(self) -> Iterator[tuple[str, str]]:
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")  # it holds half a character for the rest
        # We hold newlines until text follows: before a marker we drop them.
        token, channel, is_after_marker, held = -1, "message", False, list[str]()
        for token in self.tokens:
            is_marker = token in CHANNEL_AFTER
            self.channels.append("reasoning" if is_marker else channel)
            text = utf8.decode(BYTES[token], final=is_marker)
            text = text.lstrip("\n") if is_after_marker else text
            whole = text.rstrip("\n")
            if whole:
                yield from ((channel, piece) for piece in [*held, whole])
                is_after_marker, held = False, []
            held += filter(None, [text[len(whole) :]])
            if is_marker:
                channel, is_after_marker, held = CHANNEL_AFTER[token], True, []
                yield "marker", ""
        self.is_cut = token not in ENDS
        yield from ((channel, piece) for piece in [*held, utf8.decode(b"", final=True)] if piece)

# --- 5. Events ----------------------------------------------------------------------------------------------
NULLS = """error incomplete_details completed_at usage instructions max_output_tokens max_tool_calls
           previous_response_id safety_identifier prompt_cache_key"""
RESPONSE: dict[str, Any] = dict.fromkeys(NULLS.split()) | {
    "object": "response", "status": "in_progress", "output": [], "temperature": 1, "top_p": 1.0,
    "presence_penalty": 0.0, "frequency_penalty": 0.0, "top_logprobs": 0, "metadata": {}, "tools": [],
    "parallel_tool_calls": True, "tool_choice": "auto", "truncation": "disabled", "service_tier": "default",
    "text": {"format": {"type": "text"}}, "reasoning": {"effort": None, "summary": None},
    "store": False, "background": False,
}
REPEATED = ("temperature", "instructions", "max_output_tokens", "metadata")  # by the response
ITEMS: dict[str, Any] = {  # of a channel the item, its part, and what each event about its text has besides
    "reasoning": ({"type": "reasoning", "summary": []}, {"type": "reasoning_text"}, {}),
    "message": ({"type": "message", "role": "assistant"},
                {"type": "output_text", "annotations": [], "logprobs": []}, {"logprobs": []}),
}

def respond(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the events of a response as its tokens come: announce each item, let it grow, and close it."""
    given, instructions = body["input"], body["instructions"]
    messages = [{"role": "system", "content": instructions}] if instructions else []
    messages += given if isinstance(given, list) else [{"role": "user", "content": given}]
    prompt = encode_chat(messages)
    limit = min(body["max_output_tokens"] or 4096, CONFIG["max_position_embeddings"] - len(prompt))
    answer = Answer(generate(prompt, limit, body["temperature"], body.get("seed")))
    own = {"id": f"resp_{secrets.token_hex(16)}", "created_at": int(time.time()), "model": DIRECTORY.name}
    response, output = RESPONSE | {name: body[name] for name in REPEATED} | own, list[Any]()
    yield from ({"type": f"response.{kind}", "response": response} for kind in ("created", "in_progress"))
    for channel, pieces in groupby(answer, itemgetter(0)):
        if channel == "marker":
            continue  # it has ended the item before it
        item, part, more = ITEMS[channel]
        item = item | {"id": f"item_{secrets.token_hex(16)}", "status": "in_progress", "content": []}
        index, text, kind = {"output_index": len(output)}, "", f"response.{part['type']}"
        place = index | {"item_id": item["id"], "content_index": 0}
        yield {"type": "response.output_item.added", "item": item} | index
        yield {"type": "response.content_part.added", "part": part | {"text": ""}} | place
        for _, piece in pieces:
            text += piece
            yield {"type": f"{kind}.delta", "delta": piece} | place | more
        yield {"type": f"{kind}.done", "text": text} | place | more
        yield {"type": "response.content_part.done", "part": part | {"text": text}} | place
        item |= {"status": "incomplete" if answer.is_cut else "completed", "content": [part | {"text": text}]}
        yield {"type": "response.output_item.done", "item": item} | index
        output.append(item)
    n, n_reasoning = len(answer.channels), answer.channels.count("reasoning")
    usage = {"input_tokens": len(prompt), "output_tokens": n, "total_tokens": len(prompt) + n,
             "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
             "output_tokens_details": {"reasoning_tokens": n_reasoning}}
    ending: dict[str, Any] = {"status": "completed", "completed_at": int(time.time())}
    if answer.is_cut:
        ending = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    response |= ending | {"output": output, "usage": usage}
    yield {"type": f"response.{response['status']}", "response": response}

# --- 6. The server ------------------------------------------------------------------------------------------
class Handler(BaseHTTPRequestHandler):
    """POST /v1/responses: server-sent events, or the response of the last of them."""
    protocol_version = "HTTP/1.1"
    def write(self, data: bytes) -> None:
        """Write one chunk of the body; b"" is the last. Without it a client knows that the body was cut."""
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

    def do_POST(self) -> None:
        if self.path != "/v1/responses":
            return self.send_error(404)
        body = RESPONSE | json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        is_stream = body.get("stream")
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream" if is_stream else "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.send_header("Connection", "close")
        self.end_headers()
        for number, event in enumerate(respond(body)):
            event["sequence_number"] = number
            if is_stream:
                self.write(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode())
        self.write(b"data: [DONE]\n\n" if is_stream else json.dumps(event["response"]).encode())
        self.write(b"")

if __name__ == "__main__":
    HTTPServer(("127.0.0.1", int(sys.argv[2]) if sys.argv[2:] else 8001), Handler).serve_forever()
