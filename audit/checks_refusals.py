"""Rules on refusals: what must be refused, with which status, in which shape.

    Peer --check--> nothing, or Failed, or NotApplicable

Authority: https://platform.openai.com/docs/guides/error-codes, and what the SDKs make of a status.

Not here: what is refused because it does not exist (checks_stored.py).
"""

from collections.abc import Iterator
from functools import partial

from audit import members
from audit.peer import NOT_THERE, Failed, Json, NotApplicable, Peer, Reply, expect
from audit.probes import COCOON, GITHUB, GOOD, OPENAI, Check, with_stream

# --- refusals -----------------------------------------------------------------------------------------------

# fmt: off
#  rule                     path                 change to a good body (None: without it)
BAD: dict[str, list[tuple[str, Json]]] = {
    "bad-json":             [],  # bytes, see refuses()
    "bad-model":            [("/responses",        {"model": None}),
                             ("/responses",        {"model": 42}),
                             ("/chat/completions", {"model": 42})],
    "unknown-model":        [("/responses",        {"model": "no-such-model"}),
                             ("/chat/completions", {"model": "no-such-model"})],
    "bad-input":            [("/responses",        {"input": None}),
                             ("/responses",        {"input": 42}),
                             ("/responses",        {"input": [{"role": "nobody", "content": "hi"}]}),
                             ("/chat/completions", {"messages": None}),
                             ("/chat/completions", {"messages": "hi"}),
                             ("/chat/completions", {"messages": [{"content": "hi"}]})],
    "out-of-range":         [("/responses",        {"temperature": 99}),
                             ("/responses",        {"top_p": -1}),
                             ("/chat/completions", {"presence_penalty": 99}),
                             ("/chat/completions", {"temperature": 99}),
                             ("/chat/completions", {"n": 0}),
                             ("/chat/completions", {"top_logprobs": 99, "logprobs": True})],
    "wrong-type":           [("/responses",        {"stream": "yes please"}),
                             ("/responses",        {"tools": "none"}),
                             ("/responses",        {"temperature": "hot"}),
                             ("/chat/completions", {"stream": "yes please"}),
                             ("/chat/completions", {"max_tokens": "many"})],
    "stream-options-alone": [("/chat/completions", {"stream_options": {"include_usage": True}})],
}
# fmt: on


def refusals(peer: Peer, rule: str) -> Iterator[Reply]:
    """The replies to what a rule says is bad, from the endpoints that the server has."""
    there = [
        path
        for path, body in GOOD.items()
        if peer.once(path, with_stream(peer, body)).status not in NOT_THERE
    ]
    if rule == "bad-json":
        yield from (peer.once(path, b'{"model": ') for path in there)
    for path, change in BAD[rule]:
        body = {"model": peer.model} | GOOD[path] | change
        for stream in (False, True) if not {"stream", "stream_options"} & change.keys() else (None,):
            if path in there:
                asked = {"stream": stream} | body
                yield peer.once(path, {k: v for k, v in asked.items() if v is not None})


def refuses(rule: str, peer: Peer) -> None:
    for reply in refusals(peer, rule):
        is_refused = 400 <= reply.status < 500 or begins_with_error(reply)  # see the rule refused-by-status
        expect(is_refused, "expected a refusal, with a status of 4xx", reply)


def refuses_or_serves_any_model(rule: str, peer: Peer) -> None:
    if all(reply.status == 200 for reply in refusals(peer, "unknown-model")):
        raise NotApplicable("whatever name is asked for is served")
    refuses(rule, peer)


def bad_requests(peer: Peer) -> Iterator[Reply]:
    for rule in BAD:
        yield from (reply for reply in refusals(peer, rule) if 400 <= reply.status < 500)


def error_status(peer: Peer) -> None:
    for reply in bad_requests(peer):
        known = reply.status in (400, 404)
        expect(
            known,
            "expected status 400, or 404 for what is not there: clients retry 409 and know no 422",
            reply,
        )


def error_shape(peer: Peer) -> None:
    for reply in bad_requests(peer):
        error = reply.json.get("error")
        if not isinstance(error, dict):
            raise Failed("expected an object error", reply)
        missing = [name for name in members.ERROR if name not in error]
        expect(not missing, f"expected the error to have {missing}", reply)
        texts = isinstance(error["message"], str) and isinstance(error["type"], str)
        texts = texts and all(isinstance(error[name], str | None) for name in ("param", "code"))
        expect(texts, "expected strings, or null for param and code", reply)


def error_param(peer: Peer) -> None:
    for path, change in BAD["out-of-range"]:
        reply = peer.post(path, GOOD[path] | change)
        if 400 <= reply.status < 500 and reply.status not in NOT_THERE:
            error = reply.json.get("error")
            param = error.get("param") if isinstance(error, dict) else None
            expect(param in change, f"expected param to name {' or '.join(change)}, got {param}", reply)


def status_before_stream(peer: Peer) -> None:
    """A refusal that comes as the first frame of a stream is a success for SDKs, proxies and retries."""
    for rule in ("out-of-range", "wrong-type", "bad-input"):
        for reply in refusals(peer, rule):
            message = "expected a status of 4xx, got a stream that begins with the error"
            expect(not begins_with_error(reply), message, reply)


def begins_with_error(reply: Reply) -> bool:
    """Whether it is a stream whose first event is the error."""
    if not reply.is_stream or not reply.events:
        return False
    first = reply.events[0]
    return "error" in first or first.get("type") in ("error", "response.failed")


# --- the table ----------------------------------------------------------------------------------------------

# fmt: off
CHECKS = {
    #  rule    what checks it, its profiles, its strength, bugs of tests/BUGS.md
    #      title
    #      source
    #      link
    "bad-json": Check(partial(refuses, "bad-json"), "chat responses", "must", "B14",
        "a body that is no JSON is refused",
        "RFC 9110: what the client did wrong is a 4xx",
        OPENAI + "responses/create"),
    "bad-model": Check(partial(refuses_or_serves_any_model, "bad-model"), "chat responses", "advice", "",
        "a model that is no string is refused, and one that is missing",
        "openai/openai-openapi: a string; some servers have one model, and SDKs do not insist",
        OPENAI + "responses/create"),
    "unknown-model": Check(
        partial(refuses_or_serves_any_model, "unknown-model"), "chat responses", "should", "",
        "a model that is not there is refused",
        "an answer of another model than asked for is taken for the one asked for",
        OPENAI + "responses/create"),
    "bad-input": Check(partial(refuses, "bad-input"), "chat responses", "must", "B14",
        "input or messages of another shape are refused",
        "openai/openai-openapi: input and messages have this shape",
        OPENAI + "responses/create"),
    "out-of-range": Check(partial(refuses, "out-of-range"), "chat responses", "should", "",
        "a number out of its range is refused",
        "openai/openai-openapi has these bounds",
        OPENAI + "responses/create"),
    "wrong-type": Check(partial(refuses, "wrong-type"), "chat responses", "should", "",
        "a parameter of another type is refused",
        "openai/openai-openapi has these types",
        OPENAI + "responses/create"),
    "stream-options-alone": Check(partial(refuses, "stream-options-alone"), "chat", "should", "B09",
        "stream_options without stream are refused",
        "the API reference: only set this when you set stream",
        COCOON + "ValidateRequest.cpp"),
    "refused-by-status": Check(status_before_stream, "chat responses", "must", "B13",
        "what is refused is refused by its status, with stream too",
        "SDKs raise by the status; retries and proxies look at nothing else",
        "https://platform.openai.com/docs/guides/error-codes"),
    "error-status": Check(error_status, "chat responses", "should", "",
        "a refusal is a 400, or a 404 for what is not there",
        "SDKs map each status to an error class, and retry 408, 409, 429 and 5xx",
        GITHUB + "openai/openai-python/blob/main/src/openai/_base_client.py"),
    "error-shape": Check(error_shape, "chat responses", "must", "H07",
        "an error has message, type, param and code",
        "openai/openai-openapi: an error has message, type, param and code; SDKs show them",
        "https://platform.openai.com/docs/guides/error-codes"),
    "error-param": Check(error_param, "chat responses", "should", "",
        "an error names the parameter that was out of its range",
        "the guide on error codes: param names what was wrong",
        GITHUB + "openai/openai-openapi"),
}
# fmt: on
