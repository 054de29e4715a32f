"""Random inputs, and what pure functions make of them: the original's outcomes judge another version.

    python tests/oracle.py sse      prints a case a line, [case, outcome], of the modules in this checkout

The cases are the same in each run. tests/judge.py runs this in two checkouts and compares.
"""

import asyncio
import json
import os
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from itertools import chain, combinations, count
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # the server's modules

TINY = Path(__file__).parent / "models" / "tiny"
N = int(os.environ.get("CASES", "400"))  # fewer where a glance will do
Cases = Iterator[tuple[object, object]]
# By the number of rows of plain_kernels(): no sum in another order would round a number to another bfloat16.
SEEDS = {1: 1, 5: 4}


def outcome(function: Callable[..., object], *arguments: Any) -> Any:
    """Return what a function returns, or the name of what it raises."""
    try:
        return function(*arguments)
    except Exception as error:
        return type(error).__name__


def counted_ids() -> Callable[[str], str]:
    numbers = count()
    return lambda prefix: f"{prefix}_{next(numbers)}"


def cuts(random: Random, whole: Any) -> Iterator[Any]:
    """Yield a text, or bytes, in pieces."""
    while whole:
        n = random.randint(1, min(len(whole), random.choice([1, 4, 30])))
        yield whole[:n]
        whole = whole[n:]


def drawn(random: Random, words: list[Any], longest: int) -> list[Any]:
    return random.choices(words, k=random.randint(1, random.choice([2, 5, longest])))


def sse(random: Random) -> Cases:
    from sse import BOM, Parser

    words, ends = [b"data: x", b"data:  y", b"data", b"id: 7", b"event: e"], [b"\n", b"\r", b"\r\n"]
    words += ["data: ü€".encode(), b": note", BOM, b"x", b'data: {"a": {}', b"data: }", b"data: a\x0bb\x0c"]
    words += [*ends, b"\n\n", b"\r\r", b"\r\n\r\n", b"data: " + bytes(40), b"id: \0"]
    words += [b"data: x\n\n", b"data: [DONE]"]
    for i in range(4 * N):
        said = drawn(random, words, 12)
        said = [part for line in said for part in (line, random.choice(ends))] if i % 2 else said
        chunks, limit = [*cuts(random, b"".join(said))], random.choice([9, 44, 1000])
        chunks[1:1] = [b""] * (i % 3 == 0)
        parser, fed = Parser(limit), list[Any]()
        while len(fed) < len(chunks) and "EventTooLarge" not in fed:
            fed.append(outcome(parser.feed, chunks[len(fed)]))
        case = ["max_event_bytes", limit, "chunks", chunks]
        ended = "is not called" if "EventTooLarge" in fed else outcome(parser.close)
        yield case, {"feed()": fed, "close()": ended}


def channels(random: Random) -> Cases:
    from channels import Parser, Piece, TokenLogprob
    from dialects.families import DIALECTS

    call = '<tool_call>\n{"name": "f", "arguments": {"x": "</tool_call>"}}\n</tool_call>'
    words = ["Hi", " ", "\n", "<", "<think>", "</think>", "<tool", "<tool_call>"]
    # As with Llama the last one ends the turn, also inside a string of a call.
    words += ["EN", "END", "E", call, call[:30], "{}", '"', "ST<tool", "<|eot_id|>"]
    hermes = DIALECTS["hermes"]
    transitions = {**hermes.transitions, ("any", "<|eot_id|>"): "end"}
    for i in range(2 * N):
        special = ["<think>", "</think>", "<|eot_id|>"] if i % 2 else []
        dialect = hermes._replace(tokens=frozenset(special), transitions=transitions)
        pieces = [
            Piece(text, text if text in dialect.tokens else "", (TokenLogprob(text, -1.0, b""),))
            for word in drawn(random, words, 9)
            for text in ([word] if word in dialect.tokens else cuts(random, word))
        ]
        parser, is_cut = Parser(dialect, stop=["END", "NEND", "ST<t"], one_call=i % 3 == 0), i % 5 == 0
        fed = [outcome(parser.feed, piece) for piece in pieces]
        case = ["pieces", [piece.text for piece in pieces], "marker tokens", special]
        found = {"feed()": fed, "close()": outcome(parser.close, is_cut)}
        yield [*case, "one call", i % 3 == 0, "cut", is_cut], found


def special_tokens(random: Random) -> Cases:
    from request.special_tokens import ALPHABET, PLAIN, SpecialTokens

    known = SpecialTokens(["<|im_end|>", "<|im_start|>", "<|im", "｜｜", "｜end｜", "[X]"])
    words = ["<|im_end|>", "<|im", "_start|>", "｜｜", "｜", "end", "[X]", "[", "X]", " ", "\n", "user"]
    for _ in range(N):
        alphabets = random.choices([ALPHABET, {}], k=9)  # of the template, or of the request
        pieces = [random.choice(words).translate(alphabet) for alphabet in alphabets]
        prompt = (trace := "".join(pieces)).translate(PLAIN)
        yield ["prompt", prompt, "trace", trace], known.cut(prompt, trace)


def tokenizer(random: Random) -> Cases:
    from channels import TokenLogprob
    from tokenizer import Decoder, Tokenizer

    known = Tokenizer(TINY / "tokenizer.json")
    words = [*known.encode(" Hi 🙂 é€\n\ufffd"), *known.encode("🙂🙂"), 2041, 2042, 2046, 220, 172, 253]
    for i in range(2 * N):
        token_ids, decoder = drawn(random, words, 12), Decoder(known)
        entries = [(TokenLogprob(str(n), -1.0, b""),) if i % 2 else () for n in token_ids]
        fed = [outcome(decoder.feed, n, one) for n, one in zip(token_ids, entries, strict=True)]
        case = [token_ids, "with logprobs" if i % 2 else ""]
        yield case, {"feed()": fed, "close()": outcome(decoder.close)}


def model(random: Random) -> Cases:
    import numpy as np

    from checkpoint.config import read_config
    from checkpoint.weights import read_weights
    from model import Batch, NumpyOps, Span, forward, softmax

    for i in range(N):
        logits = [random.choice([0, 1, -3, 90, -90, random.random()]) for _ in range(i % 7 + 1)]
        x = np.array([logits], np.float32)
        sink = np.array([[random.choice([0, 50, 95, -95])]], np.float32) if i % 2 else None
        shares = np.round(outcome(softmax, x, sink), 2)  # no further: sums may be made in another order
        yield [x.tolist(), sink is not None and sink.tolist()], shares.tolist()
    config = replace(read_config(TINY), windows=(None, 3, 70, 1))
    weights = read_weights(TINY, config)
    weights.layers[0].sinks = np.linspace(-2, 2, config.n_heads, dtype=np.float32)
    for length in (1, 2, 3, 63, 64, 65, 130):
        ops, table = NumpyOps(config, weights, 256, 4, 1), random.sample(range(4), 3)
        prompt = [random.randrange(2000) for _ in range(length)]
        logits = outcome(forward, ops, weights, Batch([Span(0, table, prompt, 0, min(length, 2))]))
        yield f"{length} tokens {prompt[:9]}, pages {table}", np.round(logits[:, :40], 1).tolist()


def pages(random: Random) -> Cases:
    from pages import PagePool, prefix_hash, root_hash

    made = {f"root_hash({owner!r})": root_hash(owner) for owner in ("a", "b", "ab")}
    for _ in range(2):
        for name, one in [*made.items()]:
            for text in ([1, 2], [2, 1]):
                made[f"prefix_hash({name}, {text})"] = prefix_hash(one, text)
    texts = [[1, 23], [12, 3], [123], [1, 2, 3], [257, 23], [65537, 23]]
    alike = [f"{a} and {b}" for a, b in combinations(texts, 2) if prefix_hash(b"", a) == prefix_hash(b"", b)]
    yield f"prefix_hash() of {texts}: which are the same?", alike
    names = [*made]
    for i, name in enumerate(names):
        yield f"{name}: which others are the same?", [one for one in names[:i] if made[one] == made[name]]
    hashes, numbers = [*made.values()], range(len(made))
    for _ in range(N):
        pool, held, told, case = PagePool(3), [], [], []
        for _ in range(random.randint(1, 12)):
            what, number = random.choice(["take", "register", "find", "release"]), random.choice(numbers)
            case.append((what, number))
            if what == "take":
                told.append(outcome(pool.take))
                held += [told[-1]] if isinstance(told[-1], int) else []
            elif what == "register" and held:
                pool.register(held[number % len(held)], hashes[number])
            elif what == "find":
                told.append(outcome(pool.find, hashes[number]))
                if isinstance(told[-1], int) and number % 2:
                    pool.share(told[-1])
                    held.append(told[-1])
            elif what == "release" and held:
                pool.release([held.pop(number % len(held))])
            told.append(pool.n_free)
        yield case, told


def scheduler(random: Random) -> Cases:
    import numpy as np

    from sampling import Choice, Sampling
    from scheduler import Scheduler, Sequence, prompt_lookup

    for _ in range(N):
        text = [random.randrange(3) for _ in range(random.randint(2, 9))]
        yield ["prompt_lookup", text], outcome(prompt_lookup, np.array(text), 3)
    for i in range(N // 2):
        chunk, speculate = random.choice([64, 128]), i % 3 * 3
        # Half of the cases begin with three whose next pages are all that is left.
        lengths = random.sample([63, 63, 127, 191], 3) if i % 2 else []
        coming = [*zip(lengths, random.sample("aab", 3), (4, 5, 6), strict=False)]
        n_pages = sum(n // 64 + 1 for n in lengths) + 2 if lengths else random.randint(3, 6)
        one = Scheduler(n_pages=n_pages, max_batch=3, chunk=chunk, speculate=speculate, max_wanted=6)
        case = [f"{n_pages} pages, chunk {chunk}, speculate {speculate}"]
        told, sequences = list[str](), list[Any]()
        for _ in range(random.randint(2, 14)):
            if random.random() < 0.4:
                n = random.choice([5, 61, 63, 64, 100, 127, 128, 170])
                coming.append((n, random.choice("aab"), random.choice([7, 8])))
            for n, owner, first in coming:
                prompt = [first] * n if first < 7 or n < 128 else [7] * 64 + [*range(n - 64)]
                sequences.append(Sequence(prompt, 30, frozenset(), Sampling(), owner=owner))
                one.add(sequences[-1])
                case.append(f"{owner} comes with {n} tokens, {prompt[:1]} first")
            coming = []
            rows = random.choice([2, 20, 10**6])
            case.append(f"a step of {rows} rows")
            batch = outcome(one.schedule, (), rows)
            if isinstance(batch, str):
                told.append(batch)
                break
            for x in batch:
                number, rows_of = sequences.index(x.sequence), f"rows {x.span.start} to {x.span.end - 1}"
                told.append(f"{rows_of} of sequence {number}, drafts {x.drafts}")
            for x in batch:
                one.postprocess(x, [Choice(7) for _ in x.contexts])
            running = [sequences.index(each) for each in one.running]
            told.append(f"{one.pool.n_free} pages are free, the sequences {running} run")
        yield case, told


def responses(random: Random) -> Cases:
    from channels import Arguments, Call, Close, Delta, Finish, Usage
    from responses import Builder, fold

    items: list[list[Any]] = [[Delta("final", "Hi")], [Delta("analysis", "Hm")], [Close()]]
    calls = [Call("f"), Arguments('{"x":'), Arguments("1}")], [Call("g", True), Arguments("a")]
    items += [*calls, [Call("f")], [Call("g", True)]]
    ends = [Finish("stop"), Finish("length", Usage(3, 2)), Finish("failed", None, "why"), Finish("cancelled")]
    for _ in range(N):
        head = {"id": "resp_0", "created_at": 0}
        builder, unused = (Builder(head, counted_ids(), "{}: {}".format) for _ in range(2))
        said, end = [one for run in drawn(random, items, 8) for one in run], random.choice(ends)
        events = builder.start()
        for one in said:
            events += outcome(builder.feed, one)
        events += outcome(builder.finish, end, 1)
        again = outcome(builder.feed, said[0]), outcome(builder.finish, end, 2)
        folded = [outcome(fold, events[:n]) for n in (1, 3, len(events))]
        early = outcome(unused.feed, said[0]), outcome(unused.finish, end, 1)
        # The order of members means nothing.
        yield [*said, end], json.loads(json.dumps([events, again, folded, early], sort_keys=True))


def event_log(random: Random) -> Cases:
    from event_log import FRAMES_A_READ, EventLog

    async def run(actions: list[Any], is_written: bool) -> object:
        n_written = 0 if is_written else 10**6

        async def write(number: int, entries: Collection[Any]) -> bool:
            nonlocal n_written
            for _ in range(5):
                await asyncio.sleep(0)
            n_written = number + len(entries)
            return True

        async def follow(after: int) -> list[bytes]:
            frames = list[bytes]()
            async for some in log.read(after):
                is_early = after + 1 + len(frames) + len(some) > n_written
                frames += [b"too many, or too early"] if is_early or len(some) > FRAMES_A_READ else some
            return frames

        log, readers = EventLog(write if is_written else None), list[asyncio.Task[list[bytes]]]()
        for number, action in enumerate(actions):
            if isinstance(action, list):
                log.extend({"type": f"response.{kind}", "n": number} for kind in action)
            else:
                readers.append(asyncio.create_task(follow(action)))
            for _ in range(random.choice([1, 9])):
                await asyncio.sleep(0)
        for _ in range(30):
            await asyncio.sleep(0)
        n_ready = len(vars(asyncio.get_running_loop())["_ready"])  # 0: a reader that waits takes no time
        log.close()
        await asyncio.wait(readers or [asyncio.create_task(asyncio.sleep(0))], timeout=5)
        return [[outcome(reader.result) for reader in readers], n_ready]

    for i in range(N):
        words = [["a"], ["a", "b"], ["a"] * 70, [], -1, 0, 3]
        actions = drawn(random, words, 6)
        yield [*actions, "written first" * (i % 2)], asyncio.run(run(actions, i % 2 > 0))


def answers(random: Random) -> Cases:
    from gateway.answers import Answer, Asked
    from gateway.metering import Meter

    parts = {"name": "f", "arguments": ""}, {"name": "g"}, {"arguments": '{"x":'}, {"arguments": "1}"}
    calls = [index | {"function": part} for index in ({"index": 0}, {"index": 1}, {}) for part in parts]
    words = [json.dumps({"choices": [{"index": 0, "delta": {"tool_calls": [call]}}]}) for call in calls]
    words += ['{"choices": null, "usage": {"prompt_tokens": 3, "completion_tokens": 2}}', "[DONE]"]
    words += ['{"choices": []}', '{"choices": [null]}']
    texts = [{"index": i, "delta": {"content": text}} for i, text in ((1, "Hi"), (0, "Hi"), (0, ""))]
    ends = ("stop", 0), ("length", 0), ("STOP", 1)
    finished = [{"index": i, "delta": {}, "finish_reason": reason} for reason, i in ends]
    words += [json.dumps({"choices": each}) for each in (texts[:2], *([one] for one in texts + finished))]
    words += ['{"error": {"message": "no", "code": 500}}', '{"object": "chat.completion.chunk"}']
    for i in range(N):
        said = drawn(random, words, 9)
        asked = Asked(n=1 + i // 2 % 2, new_id=counted_ids(), shows_usage=i % 2 == 0)
        answer = Answer(Meter(), asked)
        whole = "".join(f"data: {one}\n\n" for one in said) if i % 4 else said[0]
        chunks = [*cuts(random, whole.encode())] if i % 4 > 1 else [whole.encode()]
        fed = [outcome(answer.feed, chunk) for chunk in chunks]
        found = {"feed()": [*chain(*fed)], "close()": outcome(answer.close)}
        yield ["n", asked.n, said, "in chunks of", [*map(len, chunks)]], found


def metering(random: Random) -> Cases:
    from channels import Usage
    from gateway.metering import Meter

    names = ["prompt_tokens", "completion_tokens", "input_tokens", "output_tokens"]
    for i in range(N):
        pairs = [random.sample(names, 2) for _ in range(random.randint(0, 3))]
        documents = [{name: random.choice([0, 0, 3, 8]) for name in pair} for pair in pairs]
        meter = Meter([None, 0, 3][i % 3])
        case = json.dumps([meter.price, documents])
        read = [outcome(meter.read, one) for one in documents]
        if i % 2:
            meter.usage = Usage(9, 8, random.randrange(9), random.randrange(8))
        yield [case, meter.usage], [read, documents, outcome(meter.used)]


def plain_kernels(_: Random) -> Cases:
    """Two small models on the emulator, whose checker sees races and places outside of an array."""
    import numpy as np

    from checkpoint.weights import bfloat16, unpacked
    from helpers.device_ops import CONFIGS, OTHERS, Both, PlainOps, difference, span
    from model import Batch, Span

    models = {"18 heads, biases, norms": CONFIGS["many-heads"], "a window, sinks": OTHERS["small-sinks"]}
    for name, c in [*models.items()][: 1 + N // 400]:
        m = Both(c, 0, True, PlainOps, 1)
        linear = {"qkv": (m.layer.attn_norm, m.layer.wqkv, m.layer.bqkv)}
        linear["logits"] = m.weights.norm, m.weights.head, None
        for n, seed in SEEDS.items():
            x, y, h = (np.random.default_rng(seed).standard_normal(i.shape, np.float32) for i in m.inputs(n))
            x[1:2] *= 1e-5  # beside it NORM_EPS counts
            spans = Batch([Span(0, range(16), [0] * n, 0, 0)])
            right = {"gate_up": m.numpy.gate_up(x, m.layer, spans)}
            for op, (norm, w, b) in linear.items():
                right[op] = m.numpy._linear(unpacked(bfloat16(m.numpy._rms_norm(x, norm))), w, b)
            for op, inputs in (("out", y), ("down", h)):
                right[op] = x.copy()
                getattr(m.numpy, op)(right[op], inputs, m.layer, spans)
            found = m.products(x, y, h)
            for op in right:
                how = ", of x normed, then rounded once to bfloat16" if op in linear else ""
                share = 2e-5 if op in linear else 0.02
                yield f"{name}, {op}() of {n} rows{how}", difference(found[op], right[op], share)
        for n, rotary in ((2, True), (70, True), (3, False)):
            m.cuda.config = m.numpy.config = replace(c, rotary=(rotary,))
            spans = Batch([Span(1, [9, 2], [0] * (n + 5), 0, 0)])
            attended = difference(m.attended(n)[0], m.numpy.attend(m.qkv_noise(n + 5), m.layer, 0, spans))
            yield f"{name}, rotary {rotary:d}: attend() of a prompt of {n} tokens, of one, of four", attended
        m.put("y", alone := np.full((4, y.shape[1]), 7, np.float32))
        m.attend([span(1, 6, 3, False)], noise := m.qkv_noise(4))
        kept = difference(m.got("qkv", 4)[3:], noise[3:], 0), difference(m.got("y", 4)[3:], alone[3:], 0)
        yield f"{name}, attend(): a row that only pads, in qkv and y", kept
        if c.sinks:
            # Weights of keys are 1, e^-2, e^-1 and 0.502, rounded 1, 0.1357, 0.3672 and 0.5: then the first
            # column of the values cancels out, and in the second the sum of weights does. No sink beside 40.
            scores = np.array([[0], [-2], [-1], *[[-0.68955]] * 33], np.float32)
            upper = unpacked(bfloat16(scores))
            key = np.hstack([np.full_like(scores, 40), upper, scores - upper, 0 * scores])
            query, value = np.full_like(key, 2), np.zeros_like(key)
            value[1:3, 0], value[:, 1] = (0.3671875, -0.1357421875), 1.9921875
            m.cuda.config = replace(c, rotary=(False,))
            y = m.attend([span(1, 0, len(key), True)], np.hstack([query] * 4 + [key] * 2 + [value] * 2))
            label = "attend() of 36 tokens, all with one query: are the keys' weights rounded, in both sums?"
            yield f"{name}, {label}", y[-1, :2].tolist()


ORACLES = {
    "sse": sse, "channels": channels, "tokenizer": tokenizer, "model": model, "pages": pages,
    "scheduler": scheduler, "responses": responses, "event_log": event_log, "gateway/answers": answers,
    "gateway/metering": metering, "devices/plain.cu": plain_kernels, "request/special_tokens": special_tokens,
}  # fmt: skip


if __name__ == "__main__":
    name = sys.argv[1]
    for case, found in ORACLES[name](Random(0)):
        print(json.dumps([repr(case), repr(found)]), flush=True)
    if name in {"pages", "scheduler"}:  # orders of events in a small scheduler that break a law
        import explore

        for label, small in explore.CASES.items():
            story = repr(explore.explore(small, N).story)
            print(json.dumps([f"an order of events in the case {label}", story]), flush=True)
