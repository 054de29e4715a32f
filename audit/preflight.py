"""Before any rule: is anybody there, is it HTTP, is a key missing, which model and which API does it have.

    Peer --look()--> Server, or NoServer with one line that says what to do

Authority: https://platform.openai.com/docs/api-reference

Rules of this file:
1. What is wrong here is told in one line, and is no failure of a rule.
2. What is found out is told too: the rules are about this model, with this way to make it write much.

Not here: the rules (checks.py), HTTP (peer.py).
"""

from typing import NamedTuple

from audit.peer import NOT_THERE, Failed, Json, NoReply, Peer, Reply
from audit.probes import CHAT_STORY, CUT, HI, STORY

ASKED: dict[str, Json] = {
    "/responses": HI | {"max_output_tokens": CUT},
    "/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": CUT},
}
ANY_MODEL = "default"  # asked for where none is listed: some servers have one model, and take any name
ENOUGH = 200  # tokens: long enough to be cancelled, left and resumed
# Members of a body that keep a model from ending early: none, vLLM's and SGLang's, and llama.cpp's.
LONG: list[Json] = [{}, {"ignore_eos": True}, {"ignore_eos": True, "min_tokens": ENOUGH}]


class NoServer(Exception):
    """There is nothing that could be audited; one line says why, and what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class Server(NamedTuple):
    """What is known of a server before the first rule."""

    apis: list[str]  # paths of ASKED that it answers
    long: Json  # members of a body that make an answer long


def look(peer: Peer, long: Json | None = None) -> Server:
    """Find out what can be audited; a peer without a model gets the first that the server lists."""
    models = asked(peer, "GET", "/models")
    if models.status in (401, 403):
        raise NoServer(f"a key is missing or wrong: give --api-key KEY. {models}")
    if not peer.model:
        peer.model = first_model(models) or ANY_MODEL
    replies = {path: asked(peer, "POST", path, {"model": peer.model} | body) for path, body in ASKED.items()}
    apis = [path for path, reply in replies.items() if reply.status == 200 and reply.json]
    if not apis:
        raise NoServer(nothing_served(peer, replies))
    if long is None:
        long = what_makes_it_long(peer, apis)
    return Server(apis, long)


def asked(peer: Peer, method: str, path: str, body: Json | None = None) -> Reply:
    try:
        peer.start()
        return peer.ask(method, path, body)
    except (NoReply, Failed) as error:
        raise NoServer(f"no server answers at {peer.url.geturl()}: {error}") from error


def first_model(models: Reply) -> str:
    """The first that is listed; "" for none."""
    listed = models.json.get("data") or models.json.get("models")
    if isinstance(listed, list) and listed and isinstance(listed[0], dict):
        return str(listed[0].get("id") or "")
    return ""


def nothing_served(peer: Peer, replies: dict[str, Reply]) -> str:
    """Why neither API answers, in a line."""
    statuses = {reply.status for reply in replies.values()}
    if statuses <= NOT_THERE:
        message = "no LLM server of these APIs"
        if not peer.url.path.rstrip("/").endswith("/v1"):
            message += f" (try {peer.url.geturl().rstrip('/')}/v1)"
    elif statuses & {401, 403}:
        message = "a key is missing or wrong: give --api-key KEY"
    elif peer.model == ANY_MODEL:
        message = "which model? Give --model NAME: the server lists none"
    else:
        message = f"neither API answers for the model {peer.model!r}"
    shown = "; ".join(str(reply) for reply in replies.values())
    return f"{message}. {shown}"


def what_makes_it_long(peer: Peer, apis: list[str]) -> Json:
    """The first of LONG with which the model writes enough; {} where none does."""
    for members in LONG:
        body = STORY | {"max_output_tokens": ENOUGH} | members
        path = "/responses"
        if path not in apis:
            path = "/chat/completions"
            body = CHAT_STORY | {"max_tokens": ENOUGH} | members
        reply = asked(peer, "POST", path, {"model": peer.model} | body)
        usage = reply.json.get("usage") or {}
        n_tokens = usage.get("output_tokens") or usage.get("completion_tokens") or 0
        if isinstance(n_tokens, int) and n_tokens >= ENOUGH:
            return members
    return {}
