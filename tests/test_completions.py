"""Laws of completions.py over any outputs and any end. The documented bugs are in
tests/replays/completions-*.toml."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sse
from channels import Accepted, Call, Delta, Finish, Output, Usage
from completions import Chunk, Chunks, fold
from helpers import laws
from helpers.laws import outputs, usages
from helpers.scripted import counted_ids

HEAD = {"id": "chatcmpl-1", "created": 1, "model": "m", "system_fingerprint": "fp_1"}
Choice = list[Output | Finish]

ended = st.builds(Finish, st.sampled_from(["stop", "length"]), usages)
some_choices = st.lists(
    st.builds(lambda outputs, finish: [*outputs, finish], outputs, ended), min_size=1, max_size=3
)


def chunks_of(choices: list[Choice], include_usage: bool = True) -> list[Chunk]:
    """The choices take turns, as they do in a batch; the chunks are as the client reads them."""
    chunks = Chunks(HEAD, counted_ids(), len(choices), include_usage)
    made = [chunk for index in range(len(choices)) for chunk in chunks.feed(index, Accepted())]
    for turn in itertools.zip_longest(*choices):
        for index, output in enumerate(turn):
            if output is not None:
                made += chunks.feed(index, output)
    return [json.loads(sse.dumps(chunk)) for chunk in made]


@given(some_choices, st.booleans())
def test_shape(choices: list[Choice], include_usage: bool) -> None:
    """Every chunk and the whole by the SDK's own models; one role, one end and one head of each call.

    Usage is last, alone and only there when asked for.
    """
    chunks = chunks_of(choices, include_usage)
    laws.check_chunks(chunks)
    for chunk in chunks:
        assert {k: chunk[k] for k in HEAD} == HEAD
        assert ("usage" in chunk) == include_usage
        assert all(choice["delta"] or choice["finish_reason"] for choice in chunk["choices"])
    laws.check_completion(fold(chunks))
    without_choices = [chunk for chunk in chunks if not chunk["choices"]]
    assert without_choices == (chunks[-1:] if include_usage else [])
    assert [chunk for chunk in chunks if chunk.get("usage")] == without_choices


@pytest.mark.bug("G02")
@given(some_choices)
def test_the_whole_is_what_was_said(choices: list[Choice]) -> None:
    """By kind: a completion does not keep the order of text and calls. A call ends it, but for a length."""
    body = fold(chunks_of(choices))
    said = [finish.usage or Usage(0, 0) for *_, finish in choices if isinstance(finish, Finish)]
    usage = body["usage"]  # one prompt is counted once
    assert usage["prompt_tokens"] == max(each.input_tokens for each in said)
    assert usage["prompt_tokens_details"]["cached_tokens"] == min(each.cached_tokens for each in said)
    assert usage["completion_tokens"] == sum(each.output_tokens for each in said)
    details = usage["completion_tokens_details"]
    assert details["reasoning_tokens"] == sum(each.reasoning_tokens for each in said)
    for found, choice in zip(body["choices"], choices, strict=True):
        outputs = [output for output in choice if not isinstance(output, Finish)]
        message = found["message"]
        finish = choice[-1]
        assert isinstance(finish, Finish)
        called = any(isinstance(output, Call) for output in outputs) and finish.reason == "stop"
        assert found["finish_reason"] == ("tool_calls" if called else finish.reason)
        calls = [item for item in laws.items(outputs) if item[0] in ("call", "custom")]
        deltas = [output for output in outputs if isinstance(output, Delta)]
        visible = [delta for delta in deltas if delta.channel in ("commentary", "final")]
        refusal = "".join(delta.text for delta in deltas if delta.channel == "refusal")
        assert (message["content"] or "") == "".join(delta.text for delta in visible)
        assert (message["content"] is None) == (not visible and bool(calls or refusal))
        assert (message["refusal"] or "") == refusal
        thought = "".join(delta.text for delta in deltas if delta.channel == "analysis")
        assert message.get("reasoning", "") == message.get("reasoning_content", "") == thought
        assert [members_of(call) for call in message.get("tool_calls", [])] == calls
        logprobs = (found["logprobs"] or {"content": []})["content"]
        assert [p["logprob"] for p in logprobs] == [p.logprob for delta in visible for p in delta.logprobs]


def members_of(call: dict[str, Any]) -> list[str]:
    """As laws.items() has it."""
    if call["type"] == "custom":
        return ["custom", call["custom"]["name"], call["custom"]["input"]]
    return ["call", call["function"]["name"], call["function"]["arguments"]]


@given(some_choices, some_choices, st.text())
def test_nothing_follows_an_error(before: list[Choice], after: list[Choice], message: str) -> None:
    """One choice fails and the others go on: the error is the last chunk, and the answer."""
    chunks = chunks_of([*before, [Finish("failed", None, message)], *after])
    error = {"message": message, "type": "server_error", "param": None, "code": "server_error"}
    assert [chunk for chunk in chunks if "error" in chunk] == [chunks[-1]]
    assert fold(chunks) == chunks[-1] == {"error": error}
