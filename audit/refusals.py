"""Rules on refusals: what must be refused, with which status, in which shape.

    rows of a rule --refusals()--> the replies to them, plain and with stream

Authority: https://platform.openai.com/docs/guides/error-codes, and what the SDKs make of a status.

Rules of this file:
1. A rule on what is refused gives its rows: a path, and a change to a good body. None leaves a member out,
   bytes are the body itself.

Not here: what is refused because it does not exist (stored.py).
"""

from collections.abc import Callable, Iterator
from contextlib import suppress

from audit.agents import ORPHAN, SEALED
from audit.http import NOT_THERE, Reply
from audit.peer import GOOD, TIME, Peer, request
from audit.rules import RULES, Check, NotApplicable, rules_of
from audit.schema import Json, missing

RESPONSES, CHAT = GOOD
Rows = list[tuple[str, Json | bytes]]


def refusals(peer: Peer, rows: Rows) -> Iterator[Reply]:
    """Yield the replies of the endpoints that the server has."""
    for path, change in rows:
        if peer.once(path, {"model": peer.model, "stream": True} | GOOD[path]).status in NOT_THERE:
            continue
        if isinstance(change, bytes):
            yield peer.once(path, change)
            continue
        for stream in (False, True):
            body: Json = {"stream": stream, "model": peer.model} | GOOD[path] | change
            if "stream_options" in change:
                body["stream"] = None
            with suppress(NotApplicable):  # a reply that breaks off refuses nothing, and accepts nothing
                yield peer.once(path, {name: value for name, value in body.items() if value is not None})


def each(path: str, **members: object) -> Rows:
    """Return a row for each member: a good body but for it."""
    return [(path, {name: value}) for name, value in members.items()]


def refused(rows: Callable[[], Rows]) -> Check:
    """Make the check that each row is refused."""

    def check(peer: Peer) -> None:
        is_about_models = rows in (bad_model, unknown_model)
        if is_about_models and all(reply.status == 200 for reply in refusals(peer, unknown_model())):
            raise NotApplicable("whatever name is asked for is served")
        for reply in refusals(peer, rows()):
            is_refused = reply.is_refusal or begins_with_error(reply)  # see the rule refused-by-status
            assert is_refused, "expected a refusal, with a status of 4xx"

    return check


def begins_with_error(reply: Reply) -> bool:
    """True for a stream whose first event is the error."""
    first = reply.events[0] if reply.is_stream and reply.events else {}
    return "error" in first or first.get("type") in ("error", "response.failed")


must, should, advice = rules_of("refusals", "chat responses", RULES, refused)


@must
def bad_json() -> Rows:
    """bad-json: a body that is not JSON is refused

    RFC 9110: what the client did wrong is a 4xx
    B14 https://platform.openai.com/docs/api-reference/responses/create
    """
    return [(path, b'{"model": ') for path in GOOD]


@advice
def bad_model() -> Rows:
    """bad-model: a model that is missing, or not a string, is refused

    openai/openai-openapi: a string; some servers have one model, and SDKs do not insist
    https://platform.openai.com/docs/api-reference/responses/create
    """
    return [*each(RESPONSES, model=None), *each(RESPONSES, model=42), *each(CHAT, model=42)]


@should
def unknown_model() -> Rows:
    """unknown-model: a model that is not there is refused

    an answer of another model than asked for is taken for the one asked for
    https://platform.openai.com/docs/api-reference/responses/create
    """
    return [*each(RESPONSES, model="no-such-model"), *each(CHAT, model="no-such-model")]


@must
def bad_input() -> Rows:
    """bad-input: input or messages of another shape are refused

    openai/openai-openapi: input and messages have this shape
    B14 https://platform.openai.com/docs/api-reference/responses/create
    """
    rows: Rows = []
    for value in (None, 42, [{"role": "none", "content": "hi"}]):
        rows += each(RESPONSES, input=value)
    for messages in (None, "hi", [{"content": "hi"}]):
        rows += each(CHAT, messages=messages)
    return rows


@should
def out_of_range() -> Rows:
    """out-of-range: a number out of its range is refused

    openai/openai-openapi has these bounds
    https://platform.openai.com/docs/api-reference/responses/create
    """
    rows = each(RESPONSES, temperature=99, top_p=-1) + each(CHAT, presence_penalty=99, temperature=99, n=0)
    return [*rows, (CHAT, {"top_logprobs": 99, "logprobs": True})]


@should
def wrong_type() -> Rows:
    """wrong-type: a parameter of another type is refused

    openai/openai-openapi has these types
    https://platform.openai.com/docs/api-reference/responses/create
    """
    responses = each(RESPONSES, stream="yes please", tools="none", temperature="hot")
    return responses + each(CHAT, stream="yes please", max_tokens="many")


@should(profiles="chat")
def stream_options_alone() -> Rows:
    """stream-options-alone: stream_options without stream are refused

    the API reference: only set this when you set stream
    B09 https://github.com/TelegramMessenger/cocoon/blob/b75d444766212b9b17ae2bfab1268a2e2e334b6f/runners/helpers/ValidateRequest.cpp
    """
    return each(CHAT, stream_options={"include_usage": True})


@should(profiles="responses agents")
def unknown_tool_choice() -> Rows:
    """unknown-tool-choice: tool_choice with the name of an unknown tool is refused

    OpenAI's own server; else a client waits for a call that cannot come
    https://platform.openai.com/docs/api-reference/responses/create
    """
    _, body = request("responses", tools=(TIME,))
    return [(RESPONSES, body | {"tool_choice": {"type": "function", "name": "no_such_tool"}})]


@should(profiles="responses agents")
def bad_schema() -> Rows:
    """bad-schema: a schema that is not valid is refused

    the guide on structured outputs: schemas that are not supported are an error
    https://platform.openai.com/docs/guides/structured-outputs
    """
    _, body = request("responses", schema={"type": "no such type"})
    return [(RESPONSES, body)]


@should(profiles="responses agents", after="results")
def orphan_result() -> Rows:
    """orphan-result: a result without its call is refused

    OpenAI's own server: No tool call found for function call output
    https://platform.openai.com/docs/guides/function-calling
    """
    return each(RESPONSES, input=[{"role": "user", "content": "hi"}, ORPHAN])


@should(profiles="responses agents", after="encrypted-reasoning")
def forged_encrypted() -> Rows:
    """forged-encrypted: encrypted_content that the server did not make is refused

    OpenAI's own server: The encrypted content could not be verified
    https://platform.openai.com/docs/guides/reasoning
    """
    forged = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "Zm9yZ2Vk"}
    return [(RESPONSES, SEALED | {"input": [forged, {"role": "user", "content": "hi"}]})]


@must(profiles="stateful")
def unknown_previous() -> Rows:
    """unknown-previous: an unknown previous_response_id is refused

    a chain that is not continued answers without its context, and no client sees it
    F14 https://github.com/EricLBuehler/mistral.rs/blob/9e922623f24b32d41f3892b74f0eed18707f4e6c/mistralrs-server-core/src/responses.rs
    """
    return each(RESPONSES, previous_response_id="resp_00000000000000000000000000000000")


@should(profiles="stateful", after="background")
def background_refuses() -> Rows:
    """background-refuses: a bad request is refused before it is accepted, in the background too

    Azure's contract of behaviour: what is wrong is refused before it is accepted
    F08 https://github.com/EricLBuehler/mistral.rs/blob/9e922623f24b32d41f3892b74f0eed18707f4e6c/mistralrs-server-core/src/background_tasks.rs
    """
    return [(RESPONSES, {"background": True} | bad) for bad in ({"temperature": 99}, {"input": 42})]


# --- how it is told -----------------------------------------------------------------------------------------

must, should, _ = rules_of("refusals", "chat responses")
BAD = (bad_json, bad_model, unknown_model, bad_input, out_of_range, wrong_type, stream_options_alone)


def told(peer: Peer) -> Iterator[Reply]:
    for rows in BAD:
        yield from (reply for reply in refusals(peer, rows()) if reply.is_refusal)


@must
def refused_by_status(peer: Peer) -> None:
    """refused-by-status: what is refused is refused by its status, with stream too

    SDKs raise by the status; retries and proxies look at nothing else
    B13 https://platform.openai.com/docs/guides/error-codes
    """
    # A refusal that comes as the first frame of a stream is a success for all of them.
    for reply in refusals(peer, out_of_range() + wrong_type() + bad_input()):
        assert not begins_with_error(reply), "expected a status of 4xx, got a stream that begins with it"


@should
def error_status(peer: Peer) -> None:
    """error-status: a refusal is a 400, or a 404 for what is not there

    SDKs map each status to an error class, and retry 408, 409, 429 and 5xx
    https://github.com/openai/openai-python/blob/main/src/openai/_base_client.py
    """
    for reply in told(peer):
        # Clients retry 409, and do not know 422.
        assert reply.status in (400, 404), "expected status 400, or 404 for what is not there"


@must
def error_shape(peer: Peer) -> None:
    """error-shape: an error has message, type, param and code

    openai/openai-openapi: an error has message, type, param and code; SDKs show them
    H07 https://platform.openai.com/docs/guides/error-codes
    """
    for reply in told(peer):
        error = reply.error
        faults = list(missing(error, "error"))
        assert not faults, f"expected all its members: {', '.join(faults)}"
        texts = [isinstance(error[name], str) for name in ("message", "type")]
        texts += [isinstance(error[name], str | None) for name in ("param", "code")]
        assert all(texts), "expected strings, or null for param and code"


@should
def error_param(peer: Peer) -> None:
    """error-param: an error names the parameter that was out of its range

    the guide on error codes: param names what was wrong
    https://github.com/openai/openai-openapi
    """
    for path, change in out_of_range():
        for reply in refusals(peer, [(path, change)]):
            param = reply.error.get("param")
            is_named = param in dict(change) or not reply.is_refusal
            assert is_named, f"expected param to name {' or '.join(dict(change))}, got {param}"
