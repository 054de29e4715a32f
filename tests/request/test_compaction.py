"""What is made of a model's summary, and of what is none. The endpoint is in tests/test_lifecycle.py."""

from typing import Any

import pytest

from channels import Accepted, Call, Compaction, Delta, Finish, Output, Usage
from request.items import compacted, summary_request
from request.params import from_responses

USAGE = Usage(7, 3)


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
