"""One picture a chapter of the course, of what the tiny model says: rows of boxes, drawn by one function.

pictures()[chapter] --drawn()--> pictures/<chapter>.svg; `python tests/course_data.py --write` writes them
"""

import asyncio
from collections.abc import Callable, Iterable
from functools import cache
from html import escape
from itertools import accumulate, repeat
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

import sse
from channels import Parser
from course import micro, numpy_micro
from dialects.families import DIALECTS
from engine import StepRead
from event_log import EventLog
from gateway.answers import Answer, Asked
from gateway.metering import Meter
from helpers.tables import table
from model import PAGE
from sampling import Choice, Sampling, apply_temperature, apply_top_p
from scheduler import Scheduler, Sequence
from service.steps import Steps
from tokenizer import Decoder, Tokenizer

LEFT, HEIGHT, LETTER = 170, 22, 6.1  # of the boxes, of a row, of a letter: pixels
STYLE = table("pictures")["course_style"].strip()


class Box(NamedTuple):
    start: float
    width: float
    text: str = ""
    kind: str = ""  # a class of STYLE
    shade: float = 1


Rows = dict[str, list[Box]]  # by the text at their left


def drawn(title: str, unit: float, rows: Rows) -> str:
    right = LEFT + unit * max(box.start + box.width for boxes in rows.values() for box in boxes) + 8
    size = f'viewBox="0 0 {right:.0f} {HEIGHT * (len(rows) + 1) + 4}" width="{right:.0f}"'
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">']
    lines += [f"<style>{STYLE}</style>", f'<text x="4" y="14">{escape(title)}</text>']
    for i, (label, boxes) in enumerate(rows.items(), 1):
        y = 2 + i * HEIGHT
        lines.append(f'<text x="4" y="{y + 14}">{escape(label)}</text>')
        for box in boxes:
            x, width = LEFT + unit * box.start, unit * box.width
            place = f'x="{x:.1f}" y="{y}" width="{width:.1f}" height="{HEIGHT - 3}"'
            shade = "" if box.shade == 1 else f' fill-opacity="{box.shade:.2f}"'
            lines.append(f'<rect class="{box.kind}" {place}{shade}/>')
            if box.text and len(box.text) * LETTER < width:
                place, text = f'x="{x + width / 2:.1f}" y="{y + 13}"', escape(box.text)
                lines.append(f'<text class="mid" {place}>{text}</text>')
    return "\n".join([*lines, "</svg>", ""])


def in_a_row(texts: Iterable[str], kind: str = "", widths: Iterable[int] = repeat(1)) -> list[Box]:
    parts = [*zip(texts, widths, strict=False)]
    starts = accumulate((width for _, width in parts), initial=0)
    return [Box(start, width, text, kind) for start, (text, width) in zip(starts, parts, strict=False)]


def asked(text: str) -> list[int]:
    return micro.encode_chat([{"role": "user", "content": text}])


def said(text: str) -> list[int]:
    """Return the tokens of the answer at temperature 0."""
    numpy_micro.take_over()
    return [*micro.generate(asked(text), 400, 0, None)]


def responded(text: str) -> list[dict[str, Any]]:
    numpy_micro.take_over()
    return [*micro.respond(micro.RESPONSE | {"input": text, "temperature": 0})]


def visible(token: int) -> str:
    return micro.BYTES[token].decode("utf-8", "replace").replace("\n", "⏎").replace(" ", "␣")


def tokens() -> Rows:
    text = "Well done 🙂!"
    ids, rows = micro.encode(text), {"characters": in_a_row(text, "", (len(one.encode()) for one in text))}
    rows["bytes"] = in_a_row(f"{byte:02x}" for byte in text.encode())
    return rows | {"tokens": in_a_row(map(str, ids), "blue", (len(micro.BYTES[one]) for one in ids))}


def forward_pass() -> Rows:
    shares, softmax = list[Any](), numpy_micro.softmax

    def recorded(x: Any) -> Any:
        shares.append(softmax(x))
        return shares[-1]

    numpy_micro.softmax = recorded
    prompt = asked("What is 2+2?")
    numpy_micro.forward(prompt, 0, numpy_micro.new_cache(len(prompt)))
    numpy_micro.softmax = softmax
    heads, names = np.array(shares), [visible(token) or "marker" for token in prompt]
    rows = {"key of the token": in_a_row(names)}
    for i, row in enumerate(heads[-1]):
        shaded = [Box(k, 1, "", "blue", round(float(share), 2)) for k, share in enumerate(row[: i + 1])]
        rows[f"query {i}: {names[i]}"] = shaded
    return rows


def pages() -> Rows:
    scheduler = Scheduler(n_pages=24, max_batch=2, chunk=1024, speculate=0, max_wanted=2)
    history = [{"role": "user", "content": "Tell me a story about a cat. " * 60}]
    more = [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And then?"}]
    rows: Rows = {}
    for name, messages in (("first", history), ("second", history + more)):
        sequence = Sequence(micro.encode_chat(messages), 1, frozenset(), Sampling())
        n, label = len(sequence.prompt), f"{name} turn, {len(sequence.prompt)} tokens"
        scheduler.add(sequence)
        while not sequence.finish:
            for one in scheduler.schedule():
                rows.setdefault(label, [Box(i, 1, "found", "green") for i in range(one.span.start // PAGE)])
                for i in range(len(rows[label]), len(sequence.page_table)):
                    rows[label].append(Box(i, min(1, n / PAGE - i), f"page {sequence.page_table[i]}", "blue"))
                scheduler.postprocess(one, [Choice(7) for _ in one.contexts])
    return rows


@cache
def three_requests() -> list[dict[str, Any]]:
    """Return the steps of three requests in four pages, as /debug/steps tells them: chapter 4's run."""
    scheduler = Scheduler(n_pages=4, max_batch=3, chunk=PAGE, speculate=0, max_wanted=3)
    engine: Any = SimpleNamespace()
    observed, steps = list[dict[str, Any]](), Steps(engine, micro.BYTES.__getitem__)
    arrivals = {1: "Name a color. " * 16, 2: "What is 2+2? " * 6 + "Well?", 4: "Hello! " * 46 + "Hi"}
    answers: dict[Sequence, list[int]] = {}
    for number in range(1, 17):
        if text := arrivals.get(number):
            sequence = Sequence(asked(text), 8, frozenset(), Sampling())
            answers[sequence] = said(text)
            scheduler.add(sequence)
        read: StepRead = []
        for one in scheduler.schedule():
            chosen = [Choice(answers[one.sequence][len(one.sequence.output)]) for _ in one.contexts]
            read.append((one, scheduler.postprocess(one, chosen)))
        steps.observe(scheduler, read, 0)
        step, shares = steps.steps[-1]
        whole = [share | texts for _, share, texts in shares]
        observed.append(step | {"step": number, "time_s": 0, "sequences": whole})
    return observed


def batching() -> Rows:
    rows: Rows = {}
    for step in three_requests():
        for share in step["sequences"]:
            boxes = rows.setdefault(f"{'ABC'[share['sequence']]}, {share['n_prompt']} tokens", [])
            if phase := share.get("phase"):
                n, kind = f"{share['end'] - share['start']}", "gold" if phase == "prefill" else "blue"
            else:
                n, kind = "", "red" if share["preempted_for"] else ""
            boxes.append(Box(step["step"] - 1, 1, n, kind))
    return rows


def sampling() -> Rows:
    prompt = asked("Hello!")
    logits = numpy_micro.forward(prompt + said("Hello!")[:3], 0, numpy_micro.new_cache(90))
    best = np.argsort(-logits)[:9].tolist()
    rows = {"token": in_a_row(map(visible, best))}
    for name, temperature, top_p in (("1", 1, 1.0), ("2", 2, 1.0), ("4", 4, 1.0), ("4, top_p 0.5", 4, 0.5)):
        probs = apply_top_p(apply_temperature(logits, temperature), top_p)
        shares = (probs / probs.sum())[best].tolist()
        boxes = [Box(i, 1, f"{share:.1%}", "blue", round(share**0.5, 2)) for i, share in enumerate(shares)]
        rows[f"temperature {name}"] = boxes
    return rows


def channels() -> Rows:
    tokenizer = Tokenizer(micro.DIRECTORY / "tokenizer.json")
    hermes = DIALECTS["hermes"]
    known = frozenset(filter(micro.MARKERS.__contains__, hermes.tokens | {"<think>", "</think>"}))
    parser, decoder = Parser(hermes._replace(tokens=known)), Decoder(tokenizer)
    rows: Rows = {name: [] for name in ("token", "reasoning", "answer", "call", "arguments", "nothing yet")}
    names = {"analysis": "reasoning", "final": "answer", "Call": "call", "Arguments": "arguments"}
    for i, token in enumerate(said("What is the weather in Tokyo?")[:-1]):
        found = [one for piece in decoder.feed(token) for one in parser.feed(piece)]
        rows["token"].append(Box(i, 1, visible(token) or "<…>"))
        said_by = [getattr(one, "channel", type(one).__name__) for one in found]
        kinds = {names[one] for one in said_by if one in names}
        for kind in kinds or {"nothing yet"}:
            rows[kind].append(Box(i, 1, "", "blue" if kinds else "gold"))
    return rows


def events() -> Rows:
    rows: Rows = {name: [] for name in ("response", "output_item", "content_part", "text, its deltas")}
    opened: dict[str, int] = {}
    made = responded("Hello!")
    for number, event in enumerate(made):
        name, _, what = event["type"].removeprefix("response.").partition(".")
        if what == "added":
            opened[name] = number
        elif what == "done" and name in opened:
            text = event["item"]["type"] if name == "output_item" else event["part"]["type"]
            rows[name].append(Box(opened[name], number + 1 - opened[name], text, "blue"))
        elif what == "delta":
            rows["text, its deltas"].append(Box(number, 1, "", "green"))
    rows["response"].append(Box(0, len(made), f"{len(made)} events", "blue"))
    rows["sequence_number"] = in_a_row(map(str, range(len(made))), "none")
    return rows


def frames() -> Rows:
    made, size = responded("Hello!")[2:13], 536
    numbered = [event | {"sequence_number": number} for number, event in enumerate(made, 2)]
    sizes = [len(f"event: {event['type']}\ndata: {sse.dumps(event)}\n\n".encode()) for event in numbered]
    rows: Rows = {"events": in_a_row(map(str, range(2, 13)), "blue", sizes), f"chunks of {size} bytes": []}
    for i in range(0, start := sum(sizes), size):
        inside = [box for box in rows["events"] if i < box.start + box.width <= i + size]
        rows[f"chunks of {size} bytes"].append(Box(i, min(size, start - i), f"ends {len(inside)}", "gold"))
    return rows


async def followed() -> Rows:
    made, log = responded("Hello!"), EventLog()
    rows: Rows = {"first stream": [], "starting_after=7": [], "came late": []}

    async def follow(name: str, after: int, most: int = 10**6) -> None:
        number = after + 1
        async for some in log.read(after):
            for _ in some:
                rows[name].append(Box(number, 1, str(number), "blue"))
                number += 1
                if len(rows[name]) == most:
                    return

    first = asyncio.create_task(follow("first stream", -1, 8))
    for event in made:
        log.extend([event])
        await asyncio.sleep(0)
    log.close()
    await asyncio.gather(first, follow("starting_after=7", 7), follow("came late", -1))
    return {"log": in_a_row(map(str, range(len(made)))), **rows}


def upstreams() -> Rows:
    pieces = [*filter(None, map(visible, said("Hello!")))]
    sent: list[Any] = [{"delta": {"content": piece}} for piece in pieces]
    sent.append({"delta": {}, "finish_reason": "stop"})
    rows: Rows = {"chunk": in_a_row([*pieces, "stop", "[DONE]"]), "if the end comes here": []}
    frames = [sse.encode({"choices": [choice]}) for choice in sent] + [b"data: [DONE]\n\n"]
    for i in range(len(frames)):
        answer = Answer(Meter(), Asked(new_id=str))
        made = answer.feed(b"".join(frames[: i + 1])) + answer.close()
        shown = ("error", "red") if any("error" in chunk for chunk in made) else ("whole", "green")
        rows["if the end comes here"].append(Box(i, 1, *shown))
    return rows


def kernels() -> Rows:
    lanes = np.array(micro.WEIGHTS["model.embed_tokens.weight"][700][:32], np.float32) ** 2
    rows = {"lane": in_a_row(map(str, range(32)))}
    total = float(lanes.sum())
    for m in (0, 16, 8, 4, 2, 1):
        lanes = lanes + lanes[np.arange(32) ^ m] if m else lanes
        shades = enumerate(np.round(np.sqrt(lanes / total), 2).tolist())
        rows[f"+ that of lane ^ {m}" if m else "x * x"] = [Box(i, 1, "", "blue", one) for i, one in shades]
    return rows


# of each chapter what the picture shows, how wide a box is, and what makes its rows
PICTURES: dict[str, tuple[str, float, Callable[[], Rows]]] = {
    "01-tokens-and-text": ("A text as characters, bytes and tokens", 34, tokens),
    "02-the-forward-pass": ("Attention: what share of each token's value a row takes", 44, forward_pass),
    "03-pages": ("The pages of the two turns of a conversation; green: found in the prefix cache", 62, pages),
    "04-batching": ("Rows of each step; gold: prefill, blue: decode, red: preempted", 24, batching),
    "05-sampling": ("The likeliest next tokens, and what temperature and top_p make of them", 58, sampling),
    "06-channels": ("Where each token of an answer went; gold: nothing leaves yet", 40, channels),
    "07-events": ("A response: what is open at each event", 22, events),
    "08-sse": ("The bytes of the events 2 to 12, and the chunks in which they come", 0.28, frames),
    "09-background": ("One log, three readers", 22, lambda: asyncio.run(followed())),
    "10-upstreams": ("An upstream's answer that ends after one of its chunks", 36, upstreams),
    "11-kernels": ("A sum by 32 lanes: how much of it each has after each round", 22, kernels),
}


def picture(chapter: str) -> str:
    title, unit, rows = PICTURES[chapter]
    return drawn(title, unit, rows())
