"""Requests in tables; what the tiny model's template and small ones like others' make of it."""

import json
import re
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from channels import Parser, Piece
from dialects import families
from helpers.laws import parse
from helpers.scripted import TEMPLATES
from helpers.tables import table
from request import messages, params
from request.body import MAX_VALUES
from request.messages import Message, turn_starts, without_old_turns
from request.refusals import BadInput
from request.template import BadTemplate, ChatTemplate

NOW = datetime(2026, 3, 9, 8, 7, 6)


def responses(input: Any) -> list[Message]:
    return params.from_responses({"model": "m", "input": input}, {}).messages


def chat(messages: Any) -> list[Message]:
    return params.from_chat({"model": "m", "messages": messages}, {}).messages


def blocks(messages: Any) -> list[Message]:
    return params.from_messages({"model": "m", "max_tokens": 1, "messages": messages}, {}).messages


def says(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


system, user, assistant = (partial(says, role) for role in ("system", "user", "assistant"))


# --- what a request says, and what a template gets ----------------------------------------------------------

TABLE = table("messages")
READ = {"responses": responses, "chat": chat, "messages": blocks}
CALL = {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": '{"x": 1}'}
CALL_2 = CALL | {"call_id": "call_2", "name": "g"}
OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": "42"}
CUT = {"status": "incomplete"}
OUTPUT_2 = OUTPUT | {"call_id": "call_2"}
HM = {"type": "reasoning", "id": "rs_1", "content": [{"type": "reasoning_text", "text": "Hm."}]}


@pytest.mark.bug("K05", "S23")
@pytest.mark.parametrize("row", TABLE["conversations"], ids=lambda row: row["why"])
def test_a_conversation(row: dict[str, Any]) -> None:
    assert READ[row["api"]](row["said"]) == row["messages"]


@pytest.mark.parametrize(("api", "row"), [(api, row) for api, rows in TABLE["bad"].items() for row in rows])
def test_a_bad_conversation(api: str, row: list[Any]) -> None:
    param, code, said = row
    with pytest.raises(BadInput) as error:
        READ[api](said)
    assert (error.value.param, error.value.code) == (param, code)


def test_what_becomes_one_message_is_joined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a turn with 4,000 texts, 4 GB were copied."""
    joined: list[int] = []
    monkeypatch.setattr(messages, "paragraphs", lambda *texts: joined.append(len(texts)))
    responses([assistant("Hello")] * 1000)
    assert joined == [1000]


def test_values_in_the_arguments_of_all_calls_are_bounded() -> None:
    """Bug: a text of 2 MB was parsed whatever it holds: ten such requests took 600 MB, and 0.8 s of Python's
    lock, while the same values in the body itself are refused.
    """
    half = {"arguments": json.dumps({"x": [0] * (MAX_VALUES // 2)})}
    responses([CALL | half, OUTPUT])
    with pytest.raises(BadInput, match=f"at most {MAX_VALUES}") as refusal:
        responses([CALL | half, CALL_2 | half, OUTPUT, OUTPUT_2])
    assert refusal.value.status == 413


def test_a_prompt_loses_its_oldest_turns_one_by_one() -> None:
    messages = [system("s"), user("a"), assistant("b"), user("c"), user("d")]
    shortened = [without_old_turns(messages, start) for start in turn_starts(messages)]
    assert shortened == [messages, messages, [system("s"), *messages[3:]], [system("s"), user("d")]]


# --- templates in the style of others -----------------------------------------------------------------------

PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "<b>now</b>, in °C"}}


@pytest.mark.bug("P12")
@pytest.mark.parametrize("row", TABLE["rendered"], ids=lambda row: row["why"])
def test_a_template_is_rendered(row: dict[str, Any]) -> None:
    template, tools = ChatTemplate(row["source"], {}), [WEATHER] if row.get("tools") else []
    assert template.render(responses(row["said"]), tools, NOW) == row["prompt"]


@pytest.mark.parametrize("source", ["raise_exception('not ' + said)", "said + 1", "messages.append(1)"])
def test_what_a_template_raises_is_the_requests_fault(source: str) -> None:
    """Also what its sandbox refuses; told in its words, and briefly."""
    template = ChatTemplate("{% set said = messages[0].content %}{{ " + source + " }}", {})
    with pytest.raises(BadInput, match="chat template refuses these messages") as error:
        template.render([user("<b>" + "x" * 9999)], None, NOW)
    assert (error.value.param, error.value.code) == (None, "invalid_prompt")
    assert ("not <b>xxx" in error.value.message) == ("raise_exception" in source)
    assert len(error.value.message) < 400


def test_a_template_that_shows_no_tools_refuses_them() -> None:
    """Calls and results of earlier turns too: they would be lost."""
    template = ChatTemplate(PLAIN, {})
    called = responses([user("q"), CALL, OUTPUT])
    for asked, tools in (([user("q")], [WEATHER]), (called, None)):
        with pytest.raises(BadInput, match="chat template shows none") as refusal:
            template.render(asked, tools, NOW)
        assert (refusal.value.param, refusal.value.code) == ("tools", "unsupported_parameter")


# --- templates of other dialects ----------------------------------------------------------------------------

SHOWS = TABLE["shows"]
LETTERS = st.characters(codec="utf-8", exclude_characters="<>\n")
WORDS = st.text(LETTERS, min_size=1).map(str.strip).filter(bool)
TYPES = {"s": "string", "n": "integer", "b": ["boolean", "null"], "a": "array"}
PARAMETERS = {"type": "object", "properties": {name: {"type": of_type} for name, of_type in TYPES.items()}}
F_TOOL = [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}]
ARRAYS = st.lists(st.none() | st.booleans(), max_size=2)
CALLED_F = st.fixed_dictionaries(
    {}, optional={"s": WORDS, "n": st.integers(), "b": st.none() | st.booleans(), "a": ARRAYS}
)


@pytest.mark.parametrize("file", SHOWS)
@given(reasoning=WORDS, text=WORDS, called=st.lists(CALLED_F, max_size=2))
def test_what_is_rendered_is_read(file: str, reasoning: str, text: str, called: list[dict[str, Any]]) -> None:
    """A turn of the assistant in the prompt is what our parser reads as that turn."""
    template, (shown, n_calls, end) = TEMPLATES[file], SHOWS[file]
    called, text = called[:n_calls], "" if file == "llama" and called else text
    turn: list[Any] = [HM | {"content": [{"type": "reasoning_text", "text": reasoning}]}] if shown else []
    turn += [says("assistant", text)] if text else []
    for n, arguments in enumerate(called):
        turn.append(CALL | CUT | {"call_id": f"call_{n}", "arguments": json.dumps(arguments)})
    before = template.render([user("q")], F_TOOL, NOW)
    prompt = template.render(responses([user("q"), *turn]), F_TOOL, NOW)
    assert prompt.startswith(before)
    said = prompt.removeprefix(before).split(end)[0]
    expected = [["analysis", reasoning]] if shown else []
    expected += [["commentary" if file == "harmony" and called else "final", text]] if text else []
    found = read(families.recognised(template.source, template.takes_tools), said)
    assert [[*item[:-1], json.loads(item[-1])] if item[0] == "call" else item for item in found] == [
        *expected,
        *(["call", "f", arguments] for arguments in called),
    ]


def read(name: str, said: str) -> list[list[str]]:
    row = families.DIALECTS[name]
    dialect = families.find(row, row.markers, "", tools=True)
    cut = re.split("(" + "|".join(map(re.escape, sorted(row.markers))) + ")", said)
    pieces = [Piece(text, text if text in row.markers else "") for text in cut if text]
    return parse(pieces, Parser(dialect, dialect.start, schemas={"f": PARAMETERS}))


ITEMS = ["user", "assistant", "system", "developer", "call", "cut call", "result"]


def conversation(kinds: list[str]) -> tuple[list[Any], list[str]]:
    """Items of these kinds, the results that are missing behind them; and their words, one each."""
    items: list[Any] = []
    words: list[str] = []
    open_calls: list[str] = []
    for kind in [*kinds, *["result"] * kinds.count("call")]:
        if kind == "result" and not open_calls:
            continue
        word = f"word_{len(words)}_"
        words.append(word)
        call_id = f"call_{len(words)}"
        if kind == "call":
            open_calls.append(call_id)
            items.append(CALL | {"call_id": call_id, "arguments": json.dumps({"s": word})})
        elif kind == "cut call":
            items.append(CALL | CUT | {"call_id": call_id, "arguments": f'{{"s": "{word}'})
        elif kind == "result":
            items.append(OUTPUT | {"call_id": open_calls.pop(), "output": word})
        else:
            items.append(says(kind, word))
    return items, words


@given(st.lists(st.sampled_from(ITEMS), min_size=1, max_size=8), st.booleans())
def test_nothing_that_is_said_is_lost_or_said_twice(kinds: list[str], with_tools: bool) -> None:
    """In the prompt of any family, in whatever order it was said."""
    items, words = conversation([*kinds, "user"])
    for file in SHOWS:
        prompt = TEMPLATES[file].render(responses(items), F_TOOL if with_tools else None, NOW)
        assert [(file, word) for word in words if prompt.count(word) != 1] == []


@pytest.mark.bug("M10")
@pytest.mark.parametrize("file", SHOWS)
@pytest.mark.parametrize(
    "arguments", ['{"s": "half', "[1]", "[" * 9999, '{"x":' * 9999, '"Beijing"', "null", ""]
)
def test_arguments_in_the_history_are_an_object(file: str, arguments: str) -> None:
    """Qwen3-Coder's template raised over others, so every later turn was a 400; hermes showed
    `"arguments": }` for none, and harmony nothing.
    """

    def rendered(arguments: str) -> str:
        messages = responses([user("q"), CALL | {"arguments": arguments}, OUTPUT, user("r")])
        return TEMPLATES[file].render(messages, F_TOOL, NOW)

    as_object = json.dumps({"arguments": arguments}) if arguments else "{}"
    assert rendered(arguments) == rendered(as_object)


# --- files --------------------------------------------------------------------------------------------------


@pytest.mark.bug("P16")
def test_a_model_directory_holds_the_template_and_its_tokens(tmp_path: Path) -> None:
    """The Jinja file goes before the config; of named templates the default is taken without tools."""
    eos = {"content": "</s>"}
    tokens = {"bos_token": None, "eos_token": eos, "unk_token": "<unk>", "add_bos_token": True}
    source = "{{ bos_token }}|{{ eos_token }}|{{ unk_token }}|{{ add_bos_token is defined }}"
    named = [{"name": "rag", "template": "x"}, {"name": "default", "template": source}]
    named += [{"name": "tool_use", "template": "{{ eos_token }}{{ tools }}"}]
    for chat_template in (source, named):
        config = json.dumps(tokens | {"chat_template": chat_template})
        (tmp_path / "tokenizer_config.json").write_text(config)
        template = ChatTemplate.load(tmp_path)
        assert template.render([user("a")], None, NOW, eos_token="mine") == "|mine|<unk>|False"
    assert template.render([user("a")], [WEATHER], NOW) == f"</s>{[WEATHER]}"
    (tmp_path / "chat_template.jinja").write_text("new {{ eos_token }}")
    assert ChatTemplate.load(tmp_path).render([user("a")], [], NOW) == "new </s>"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools: {{ tools }}")
    template = ChatTemplate.load(tmp_path)
    assert template.render([user("a")], [], NOW) == "new </s>"
    assert template.render([user("a")], [WEATHER], NOW) == f"tools: {[WEATHER]}"


@pytest.mark.parametrize("source", TABLE["endless"].values(), ids=TABLE["endless"])
def test_a_template_ends(source: str) -> None:
    """At the start, and later if only some messages lead there. A larger request may take more turns."""
    with pytest.raises(BadTemplate, match=r"it may take 2\d{4} calls and turns"):
        ChatTemplate(source, {})
    template = ChatTemplate("{% if messages[0].content == 'x' %}" + source + "{% endif %}", {})
    with pytest.raises(BadInput, match=r"it may take 2\d{4} calls and turns"):
        template.render([user("x")], None, NOW)
    template.render([user("x"), user("a" * 500_000)], None, NOW)
    assert template.render([user("a")], None, NOW) == ""


def test_a_template_computes_no_endless_number() -> None:
    """Bug: 10 ** (10 ** 10) was computed while Jinja read the template."""
    with pytest.raises(BadTemplate, match="no powers"):
        ChatTemplate("{{ 10 ** (10 ** 10) }}", {})
    squares = "{% set n = namespace(x=9) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}"
    with pytest.raises(BadInput, match="4300 digits"):
        ChatTemplate(squares, {}).render([user("x")], None, NOW)


@pytest.mark.parametrize(("config", "words"), TABLE["no_template"])
def test_a_model_without_template_is_refused_at_once(tmp_path: Path, config: str, words: str) -> None:
    if config:
        (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(BadTemplate) as error:
        ChatTemplate.load(tmp_path)
    assert words in str(error.value)


# --- what other servers and newer clients say ---------------------------------------------------------------


@pytest.mark.bug("P10", "P26")
@pytest.mark.parametrize(("item", "said"), TABLE["told"])
def test_an_item_of_an_unknown_type_is_told_as_text(item: dict[str, Any], said: str) -> None:
    request = params.from_responses({"model": "m", "input": [user("q"), item]}, {})
    assert request.messages[1] == user(said)
    assert request.not_run == (item["type"],)
    with pytest.raises(BadInput, match="content with text"):
        params.from_responses({"model": "m", "input": [item | {"content": [{"type": "x"}]}]}, {})


@pytest.mark.bug("P19")
def test_reasoning_that_cannot_be_opened_is_told_by_its_summary() -> None:
    summary = [{"type": "summary_text", "text": "Two and two."}]
    thought = {"type": "reasoning", "encrypted_content": "of another server", "summary": summary}
    body = {"model": "m", "input": [user("q"), thought, assistant("4"), user("r")]}
    request = params.from_responses(body, {})
    assert request.messages[1]["reasoning_content"] == "Two and two."
    assert request.not_run == ("reasoning.encrypted_content",)
