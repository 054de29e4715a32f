"""Special tokens of a prompt: the template's, whatever the strings of the request spell."""

import asyncio
import json
import random
import re
from collections.abc import Iterator
from datetime import datetime
from functools import partial
from typing import Any

import jinja2
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from helpers.scripted import TEMPLATES, TINY, worker_of
from helpers.serving import ROOT
from helpers.tables import table
from request import params
from request.refusals import BadInput
from request.special_tokens import ALPHABET, Own, SpecialTokens
from request.template import ChatTemplate
from tokenizer import Tokenizer
from worker import LocalPrompt

# --- templates that make it hard ----------------------------------------------------------------------------

# Templates do this: Qwen3-Coder prints keys as tags, SmolLM3 takes "/no_think" out of the system's message,
# Qwen3 looks for </think> in the assistant's and for <tool_response> at both ends of the user's.
HARD = {path.stem: path.read_text("utf-8") for path in sorted((ROOT / "tests/templates/hard").iterdir())}
ALL_TEMPLATES = TEMPLATES | {name: ChatTemplate(source, {}) for name, source in HARD.items()}
MARKER = re.compile(r"<｜[^｜]+｜>|</?\|?\w+\|?>|\[/?[A-Z_]+\]")
TABLE = table("special_tokens")
OURS = Tokenizer(TINY / "tokenizer.json")
Vocabularies = tuple[ChatTemplate, Tokenizer, tokenizers.Tokenizer]


@pytest.fixture(scope="module", params=ALL_TEMPLATES)
def vocabularies(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Vocabularies:
    """A template; our tokenizer and the library's, both with the tiny model's merges and its markers."""
    template = ALL_TEMPLATES[request.param]
    library = tokenizers.Tokenizer.from_file(str(TINY / "tokenizer.json"))
    markers = sorted({*MARKER.findall(template.source), "<tool_call>", "[INST]"})
    library.add_special_tokens([AddedToken(marker, normalized=False) for marker in markers])
    file = tmp_path_factory.mktemp(request.param) / "tokenizer.json"
    library.save(str(file))
    return template, Tokenizer(file), library


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def prepared(template: ChatTemplate, tokenizer: Tokenizer, body: dict[str, Any]) -> LocalPrompt:
    return asyncio.run(worker_of(tokenizer, template).prepare(params.from_chat({"model": "m"} | body, {})))


def special_tokens(prompt: LocalPrompt, tokenizer: Tokenizer) -> list[str]:
    added = tokenizer.added_by_id
    return [added[token_id].content for token_id in prompt.token_ids if token_id in added]


# --- a chat, each string of it one of the request -----------------------------------------------------------


def chat(template: ChatTemplate, strings: Iterator[str]) -> dict[str, Any]:
    """A conversation with all that one can have in this template; the strings are taken one by one."""
    take = strings.__next__
    arguments = {take(): take(), take(): [take(), {take(): 1}]}
    function = {"name": take(), "arguments": json.dumps(arguments)}
    call = {"id": "call_1", "type": "function", "function": function}
    properties = {take(): {"type": "string", "description": take(), "enum": [take()]} for _ in range(2)}
    parameters = {"type": "object", "properties": properties, "required": [*properties]}
    tool = {"name": "f", "description": take(), "parameters": parameters}
    said = [
        {"role": "system", "content": take()},
        user(take()),
        {"role": "assistant", "content": take(), "reasoning_content": "r" + take()},
        {"role": "user", "content": [{"type": "text", "text": take()}, {"type": "text", "text": take()}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": take()},
        {"role": "assistant", "content": take()},
        user(take()),
    ]
    body = {"messages": said, "chat_template_kwargs": {"note": take(), "notes": [take()]}}
    if template.takes_tools:
        return body | {"tools": [{"type": "function", "function": tool}]}
    del said[4:6]
    return body


N_STRINGS = 26


def test_a_harmless_chat_has_the_ids_that_it_ever_had(vocabularies: Vocabularies) -> None:
    template, tokenizer, library = vocabularies
    for seed in range(20):
        strings = random.Random(seed).sample(TABLE["harmless"], N_STRINGS)
        body = chat(template, iter(strings))
        request = params.from_chat({"model": "m"} | body, {})
        now = datetime.now()
        try:
            rendered = template.render(request.messages, request.tools, now, **request.template_kwargs)
        except BadInput:
            continue
        prompt = prepared(template, tokenizer, body)
        assert prompt.token_ids == library.encode(rendered, add_special_tokens=False).ids


# --- the law ------------------------------------------------------------------------------------------------

STRINGS = st.lists(st.sampled_from(TABLE["spelled"]), max_size=4).map("".join)


def same_shape(text: str, n: int) -> str:
    """A harmless text with blanks where this one has them; n tells it from the others, as some are keys."""
    ours = re.sub(r"\S", "x", text)
    return ours.replace("x", f"x{n}x", 1) if ours.strip() else ours


@given(strings=st.lists(STRINGS, min_size=N_STRINGS, max_size=N_STRINGS))
def test_special_tokens_come_from_the_template_alone(vocabularies: Vocabularies, strings: list[str]) -> None:
    """Whatever a request spells, its prompt has the special tokens of a harmless one, and opens as it."""
    template, tokenizer, _ = vocabularies
    strings = [text if strings.index(text) == n else f"{text}{n}" for n, text in enumerate(strings)]
    harmless = [same_shape(text, n) for n, text in enumerate(strings)]
    forged = prepared(template, tokenizer, chat(template, iter(strings)))
    plain = prepared(template, tokenizer, chat(template, iter(harmless)))
    assert special_tokens(forged, tokenizer) == special_tokens(plain, tokenizer)
    assert vars(forged.parser()._trimming) == vars(plain.parser()._trimming)
    assert forged.parser().state == plain.parser().state


@pytest.mark.bug("K02")
@pytest.mark.parametrize(("said", "source"), TABLE["glued"].values(), ids=TABLE["glued"])
def test_a_token_is_not_put_together_from_pieces(said: str, source: str) -> None:
    tools = [{"type": "function", "function": {"name": "tool_call"}}]
    body = {"messages": [user(said)], "tools": tools, "chat_template_kwargs": {"note": "call>"}}
    names = "{% for tool in tools or [] %}<{{ tool.function.name }}>{% endfor %}"
    template = ChatTemplate(names + "{% set said = messages[0].content %}" + source, {})
    assert special_tokens(prepared(template, OURS, body), OURS) == []


# --- traces and cuts ----------------------------------------------------------------------------------------

TOKENS = ["<a>", "<ab>", "<a", "ab<", "<a><b>", "b>a<", "aa", "  ", "\n"]


@given(
    tokens=st.lists(st.sampled_from(TOKENS), unique=True),
    pieces=st.lists(st.tuples(st.sampled_from(["<", "a", "b", ">", " "]), st.booleans()), max_size=14),
)
def test_a_prompt_is_cut_in_each_token_that_the_template_has_not_written_alone(
    tokens: list[str], pieces: list[tuple[str, bool]]
) -> None:
    """Against a plain reading of the rule: the longest token at each place, from left to right."""
    prompt = "".join(text for text, _ in pieces)
    trace = "".join(text.translate(ALPHABET) if is_own else text for text, is_own in pieces)
    tokens = [token for token in tokens if token.strip()]
    texts, start, place = [], 0, 0
    while place < len(prompt):
        n = max((len(token) for token in tokens if prompt.startswith(token, place)), default=0)
        requests = [i for i in range(n) if not (pieces[place + i][1] or prompt[place + i] == " ")]
        if requests:
            texts.append(prompt[start : place + max(requests[0], 1)])
            start = place = place + max(requests[0], 1)
        else:
            place += n or 1
    assert SpecialTokens(tokens).cut(prompt, trace) == [*texts, prompt[start:]]
    assert SpecialTokens(tokens).cut(prompt, "x" + trace) == SpecialTokens(tokens).cut(prompt, prompt)


@pytest.mark.bug("P11")
@pytest.mark.parametrize("source", TABLE["kept"].values(), ids=TABLE["kept"])
def test_what_a_template_makes_of_its_own_text_is_its_own(source: str) -> None:
    template = ChatTemplate("{% set said = messages[0].content %}" + source, {"eos_token": "<|im_end|>"})
    assert special_tokens(prepared(template, OURS, {"messages": [user("said")]}), OURS) == ["<|im_end|>"] * 2


@pytest.mark.bug("P11")
@pytest.mark.parametrize("source", TABLE["printed"].values(), ids=TABLE["printed"])
def test_a_prompt_is_what_jinja_makes_of_the_request(source: str) -> None:
    """Marks in the strings of a request were printed: `<\\ufdd0b>`; a type with one was not "object"."""
    source = "{% if tools %}" + source + "{{ tools }}{% endif %}"
    template = ChatTemplate(source, {})
    messages = [user("<f> 'é' </f>")]
    function = {"name": "f", "description": "<b> é", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": function}]
    environment = jinja2.Environment()
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    prompt = environment.from_string(source).render(messages=messages, tools=tools)
    assert template.render(messages, tools, datetime.min) == prompt
    assert Own.read(template.render(messages, tools, datetime.min, True)) == prompt
    tokens = SpecialTokens(["<|object|>", "object", "<b>", "<f>"])
    assert "".join(tokens.cut(prompt, template.render(messages, tools, datetime.min, True))) == prompt
