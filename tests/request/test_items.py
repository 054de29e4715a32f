"""Items: what is looked up, how often, what each becomes; what a compaction makes of a summary."""

import json
from dataclasses import replace
from functools import partial
from typing import Any

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import ResponseItem

from audit import schema
from channels import Accepted, Call, Compaction, Delta, Finish, Output, Usage
from helpers.serving import Json, serve, without
from helpers.tables import table
from request import items, params
from request.ids import PREFIXES, item_ids, new_id, response_id_of
from request.items import OutputFilter, _opened, n_bytes, named, resolve, sealer, summary_request
from request.messages import MAX_ITEMS
from request.params import RESPONSES, from_responses, read
from request.query import page
from request.refusals import BadInput
from store import Row

KEPT = new_id("resp")
NEW_ITEM = item_ids(KEPT)
SAID: Json = {"id": NEW_ITEM("msg"), "type": "message", "role": "assistant", "status": "completed"}
THOUGHT = {"id": NEW_ITEM("rs"), "type": "reasoning", "status": "completed", "summary": [], "content": []}
OUTPUT = [THOUGHT, SAID]
HI = [{"type": "input_text", "text": "hi"}]
QUESTION = {"id": "msg_1", "type": "message", "role": "user", "status": "completed", "content": HI}
RESPONSE = {"id": KEPT, "status": "completed", "output": OUTPUT}
ITEMS, SHOWN = json.dumps([QUESTION]), json.dumps(RESPONSE)
ROW = Row(KEPT, "", 0, 1, True, False, False, "{}", ITEMS, "completed", SHOWN)


def resolved(input: Any, previous_response_id: str | None = None, row: Row = ROW) -> tuple[Any, Any, Any]:
    """What resolve() returns, and the ids that it has looked up."""
    values = {"input": input, "previous_response_id": previous_response_id}
    ids = named(values)
    found = {id_: row if id_ == KEPT else None for id_ in ids}
    return *resolve(values, found, partial(sealer, b"", "")), ids


@given(st.integers(0, 9), st.integers(1, 10), st.sampled_from(["asc", "desc"]))
def test_pages_add_up_to_the_list(n_items: int, limit: int, order: str) -> None:
    listed: list[Json] = [{"id": f"msg_{n}"} for n in range(n_items)]
    asked, seen = {"limit": str(limit), "order": order}, list[Json]()
    while (found := page(listed, asked))["data"]:
        assert len(found["data"]) <= limit
        seen += found["data"]
        assert found["has_more"] == (len(seen) < n_items)
        asked["after"] = seen[-1]["id"]
    assert seen == listed[:: 1 if order == "asc" else -1]
    with pytest.raises(BadInput, match="'before'"):
        page(listed, asked | {"before": "msg_1"})


@given(st.sampled_from(sorted(PREFIXES.values())))
def test_an_item_says_which_response_it_is_of(prefix: str) -> None:
    response_id = new_id("resp")
    assert len(response_id) == len("resp_") + 48  # 192 bits, which cannot be guessed
    assert len({new_id("resp") for _ in range(1000)}) == 1000
    draw = item_ids(response_id)
    drawn = [draw(prefix) for _ in range(3)]
    assert len({*drawn}) == 3
    assert {response_id_of(id_) for id_ in drawn} == {response_id}


@pytest.mark.bug("F14")
def test_a_response_is_looked_up_once_and_only_if_it_is_named() -> None:
    references = [{"type": "item_reference", "id": item["id"]} for item in OUTPUT]
    assert resolved(references) == ([], OUTPUT, {KEPT})
    assert resolved([QUESTION | {"id": "msg_2"}], KEPT)[0] == [QUESTION, *OUTPUT]


# --- the long form ------------------------------------------------------------------------------------------


def test_items_of_one_conversation_differ_by_id() -> None:
    chain, own, _ = resolved([{"role": "user", "content": "hi"}, QUESTION, QUESTION | {"id": None}], KEPT)
    assert len({item["id"] for item in chain + own}) == len(chain) + 3
    assert without(own, {"id"}) == [without(QUESTION, {"id"})] * 3


@pytest.mark.parametrize("item", [*map(json.loads, table("request")["short_forms"])])
def test_what_is_listed_is_an_item_of_the_sdk(item: Json) -> None:
    (long,) = resolved([item])[1]
    pydantic.TypeAdapter[Any](ResponseItem).validate_json(json.dumps(long), strict=True)
    assert '"hi"' in json.dumps(long)
    for part in long.get("content", ()):
        row = schema.ROWS["part"].get(part["type"], {})
        assert {name for name in row if "?" not in name} <= part.keys()


JUNK = [{"zz": "zz"}] * 1000
ODD: Json = {"model": "m", "input": "hi"} | {
    "logit_bias": {"5": 1},
    "tools": [{"type": "function", "name": "get_weather", "zz": JUNK}],
    "tool_choice": {"type": "function", "name": "get_weather"},
    "reasoning": {"effort": "none", "zz": JUNK},
    "text": {"format": {"type": "text", "zz": JUNK}},
    **dict.fromkeys(("user", "service_tier", "zz"), JUNK),
}


@pytest.mark.bug("I06")
@pytest.mark.parametrize("body", [ODD, ODD | {"input": [{"role": "user", "content": "hi"}, items.TRIGGER]}])
def test_what_is_kept_of_a_request_is_what_means_something(body: Json) -> None:
    """Its members that no table knows were held as long as it waited, and stored: 200 MB of 8 kB of gzip.

    What is left asks for the same after a restart, also for a compaction.
    """
    values = read(RESPONSES, body, {})
    asked = params.responses_request(values, [], values["input"])
    kept = items.new_row(asked, values, values["input"])
    assert "zz" not in kept.request_json
    again = from_responses(items.body_of(kept), {})
    assert (again.not_run, asked.not_run) == ((), ("zz",))  # the client has been told
    assert again == replace(asked, not_run=())


# --- how long a conversation may be -------------------------------------------------------------------------


def too_long(*asked: Any) -> str:
    with pytest.raises(BadInput) as refusal:
        resolved(*asked)
    assert (refusal.value.param, refusal.value.code) == ("input", "context_length_exceeded")
    assert "Compact it" in refusal.value.message
    return refusal.value.message


def test_a_chain_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it: its items, and what they hold, with the input."""
    chain = [*ROW.items, *ROW.response["output"]]
    n_left = MAX_ITEMS - len(chain)
    assert len(resolved([QUESTION] * n_left, KEPT)[1]) == n_left
    assert f"{MAX_ITEMS} items" in too_long([QUESTION] * (n_left + 1), KEPT)
    n_bytes_of_chain = sum(map(n_bytes, chain))
    asked = QUESTION | {"id": "msg_2"}
    monkeypatch.setattr(items, "MAX_CONVERSATION_BYTES", n_bytes_of_chain + n_bytes(asked))
    assert resolved([asked], KEPT)[1] == [asked]
    assert str(items.MAX_CONVERSATION_BYTES) in too_long([asked | {"phase": "commentary"}], KEPT)
    monkeypatch.setattr(items, "MAX_CONVERSATION_BYTES", n_bytes_of_chain - 1)
    too_long([], KEPT)
    assert resolved([items.TRIGGER], KEPT)[0] == chain  # it can still be compacted


def test_a_chain_that_is_too_long_can_be_compacted() -> None:
    """Bug: the refusal of 4,097 items advises to compact them, and so did the refusal of the compaction."""
    said = [QUESTION | {"id": f"msg_{n}"} for n in range(MAX_ITEMS + 1)]
    ended = json.dumps(RESPONSE | {"output": []})
    row = ROW._replace(items_json=json.dumps(said), response_json=ended)
    assert "items" in too_long([QUESTION], KEPT, row)
    chain, own, _ = resolved([items.TRIGGER], KEPT, row)
    request = params.responses_request(read(RESPONSES, {"model": "m", "background": True}, {}), chain, own)
    summary = summary_request(replace(request, not_run=("x",)), [*chain, *own], {})
    assert len(summary.messages) > MAX_ITEMS
    assert (summary.background, summary.not_run, summary.compacts) == (True, ("x",), True)


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
    assert f"{items.MAX_REFERENCED} responses" in too_long(references)


# --- compactions --------------------------------------------------------------------------------------------


def test_a_trigger_is_the_last_item() -> None:
    """As OpenAI has it: https://github.com/james-6-23/codex2api/pull/546"""
    trigger = {"type": "compaction_trigger"}
    assert items.is_trigger(resolved([QUESTION, trigger])[1][-1])
    with pytest.raises(BadInput, match="must be the final input item") as refusal:
        resolved([trigger, QUESTION])
    assert refusal.value.param == "input[0]"


HM, THEY, MET = Delta("analysis", "hm"), Delta("final", "They "), Delta("final", "met.")
NOTHING = Delta("final", "")  # as a relay says logprobs that have no text
MADE, FAILED = Compaction("They met."), Finish("failed", None, "The engine has stopped.")
STOP, CUT = Finish("stop", Usage(7, 3)), Finish("length", Usage(7, 3))
NO_SUMMARY = Finish("failed", Usage(7, 3), "The model wrote no summary.")
SUMMARIES: list[tuple[list[Output | Finish], list[Compaction | Finish]]] = [
    # what the model says              what is made of it
    ([HM, THEY, Call("f"), MET, STOP], [MADE, STOP]),
    ([THEY, MET, CUT],                 [MADE, STOP]),
    ([HM, NOTHING, STOP],              [NO_SUMMARY]),
    ([THEY, FAILED],                   [FAILED]),
]  # fmt: skip


@pytest.mark.parametrize(("said", "expected"), SUMMARIES)
def test_a_summary_is_one_item_whatever_else_is_said(said: list[Any], expected: list[Any]) -> None:
    request = summary_request(from_responses({"model": "m", "input": "hi"}, {}), [QUESTION], {})
    shown = OutputFilter(request)
    made = [each for output in [Accepted(), *said] for each in shown.feed(output)]
    assert made == [Accepted(), *expected]


def test_a_summary_is_not_a_call_of_a_tool_that_the_conversation_brings() -> None:
    """The model called it, and so wrote no summary; the tools stay in the prompt, for the prefix cache."""
    brought = {"type": "additional_tools", "role": "developer", "tools": [{"type": "function", "name": "f"}]}
    conversation: list[Any] = [{"type": "message", "role": "user", "content": "hi"}, brought]
    summary = summary_request(from_responses({"model": "m", "input": conversation}, {}), conversation, {})
    assert [tool["function"]["name"] for tool in summary.tools] == ["f"]
    assert summary.called == {}


@pytest.mark.parametrize("kind", [False, 0, [], {}])
def test_a_type_that_is_no_text_is_refused(kind: object) -> None:
    """Bug: one that is false was stored without an id, and the next response of its chain was a 500."""
    values = read(RESPONSES, {"model": "m", "input": [{"type": kind, "role": "user"}]}, {})
    with pytest.raises(BadInput, match=r"Invalid type for 'input\[0\].type'"):
        resolve(values, {}, str)  # type: ignore[arg-type]


# --- what a client keeps for us comes back unchanged, or not at all -----------------------------------------

KEY = b"k" * 32
OURS = sealer(KEY, "o", "p")
THINK: dict[str, Any] = {
    "model": "tiny",
    "input": "What is 2+2? Answer with just the number.",
    "include": ["reasoning.encrypted_content"],
}


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_a_sealed_text_comes_back(text: str) -> None:
    assert OURS.loads(OURS.dumps(text)) == text


def test_a_blob_that_was_changed_or_is_of_another_key_is_refused() -> None:
    blob = str(OURS.dumps("four"))
    odd = ["", "x", "AAAA", "=", "é", "\ud800"]
    odd += [blob[:i] + ("A" if blob[i] != "A" else "B") + blob[i + 1 :] for i in range(len(blob))]
    others = [(b"q" * 32, "o", "p"), (KEY, "o", "another purpose"), (KEY, "another owner", "p")]
    of_others = [sealer(*key).dumps("four") for key in others]
    for each in odd + of_others:
        item = {"type": "compaction", "encrypted_content": each}
        with pytest.raises(BadInput, match="Expected a blob of compaction") as refusal:
            _opened(item, "input[0]", lambda purpose: OURS)
        assert refusal.value.code == "invalid_encrypted_content"


@pytest.mark.bug("P19")
def test_reasoning_comes_back_without_its_text() -> None:
    """The model reads the same prompt, be the reasoning given back as text or as the blob alone.

    Without `include` there is no blob, not even null: the schema of Open Responses knows none there. A blob
    of another server is left out, and named: refused, it would come again for ever.
    """
    with serve("--secret", "kept over restarts") as server:
        plain, _ = server.post("/v1/responses", THINK | {"include": []}).json["output"]
        assert "encrypted_content" not in plain
        thought, said = server.post("/v1/responses", THINK).json["output"]
        blob = thought["encrypted_content"]
        bare = {"id": "rs_1", "type": "reasoning", "summary": [], "encrypted_content": blob}
        question, more = ({"role": "user", "content": text} for text in (THINK["input"], "And 3+3?"))
        counts: list[Any] = []
        for thinking in (thought, bare):
            body = {"model": "tiny", "input": [question, thinking, said, more]}
            counts.append(server.post("/v1/responses/input_tokens", body).json)
        assert counts[0] == counts[1]
    with serve() as stranger:
        reply = stranger.post("/v1/responses", body)
        assert reply.status == 200
        bare["summary"] = [{"type": "summary_text", "text": "Two and two."}]
        reply = stranger.post("/v1/responses", body)
        assert "reasoning.encrypted_content" in reply.headers["warning"]
