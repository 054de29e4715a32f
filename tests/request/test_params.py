"""Parameters: each takes a value as it is, or refuses it by its name; what comes of it, and is echoed."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest

from helpers.tables import plain, table
from request import params
from request.params import CHAT, RESPONSES, Request
from request.refusals import MAX_MESSAGE, MAX_SHOWN, BadInput, shown

Json = dict[str, Any]
Read = Callable[[Any, dict[str, Any]], Request]

APIS: dict[str, tuple[Read, Json, dict[str, params.Parameter]]] = {
    "responses": (params.from_responses, {"model": "m", "input": "hi"}, RESPONSES),
    "chat": (params.from_chat, {"model": "m", "messages": [{"role": "user", "content": "hi"}]}, CHAT),
}

TABLE = table("params")
TYPE, VALUE, UNSUPPORTED = "invalid_type", "invalid_value", "unsupported_parameter"
MISSING = "missing_required_parameter"
NAN = float("nan")
NO_IDS = ("a", "-1", "1.0", "", "\N{SUPERSCRIPT TWO}", "9" * 5000)
FUNCTION = {"type": "function", "name": "f", "description": None, "parameters": None, "strict": False}
HOSTED = {"type": "web_search"}

ODD: list[Any] = [
    True, False, -1, 7, 0.5, NAN, 10**30, "", "x" * 2000, [], [5], ["x"], [[]], {}, {"x": 5}, {"x": {}},
]  # fmt: skip
CODES = (TYPE, VALUE, UNSUPPORTED, MISSING)

#   API           param of the error  code   what is wrong; tables/params.toml has what is data alone
BAD: list[tuple[str, str, str, Json]] = [
    *((api, *row) for api, rows in TABLE["bad"].items() for row in rows),
    ("responses", "metadata",         VALUE, {"metadata": {str(i): "" for i in range(17)}}),
    ("chat",      "logit_bias",       VALUE, {"logit_bias": {str(token_id): 0 for token_id in range(301)}}),
    *(("chat",    "logit_bias",       VALUE, {"logit_bias": {id_: 1}}) for id_ in NO_IDS),
    ("responses", "tools",            VALUE, {"tools": [FUNCTION] * 129}),
]  # fmt: skip


def read(api: str, change: Json, defaults: Json | None = None) -> Request:
    from_body, body, _ = APIS[api]
    return from_body(body | change, defaults or {})


def refusal(api: str, change: Json) -> BadInput:
    with pytest.raises(BadInput) as caught:
        read(api, change)
    assert caught.value.message
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 500
    return caught.value


ROWS = [(api, name) for api, (_, _, rows) in APIS.items() for name in rows]


@pytest.mark.parametrize(("api", "name"), ROWS)
def test_a_value_is_taken_as_it_is_or_refused_by_its_name(api: str, name: str) -> None:
    taken, refused = [], []
    for value in ODD:
        try:
            taken.append((value, read(api, {"stream": True} | {name: value}).echo))
        except BadInput as error:
            refused.append((re.split(r"\W", str(error.param))[0], error.code in CODES))
    assert {*refused} <= {(name, True)}
    assert refused or name in ("prompt_cache_retention", "service_tier", "user")
    if APIS[api][2][name].echo and name not in ("tools", "reasoning", "text"):  # they get more members
        assert [echo.get(name, value) for value, echo in taken] == [value for value, _ in taken]


@pytest.mark.parametrize(("api", "param", "code", "change"), BAD)
def test_bad_value(api: str, param: str, code: str, change: Json) -> None:
    error = refusal(api, change)
    assert (error.param, error.code) == (param, code)


@pytest.mark.parametrize(("api", "name"), ROWS)
def test_null_is_absent(api: str, name: str) -> None:
    if name in ("model", "input" if api == "responses" else "messages"):
        error = refusal(api, {name: None})
        assert (error.param, error.code) == (name, "missing_required_parameter")
    else:
        assert read(api, {name: None}) == read(api, {})


def test_a_refusal_is_short() -> None:
    """Bug: the id of a call was repeated, however long it was."""
    output = {"type": "function_call_output", "call_id": "x" * 1_000_000, "output": ""}
    with pytest.raises(BadInput) as caught:
        read("responses", {"input": [output]})
    assert len(caught.value.message) == len(str(caught.value)) == MAX_MESSAGE


@pytest.mark.parametrize("api", APIS)
def test_unknown_parameters_change_nothing_and_are_named(api: str) -> None:
    plain = read(api, {})
    assert read(api, {"banana": object(), "temprature": 0, "of_none": None}) == dataclasses.replace(
        plain, not_run=("banana", "temprature")
    )
    assert plain.not_run == ()


@pytest.mark.bug("M12")
def test_what_is_not_run_is_named() -> None:
    """Hosted tools were dropped without a word, and the limit on their calls with them."""
    tools = [FUNCTION, {"type": "mcp", "server_label": "x"}, HOSTED, HOSTED]
    not_run = read("responses", {"tools": tools, "max_tool_calls": 3}).not_run
    assert not_run == ("max_tool_calls", "mcp", "web_search")


def test_names_of_what_is_not_run_fit_into_a_header() -> None:
    odd = {'a"b\\c\r\n': 1, "é\N{LINE SEPARATOR}": 1, "x" * 65: 1} | {f"p{i}": 1 for i in range(9)}
    names = read("chat", odd).not_run
    assert names == ("a?b?c??", "??", "x" * 64, "p0", "p1", "p2", "p3", "p4")


# --- what comes of it ---------------------------------------------------------------------------------------


@pytest.mark.bug("P22")
def test_a_hint_fits_its_parameter() -> None:
    """min_tokens was told that for functions there are 'tools', and `messages: []` that it was missing."""
    hints = {"min_tokens": "leave it out.", "functions": "use 'tools' and 'tool_choice'."}
    why = "This server does not implement it"
    for name, hint in hints.items():
        with pytest.raises(BadInput) as refusal:
            read("chat", {name: 5})
        assert refusal.value.message == f"Unsupported parameter: '{name}'. {why}: {hint}"
    with pytest.raises(BadInput, match="with at least one message"):
        read("chat", {"messages": []})


MEANING = [(api, row) for api, rows in TABLE["meaning"].items() for row in rows]


@pytest.mark.bug("N02")
@pytest.mark.parametrize(("api", "row"), MEANING)
def test_meaning(api: str, row: list[Any]) -> None:
    attribute, value, change = row
    found = plain(getattr(read(api, change), attribute))
    if attribute == "structured_output" and found:
        found.pop("schema_path", None)
    assert found == value


@pytest.mark.parametrize("row", TABLE["echoes"], ids=lambda row: str(row["change"])[:30])
def test_echo(row: Json) -> None:
    echo = plain(read("responses", row["change"]).echo)
    assert {name: echo[name] for name in row["says"]} == row["says"]
    assert echo.keys() == TABLE["echoes"][0]["says"].keys()


@pytest.mark.parametrize(
    ("given", "holds"), [({}, 0.2), ({"temperature": None}, 0.2), ({"temperature": 0}, 0)]
)
def test_defaults_are_the_models(given: Json, holds: float) -> None:
    response, chat = (read(api, given, {"temperature": 0.2}) for api in APIS)
    assert response.sampling["temperature"] == chat.sampling["temperature"] == holds
    assert response.echo["temperature"] == holds  # a number, never null: openresponses' schema
    assert chat.echo == {}


def test_of_a_large_value_no_more_is_written_than_is_shown() -> None:
    """Bug: all of a body of 8 MB was written, 0.25 s, to quote 60 characters."""

    class Counted:
        n_written = 0

        def __str__(self) -> str:
            Counted.n_written += 1
            return "x"

    assert shown([Counted()] * 1000).startswith('["x", "x", ')
    assert Counted.n_written <= MAX_SHOWN
