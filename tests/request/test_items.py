"""Items resolved: what is looked up, how often, and what each becomes."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from request.ids import item_ids, new_id, response_id_of
from request.items import PREFIXES, listed, resolve
from request.messages import ITEMS, MAX_ITEMS
from request.refusals import BadInput
from store import Row

KEPT = new_id("resp")
NEW_ITEM = item_ids(KEPT)
OUTPUT = [{"id": NEW_ITEM("rs"), "type": "reasoning"}, {"id": NEW_ITEM("msg"), "type": "message"}]
QUESTION = {"id": "msg_1", "type": "message", "role": "user", "content": "hi"}
RESPONSE = {"id": KEPT, "status": "completed", "output": OUTPUT}
ROW = Row(KEPT, 0, 1, True, False, False, "{}", json.dumps([QUESTION]), json.dumps(RESPONSE))


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


def test_every_item_has_a_prefix() -> None:
    assert PREFIXES.keys() == ITEMS.keys()


def test_a_response_is_looked_up_once() -> None:
    references = [{"type": "item_reference", "id": item["id"]} for item in OUTPUT]
    assert resolved(references) == ([], OUTPUT, [KEPT])
    assert resolved([OUTPUT[1]], KEPT) == ([QUESTION, *OUTPUT], [OUTPUT[1]], [KEPT])


def test_nothing_is_looked_up_unasked() -> None:
    too_many = [{"id": OUTPUT[0]["id"]}] * (MAX_ITEMS + 1)
    for came in (None, "hi", 7, [], [QUESTION, {}, "hi", None, 7], too_many):
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


def test_what_came_is_not_changed() -> None:
    came = {"type": "compaction", "encrypted_content": "blob"}
    resolved([came])
    assert came == {"type": "compaction", "encrypted_content": "blob"}


def test_items_of_one_conversation_differ_by_id() -> None:
    items = listed([QUESTION], [{"role": "user", "content": "hi"}, QUESTION, QUESTION | {"id": None}])
    assert items[0] is QUESTION
    assert len({item["id"] for item in items}) == 4
    assert [item["content"] for item in items[1:]] == [[{"type": "input_text", "text": "hi"}]] * 3
    assert listed([], "hi")[0]["content"] == items[1]["content"]
