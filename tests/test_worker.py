"""worker.py in every dialect: limits, usage and what was demanded, from token ids to what is said."""

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import jsonschema
import pytest

import worker as worker_module
from channels import Delta, Finish, Output, Usage
from dialects.families import DIALECTS
from engine import Engine
from helpers import laws, scripted
from helpers.engines import tiny
from helpers.grammars import grammars_of
from helpers.scripted import END, ids_of, in_steps, outputs_of, request, said, vocabulary, worker_of
from helpers.serving import TINY
from helpers.tables import table
from model import NumpyOps
from request.refusals import BadInput
from request.template import ChatTemplate
from tokenizer import Tokenizer
from worker import CHARACTERS_PER_TOKEN, LocalWorker

STRING = {"type": "string", "maxLength": 9}
SCHEMA = {"type": "object", "properties": {"s": STRING}, "required": ["s"], "additionalProperties": False}
TOOL: dict[str, Any] = {"type": "function", "name": "f", "parameters": SCHEMA}

# --- a turn, cut anywhere -----------------------------------------------------------------------------------

TURNS: dict[str, list[str]] = table("worker")["turns"]
SAID = [["analysis", "aé"], ["final", "bé"], ["call", "f", '{"s": "é"}']]


def turn(name: str) -> tuple[Tokenizer, list[int]]:
    halves = {"é": [b"\xc3", b"\xa9"]}
    tokens = [token for text in (*TURNS[name], END) for token in halves.get(text, [text.encode()])]
    added = {marker.encode() for marker in (*DIALECTS[name].markers, END)}
    tokenizer = vocabulary([token for token in tokens if token not in added], name)
    return tokenizer, ids_of(tokenizer, tokens)


def ended(outputs: list[Output | Finish]) -> tuple[list[list[str]], str, Usage]:
    *found, finish = outputs
    assert isinstance(finish, Finish)
    assert finish.usage
    items = laws.items(output for output in found if not isinstance(output, Finish))
    return items, finish.reason, finish.usage


@pytest.mark.parametrize("name", DIALECTS)
def test_a_limit_cuts_anywhere(name: str) -> None:
    """Inside reasoning, a header, a call or a character: what was said is the beginning of what would be."""
    tokenizer, token_ids = turn(name)
    assert ended(said(tokenizer, in_steps(token_ids, [4]), name, tools=[TOOL]))[0] == SAID
    n_reasoning = 0
    for limit in range(1, len(token_ids)):
        outputs = said(tokenizer, in_steps(token_ids, [4]), name, tools=[TOOL], max_output_tokens=limit)
        laws.check_response(laws.on_the_wire(scripted.events_of(outputs)))
        found, reason, usage = ended(outputs)
        assert (reason, usage.output_tokens) == ("length", limit)
        assert n_reasoning <= usage.reasoning_tokens <= min(n_reasoning + 1, limit)
        n_reasoning = usage.reasoning_tokens
        for item, whole in zip(found, SAID, strict=False):
            assert item[:-1] == whole[:-1]
            assert whole[-1].startswith(item[-1].removesuffix("\ufffd"))
            assert item == whole or item is found[-1]
    assert n_reasoning == 5  # three of text, and the markers beside them


def test_the_end_can_be_ignored() -> None:
    """vLLM's ignore_eos: the model's own end is a token like others, what the client has named stops."""
    tokenizer = vocabulary([b"a", b"b", b"c"])
    steps = [ids_of(tokenizer, [b"a", END.encode(), b"b", b"c"])]
    named = {"ignore_eos": True, "stop_token_ids": ids_of(tokenizer, [b"c"])}
    for more, text, n_tokens in (({}, "a", 2), ({"ignore_eos": False}, "a", 2), (named, "ab", 4)):
        found, reason, usage = ended(said(tokenizer, steps, **more))
        assert (found, reason, usage.output_tokens) == ([["final", text]], "stop", n_tokens)


def test_the_server_bounds_every_answer() -> None:
    """A model that had to call a tool went on for 590 s. A request may ask for fewer tokens, not for more."""
    tokenizer = vocabulary([b"a"])
    worker = worker_of(tokenizer, scripted.TEMPLATE, [ids_of(tokenizer, [b"a"] * 9)], max_output_tokens=5)
    for asked, n_tokens in ((None, 5), (3, 3), (8, 5)):
        found, reason, usage = ended(asyncio.run(outputs_of(worker, {"max_output_tokens": asked})))
        assert (found, reason, usage.output_tokens) == ([["final", "a" * n_tokens]], "length", n_tokens)


# --- what is demanded is said, by a real model --------------------------------------------------------------

GREEDY = {"tools": [], "temperature": 0, "reasoning": {"effort": "none"}}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    ops = NumpyOps(tiny().config, tiny().weights, 512, n_pages=64, max_batch=4)
    with closing(Engine(ops)) as engine:
        yield engine


@pytest.fixture
def local(engine: Engine) -> LocalWorker:
    return worker_in(engine)


def worker_in(engine: Engine, dialect: str | None = None) -> LocalWorker:
    tokenizer, template = Tokenizer(TINY / "tokenizer.json"), ChatTemplate.load(TINY)
    return LocalWorker(engine, tokenizer, template, grammars_of(), dialect, ["model"], {}, 4096)


@pytest.mark.parametrize(("syntax", "definition"), [("lark", "start: nowhere"), ("regex", "a(")])
def test_a_bad_grammar_is_refused_with_its_place(local: LocalWorker, syntax: str, definition: str) -> None:
    """Before anything runs, in the words of the request."""
    wanted = {"type": "grammar", "syntax": syntax, "definition": definition}
    asked = request({"tools": [{"type": "custom", "name": "p", "format": wanted}]})
    with pytest.raises(BadInput, match=f"Invalid {syntax} grammar for 'p': ") as caught:
        asyncio.run(local.prepare(asked))
    assert caught.value.param == "tools[0].format.definition"


@pytest.mark.bug("P13")
@pytest.mark.parametrize(("tool_choice", "not_run"), [("auto", ("tools",)), ("none", ())])
async def test_calls_that_stay_text_are_named(tool_choice: str, not_run: tuple[str, ...]) -> None:
    """The template teaches calls that no dialect reads: the log of the start alone said so."""
    source = "Reply with [f(x=1)]. {{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}"
    asked = request({"tools": [{"type": "function", "name": "f"}], "tool_choice": tool_choice})
    prompt = await worker_of(Tokenizer(TINY / "tokenizer.json"), ChatTemplate(source, {})).prepare(asked)
    assert prompt.request.not_run == not_run


@pytest.mark.parametrize("name", DIALECTS)
async def test_tool_choice_none_changes_nothing_before_the_answer(engine: Engine, name: str) -> None:
    """Tools vanished from the prompt, and with them the prefix cache, at the last step of every agent."""
    worker = worker_in(engine, name)
    auto = await worker.prepare(request({"tools": [TOOL]}))
    none = await worker.prepare(request({"tools": [TOOL], "tool_choice": "none"}))
    assert none.token_ids == auto.token_ids
    assert (none.grammar is None) == (name != "harmony")  # all others are free, and as fast as without tools


@pytest.mark.parametrize("name", [name for name in DIALECTS if name != "harmony"])
def test_no_call_if_tool_choice_is_none(engine: Engine, name: str) -> None:
    """Though the model would write one: the token that begins it, if it has one, is forbidden."""
    worker = worker_in(engine, name)
    begin = worker.tokenizer.added["<tool_call>"]
    body = {"tools": [TOOL], "tool_choice": "none", "logit_bias": {str(begin): 20.0}, "max_output_tokens": 20}
    said, _, _ = ended(asyncio.run(outputs_of(worker, GREEDY | body)))
    assert [kind for kind, *_ in said] == ["final"]
    if "<tool_call>" in DIALECTS[name].markers:
        assert "<tool_call>" not in str(said)


def test_logprobs_are_bounded(local: LocalWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing bounded them but the context: 15 choices with 20 candidates a token were an answer of 32 MB."""
    monkeypatch.setattr(worker_module, "MAX_LOGPROBS", 1000)
    # No marker is likely: one is counted, but has no text and so no logprobs.
    endless = GREEDY | {"logit_bias": {"2041": -100}, "max_output_tokens": 200}
    asked = {"top_logprobs": 20, "include": ["message.output_text.logprobs"]}
    outputs = asyncio.run(outputs_of(local, endless | asked))
    _, reason, usage = ended(outputs)
    logprobs = [p for output in outputs if isinstance(output, Delta) for p in output.logprobs]
    assert (reason, usage.output_tokens) == ("length", len(logprobs))
    assert 1000 < sum(1 + len(p.top) for p in logprobs) <= 1000 + 21
    assert ended(asyncio.run(outputs_of(local, endless)))[2].output_tokens == 200


def test_logprobs_that_are_too_many_cut_an_answer_alike_in_any_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose last step held the stop token too ended with "stop", without the tokens between."""
    tokenizer = vocabulary([b"a"])
    token_ids = ids_of(tokenizer, [*[b"a"] * 6, END.encode()])
    for n_tokens, text, reason in ((4, "aaaa", "length"), (7, "aaaaaa", "stop")):
        monkeypatch.setattr(worker_module, "MAX_LOGPROBS", n_tokens - 1)
        for size in range(1, len(token_ids) + 1):
            found, reason_found, usage = ended(said(tokenizer, in_steps(token_ids, [size])))
            assert (found, reason_found, usage.output_tokens) == ([["final", text]], reason, n_tokens)


def test_what_is_demanded_ends_though_the_end_is_ignored(local: LocalWorker) -> None:
    """Its grammar allows nothing after it."""
    format_ = {"type": "json_schema", "name": "s", "schema": SCHEMA}
    body = {"tools": [], "text": {"format": format_}, "ignore_eos": True, "seed": 1, "max_output_tokens": 200}
    items, reason, _ = ended(asyncio.run(outputs_of(local, body)))
    assert reason == "stop"
    jsonschema.validate(json.loads(items[-1][1]), SCHEMA)


# what a request has beside a short input, and whether its prompt is short
SHORT: list[tuple[dict[str, Any], bool]] = [
    ({}, True),
    ({"input": "hi" * 1000}, False),
    ({"input": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}] * 99}, False),
    ({"tools": [TOOL]}, False),
    ({"text": {"format": {"type": "json_object"}}}, False),
    ({"chat_template_kwargs": {"a": "b" * 9000}}, False),
]


@pytest.mark.parametrize(("body", "is_short"), SHORT)
def test_only_a_short_prompt_is_made_in_the_event_loop(body: dict[str, Any], is_short: bool) -> None:
    """Any other would stop all streams for as long as it takes."""
    assert worker_module.is_short(request(body)) == is_short


# --- prompts that are too long ------------------------------------------------------------------------------

CONTEXT = 2048  # tokens


class Measured(Tokenizer):
    n_characters = 0  # that went through it

    def encode(self, *texts: str) -> list[int]:
        self.n_characters += sum(map(len, texts))
        return super().encode(*texts)


class MeasuredTemplate(ChatTemplate):
    n_characters = 0  # that it has written

    def render(self, *args: Any, **kwargs: Any) -> str:
        prompt = super().render(*args, **kwargs)
        self.n_characters += len(prompt)
        return prompt


def preparation(**body: Any) -> tuple[str, int, int]:
    """Why it was refused, if it was; how many characters were rendered, and how many tokenized."""
    template = MeasuredTemplate(ChatTemplate.load(TINY).source, {})
    tokenizer, template.n_characters = Measured(TINY / "tokenizer.json"), 0  # without its probes
    worker = worker_of(tokenizer, template, max_seq_len=CONTEXT)
    refusal = ""
    try:
        prompt = asyncio.run(worker.prepare(request(body)))
        assert CONTEXT - 100 < len(prompt.token_ids) < CONTEXT
    except BadInput as error:
        refusal = f"{error.code}: {error.message}"
    return refusal, template.n_characters, tokenizer.n_characters


@pytest.mark.bug("K06")
@pytest.mark.parametrize("truncation", ["disabled", "auto"])
def test_a_prompt_that_cannot_fit_is_not_rendered(truncation: str) -> None:
    """8 MB took 10 s, in which no stream got anything, and 2.3 GB."""
    n = CHARACTERS_PER_TOKEN * CONTEXT + 1
    refusal, *work = preparation(input="7" * n, truncation=truncation)
    assert re.fullmatch(rf"context_length_exceeded: .*the prompt has {n} characters\.", refusal)
    assert work == [0, 0]


@pytest.mark.bug("K06")
def test_a_prompt_that_does_not_fit_is_not_tokenized() -> None:
    """Nor if its messages are short, and only what they carry besides is long. At the limit it may fit."""
    reasoning = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "7" * 2**20}]}
    messages = [{"role": "user", "content": "hi"}, reasoning, {"role": "assistant", "content": "Hello"}]
    refusal, n_rendered, n_tokenized = preparation(input=messages)
    assert re.search(r"the prompt has \d+ characters\.$", refusal)
    assert (n_rendered > 2**20, n_tokenized) == (True, 0)
    n = CHARACTERS_PER_TOKEN * CONTEXT
    n_more = preparation(input="7" * n)[1] - n  # of the template
    assert preparation(input="7" * (n - n_more))[2] == n


@pytest.mark.bug("K06")
def test_turns_are_dropped_with_work_that_is_bounded() -> None:
    """The newest 30 of 2,000 turns fit; what went through is a small multiple of the conversation."""
    turns = [{"role": "user", "content": f"{n} " + "word " * 60} for n in range(2000)]
    refusal, *work = preparation(input=turns, truncation="auto")
    assert refusal == ""
    assert max(work) < 2 * sum(len(turn["content"]) for turn in turns)
