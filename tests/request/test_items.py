"""Items resolved: what is looked up, how often, and what each becomes."""

import asyncio
import json
import re
from typing import Any

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import ResponseItem

from audit import schema
from request import items
from request.ids import PREFIXES, item_ids, new_id, response_id_of
from request.items import listed, n_bytes, resolve
from request.messages import MAX_ITEMS
from request.refusals import BadInput
from store import Row

KEPT = new_id("resp")
NEW_ITEM = item_ids(KEPT)
OUTPUT = [{"id": NEW_ITEM("rs"), "type": "reasoning"}, {"id": NEW_ITEM("msg"), "type": "message"}]
QUESTION = {"id": "msg_1", "type": "message", "role": "user", "content": "hi"}
RESPONSE = {"id": KEPT, "status": "completed", "output": OUTPUT}
ROW = Row(
    id=KEPT,
    owner="",
    born_at=0,
    ended_at=1,
    kept=True,
    background=False,
    streamed=False,
    request_json="{}",
    items_json=json.dumps([QUESTION]),
    status="completed",
    response_json=json.dumps(RESPONSE),
)


def resolved(input: Any, previous_response_id: str | None = None) -> tuple[list[Any], Any, list[str]]:
    """What resolve() returns, and the ids that it has looked up."""
    looked_up = []

    async def find(response_id: str) -> Row | None:
        looked_up.append(response_id)
        return {KEPT: ROW}.get(response_id)

    def unseal(purpose: str, blob: str) -> str:
        if blob != "blob":
            raise ValueError("expected a blob that this server has made")
        return f"the {purpose}"

    chain, own = asyncio.run(resolve(input, previous_response_id, find, unseal))
    return chain, own, looked_up


@given(st.sampled_from(sorted(PREFIXES.values())))
def test_an_item_says_which_response_it_is_of(prefix: str) -> None:
    response_id = new_id("resp")
    draw = item_ids(response_id)
    drawn = [draw(prefix) for _ in range(3)]
    assert len({*drawn}) == 3
    assert {response_id_of(id_) for id_ in drawn} == {response_id}


def test_a_response_is_looked_up_once() -> None:
    references = [{"type": "item_reference", "id": item["id"]} for item in OUTPUT]
    assert resolved(references) == ([], OUTPUT, [KEPT])
    assert resolved([OUTPUT[1]], KEPT) == ([QUESTION, *OUTPUT], [OUTPUT[1]], [KEPT])


def test_nothing_is_looked_up_unasked() -> None:
    for came in (None, [], [QUESTION, {}, {"type": ["message"]}]):
        assert resolved(came) == ([], came, [])


def test_blobs_become_their_text() -> None:
    thought = {"type": "reasoning", "encrypted_content": "blob"}
    as_text = {"content": [{"type": "reasoning_text", "text": "the reasoning"}]}
    compaction = {"type": "compaction", "encrypted_content": "blob"}
    _, own, _ = resolved([thought, thought | as_text, compaction])
    assert own == [thought | as_text, thought | as_text, compaction | {"summary": "the compaction"}]
    with pytest.raises(BadInput) as refusal:
        resolved([QUESTION, compaction | {"encrypted_content": None}])
    assert refusal.value.param == "input[1].encrypted_content"
    assert refusal.value.code == "invalid_encrypted_content"


def test_what_came_is_not_changed() -> None:
    came = {"type": "compaction", "encrypted_content": "blob"}
    resolved([came])
    assert came == {"type": "compaction", "encrypted_content": "blob"}


def test_items_of_one_conversation_differ_by_id() -> None:
    found = listed([QUESTION], [{"role": "user", "content": "hi"}, QUESTION, QUESTION | {"id": None}])
    assert found[0] is QUESTION
    assert len({item["id"] for item in found}) == 4
    assert [item["content"] for item in found[1:]] == [[{"type": "input_text", "text": "hi"}]] * 3


def texts_of(role: str, *types: str) -> dict[str, Any]:
    return {"role": role, "content": [{"type": type_, "text": "hi"} for type_ in types]}


REFUSAL = {"type": "refusal", "refusal": "no"}
CALLED = {"type": "function_call_output", "call_id": "c"}
SHORT_FORMS: list[dict[str, Any]] = [
    {"role": "assistant", "content": "hi"},
    texts_of("assistant", "output_text"),  # as Codex writes it
    texts_of("assistant", "input_text", "text"),
    texts_of("user", "text", "output_text"),
    texts_of("developer", "input_text"),
    {"role": "assistant", "content": [REFUSAL]},
    {"role": "user", "content": "hi", "status": "done"},
    {"role": "user", "content": "hi", "status": 5},
    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
    {"type": "reasoning", "content": "hm", "summary": None},
    {"type": "reasoning", "content": [{"type": "text", "text": "hm"}], "status": "done"},
    CALLED | {"output": "hi"},
    CALLED | {"output": [{"type": "text", "text": "hi"}], "status": "success"},
    CALLED | {"type": "custom_tool_call_output", "output": [{"type": "output_text", "text": "hi"}]},
]


@pytest.mark.parametrize("item", SHORT_FORMS)
def test_what_is_listed_is_an_item_of_the_sdk(item: dict[str, Any]) -> None:
    """Some lacked annotations or a summary, or had parts or a status that no type of the SDK has."""
    (long,) = listed([], resolved([item])[1])
    pydantic.TypeAdapter[Any](ResponseItem).validate_json(json.dumps(long), strict=True)
    assert {"hi", "hm", "no"} & {*re.findall("[a-z]+", json.dumps(long))}
    for part in long.get("content", ()):
        assert {*schema.required(schema.PARTS.get(part["type"], {}))} <= part.keys()


# --- what is kept -------------------------------------------------------------------------------------------

JUNK: list[dict[str, Any]] = [{}] * 1000
HOLDERS = (
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi", "zz": JUNK}]},
    {"role": "assistant", "content": [{"type": "output_text", "text": "hi", "annotations": JUNK}]},
    {"role": "assistant", "content": [{"type": "output_text", "text": "hi", "logprobs": JUNK}]},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s", "zz": JUNK}]},
    {"type": "custom_tool_call_output", "call_id": "c", "output": [{"type": "input_text", "zz": JUNK}]},
)


@pytest.mark.bug("I06")
@pytest.mark.parametrize("item", HOLDERS, ids=lambda item: str(item.get("type")))
def test_of_a_part_only_its_text_is_kept(item: dict[str, Any]) -> None:
    """Logprobs that come back may be a hundred times the text, and a chain stores them with each turn."""
    (kept,) = listed([], resolved([item])[1])
    assert n_bytes(kept) < 2000 < n_bytes(item)
    assert "zz" not in json.dumps(kept)


def test_what_an_item_says_is_kept() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "namespace": "n", "arguments": "{}"}
    said = {
        "type": "message",
        "role": "assistant",
        "content": "hi",
        "phase": "commentary",
        "status": "incomplete",
    }
    for item in (call, said, {"type": "tool_search_call", "execution": "client", "arguments": {"a": [1]}}):
        (kept,) = resolved([item])[1]
        assert kept == item


# --- how long a conversation may be -------------------------------------------------------------------------


def too_long(input: Any, previous_response_id: str | None = None) -> str:
    with pytest.raises(BadInput) as refusal:
        resolved(input, previous_response_id)
    assert (refusal.value.param, refusal.value.code) == ("input", "context_length_exceeded")
    assert "Compact it" in refusal.value.message
    return refusal.value.message


def test_a_chain_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it: its items, and what they hold, with the input."""
    n_left = MAX_ITEMS - len([*ROW.items, *ROW.response["output"]])
    assert len(resolved([QUESTION] * n_left, KEPT)[1]) == n_left
    assert f"{MAX_ITEMS} items" in too_long([QUESTION] * (n_left + 1), KEPT)
    context = sum(map(n_bytes, [*ROW.items, *ROW.response["output"]]))
    monkeypatch.setattr(items, "MAX_CONVERSATION_BYTES", context + n_bytes(QUESTION))
    assert resolved([QUESTION], KEPT)[1] == [QUESTION]
    assert str(items.MAX_CONVERSATION_BYTES) in too_long([QUESTION | {"content": "hi!!"}], KEPT)
    too_long([QUESTION | {"content": "x" * items.MAX_CONVERSATION_BYTES}], KEPT)
    monkeypatch.setattr(items, "MAX_CONVERSATION_BYTES", context - 1)
    assert resolved(None, KEPT)[0] == [*ROW.items, *ROW.response["output"]]  # it can still be compacted


@pytest.mark.bug("I06")
def test_references_count_as_what_they_stand_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """400 kB of them to one long item had no answer in 120 s: the look ends where the limit is reached."""
    sizes: list[int] = []

    def measure(value: Any) -> int:
        sizes.append(n_bytes(value))
        return sizes[-1]

    monkeypatch.setattr(items, "n_bytes", measure)
    monkeypatch.setattr(items, "MAX_CONVERSATION_BYTES", 2000)
    too_long([{"type": "item_reference", "id": OUTPUT[1]["id"]}] * MAX_ITEMS)
    assert sum(sizes) < 3000


def test_references_name_so_many_responses() -> None:
    references = [{"id": item_ids(f"resp_{i}")("msg")} for i in range(items.MAX_REFERENCED + 1)]
    known = {response_id_of(reference["id"]) for reference in references}
    looked_up: set[str] = set()

    async def find(response_id: str) -> Row | None:
        looked_up.add(response_id)
        said = [reference for reference in references if response_id_of(reference["id"]) == response_id]
        return ROW._replace(response_json=json.dumps(RESPONSE | {"output": said}))

    with pytest.raises(BadInput, match="too long"):
        asyncio.run(resolve(references, None, find, lambda _, blob: blob))
    assert len(looked_up) == items.MAX_REFERENCED < len(known)


# --- compactions --------------------------------------------------------------------------------------------


def test_a_trigger_is_the_last_item() -> None:
    """As OpenAI has it: https://github.com/james-6-23/codex2api/pull/546"""
    trigger = {"type": "compaction_trigger"}
    assert resolved([QUESTION, trigger])[1] == [QUESTION, trigger]
    with pytest.raises(BadInput, match="must be the final input item") as refusal:
        resolved([trigger, QUESTION])
    assert refusal.value.param == "input[0]"


def test_a_chain_behind_a_compaction_has_nothing_of_what_it_stands_for() -> None:
    said = {"id": "msg_2", "type": "message", "role": "assistant", "content": "Hello"}
    compaction = {"id": NEW_ITEM("cmp"), "type": "compaction", "encrypted_content": "blob"}
    trigger = {"id": "cmpt_1", "type": "compaction_trigger"}
    response_json = json.dumps(RESPONSE | {"output": [compaction]})
    row = ROW._replace(items_json=json.dumps([QUESTION, said, trigger]), response_json=response_json)

    async def find(_: str) -> Row:
        return row

    chain, _ = asyncio.run(resolve([], KEPT, find, lambda _, blob: f"all of {blob}"))
    assert chain == [QUESTION, compaction | {"summary": "all of blob"}]
