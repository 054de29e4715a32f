"""gpt-oss from its checkpoint to the events: a tiny one (helpers/gpt_oss.py), the real server, its client.

Each answer has been taught for one prompt, so it comes only if the template, the tokenizer, the weights and
the forward pass are all right; and harmony's channels must become reasoning, preambles, calls and text.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from helpers.gpt_oss import write_model
from helpers.serving import Json, Server, serve

QUESTION = "What is the weather in Oslo?"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Json = {"type": "function", "name": "get_weather", "description": "The weather", "parameters": CITY}
NESTED: Json = {"type": "function", "function": {k: v for k, v in WEATHER.items() if k != "type"}}
YES_NO: Json = {
    "type": "object",
    "properties": {"answer": {"enum": ["yes", "no"]}},
    "required": ["answer"],
    "additionalProperties": False,
}
FORMAT: Json = {"format": {"type": "json_schema", "name": "verdict", "schema": YES_NO, "strict": True}}
NEXT = "<|end|><|start|>assistant"


def thought(text: str) -> str:
    return f"<|channel|>analysis<|message|>{text}{NEXT}"


def answer(text: str) -> str:
    return f"<|channel|>final<|message|>{text}<|return|>"


ARGUMENTS = '{"city": "Oslo"}'
CALL = f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>"
THOUGHTS = {"low": "Sum.", "medium": "2 plus 2, so add.", "high": "Two and two. Count: 3, 4. So it is 4."}
ANSWERS = {"low": "4", "medium": "It is 4.", "high": "2 plus 2 is 4."}
SUM = "What is 2+2?"
ASKED: list[Json] = [{"role": "user", "content": QUESTION}]
TURN: list[Json] = [
    *ASKED,
    {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "I must look."}],
    },
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me look."}]},
    {"type": "function_call", "call_id": "call_1", "name": "get_weather", "arguments": ARGUMENTS},
    {"type": "function_call_output", "call_id": "call_1", "output": "9 degrees"},
]
TURNS: list[tuple[Json, str]] = [
    *(
        ({"input": SUM, "reasoning": {"effort": effort}}, thought(THOUGHTS[effort]) + answer(ANSWERS[effort]))
        for effort in THOUGHTS
    ),
    (
        {"input": ASKED, "tools": [WEATHER]},
        thought("I must look.") + f"<|channel|>commentary<|message|>Let me look.{NEXT}" + CALL,
    ),
    ({"input": TURN, "tools": [WEATHER]}, thought("9 is cold.") + answer("It is 9 degrees in Oslo.")),
    ({"input": "Is 7 odd?", "text": FORMAT}, thought("7 is odd.") + answer("I would say so!")),
    ({"input": "Hello", "tools": [WEATHER], "tool_choice": "required"}, thought("Hm.") + answer("Hello!")),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("gpt-oss") / "tiny-gpt-oss"
    write_model(directory, {json.dumps(body): text for body, text in TURNS})
    return directory


@pytest.fixture(scope="module", params=[(), ("--speculate", "4")], ids=["", "drafts"])
def server(model: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    with serve(*request.param, model=model) as server:
        yield server


def created(server: Server, **body: Any) -> Any:
    """The response; the same plain, streamed and in the background."""
    with server.sdk() as client:
        plain = client.responses.create(model="tiny-gpt-oss", **body)
        with client.responses.stream(model="tiny-gpt-oss", **body) as stream:
            streamed = stream.get_final_response()
        job = client.responses.create(model="tiny-gpt-oss", background=True, **body)
        while job.status in ("queued", "in_progress"):
            time.sleep(0.01)
            job = client.responses.retrieve(job.id)
    assert summary(plain) == summary(streamed) == summary(job)
    return plain


def summary(response: Any) -> list[tuple[str, ...]]:
    """What its items say."""
    found: list[tuple[str, ...]] = []
    for item in response.output:
        if item.type == "function_call":
            found.append((item.type, item.name, item.arguments))
        else:
            found.append((item.type, "".join(part.text for part in item.content)))
    return found


@pytest.mark.parametrize("effort", THOUGHTS)
def test_reasoning_effort(server: Server, effort: Any) -> None:
    response = created(server, input=SUM, reasoning={"effort": effort})
    assert summary(response) == [("reasoning", THOUGHTS[effort]), ("message", ANSWERS[effort])]
    assert response.status == "completed"
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
    with server.sdk() as client:
        messages: Any = [{"role": "user", "content": SUM}]
        chat = client.chat.completions.create(
            model="tiny-gpt-oss", messages=messages, reasoning_effort=effort
        )
    message: Any = chat.choices[0].message
    assert (message.reasoning_content, message.content) == (THOUGHTS[effort], ANSWERS[effort])


def test_medium_is_what_is_not_said(server: Server) -> None:
    assert created(server, input=SUM).output_text == ANSWERS["medium"]


LOOKING = [
    ("reasoning", "I must look."),
    ("message", "Let me look."),
    ("function_call", "get_weather", ARGUMENTS),
]
FOUND = [("reasoning", "9 is cold."), ("message", "It is 9 degrees in Oslo.")]


def test_a_preamble_a_call_and_a_chain_with_its_reasoning(server: Server) -> None:
    """By the chain, and by all items given back."""
    tools: Any = [WEATHER]
    first = created(server, input=ASKED, tools=tools)
    assert summary(first) == LOOKING
    result = {"type": "function_call_output", "call_id": first.output[2].call_id, "output": "9 degrees"}
    chained = created(server, previous_response_id=first.id, input=[result], tools=tools)
    assert summary(chained) == FOUND
    given_back = [item.model_dump(exclude_none=True) for item in first.output]
    assert summary(created(server, input=[*ASKED, *given_back, result], tools=tools)) == FOUND


def test_the_same_by_chat_completions(server: Server) -> None:
    with server.sdk() as client:
        tools: Any = [NESTED]
        asked: Any = ASKED
        first: Any = client.chat.completions.create(model="tiny-gpt-oss", messages=asked, tools=tools)
        message = first.choices[0].message
        [call] = message.tool_calls
        assert (message.reasoning_content, message.content) == ("I must look.", "Let me look.")
        assert (call.function.name, call.function.arguments) == ("get_weather", ARGUMENTS)
        assert first.choices[0].finish_reason == "tool_calls"
        result = {"role": "tool", "tool_call_id": call.id, "content": "9 degrees"}
        turn = [*asked, message.model_dump(exclude_none=True), result]
        second: Any = client.chat.completions.create(model="tiny-gpt-oss", messages=turn, tools=tools)
    assert second.choices[0].message.content == "It is 9 degrees in Oslo."


def test_structured_output_against_what_it_would_say(server: Server) -> None:
    response = created(server, input="Is 7 odd?", text=FORMAT)
    assert summary(response)[0] == ("reasoning", "7 is odd.")
    jsonschema.validate(json.loads(response.output_text), YES_NO)


def test_a_call_that_must_come_against_what_it_would_say(server: Server) -> None:
    """And with arguments that it was not taught."""
    tools: Any = [WEATHER | {"parameters": {**CITY, "properties": {"city": {"enum": ["Oslo", "Rome"]}}}}]
    response = created(server, input="Hello", tools=tools, tool_choice="required", max_output_tokens=200)
    call = response.output[-1]
    assert (call.type, call.name) == ("function_call", "get_weather")
    assert json.loads(call.arguments)["city"] in ("Oslo", "Rome")
