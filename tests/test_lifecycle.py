"""Responses that outlive their request: by the official client, and when the process is killed.

What happens in which order is tried by simulate.py in one process; here are a real client and a real kill.
"""

import itertools
import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import openai
import pytest

import sse
from background import MAX_RUNNING
from helpers import laws
from helpers.asked import HELLO, HI, NO_END, RESPONSES, created, path_of
from helpers.serving import Json, Server, http_bytes, http_frames, serve, until
from store import TERMINAL

LONG: Json = HI | NO_END | {"max_output_tokens": 1900}  # seconds
BACKGROUND: Json = {"background": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve() as started:
        yield started
        assert "Task exception was never retrieved" not in started.log()


@pytest.fixture(scope="module")
def sdk(server: Server) -> Iterator[openai.OpenAI]:
    with server.sdk() as client:
        yield client


def ended(server: Server, id: str) -> Json:
    """A response when it is terminal."""
    until(lambda: server.get(path_of(id)).json["status"] in TERMINAL, f"{id} is terminal")
    return dict(server.get(path_of(id)).json)


def frames_of(body: bytes) -> list[bytes]:
    """A stream's frames, without its [DONE]."""
    *frames, last = [frame + b"\n\n" for frame in body.split(b"\n\n")[:-1]]
    assert last == sse.DONE
    return frames


def parsed(frame: bytes) -> Json:
    return dict(json.loads(sse.data(frame)))


# --- the official client ------------------------------------------------------------------------------------


def test_sdk_background(sdk: openai.OpenAI) -> None:
    """It resumes by a plain stream; by a helper that asks for all, and shows a part: openai-node#1984."""
    with sdk.responses.create(model="tiny", input="hi", background=True, stream=True) as stream:
        seen = list(stream)
    assert seen[0].type == "response.created"
    id_ = seen[0].response.id
    for after in (0, 17, len(seen) - 2, len(seen) - 1):
        with sdk.responses.retrieve(id_, stream=True, starting_after=after) as rest:
            assert list(rest) == seen[after + 1 :]
        with sdk.responses.stream(response_id=id_, starting_after=after) as helper:
            assert [e.sequence_number for e in helper] == [e.sequence_number for e in seen[after + 1 :]]
            assert helper.get_final_response().output_text == HELLO
    found = sdk.responses.retrieve(id_)
    assert (found.status, found.output_text, found.background) == ("completed", HELLO, True)
    with pytest.raises(openai.BadRequestError, match=r"Cannot cancel a completed response\."):
        sdk.responses.cancel(id_)
    sdk.responses.delete(id_)
    with pytest.raises(openai.NotFoundError):
        sdk.responses.retrieve(id_)


def test_sdk_pages_through_the_input_of_a_chain(sdk: openai.OpenAI) -> None:
    last: Any = openai.omit
    for i in range(4):
        said: Any = [{"role": "user", "content": f"hi {i}"}, {"role": "user", "content": "hello"}]
        made = sdk.responses.create(model="tiny", input=said, previous_response_id=last, max_output_tokens=3)
        last = made.id
    forward = sdk.responses.input_items.list(last, order="asc", limit=100).data
    assert len({item.id for item in forward}) == len(forward) == 11
    for limit in (1, 11, 12):
        assert list(sdk.responses.input_items.list(last, order="asc", limit=limit)) == forward
        assert list(sdk.responses.input_items.list(last, limit=limit)) == forward[::-1]
    after = str(forward[4].id)
    assert list(sdk.responses.input_items.list(last, order="asc", after=after)) == forward[5:]


def test_sdk_counts_as_create_does(sdk: openai.OpenAI) -> None:
    first = sdk.responses.create(model="tiny", input="hi", instructions="Be brief.")
    second = sdk.responses.create(model="tiny", input="hello", previous_response_id=first.id)
    counted = sdk.responses.input_tokens.count(input="hello", previous_response_id=first.id)
    assert second.usage
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", second.usage.input_tokens)
    alone = sdk.responses.input_tokens.count(previous_response_id=first.id)
    said: Any = [{"role": "user", "content": "hi"}, *(item.model_dump() for item in first.output)]
    assert alone == sdk.responses.input_tokens.count(input=said)


def test_sdk_compacts(sdk: openai.OpenAI) -> None:
    """User messages stay, the rest is one item, which later requests, chains and compactions take."""
    first = sdk.responses.create(model="tiny", input="hi")
    compacted = sdk.responses.compact(model="tiny", previous_response_id=first.id)
    assert compacted.object == "response.compaction"
    assert [item.type for item in compacted.output] == ["message", "compaction"]
    assert compacted.usage.output_tokens > 0
    items: list[Any] = [item.model_dump(exclude_none=True, warnings=False) for item in compacted.output]
    hello: Any = {"role": "user", "content": "hello"}
    second = sdk.responses.create(model="tiny", input=[*items, hello])
    listed = sdk.responses.input_items.list(second.id, order="asc").data
    assert [item.type for item in listed] == ["message", "compaction", "message"]
    third = sdk.responses.create(model="tiny", input="hi", previous_response_id=second.id)
    assert third.status == "completed"
    again = sdk.responses.compact(model="tiny", input="hello", previous_response_id=third.id)
    assert [item.type for item in again.output] == ["message"] * 4 + ["compaction"]


# --- the end of a process -----------------------------------------------------------------------------------


def test_kill_loses_nothing_that_was_accepted(tmp_path: Path) -> None:
    """kill -9 amid the work: what got a 200 ends, what was seen stays seen, and the file is whole."""
    file = tmp_path / "store.db"
    with serve("--store", str(file)) as server:
        running = [created(server, LONG | BACKGROUND)["id"] for _ in range(MAX_RUNNING - 1)]
        with server.connect(http_bytes(RESPONSES, LONG | BACKGROUND | {"stream": True})) as connection:
            frames = [*itertools.islice(http_frames(connection), 20)]
            queued = [created(server, HI | BACKGROUND)["id"] for _ in range(2)]
            server.process.kill()
    id_ = parsed(frames[0])["response"]["id"]
    with serve("--store", str(file)) as server:
        last = {id_: ended(server, id_) for id_ in (*running, id_, *queued)}
        replayed = server.get(path_of(id_) + "?stream=true").body
    assert [last[one]["status"] for one in queued] == ["completed"] * 2
    for one in (*running, id_):
        assert last[one]["error"] == {"code": "server_error", "message": "interrupted by a restart"}
    assert replayed.startswith(b"".join(frames))
    laws.check_response([parsed(frame) for frame in frames_of(replayed)])
    with closing(sqlite3.connect(file)) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
