"""A model that says what it is told, in any dialect: an engine without weights, a vocabulary of given tokens.

A step holds any number of tokens, as with speculative decoding. The engine's contract holds: nothing after a
stop token, and never more than was asked for.
"""

import asyncio
import itertools
import re
from collections import abc
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, cast

import tokenizers
from tokenizers import AddedToken, decoders, models

from channels import Accepted, Compaction, Finish, Output
from dialects.families import DIALECTS
from engine import Engine, OnStep, StepOutput
from helpers.grammars import grammars_of
from request import params
from request.params import Request
from request.template import ChatTemplate
from responses import Builder, Event
from sampling import Choice
from scheduler import Sequence
from tokenizer import BYTE_OF, Tokenizer
from worker import LocalWorker

MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")  # of Hermes
END = "<|im_end|>"
TINY = Path(__file__).parents[1] / "models" / "tiny"
TEMPLATE = ChatTemplate.load(TINY)
TEMPLATES = {
    path.stem: ChatTemplate(path.read_text(encoding="utf-8"), {"bos_token": "", "eos_token": END})
    for path in (Path(__file__).parents[1] / "templates").glob("*.jinja")
} | {"hermes": TEMPLATE}
ENDS = {END, "<|call|>", "<|return|>", "<|eot_id|>", "<|eom_id|>"}  # as in generation_config.json
TAG = re.compile(r"</?\w+>")
TOOL = {"type": "function", "name": "f"}


def request(body: dict[str, Any]) -> Request:
    return params.from_responses({"model": "m", "input": "hi"} | body, {})


ECHO = request({"tools": [TOOL], "metadata": {"a": "b"}}).echo
HEAD = {"id": "resp_1", "object": "response", "created_at": 1, "model": "m"} | ECHO


class ScriptedEngine:
    """Answers every job with the same steps."""

    def __init__(self, tokenizer: Tokenizer, steps: Iterable[abc.Sequence[int]], max_seq_len: int) -> None:
        eos = frozenset(tokenizer.added[end] for end in tokenizer.added.keys() & ENDS)
        self.config = SimpleNamespace(eos_token_ids=eos, vocab_size=vocab_size(tokenizer))
        self.max_seq_len = max_seq_len
        self._steps = [[Choice(token_id, -1.0) for token_id in step] for step in steps]

    async def generate(self, job: Sequence, on_step: OnStep) -> None:
        n_left = job.max_tokens
        for tokens in self._steps:
            wanted = tokens[:n_left]
            ends = [n for n, token in enumerate(wanted, 1) if token.token_id in job.stop_token_ids]
            if ends:
                on_step(StepOutput(wanted[: ends[0]], "stop"))
                return
            n_left -= len(wanted)
            wants_more = on_step(StepOutput(wanted, None if n_left else "length"))
            if not (n_left and wants_more):
                return
        on_step(StepOutput([], "length"))


def said(
    tokenizer: Tokenizer, steps: Iterable[abc.Sequence[int]], dialect: str = "hermes", **body: Any
) -> list[Output | Finish]:
    """What the worker makes of these steps; `body` is more of the request."""
    return asyncio.run(outputs_of(worker_of(tokenizer, TEMPLATES[dialect], steps), body))


def counted_ids() -> Callable[[str], str]:
    """Return what draws ids from 1 on: each ends with its number."""
    numbers = itertools.count(1)
    return lambda prefix: f"{prefix}_{next(numbers)}"


def builder(**options: Any) -> Builder:
    return Builder(HEAD, counted_ids(), "{}: {}".format, **options)


def events_of(outputs: Iterable[Output | Compaction | Finish], **options: Any) -> list[Event]:
    """The events of a response, from the first on."""
    made = builder(**options)
    events = made.start()
    for output in outputs:
        events += made.finish(output, now=2) if isinstance(output, Finish) else made.feed(output)
    return events


async def outputs_of(worker: LocalWorker, body: dict[str, Any]) -> list[Output | Finish]:
    outputs: list[Accepted | Output | Finish] = []
    prompt = await worker.prepare(request({"tools": [TOOL]} | body))
    await prompt.run(outputs.extend)
    return [output for output in outputs if not isinstance(output, Accepted)]


def worker_of(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    steps: Iterable[abc.Sequence[int]] = (),
    max_seq_len: int = 4096,
    max_output_tokens: int = 4096,
) -> LocalWorker:
    engine = cast(Engine, ScriptedEngine(tokenizer, steps, max_seq_len))
    return LocalWorker(engine, tokenizer, template, grammars_of(), None, ["model"], {}, max_output_tokens)


def in_steps(token_ids: abc.Sequence[int], sizes: Iterable[int]) -> list[abc.Sequence[int]]:
    """Cut into steps of these sizes, over and over."""
    rest = iter(token_ids)
    steps = (list(itertools.islice(rest, size)) for size in itertools.cycle(sizes))
    return list(itertools.takewhile(bool, steps))


def vocabulary(tokens: Iterable[bytes], dialect: str = "hermes") -> Tokenizer:
    """All bytes and these tokens; then the markers and the end, as added tokens: tags are text, as Qwen has
    them, the others control tokens.
    """
    spelled = {byte: character for character, byte in BYTE_OF.items()}
    words = dict.fromkeys([*(bytes([n]) for n in range(256)), *tokens])
    vocab = {"".join(spelled[byte] for byte in word): n for n, word in enumerate(words)}
    library = tokenizers.Tokenizer(models.BPE(vocab, []))
    library.decoder = decoders.ByteLevel()
    for marker in sorted(DIALECTS[dialect].markers | {END}):
        add = library.add_tokens if TAG.fullmatch(marker) else library.add_special_tokens
        add([AddedToken(marker, normalized=False)])
    with TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        path.write_text(library.to_str(), encoding="utf-8")
        return Tokenizer(path)


def vocab_size(tokenizer: Tokenizer) -> int:
    """Added tokens are its last."""
    return 1 + max(tokenizer.added.values())


def ids_of(tokenizer: Tokenizer, tokens: Iterable[bytes]) -> list[int]:
    """Of whole tokens; a marker is the added token."""
    ids = {tokenizer.token_bytes(token_id): token_id for token_id in range(vocab_size(tokenizer))}
    return [ids[token] for token in tokens]
