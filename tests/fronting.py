"""A real server asked directly and through our front, with the official SDK: the same answers?

    python tests/fronting.py http://host:port/v1 --model NAME        [--api-key KEY]

It starts `server.py --upstream URL` and prints a table, a case a line: what the server says directly, what it
says through the front over chat completions, and what through the front over the Responses API, which many
servers have not. Answers are asked for at temperature 0; a server that says something else each time shows by
two direct answers that differ. Exit status 1 where an answer differs.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import openai
from openai import OpenAI

from helpers.serving import serve

HI: Any = [{"role": "user", "content": "Name three colours."}]
# Some tokens are parts of one.
EMOJI: Any = [{"role": "user", "content": "Write only emoji: \N{GRINNING FACE}"}]
ASK = "What is the weather in Tokyo?"
PARAMETERS: Any = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION: Any = {"name": "get_weather", "description": "Get the weather of a city", "parameters": PARAMETERS}
CHAT_TOOL: dict[str, Any] = {
    "messages": [{"role": "user", "content": ASK}],
    "tools": [{"type": "function", "function": {**FUNCTION, "strict": True}}],
    "tool_choice": "required",
}
TOOL: dict[str, Any] = {
    "input": ASK,
    "tools": [{"type": "function", "strict": True, **FUNCTION}],
    "tool_choice": "required",
}
TIME = FUNCTION | {"name": "get_time", "description": "Get the time in a city"}
CHAT_NAMED: dict[str, Any] = {
    "messages": [{"role": "user", "content": ASK}],
    "tools": [
        {"type": "function", "function": FUNCTION},
        {"type": "function", "function": TIME | {"strict": True}},
    ],
    "tool_choice": {"type": "function", "function": {"name": "get_time"}},
}
NAMED: dict[str, Any] = {
    "input": ASK,
    "tools": [
        {"type": "function", "strict": False, **FUNCTION},
        {"type": "function", "strict": True, **TIME},
    ],
    "tool_choice": {"type": "function", "name": "get_time"},
}
SCHEMA: Any = {
    "type": "object",
    "properties": {"colour": {"type": "string", "enum": ["red", "green"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
CHAT_LIMITS: dict[str, Any] = {"temperature": 0, "max_tokens": 60}
LIMITS: dict[str, Any] = {"temperature": 0, "max_output_tokens": 60}
Answer = Any  # what JSON can say, compared as it is


def calls_of(message: Any) -> list[Any]:
    return [[call.function.name, loaded(call.function.arguments)] for call in message.tool_calls or ()]


def loaded(arguments: str) -> Any:
    """Arguments by what they say, not by their blanks."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


# --- over chat completions ----------------------------------------------------------------------------------


def chat_plain(client: OpenAI, model: str) -> Answer:
    answer = client.chat.completions.create(model=model, messages=HI, **CHAT_LIMITS)
    choice = answer.choices[0]
    assert answer.usage
    return [choice.message.content, choice.finish_reason, answer.usage.completion_tokens]


def chat_streamed(client: OpenAI, model: str) -> Answer:
    text = ""
    reason = None
    n_tokens = None
    stream = client.chat.completions.create(
        model=model, messages=HI, stream=True, stream_options={"include_usage": True}, **CHAT_LIMITS
    )
    for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
        if chunk.usage:
            n_tokens = chunk.usage.completion_tokens
    return [text, reason, n_tokens]


def chat_call(client: OpenAI, model: str) -> Answer:
    answer = client.chat.completions.create(model=model, **CHAT_TOOL, **CHAT_LIMITS)
    return calls_of(answer.choices[0].message)


def chat_call_streamed(client: OpenAI, model: str) -> Answer:
    calls: dict[int, list[str]] = {}
    for chunk in client.chat.completions.create(model=model, stream=True, **CHAT_TOOL, **CHAT_LIMITS):
        for choice in chunk.choices:
            for delta in choice.delta.tool_calls or ():
                call = calls.setdefault(delta.index, ["", ""])
                assert delta.function
                call[0] += delta.function.name or ""
                call[1] += delta.function.arguments or ""
    return [[name, loaded(arguments)] for name, arguments in calls.values()]


def chat_named_call(client: OpenAI, model: str) -> Answer:
    """The name alone: over the Responses API an upstream is told of no other tool, so its prompt differs.

    llama.cpp takes the object for "auto": https://github.com/ggml-org/llama.cpp/issues/26535
    """
    answer = client.chat.completions.create(model=model, **CHAT_NAMED, **CHAT_LIMITS)
    return [name for name, _ in calls_of(answer.choices[0].message)]


def chat_two(client: OpenAI, model: str) -> Answer:
    answer = client.chat.completions.create(model=model, messages=HI, n=2, **CHAT_LIMITS)
    return sorted(str(choice.message.content) for choice in answer.choices)


def chat_logprobs(client: OpenAI, model: str, messages: Any = HI) -> Answer:
    answer = client.chat.completions.create(
        model=model, messages=messages, logprobs=True, top_logprobs=2, **CHAT_LIMITS
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs
    entries = [[entry.token, len(entry.top_logprobs)] for entry in logprobs.content or ()]
    text = answer.choices[0].message.content or ""
    while entries and not "".join(token for token, _ in entries).startswith(text):
        del entries[0]  # of the reasoning, of which a response has no logprobs
    return entries


def chat_schema(client: OpenAI, model: str) -> Answer:
    json_schema: Any = {"name": "colour", "schema": SCHEMA, "strict": True}
    answer = client.chat.completions.create(
        model=model,
        messages=HI,
        response_format={"type": "json_schema", "json_schema": json_schema},
        **CHAT_LIMITS,
    )
    return loaded(answer.choices[0].message.content or "")


# --- over the Responses API ---------------------------------------------------------------------------------


def calls_in(response: Any) -> list[Any]:
    calls = [item for item in response.output if item.type == "function_call"]
    return [[call.name, loaded(call.arguments)] for call in calls]


def ended(events: Iterable[Any]) -> Any:
    """The response of the terminal event; the SDK's own helper knows of completed ones only."""
    *_, last = events
    return last.response


REASONS = {"completed": "stop", "incomplete": "length"}  # status of a response -> finish_reason


def told(response: Any) -> Answer:
    """What a response says, as a chat completion's answer is compared."""
    assert response.usage
    return [response.output_text, REASONS[response.status], response.usage.output_tokens]


def plain(client: OpenAI, model: str) -> Answer:
    return told(client.responses.create(model=model, input=HI, **LIMITS))


def streamed(client: OpenAI, model: str) -> Answer:
    events = list(client.responses.create(model=model, input=HI, stream=True, **LIMITS))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    response = ended(events)
    assert "".join(deltas) == response.output_text
    return told(response)


def call(client: OpenAI, model: str) -> Answer:
    return calls_in(client.responses.create(model=model, **TOOL, **LIMITS))


def call_streamed(client: OpenAI, model: str) -> Answer:
    return calls_in(ended(client.responses.create(model=model, stream=True, **TOOL, **LIMITS)))


def named_call(client: OpenAI, model: str) -> Answer:
    return [name for name, _ in calls_in(client.responses.create(model=model, **NAMED, **LIMITS))]


def background(client: OpenAI, model: str) -> Answer:
    response = client.responses.create(model=model, input=HI, background=True, **LIMITS)
    while response.status in ("queued", "in_progress"):
        response = client.responses.retrieve(response.id)
    return told(response)


def logprobs(client: OpenAI, model: str, messages: Any = HI) -> Answer:
    response = client.responses.create(
        model=model, input=messages, include=["message.output_text.logprobs"], top_logprobs=2, **LIMITS
    )
    (part,) = response.output[-1].content
    return [[entry.token, len(entry.top_logprobs)] for entry in part.logprobs]


def schema(client: OpenAI, model: str) -> Answer:
    text_format: Any = {"type": "json_schema", "name": "colour", "schema": SCHEMA, "strict": True}
    return loaded(
        client.responses.create(model=model, input=HI, text={"format": text_format}, **LIMITS).output_text
    )


# --- the table ----------------------------------------------------------------------------------------------


class Case(NamedTuple):
    over_chat: Callable[[OpenAI, str], Answer]
    over_responses: Callable[[OpenAI, str], Answer] | None


CASES = {
    "plain": Case(chat_plain, plain),
    "streamed": Case(chat_streamed, streamed),
    "in the background": Case(chat_plain, background),
    "a required call": Case(chat_call, call),
    "a required call, streamed": Case(chat_call_streamed, call_streamed),
    "a named call": Case(chat_named_call, named_call),
    "n=2": Case(chat_two, None),
    "logprobs": Case(chat_logprobs, logprobs),
    "logprobs of emoji": Case(
        partial(chat_logprobs, messages=EMOJI),
        partial(logprobs, messages=EMOJI),
    ),
    "json_schema": Case(chat_schema, schema),
}


def answer(ask: Callable[[OpenAI, str], Answer], client: OpenAI, model: str) -> Answer:
    """What was answered, or how that failed."""
    try:
        return ask(client, model)
    except openai.APIStatusError as error:
        return f"{error.status_code} {error.message}"
    except (openai.OpenAIError, AssertionError, KeyError, AttributeError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"


def compared(direct: OpenAI, front: OpenAI, model: str) -> Iterator[tuple[str, str, list[Answer]]]:
    """(case, verdict, the answers: direct, over chat, over the Responses API)"""
    for name, case in CASES.items():
        expected = answer(case.over_chat, direct, model)
        again = answer(case.over_chat, direct, model)
        answers = [expected, answer(case.over_chat, front, model)]
        if case.over_responses:
            answers.append(answer(case.over_responses, front, model))
        verdict = "same"
        if any(each != expected for each in answers):
            verdict = "DIFFERS"
            if again != expected:
                verdict = "differs, as two direct answers do"
        yield name, verdict, answers


def shown(value: Answer) -> str:
    text = json.dumps(value, ensure_ascii=False).replace("|", "\\|")
    return text if len(text) <= 100 else f"{text[:70]} ... {text[-25:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("url", help="base URL of the server, with its /v1")
    parser.add_argument("--model", required=True, metavar="NAME")
    parser.add_argument("--api-key", default="none", metavar="KEY", help="of the server")
    options = parser.parse_args()
    direct = OpenAI(base_url=options.url, api_key=options.api_key, max_retries=0, timeout=120)
    upstream = ["--upstream", options.url, "--upstream-api-key", options.api_key]
    n_different = 0
    print("| case | | direct | chat, through ours | Responses, through ours |\n|---|---|---|---|---|")
    with serve(*upstream, model=None) as ours:
        front = OpenAI(base_url=f"{ours.url}/v1", api_key="none", max_retries=0, timeout=120)
        for name, verdict, answers in compared(direct, front, options.model):
            n_different += verdict == "DIFFERS"
            cells = [shown(answers[0])]
            cells += ["the same" if each == answers[0] else shown(each) for each in answers[1:]]
            print(f"| {name} | {verdict} | {' | '.join(cells)} |", flush=True)
    return int(bool(n_different))


if __name__ == "__main__":
    sys.exit(main())
