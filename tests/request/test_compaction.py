"""What is made of a model's summary, and of what is none. The endpoint is in tests/test_lifecycle.py."""

from typing import Any

import pytest

import api
from channels import Accepted, Call, Compaction, Delta, Finish, Output, Usage
from request.items import compacted, summary_request
from request.params import from_responses
from responses import Builder

USAGE = Usage(7, 3)
CONVERSATION = [
    {"type": "message", "role": "user", "content": "hi"},
    {"type": "message", "role": "assistant", "content": "Hello."},
]


def made_of(*outputs: Accepted | Output | Finish) -> list[Any]:
    made: list[Any] = []
    take = compacted(made.append, seal=lambda text: f"sealed {text}")
    for output in outputs:
        take(output)
    return made


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_summary_is_one_item_whatever_else_is_said(reason: Any) -> None:
    accepted = Accepted()
    said: list[Output] = [Delta("analysis", "hm"), Delta("final", "They "), Call("f"), Delta("final", "met.")]
    made = made_of(accepted, *said, Finish(reason, USAGE))
    assert made == [accepted, Compaction("sealed They met."), Finish("stop", USAGE)]


def test_without_a_summary_it_has_failed() -> None:
    nothing = Delta("final", "")  # as a relay says logprobs that have no text
    _, finish = made_of(Accepted(), Delta("analysis", "hm"), nothing, Finish("stop", USAGE))
    assert finish == Finish("failed", USAGE, "The model wrote no summary.")


def test_a_summary_is_no_call_of_a_tool_that_the_conversation_brings() -> None:
    """The model called it, and so wrote no summary; the tools stay in the prompt, for the prefix cache."""
    brought = {"type": "additional_tools", "role": "developer", "tools": [{"type": "function", "name": "f"}]}
    conversation: list[Any] = [{"type": "message", "role": "user", "content": "hi"}, brought]
    asked = from_responses({"model": "m", "input": conversation}, {})
    summary = summary_request(asked, conversation, {})
    assert [tool["function"]["name"] for tool in summary.tools] == ["f"]
    assert summary.called == {}


def test_a_failure_stays_one() -> None:
    failed = Finish("failed", None, "The engine has stopped.")
    assert made_of(Accepted(), Delta("final", "They"), failed)[-1] == failed


@pytest.mark.parametrize("usage", [USAGE, None])
def test_the_object_of_its_endpoint(usage: Usage | None) -> None:
    """The user's messages, then the compaction; a failure is an error object, which gets a status."""
    builder = Builder({"id": "resp_1", "created_at": 1}, lambda prefix: f"{prefix}_1")
    events = [*builder.start(), *builder.feed(Compaction("blob")), *builder.finish(Finish("stop", usage), 2)]
    made = api.compaction_object(CONVERSATION, events)
    item = {"id": "cmp_1", "type": "compaction", "encrypted_content": "blob"}
    assert made["output"] == [CONVERSATION[0], item]
    assert (made["id"], made["object"], made["created_at"]) == ("resp_1", "response.compaction", 1)
    assert made["usage"]["total_tokens"] == (10 if usage else 0)

    builder = Builder({"id": "resp_1", "created_at": 1}, lambda prefix: f"{prefix}_1")
    failed = [*builder.start(), *builder.finish(Finish("failed", usage, "no summary"), 2)]
    error = api.compaction_object(CONVERSATION, failed)["error"]
    assert (error["message"], error["code"]) == ("no summary", "server_error")
