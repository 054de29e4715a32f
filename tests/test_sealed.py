"""What a client keeps for us comes back unchanged, or not at all."""

import gzip
import json
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.serving import Server, serve
from request.items import _opened, sealer
from request.refusals import BadInput
from request.room import MAX_BODY_BYTES

KEY = b"k" * 32


def seal(text: str) -> str:
    blob = sealer(KEY, "o", "p").dumps(text)
    assert isinstance(blob, str)
    return blob


THINK: dict[str, Any] = {
    "model": "tiny",
    "input": "What is 2+2? Answer with just the number.",
    "include": ["reasoning.encrypted_content"],
}


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_round_trip(text: str) -> None:
    assert sealer(KEY, "o", "p").loads(seal(text)) == text


OF_OTHERS = [(b"q" * 32, "o", "p"), (KEY, "o", "another purpose"), (KEY, "another owner", "p")]


def test_changed_or_of_another_key() -> None:
    blob = seal("four")
    odd = ["", "x", "AAAA", "=", "é", "\ud800"]
    odd += [blob[:i] + ("A" if blob[i] != "A" else "B") + blob[i + 1 :] for i in range(len(blob))]
    of_others = [sealer(*key).dumps("four") for key in OF_OTHERS]
    for each in odd + of_others:
        item = {"type": "compaction", "encrypted_content": each}
        with pytest.raises(BadInput, match="Expected a blob of compaction") as refusal:
            _opened(item, "input[0]", lambda purpose: sealer(KEY, "o", "p"))
        assert refusal.value.code == "invalid_encrypted_content"


# --- through the server -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve("--secret", "kept over restarts") as running:
        yield running


def test_reasoning_comes_back_without_its_text(server: Server) -> None:
    """The model reads the same prompt, be the reasoning given back as text or as the blob alone."""
    thought, said = server.post("/v1/responses", THINK).json["output"]
    streamed = server.post("/v1/responses", THINK | {"stream": True}).body
    assert thought["encrypted_content"].encode() in streamed
    bare = {
        "id": "rs_1",
        "type": "reasoning",
        "summary": [],
        "encrypted_content": thought["encrypted_content"],
    }
    question = {"role": "user", "content": THINK["input"]}
    more = {"role": "user", "content": "And 3+3?"}
    counts = {
        name: server.post("/v1/responses/input_tokens", {"input": [question, *items, said, more]}).json
        for name, items in {"text": [thought], "blob": [bare], "nothing": []}.items()
    }
    assert counts["text"] == counts["blob"]
    with serve("--secret", "kept over restarts") as again:
        body = {"model": "tiny", "input": [question, bare, said, more]}
        assert again.post("/v1/responses", body).status == 200
    with serve() as stranger:
        reply = stranger.post("/v1/responses", body)
        assert (reply.status, reply.json["error"]["param"]) == (400, "input[1].encrypted_content")


def test_no_blob_unasked(server: Server) -> None:
    """Absent, not null: the schema of Open Responses knows no null there."""
    thought, _ = server.post("/v1/responses", THINK | {"include": []}).json["output"]
    assert "encrypted_content" not in thought


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_compressed_bodies(server: Server, encoding: str, pack: Any) -> None:
    body = pack(json.dumps({"model": "tiny", "input": "hi"}).encode())
    assert server.post("/v1/responses", body, Content_Encoding=encoding).status == 200
    assert server.post("/v1/responses", body, Content_Encoding=encoding.upper()).status == 200
    for broken in (body[:-4], body + body):
        assert server.post("/v1/responses", broken, Content_Encoding=encoding).status == 400
    bomb = pack(b" " * (MAX_BODY_BYTES + 1))
    assert len(bomb) < 20_000
    reply = server.post("/v1/responses", bomb, Content_Encoding=encoding)
    assert (reply.status, reply.json["error"]["code"]) == (413, "body_too_large")
    reply = server.post("/v1/responses", body[:10] + b"x" * 20, Content_Encoding=encoding)
    assert (reply.status, reply.json["error"]["code"]) == (400, "invalid_json")
