"""Compares the answers of a server, asked directly and through ours, with the official SDKs.

    python tests/fronting.py http://host:port/v1 --model NAME        [--api-key KEY] [--messages]

It starts `server.py --upstream URL` and prints a line for each case of tables/fronting.toml: the answer of
the server over chat completions, and ours over chat completions and Responses; with --messages its answer and
ours over /v1/messages. All is asked at temperature 0; if two direct answers differ, the server is not
deterministic. Exit status 1 if an answer of ours differs.
"""

import argparse
import json
import sys
from contextlib import suppress
from functools import partial
from typing import Any

import anthropic
import openai
from anthropic import Anthropic
from openai import OpenAI
from openai.lib.streaming.chat import ChatCompletionStreamState

from helpers.serving import serve
from helpers.tables import table

Answer = Any  # what JSON can say, compared as it is
Case = dict[str, str]
SDK_ERRORS = (openai.OpenAIError, anthropic.AnthropicError)
BLOCK = ("type", "text", "thinking", "name", "input")  # what is compared of a content block


def loaded(text: str) -> Any:
    """Return the value of a JSON text, and any other text as it is."""
    with suppress(ValueError):
        return json.loads(text)
    return text


def compared(case: Case, text: str, end: list[Any], calls: list[Any], logprobs: list[Any]) -> Answer:
    """Return the part of an answer that is compared. `logprobs` are [token, number of alternatives]."""
    while logprobs and not "".join(token for token, _ in logprobs).startswith(text):
        del logprobs[0]  # of the reasoning: a response has no logprobs for it
    parts = {"calls": calls, "names": [name for name, _ in calls], "logprobs": logprobs, "JSON": loaded(text)}
    return parts.get(case.get("shows", "text"), [text, *end])


def over_chat(client: OpenAI, model: str, case: Case) -> Answer:
    body = json.loads(case["chat"]) | {"model": model, "temperature": 0, "max_tokens": 60}
    if body.get("stream"):
        state: ChatCompletionStreamState[None] = ChatCompletionStreamState()
        chunks: Any = client.chat.completions.create(**body, stream_options={"include_usage": True})
        for chunk in chunks:
            state.handle_chunk(chunk)
        answer: Any = state.current_completion_snapshot
    else:
        answer = client.chat.completions.create(**body)
    message = answer.choices[0].message
    calls = [[call.function.name, loaded(call.function.arguments)] for call in message.tool_calls or ()]
    entries = answer.choices[0].logprobs.content or () if answer.choices[0].logprobs else ()
    end = [sorted(choice.finish_reason for choice in answer.choices), answer.usage.completion_tokens]
    logprobs = [[entry.token, len(entry.top_logprobs)] for entry in entries]
    text = "\n".join(sorted(choice.message.content or "" for choice in answer.choices))
    return compared(case, text, end, calls, logprobs)


def over_responses(client: OpenAI, model: str, case: Case) -> Answer:
    body = json.loads(case["responses"]) | {"model": model, "temperature": 0, "max_output_tokens": 60}
    response: Any = client.responses.create(**body)
    if body.get("stream"):  # the SDK's own helper knows of completed ones only
        events = list(response)
        response = events[-1].response
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(deltas) == response.output_text
    while response.status in ("queued", "in_progress"):
        response = client.responses.retrieve(response.id)
    calls = [[item.name, loaded(item.arguments)] for item in response.output if item.type == "function_call"]
    parts = [part for item in response.output if item.type == "message" for part in item.content]
    logprobs = [[entry.token, len(entry.top_logprobs)] for part in parts for entry in part.logprobs or ()]
    end = [["length" if response.status == "incomplete" else "stop"], response.usage.output_tokens]
    return compared(case, response.output_text, end, calls, logprobs)


def over_messages(client: Anthropic, model: str, case: Case) -> Answer:
    body = {"max_tokens": 60} | json.loads(case["messages"])
    body |= {"model": model, "extra_body": {"temperature": 0}}
    if body.pop("stream", False):
        with client.messages.stream(**body) as stream:
            message = stream.get_final_message()
    else:
        message = client.messages.create(**body)
    blocks = [[getattr(block, name) for name in BLOCK if hasattr(block, name)] for block in message.content]
    n_in = message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
    return [*blocks, message.stop_reason, message.stop_sequence, n_in, message.usage.output_tokens]


def answer(ask: Any, client: OpenAI | Anthropic, model: str, case: Case) -> Answer:
    """Return what was answered, or how that failed."""
    try:
        return ask(client, model, case)
    except openai.APIStatusError as error:
        return f"{error.status_code} {error.message}"
    except anthropic.APIStatusError as error:  # some messages have the request's id
        return f"{error.status_code} {error.type}"
    except (*SDK_ERRORS, AssertionError, KeyError, AttributeError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"


def shown(value: Answer) -> str:
    text = json.dumps(value, ensure_ascii=False).replace("|", "\\|")
    return text if len(text) <= 100 else f"{text[:70]} ... {text[-25:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("url", help="base URL of the server, with its /v1")
    parser.add_argument("--model", required=True, metavar="NAME")
    parser.add_argument("--api-key", default="none", metavar="KEY", help="of the server")
    parser.add_argument("--messages", action="store_true", help="ask over /v1/messages")
    options = parser.parse_args()
    chat: Any = ("chat", "/v1", OpenAI, {"chat": over_chat, "responses": over_responses})
    messages: Any = ("messages", "", Anthropic, {"messages": over_messages})
    first, path, sdk, apis = messages if options.messages else chat
    client = partial(sdk, max_retries=0, timeout=120)
    direct = client(base_url=options.url.removesuffix("/v1") + path, api_key=options.api_key)
    n_different = 0
    print(f"| case | | direct | {', ours | '.join(apis)}, ours |\n{'|---' * (3 + len(apis))}|")
    with serve("--upstream", options.url, "--upstream-api-key", options.api_key, model=None) as ours:
        front = client(base_url=ours.url + path, api_key="none")
        for name, case in table("fronting")[first].items():
            expected, again = (answer(apis[first], direct, options.model, case) for _ in range(2))
            found = [answer(ask, front, options.model, case) for api, ask in apis.items() if api in case]
            differs = "DIFFERS" if again == expected else "differs, as two direct answers do"
            verdict = "same" if all(each == expected for each in found) else differs
            n_different += verdict == "DIFFERS"
            cells = ["the same" if each == expected else shown(each) for each in found]
            print(f"| {name} | {verdict} | {shown(expected)} | {' | '.join(cells)} |", flush=True)
    return int(bool(n_different))


if __name__ == "__main__":
    sys.exit(main())
