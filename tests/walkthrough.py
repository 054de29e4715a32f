"""One request as data: what "What is 2+2?" becomes, stage by stage, from its body to the bytes of the answer.

    body -> Request -> prompt text -> token ids -> Choice -> Piece -> Delta -> event -> bytes

    python tests/walkthrough.py             prints it
    python tests/walkthrough.py --write     puts it into README.md; test_walkthrough.py checks it there

The modules are the server's own, in this process, with the tiny model and NumpyOps. Temperature 0, ids that
are counted and a clock that stands still make the same text everywhere.
"""

import argparse
import asyncio
import itertools
import sys
from collections import abc
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # the server's modules

import blocks
import sse
from channels import Accepted, Delta, Finish, Output, Parser, Piece
from checkpoint.config import read_config
from checkpoint.weights import read_weights
from completions import Chunks
from dialects.matchers import Grammars
from engine import Engine, OnStep, StepOutput
from event_log import encode_event
from helpers.scripted import counted_ids, events_of
from model import NumpyOps
from request import params
from request.template import ChatTemplate
from responses import Builder
from sampling import Choice
from scheduler import Sequence
from tokenizer import Decoder, Tokenizer
from worker import LocalWorker

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
TINY = ROOT / "tests" / "models" / "tiny"
BODY = b'{"model": "tiny", "input": "What is 2+2?", "temperature": 0}'
MAX_WIDTH = 106
RESPONSE_MEMBERS = ("status", "output", "usage")  # the response object repeats the request too
EVENT_MEMBERS = ("item", "part", "delta", "text")  # an event says its place too: item_id, output_index, ...

WorkerOutput = Output | Finish  # what a worker emits once it has accepted the request


class TracedEngine(Engine):
    """An engine that records the steps of its last sequence, each with what the worker makes of it."""

    steps: list[tuple[StepOutput, list[WorkerOutput]]]

    async def generate(self, sequence: Sequence, on_step: OnStep) -> None:
        def record(step: StepOutput) -> bool:
            if step.tokens:  # else a part of the prompt has been computed
                self.steps.append((step, []))
            return on_step(step)

        await super().generate(sequence, record)

    def take(self, outputs: Any) -> None:
        if outputs and isinstance(outputs[0], Accepted):
            self.steps = []
        elif outputs:
            self.steps[-1][1].extend(outputs)


async def run(worker: LocalWorker, engine: TracedEngine, request: params.Request) -> None:
    await (await worker.prepare(request)).run(engine.take)


def walkthrough() -> str:
    config = read_config(TINY)
    tokenizer, template = Tokenizer(TINY / "tokenizer.json"), ChatTemplate.load(TINY)
    grammars = Grammars(TINY / "tokenizer.json", config.vocab_size, config.eos_token_ids)
    engine = TracedEngine(NumpyOps(config, read_weights(TINY, config, NumpyOps.pack), 256, 4, 1))
    values = params.read(params.RESPONSES, sse.loads(BODY), {})
    request = params.responses_request(values, [], values["input"])
    asyncio.run(run(LocalWorker(engine, tokenizer, template, grammars, None, [], {}, 99), engine, request))
    engine.close()

    prompt = template.render(request.messages, None, datetime.min)
    token_ids = tokenizer.encode(prompt)
    fields = [f"{field:20} {shown(value)}" for field, value in vars(request).items() if value]
    columns = [f"{name(Decoder.feed)}() -> {name(Piece)}", f"{name(Parser.feed)}() -> Output, or Finish"]
    outputs = [output for _, of_step in engine.steps for output in of_step]
    events = events_of(outputs)
    number = next(i for i, event in enumerate(events) if event["type"].endswith(".delta"))
    frame = map(str, encode_event(number, events[number]).frame.splitlines(keepends=True))
    return stages(
        ("The body of POST /v1/responses -> bytes", [BODY.decode()]),
        (f"{name(params.responses_request)}() -> {name(params.Request)}: what is not empty", fields),
        (f"{name(ChatTemplate.render)}() -> str", [repr(prompt)]),
        (f"{name(Tokenizer.encode)}() -> list[int]: {len(token_ids)} token ids", [str(token_ids)]),
        (f"{name(Engine.generate)}() hands on a StepOutput with one {name(Choice)}; it is decoded and parsed",
         ["  id  {:42}  {}".format(*columns), *elided(token_rows(engine, tokenizer))]),
        (f"{name(Builder.start)}(), feed(), finish(): {len(events)} events", elided(event_rows(events))),
        (f"{name(Chunks.feed)}(), {name(blocks.Builder.feed)}(): the last delta in the two other APIs",
         in_other_apis(outputs)),
        (f"{name(encode_event)}() -> Entry: the frame of event {number} as the client gets it", frame),
    )  # fmt: skip


def stages(*stages: tuple[str, Iterable[str]]) -> str:
    """Return the text: for each stage a heading (the function that makes it, its type), then its data."""
    lines: list[str] = []
    for heading, rows in stages:
        lines += [heading, *(f"    {shortened(row)}" for row in rows), ""]
    return "\n".join(line.rstrip() for line in lines)


def token_rows(engine: TracedEngine, tokenizer: Tokenizer) -> Iterator[tuple[str, str]]:
    """Yield (types of the outputs, row): a token, the text it completes, what the parser makes of that."""
    decoder = Decoder(tokenizer)
    for step, outputs in engine.steps:
        (choice,) = step.tokens  # without drafts a step chooses one token
        pieces = [] if step.finish else decoder.feed(choice.token_id)
        piece_column = ", ".join(map(shown, pieces)) or "none: it is a stop token"
        output_column = ", ".join(map(shown, outputs)) or "nothing yet"
        kind = " ".join(type(output).__name__ for output in outputs)
        yield kind, f"{choice.token_id:4}  {piece_column:42}  {output_column}"


def in_other_apis(outputs: abc.Sequence[WorkerOutput]) -> Iterator[str]:
    """Yield the last delta as the builders of chat and of messages write it."""
    chunks = Chunks({"id": "chatcmpl-0"}, counted_ids(), 1, include_usage=False)
    message = blocks.Builder({"id": "msg_0"}, counted_ids(), "{}: {}".format)
    for builder in (chunks, message):
        made = [builder.feed(0, output) for output in (Accepted(), *outputs)]
        said = [
            events[-1] for events, output in zip(made[1:], outputs, strict=True) if isinstance(output, Delta)
        ]
        yield sse.dumps({name: said[-1][name] for name in said[-1] if name not in ("id", "object")})


def event_rows(events: abc.Sequence[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield (type of the event, row): the event's number, type and contents."""
    for number, event in enumerate(events):
        told, names = (event["response"], RESPONSE_MEMBERS) if "response" in event else (event, EVENT_MEMBERS)
        members = {member: told[member] for member in names if member in told}
        yield event["type"], f"{number:4}  {event['type']:30}  {sse.dumps(members)}"


def elided(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield the texts of (kind, text), but of more than three of a kind in succession only two."""
    for _, group in itertools.groupby(rows, key=lambda row: row[0]):
        texts = [text for _, text in group]
        if len(texts) > 3:
            texts[1:-1] = [f"{'…':>4}  {len(texts) - 2} more"]
        yield from texts


def shown(value: Any) -> str:
    """Return a value as Python writes it, but a named tuple without its empty members."""
    if not hasattr(value, "_asdict"):
        return repr(sorted(value) if isinstance(value, frozenset) else value)
    members = value._asdict()
    told = [member for member in members if members[member] != value._field_defaults.get(member, None)]
    return f"{type(value).__name__}({', '.join(f'{member}={shown(members[member])}' for member in told)})"


def shortened(row: str) -> str:
    return row if len(row) <= MAX_WIDTH else f"{row[: MAX_WIDTH - 25]} … {row[-22:]}"


def name(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def in_page(text: str, script: str, page: Path = README) -> str:
    """Return a page of the documentation, with this text as the block that a script of tests/ makes."""
    begin = f"<!-- made by `python tests/{script}.py --write` -->\n```text\n"
    before, rest = page.read_text(encoding="utf-8").split(begin)
    _, end, after = rest.partition("```\n<!-- end of the ")
    return f"{before}{begin}{text}{end}{after}"


def command(script: str, description: str, make: Callable[[], str], page: Path = README) -> None:
    """Print a text, or put it into its page."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--write", action="store_true", help=f"put it into {page.relative_to(ROOT)}")
    if parser.parse_args().write:
        page.write_text(in_page(make(), script, page), encoding="utf-8")
    else:
        print(make(), end="")


if __name__ == "__main__":
    command("walkthrough", "What becomes of one request, stage by stage.", walkthrough)
