"""What most tests of a whole server ask, of the tiny model."""

import json

import sse
from helpers.serving import TINY, Json, Reply, Server

RESPONSES, CHAT = "/v1/responses", "/v1/chat/completions"
HI: Json = {"model": "tiny", "input": "hi"}
MINE, YOURS = {"Authorization": "Bearer mine"}, {"Authorization": "Bearer yours"}
HELLO = "Hello! How can I help you today?"
EOS = json.loads((TINY / "generation_config.json").read_text(encoding="utf-8"))["eos_token_id"]
NO_END: Json = {"logit_bias": {str(token_id): -100 for token_id in EOS}}  # until 1,900 tokens


def path_of(id: str, *rest: str) -> str:
    return "/".join((RESPONSES, id, *rest))


def created(server: Server, body: Json) -> Json:
    """Return the response that the server makes of a body."""
    reply = server.post(RESPONSES, body)
    assert reply.status == 200, reply.body
    return dict(reply.json)


def error(reply: Reply, status: int) -> Json:
    """Return the error object of a refusal with this status: its body has nothing else."""
    assert reply.status == status, reply.body
    (found,) = reply.json.values()
    return dict(found)


def events_in(stream: bytes) -> list[Json]:
    """Return the events of a whole stream, or its chunks; its [DONE] came once, and last."""
    parser = sse.Parser()
    *found, done = [event.data for event in parser.feed(stream)]
    parser.close()
    assert done == "[DONE]"
    return [json.loads(data) for data in found]
