"""The rules of tests/wire, as a table: those of audit/rules.py over a few recorded streams, and those that
take more than one request to be seen.

A check gets the server, returns where all is well, and raises Failed or NotApplicable. What a server need not
have (background, storage, tools, several choices) it may refuse with a 4xx or 501: then no rule is about it.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from audit import members, recordings, rules
from wire.peer import Failed, Json, NotApplicable, Peer, Reply, expect

NOT_THERE = {404, 405, 501}
REFUSED = {400, 403, 404, 405, 415, 422, 501}
TERMINAL = {"completed", "incomplete", "failed", "cancelled"}
UNKNOWN = "resp_00000000000000000000000000000000"
CUT = 16  # tokens: the fewest that Open Responses allows
LIMITED: Json = {"max_output_tokens": 64, "temperature": 0}
HI: Json = LIMITED | {"input": "hi"}
STORY: Json = LIMITED | {"input": "Tell me a very long story about a fox.", "max_output_tokens": 400}
CHAT: Json = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 64, "temperature": 0}
CHAT_STORY: Json = CHAT | {"messages": [{"role": "user", "content": STORY["input"]}]}

PARAMETERS: Json = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Json = {"name": "get_weather", "description": "Get the weather of a city", "parameters": PARAMETERS}
TOOL: Json = {"tools": [{"type": "function", **WEATHER}], "tool_choice": "required"}
TOKYO = "What is the weather in Tokyo?"
CHAT_TOOL: Json = {
    "tools": [{"type": "function", "function": WEATHER}],
    "tool_choice": "required",
    "messages": [{"role": "user", "content": TOKYO}],
}

# fmt: off
#  stream           path                 asked
STREAMS: dict[str, tuple[str, Json]] = {
    "text":         ("/responses",        HI),
    "echo":         ("/responses",        HI | {"instructions": "Be brief.\u2028\u0085\u2029"}),
    "cut":          ("/responses",        STORY | {"max_output_tokens": CUT}),
    "call":         ("/responses",        LIMITED | {"input": TOKYO} | TOOL),
    "background":   ("/responses",        HI | {"background": True}),
    "chat":         ("/chat/completions", CHAT),
    "chat-usage":   ("/chat/completions", CHAT | {"stream_options": {"include_usage": True}}),
    "chat-cut":     ("/chat/completions", CHAT_STORY | {"max_tokens": CUT}),
    "chat-two":     ("/chat/completions", CHAT | {"n": 2, "temperature": 1, "seed": 1}),
    "chat-call":    ("/chat/completions", CHAT | CHAT_TOOL),
    "chat-logprobs": ("/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2}),
}
PATHS = {"responses": "/responses", "chat": "/chat/completions"}
# fmt: on


def with_stream(peer: Peer, body: Json) -> Json:
    return {"model": peer.model, "stream": True} | body


def recorded(peer: Peer, name: str) -> Reply:
    """A stream of STREAMS; what may be refused and is, is not applicable."""
    path, body = asked(peer, name)
    reply = peer.once(path, with_stream(peer, body))
    if not reply.is_stream:
        optional = name not in ("text", "chat") or reply.status in NOT_THERE
        if optional and reply.status in REFUSED:
            raise NotApplicable(f"refused: {reply}")
        raise Failed("expected a stream", reply)
    return reply


def asked(peer: Peer, name: str) -> tuple[str, Json]:
    path, body = STREAMS[name]
    return path, body | (peer.long if name.endswith("cut") else {})


def whole(peer: Peer, path: str, body: Json) -> Json:
    """The answer to a request without stream, that may be refused."""
    reply = peer.post(path, body)
    if reply.status in REFUSED:
        raise NotApplicable(f"refused: {reply}")
    expect(reply.status == 200 and reply.json, "expected status 200 and a JSON object", reply)
    return reply.json


# --- the rules of one stream --------------------------------------------------------------------------------


def judged(rule: str, peer: Peer) -> None:
    """The rule over every stream of its kind that the server makes."""
    kind = rules.RULES[rule].kind
    paths = [PATHS[kind]] if kind else list(PATHS.values())
    names = [name for name, (path, _) in STREAMS.items() if path in paths]
    refusals = []
    for name in names:
        try:
            reply = recorded(peer, name)
        except NotApplicable as error:
            refusals.append(str(error))
        else:
            check_stream(name, reply, rule)
    if len(refusals) == len(names):
        raise NotApplicable(refusals[0])


def check_stream(name: str, reply: Reply, *names: str) -> None:
    try:
        capture = recordings.read(reply.body)
    except ValueError as error:
        raise Failed(str(error), reply) from error
    if violations := rules.violations(capture, names or rules.RULES):
        first = violations[0]
        frames = {f.number: f.raw.decode("utf-8", "backslashreplace").strip() for f in capture.frames}
        excerpt = frames.get(first.event, "(the end of the stream)")
        more = f", and {len(violations) - 1} more" if len(violations) > 1 else ""
        message = f"{name}: event {first.event}: {first.message}{more}"
        raise Failed(message, members.shortened(excerpt, 300))


# --- bytes and headers --------------------------------------------------------------------------------------


def some_stream(peer: Peer) -> Reply:
    """Of whichever API the server has."""
    try:
        return recorded(peer, "text")
    except NotApplicable:
        return recorded(peer, "chat")


def stream_headers(peer: Peer) -> None:
    headers = some_stream(peer).headers
    kind = headers["content-type"].replace(" ", "").lower()
    expect(
        kind in ("text/event-stream", "text/event-stream;charset=utf-8"), "expected no other charset", headers
    )
    expect("no-cache" in headers.get("cache-control", ""), "expected Cache-Control: no-cache", headers)
    expect("content-encoding" not in headers, "expected no encoding that nobody asked for", headers)
    both = {"content-length", "transfer-encoding"} <= headers.keys()
    expect(not both, "expected one of Content-Length and Transfer-Encoding", headers)


def whole_frames_a_write(peer: Peer) -> None:
    reply = some_stream(peer)
    if not reply.chunks:
        raise NotApplicable("the stream is not sent in chunks")
    for n, chunk in enumerate(reply.chunks):
        expect(
            chunk.endswith((b"\n\n", b"\r\n\r\n")),
            f"expected whole frames a write, got chunk {n}:",
            chunk[-200:],
        )
    expect(
        len(reply.chunks) > 2,
        "expected events as they are made, got all at once",
        f"{len(reply.chunks)} writes",
    )


def request_id(peer: Peer) -> None:
    replies = [some_stream(peer), peer.ask("GET", "/models"), peer.ask("POST", "/responses", b"{")]
    for reply in replies:
        expect(
            "x-request-id" in reply.headers,
            "expected an x-request-id in every reply",
            f"{reply.asked} -> {reply.headers}",
        )


def lists_models(peer: Peer) -> None:
    reply = peer.ask("GET", "/models")
    models = reply.json.get("data", [])
    expect(reply.status == 200 and reply.json.get("object") == "list", "expected a list", reply)
    named = all(isinstance(m.get("id"), str) and m.get("object") == "model" for m in models)
    expect(models and named, "expected objects of type model with ids", reply)


# --- one answer, however it is asked for --------------------------------------------------------------------


def outline(response: Json) -> Json:
    """What a Responses answer says, without ids and times."""
    items = []
    for item in response.get("output", ()):
        texts = [part.get("text") for part in item.get("content") or ()]
        items.append([item.get("type"), item.get("status"), item.get("name"), item.get("arguments"), *texts])
    end = {name: response.get(name) for name in ("status", "incomplete_details", "error")}
    counts = {name: n for name, n in (response.get("usage") or {}).items() if isinstance(n, int)}
    return end | {"items": items} | counts


def same_answer(plain: object, other: object, again: Callable[[], object], excerpt: object) -> None:
    """The other answer is the plain one; no rule is about a server whose plain answers differ `again`."""
    if plain != other:
        if again() != plain:
            raise NotApplicable("the server says something else each time, at temperature 0")
        raise Failed("expected the same answer as without stream", excerpt)


def stream_is_the_answer(peer: Peer) -> None:
    streamed = outline(recorded(peer, "text").events[-1].get("response") or {})
    answer = partial(whole, peer, "/responses", HI)
    response = answer()
    missing = [name for name in members.required(members.RESPONSE) if name not in response]
    expect(not missing, f"expected the answer to have {missing}", response)
    plain = outline(response)
    same_answer(plain, streamed, lambda: outline(answer()), f"plain: {plain}\nstreamed: {streamed}")


def plain_by_default(peer: Peer) -> None:
    for path, body in GOOD.items():
        reply = peer.once(path, {"model": peer.model} | body)
        if reply.status not in NOT_THERE:
            expect(reply.json, "expected a JSON object, for no stream was asked for", reply)


def chat_outline(chunks: list[Json]) -> dict[int, Json]:
    """What chunks, or the choices of a completion, say: by choice, its content and finish_reason."""
    by_choice: dict[int, Json] = {}
    for chunk in chunks:
        for choice in chunk.get("choices", ()):
            so_far = by_choice.setdefault(choice.get("index", -1), {"content": "", "finish_reason": None})
            message = choice.get("delta") or choice.get("message") or {}
            so_far["content"] += message.get("content") or ""
            so_far["finish_reason"] = choice.get("finish_reason") or so_far["finish_reason"]
    return by_choice


def chat_stream_is_the_answer(peer: Peer) -> None:
    streamed = chat_outline(recorded(peer, "chat").events)
    answer = partial(whole, peer, "/chat/completions", CHAT)
    body = answer()
    expect(body.get("object") == "chat.completion", "expected object chat.completion", body)
    plain = chat_outline([body])
    same_answer(plain, streamed, lambda: chat_outline([answer()]), f"plain: {plain}\nstreamed: {streamed}")


def chat_usage_is_the_answers(peer: Peer) -> None:
    streamed = [chunk["usage"] for chunk in recorded(peer, "chat-usage").events if chunk.get("usage")]
    plain = whole(peer, "/chat/completions", CHAT).get("usage")
    expect(streamed, "expected usage, for it was asked for", recorded(peer, "chat-usage"))
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    same = plain and all(plain.get(name) == streamed[-1].get(name) for name in counts)
    expect(same, "expected the same counts as without stream", f"plain: {plain}\nstreamed: {streamed[-1]}")


def usage_unasked(peer: Peer) -> None:
    for chunk in recorded(peer, "chat").events:
        silent = chunk.get("choices") and not chunk.get("usage")
        expect(silent, "expected no usage, for nobody asked for it", chunk)


# --- cut, called, stopped -----------------------------------------------------------------------------------


def cut_responses(peer: Peer) -> Iterator[Json]:
    """Of a limit that is too small, streamed and plain."""
    yield recorded(peer, "cut").events[-1].get("response") or {}
    yield whole(peer, *asked(peer, "cut"))


def cut_is_told(peer: Peer) -> None:
    for response in cut_responses(peer):
        end = response.get("status"), (response.get("incomplete_details") or {}).get("reason")
        expected = ("incomplete", "max_output_tokens")
        expect(end == expected, f"expected {', '.join(expected)}, got {end}", outline(response))


def cut_item_is_told(peer: Peer) -> None:
    """A cut may fall between two items; two cuts do not."""
    path, body = asked(peer, "cut")
    more = whole(peer, path, body | {"max_output_tokens": CUT + 3})
    last = [(response.get("output") or [{}])[-1] for response in (*cut_responses(peer), more)]
    first, plain, later = (item.get("status") for item in last)
    is_told = first == plain and "incomplete" in (plain, later)
    expect(is_told, "expected the item that was cut to be incomplete", last)


def cut_exactly(peer: Peer) -> None:
    for response in cut_responses(peer):
        n = (response.get("usage") or {}).get("output_tokens")
        expect(n == CUT, f"expected output_tokens {CUT}, as asked for, got {n}", outline(response))


def chat_cut(peer: Peer) -> None:
    body = whole(peer, *asked(peer, "chat-cut"))
    for chunks in (recorded(peer, "chat-cut").events, [body]):
        reason = chat_outline(chunks).get(0, {}).get("finish_reason")
        expect(reason == "length", f"expected finish_reason length, got {reason}", chunks[-1])
    n = (body.get("usage") or {}).get("completion_tokens")
    expect(n == CUT, f"expected completion_tokens {CUT}, as asked for, got {n}", body)


def required_call(peer: Peer) -> None:
    response = recorded(peer, "call").events[-1].get("response") or {}
    calls = [item for item in response.get("output", ()) if item.get("type") == "function_call"]
    expect(calls, "expected a function_call, as tool_choice required it", outline(response))
    expect(calls[0].get("name") == "get_weather", "expected the tool that there is", calls[0])
    if response.get("status") == "completed":
        expect(calls[0].get("status") == "completed", "expected the call to be completed", calls[0])


def chat_required_call(peer: Peer) -> None:
    chunks = recorded(peer, "chat-call").events
    deltas = [c.get("delta") or {} for chunk in chunks for c in chunk.get("choices", ())]
    reason = chat_outline(chunks).get(0, {}).get("finish_reason")
    expect(
        any(delta.get("tool_calls") for delta in deltas),
        "expected a call, as tool_choice required it",
        chunks[-1],
    )
    expect(reason in ("tool_calls", "length"), f"expected finish_reason tool_calls, got {reason}", chunks[-1])


def stop_string(peer: Peer) -> None:
    text = chat_outline([whole(peer, "/chat/completions", CHAT)]).get(0, {}).get("content", "")
    middle = len(text) // 2
    stop = text[middle : middle + 5]
    if len(stop) < 5:
        raise NotApplicable(f"the answer is too short: {text!r}")
    body = CHAT | {"stop": [stop]}
    expected = {0: {"content": text[: text.index(stop)], "finish_reason": "stop"}}
    for reply in (
        peer.post("/chat/completions", body),
        peer.post("/chat/completions", body | {"stream": True}),
    ):
        if reply.status in REFUSED:
            raise NotApplicable(f"refused: {reply}")
        chunks = reply.events if reply.is_stream else [reply.json]
        how = "streamed" if reply.is_stream else "plain"
        answer = chat_outline(chunks)
        expect(answer == expected, f"{how}: expected {expected[0]} with stop {stop!r}", answer)


def two_choices(peer: Peer) -> None:
    reply = recorded(peer, "chat-two")
    choices = chat_outline(reply.events)
    expect(choices.keys() == {0, 1}, f"expected choices 0 and 1, got {sorted(map(str, choices))}", reply)
    ended = all(choice["finish_reason"] for choice in choices.values())
    expect(ended and reply.body.count(b"[DONE]") == 1, "expected two ends and one [DONE]", choices)


CONTROL_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "</s>")  # of many families
N_COPIES = 16


def spelled_tokens(peer: Peer) -> None:
    """A server may drop or refuse what spells a control token; for a model without the token it is text."""
    for spelled in CONTROL_TOKENS:
        once, twice = prompt_tokens(peer, spelled, N_COPIES), prompt_tokens(peer, spelled, 2 * N_COPIES)
        n_tokens = (twice - once) / N_COPIES - 1  # of a copy: the digit behind it is a token too
        message = f"expected {spelled} in a user's message to be text, which is never one token"
        counts = f"prompt_tokens with {N_COPIES} and {2 * N_COPIES} of {spelled}1: {once} and {twice}"
        expect(n_tokens != 1, message, counts)


def prompt_tokens(peer: Peer, spelled: str, n_copies: int) -> int:
    """The tokens of a prompt that says so; 0 where it is refused."""
    content = "1" + f"{spelled}1" * n_copies
    body = CHAT | {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
    reply = peer.post("/chat/completions", body)
    if reply.status in NOT_THERE:
        raise NotApplicable(f"refused: {reply}")
    n_tokens: int = (reply.json.get("usage") or {}).get("prompt_tokens", 0)
    return n_tokens


def chat_logprobs(peer: Peer) -> None:
    body = whole(peer, *asked(peer, "chat-logprobs"))
    for how, chunks in (("plain", [body]), ("streamed", recorded(peer, "chat-logprobs").events)):
        logprobs = [c.get("logprobs") or {} for chunk in chunks for c in chunk.get("choices", ())]
        entries = [entry for by_token in logprobs for entry in by_token.get("content") or ()]
        text = chat_outline(chunks).get(0, {}).get("content", "")
        tokens = "".join(str(entry.get("token")) for entry in entries)
        expect(entries, f"{how}: expected logprobs, for they were asked for", chunks[0])
        message = f"{how}: expected tokens that make up {text!r}, got {tokens!r}"
        expect(tokens.startswith(text), message, entries[-1])


# --- what became of a response ------------------------------------------------------------------------------


def kept(peer: Peer, body: Json | None = None) -> Json:
    """A response that can be asked for by its id."""
    made = whole(peer, "/responses", HI | {"store": True} | (body or {}))
    reply = peer.ask("GET", f"/responses/{made.get('id')}")
    if reply.status in REFUSED:
        raise NotApplicable(f"responses are not kept: {reply}")
    return made


def at(id: object, rest: str = "") -> str:
    return f"/responses/{id}{rest}"


def stored(peer: Peer) -> None:
    made = kept(peer)
    reply = peer.ask("GET", at(made["id"]))
    expect(reply.json == made, "expected GET to give the answer once more", f"{outline(made)}\n{reply}")
    last = recorded(peer, "text").events[-1].get("response") or {}
    reply = peer.ask("GET", at(last.get("id")))
    expect(reply.json == last, "expected GET to give what a stream said", f"{outline(last)}\n{reply}")


def deleted(peer: Peer) -> None:
    id_ = kept(peer)["id"]
    gone = peer.ask("DELETE", at(id_))
    if gone.status in NOT_THERE:
        raise NotApplicable(f"nothing can be deleted: {gone}")
    expect(gone.status == 200, "expected status 200", gone)
    for method, path in (("GET", at(id_)), ("DELETE", at(id_))):
        reply = peer.ask(method, path)
        expect(reply.status == 404, "expected status 404, for it is deleted", reply)


def unknown_id(peer: Peer) -> None:
    kept(peer)
    for method, path in (("GET", at(UNKNOWN)), ("DELETE", at(UNKNOWN)), ("POST", at(UNKNOWN, "/cancel"))):
        reply = peer.ask(method, path)
        expect(reply.status in (404, 405), "expected status 404 of an unknown id", reply)


def unknown_previous(peer: Peer) -> None:
    reply = peer.post("/responses", HI | {"previous_response_id": UNKNOWN})
    if reply.status in NOT_THERE and "previous" not in reply.body.decode("utf-8", "replace"):
        raise NotApplicable(f"no Responses API: {reply}")
    expect(reply.status in (400, 404), "expected a refusal of an unknown previous_response_id", reply)


def chained(peer: Peer) -> None:
    first = kept(peer)
    after = whole(peer, "/responses", HI | {"previous_response_id": first["id"]})
    usage = [(response.get("usage") or {}).get("input_tokens", 0) for response in (first, after)]
    expect(
        usage[1] > usage[0],
        f"expected a longer prompt behind a previous response, got {usage} tokens",
        outline(after),
    )


def lists_input(peer: Peer) -> None:
    reply = peer.ask("GET", at(kept(peer)["id"], "/input_items"))
    if reply.status in NOT_THERE:
        raise NotApplicable(f"no list of input items: {reply}")
    items = reply.json.get("data") or [{}]
    expect(
        reply.json.get("object") == "list" and "id" in items[0], "expected a list of items with ids", reply
    )


# --- background ---------------------------------------------------------------------------------------------


def in_background(peer: Peer, body: Json) -> Json:
    first = peer.once("/responses", {"model": peer.model, "stream": False, "background": True} | HI)
    if first.json.get("background") is not True and first.json.get("status") in TERMINAL:
        raise NotApplicable(f"background is ignored: the answer is {first.json['status']} at once")
    return whole(peer, "/responses", body | {"background": True})


def ended(peer: Peer, id: object) -> Json:
    """A background response when it is terminal."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        reply = peer.ask("GET", at(id))
        expect(reply.status == 200, "expected status 200 of a background response", reply)
        if reply.json.get("status") in TERMINAL:
            return reply.json
        time.sleep(0.02)
    raise Failed("expected a background response to end within a minute", outline(reply.json))


def background_is_honoured(peer: Peer) -> None:
    reply = peer.once("/responses", {"model": peer.model, "stream": False, "background": True} | HI)
    if reply.status in REFUSED:
        raise NotApplicable(f"refused: {reply}")
    waits = reply.json.get("status") in ("queued", "in_progress") and reply.json.get("output") == []
    expect(
        reply.status == 200 and waits,
        "expected background: true to be refused, or answered with what is queued",
        reply,
    )


def background_completes(peer: Peer) -> None:
    last = ended(peer, in_background(peer, HI)["id"])
    plain = outline(whole(peer, "/responses", HI))
    again = partial(whole, peer, "/responses", HI)
    same_answer(
        plain, outline(last), lambda: outline(again()), f"foreground: {plain}\nbackground: {outline(last)}"
    )


def background_streams(peer: Peer) -> None:
    in_background(peer, HI)
    reply = recorded(peer, "background")
    check_stream("background", reply, "order", "terminal", "status", "sums")
    last = reply.events[-1].get("response") or {}
    final = ended(peer, last.get("id"))
    expect(final == last, "expected GET to give what the stream said", f"{outline(last)}\n{outline(final)}")


def refused_in_background(peer: Peer) -> None:
    in_background(peer, HI)
    for body in (HI | {"temperature": 99}, HI | {"input": 42}):
        reply = peer.post("/responses", body | {"background": True})
        expect(400 <= reply.status < 500, "expected a refusal, not a response that fails later", reply)


def resumed(peer: Peer) -> None:
    in_background(peer, HI)
    frames = recorded(peer, "background").body
    events = recorded(peer, "background").events
    id_ = (events[0].get("response") or {}).get("id")
    follow = peer.ask("GET", at(id_, "?stream=true"))
    if follow.status in REFUSED:
        raise NotApplicable(f"refused: {follow}")
    expect(follow.body == frames, "expected the same bytes once more", follow)
    for after in {0, 1, len(events) // 2, len(events) - 2, len(events) - 1, len(events)}:
        reply = peer.ask("GET", at(id_, f"?stream=true&starting_after={after}"))
        numbers = [event.get("sequence_number") for event in reply.events]
        expected = list(range(after + 1, len(events)))
        expect(numbers == expected, f"expected events {expected} behind {after}, got {numbers}", reply)
        expect(frames.endswith(reply.body), f"expected the same bytes behind {after}", reply)


def resumed_at_no_number(peer: Peer) -> None:
    resumed(peer)
    id_ = recorded(peer, "background").events[0]["response"]["id"]
    for after in ("-1", "x"):
        reply = peer.ask("GET", at(id_, f"?stream=true&starting_after={after}"))
        expect(reply.status == 400, "expected a refusal of what is no number of an event", reply)


def survives_its_client(peer: Peer) -> None:
    in_background(peer, HI)
    seen = peer.first_events("/responses", HI | {"background": True}, 3)
    last = ended(peer, (seen[0].get("response") or {}).get("id"))
    expect(last.get("status") in ("completed", "incomplete"), "expected the run to go on", outline(last))


def cancelled(peer: Peer) -> Json:
    """A background response that was cancelled as it ran."""
    id_ = in_background(peer, STORY | peer.long)["id"]
    reply = peer.ask("POST", at(id_, "/cancel"))
    if reply.status in NOT_THERE:
        raise NotApplicable(f"nothing can be cancelled: {reply}")
    if reply.status == 400 and ended(peer, id_).get("status") in ("completed", "incomplete"):
        raise NotApplicable("it ended before the cancel; try --long")
    expect(
        reply.status == 200 and reply.json.get("status") == "cancelled", "expected status cancelled", reply
    )
    return reply.json


def cancel(peer: Peer) -> None:
    response = cancelled(peer)
    for _ in range(5):  # a late completion must not win
        later = ended(peer, response["id"])
        shown = f"{outline(response)}\n{outline(later)}"
        expect(later == response, "expected a cancelled response to stay as it is", shown)


def cancel_again(peer: Peer) -> None:
    response = cancelled(peer)
    again = peer.ask("POST", at(response["id"], "/cancel"))
    expect(
        again.status == 200 and again.json == response, "expected the same answer to a second cancel", again
    )


def cancel_the_completed(peer: Peer) -> None:
    cancelled(peer)
    last = ended(peer, in_background(peer, HI)["id"])
    reply = peer.ask("POST", at(last["id"], "/cancel"))
    expect(
        reply.status == 400,
        f"expected status 400 for the cancel of a response that is {last['status']}",
        reply,
    )
    expect(ended(peer, last["id"]) == last, "expected it to stay as it is", reply)


def cancel_the_synchronous(peer: Peer) -> None:
    cancelled(peer)
    reply = peer.ask("POST", at(kept(peer)["id"], "/cancel"))
    expect(reply.status == 400, "expected status 400 for the cancel of a foreground response", reply)


def follower_of_the_cancelled(peer: Peer) -> None:
    cancelled(peer)
    with peer.stream("/responses", STORY | peer.long | {"background": True}) as events:
        first = next(events)
        id_ = (first.get("response") or {}).get("id")
        peer.ask("POST", at(id_, "/cancel"))
        seen = [first, *events]
    last = seen[-1]
    expect(last.get("type") == "response.failed", "expected a terminal event, response.failed", last)
    status = (last.get("response") or {}).get("status")
    expect(status == "cancelled", f"expected a response that is cancelled, got {status}", last)


def delete_the_running(peer: Peer) -> None:
    id_ = in_background(peer, STORY | peer.long)["id"]
    reply = peer.ask("DELETE", at(id_))
    if reply.status in NOT_THERE:
        raise NotApplicable(f"nothing can be deleted: {reply}")
    peer.ask("POST", at(id_, "/cancel"))
    later = peer.ask("GET", at(id_))
    expected = 404 if reply.status == 200 else 200
    expect(later.status == expected, f"expected what DELETE answered with {reply.status} to hold", later)


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
GOOD = {"/responses": HI | {"max_output_tokens": CUT}, "/chat/completions": CHAT | {"max_tokens": CUT}}


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
        expect(400 <= reply.status < 500, "expected a refusal, with a status of 4xx", reply)


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


# --- the table ----------------------------------------------------------------------------------------------


class Check(NamedTuple):
    run: Callable[[Peer], None]
    bugs: str  # ids of tests/BUGS.md
    title: str
    link: str


OPENAI = "https://platform.openai.com/docs/api-reference/"
GITHUB = "https://github.com/"
AZURE = GITHUB + "Azure/azure-sdk-for-net/tree/main/sdk/agentserver/Azure.AI.AgentServer.Responses/docs"
MISTRAL_RS = (
    GITHUB
    + "EricLBuehler/mistral.rs/blob/9e922623f24b32d41f3892b74f0eed18707f4e6c/mistralrs-server-core/src/"
)
COCOON = GITHUB + "TelegramMessenger/cocoon/blob/b75d444766212b9b17ae2bfab1268a2e2e334b6f/runners/helpers/"

# fmt: off
EXCHANGES = {
    #  rule                  what checks it             bugs
    #      title
    #      link
    "stream-headers":      Check(stream_headers,            "A09 B06 B07",
        "a stream is text/event-stream in UTF-8, not cached, not encoded, of one length or chunked",
        GITHUB + "open-metadata/OpenMetadata/pull/29532"),
    "writes":              Check(whole_frames_a_write,      "B02 D21",
        "an event is written when it is made, and whole",
        GITHUB + "openresponses/openresponses/blob/main/src/lib/sse-parser.ts"),
    "request-id":          Check(request_id,                "",
        "every reply has an x-request-id",
        OPENAI + "debugging-requests"),
    "models":              Check(lists_models,              "",
        "GET /models lists the models",
        OPENAI + "models/list"),

    "plain-by-default":    Check(plain_by_default,          "B09",
        "without stream the answer is a JSON object",
        OPENAI + "responses/create"),
    "stream-is-answer":    Check(stream_is_the_answer,      "C06 C15 G05",
        "a Responses stream says what the plain answer says, and so counts its usage",
        GITHUB + "EricLBuehler/mistral.rs/pull/2309"),
    "chat-stream-is-answer": Check(chat_stream_is_the_answer, "D02 D15 E11",
        "a chat stream says what the plain answer says",
        GITHUB + "vllm-project/vllm/pull/30437"),
    "chat-usage":          Check(chat_usage_is_the_answers, "G05 G07",
        "usage comes in the stream if it was asked for, and is that of the plain answer",
        GITHUB + "vllm-project/vllm/pull/24477"),
    "usage-unasked":       Check(usage_unasked,             "B08 B10 G07",
        "no usage and no chunk without choices in the stream if it was not asked for",
        GITHUB + "sgl-project/sglang/issues/5451"),

    "cut":                 Check(cut_is_told,               "C15",
        "a response that was cut at max_output_tokens is incomplete, streamed or not",
        GITHUB + "vllm-project/agentic-api/issues/273"),
    "cut-item":            Check(cut_item_is_told,          "C16",
        "the item that was cut is incomplete",
        GITHUB + "vllm-project/vllm/issues/57998"),
    "cut-exactly":         Check(cut_exactly,               "D10 G04 G06",
        "a response that was cut has max_output_tokens tokens, no less and no more",
        GITHUB + "ikawrakow/ik_llama.cpp/pull/2358"),
    "chat-cut":            Check(chat_cut,                  "D10 G01",
        "a completion that was cut ends with length, at max_tokens",
        GITHUB + "llm-d/llm-d-inference-sim/pull/545"),
    "call":                Check(required_call,             "E01 C13",
        "tool_choice required makes a function_call",
        GITHUB + "vllm-project/vllm/issues/36435"),
    "chat-call":           Check(chat_required_call,        "G02",
        "tool_choice required makes a call, and finish_reason tool_calls",
        GITHUB + "vllm-project/vllm/pull/9209"),
    "stop-string":         Check(stop_string,               "D16 D17",
        "nothing of a stop string is sent, nor anything behind it, and all before it",
        GITHUB + "SharpAI/SwiftLM/issues/126"),
    "two-choices":         Check(two_choices,               "A21",
        "n=2 makes two choices, two ends and one [DONE]",
        GITHUB + "vllm-project/vllm/pull/378"),
    "chat-logprobs":       Check(chat_logprobs,             "C22 D08 D21",
        "logprobs have an entry for each token of the text, streamed or not",
        GITHUB + "vllm-project/vllm/pull/47616"),

    "spelled-tokens":      Check(spelled_tokens,            "K01",
        "advice: a control token that a user spells should be text, and so cost more than one token",
        GITHUB + "huggingface/transformers/issues/29279"),

    "stored":              Check(stored,                    "F12",
        "GET gives what was answered, streamed or not",
        GITHUB + "EricLBuehler/mistral.rs/issues/1946"),
    "deleted":             Check(deleted,                   "F07",
        "a deleted response is gone",
        OPENAI + "responses/delete"),
    "unknown-id":          Check(unknown_id,                "F06",
        "an unknown id is a 404",
        AZURE),
    "unknown-previous":    Check(unknown_previous,          "F14",
        "an unknown previous_response_id is refused",
        MISTRAL_RS + "responses.rs"),
    "chained":             Check(chained,                   "F14",
        "the prompt holds what the previous response said",
        GITHUB + "tetherto/qvac/pull/2030"),
    "input-items":         Check(lists_input,               "",
        "the input can be listed, each item with an id",
        OPENAI + "responses/input-items"),

    "background":          Check(background_is_honoured,    "F01 F03",
        "background: true is refused, or answered at once with a response that is queued or in progress",
        GITHUB + "EricLBuehler/mistral.rs/issues/1945"),
    "background-completes": Check(background_completes,     "F01 F02 F03",
        "a background response comes to say what the foreground says",
        GITHUB + "EricLBuehler/mistral.rs/issues/1945"),
    "background-stream":   Check(background_streams,        "F01",
        "background and stream are one request: its events, and GET gives the last one's response",
        GITHUB + "EricLBuehler/mistral.rs/pull/2114"),
    "background-refuses":  Check(refused_in_background,     "F08",
        "a bad request is refused before it is accepted, in the background too",
        MISTRAL_RS + "background_tasks.rs"),
    "background-survives": Check(survives_its_client,       "I05",
        "a background response goes on when its client leaves",
        GITHUB + "vllm-project/vllm/pull/23927"),
    "resume":              Check(resumed,                   "F09",
        "starting_after gives the rest of the stream from there on, the same bytes",
        GITHUB + "exo-explore/exo/issues/1356"),
    "resume-number":       Check(resumed_at_no_number,      "F09",
        "starting_after is refused if it is no number of an event",
        AZURE),
    "cancel":              Check(cancel,                    "F05",
        "a cancelled response is cancelled, and stays so",
        GITHUB + "SamSaffron/term-llm/pull/789"),
    "cancel-again":        Check(cancel_again,              "F06",
        "a second cancel is answered like the first",
        GITHUB + "ogx-ai/ogx/issues/5180"),
    "cancel-completed":    Check(cancel_the_completed,      "F06",
        "the cancel of a response that has ended is a 400",
        GITHUB + "vllm-project/vllm/issues/57999"),
    "cancel-synchronous":  Check(cancel_the_synchronous,    "F06",
        "the cancel of a foreground response is a 400",
        AZURE),
    "follower-ends":       Check(follower_of_the_cancelled, "F04 C19",
        "a stream whose response is cancelled ends with a terminal event",
        GITHUB + "vllm-project/vllm/pull/49721"),
    "delete-running":      Check(delete_the_running,        "F07",
        "a running response is not deleted, or stays deleted",
        MISTRAL_RS + "background_tasks.rs"),

    "bad-json":            Check(partial(refuses, "bad-json"),     "B14",
        "a body that is no JSON is refused",
        OPENAI + "responses/create"),
    "bad-model":           Check(partial(refuses_or_serves_any_model, "bad-model"), "",
        "a model that is no string is refused, and one that is missing",
        OPENAI + "responses/create"),
    "unknown-model":       Check(partial(refuses_or_serves_any_model, "unknown-model"), "",
        "a model that is not there is refused",
        OPENAI + "responses/create"),
    "bad-input":           Check(partial(refuses, "bad-input"),    "B14",
        "input or messages of another shape are refused",
        OPENAI + "responses/create"),
    "out-of-range":        Check(partial(refuses, "out-of-range"), "",
        "a number out of its range is refused",
        OPENAI + "responses/create"),
    "wrong-type":          Check(partial(refuses, "wrong-type"),   "",
        "a parameter of another type is refused",
        OPENAI + "responses/create"),
    "stream-options-alone": Check(partial(refuses, "stream-options-alone"), "B09",
        "stream_options without stream are refused",
        COCOON + "ValidateRequest.cpp"),
    "error-status":        Check(error_status,              "",
        "a refusal is a 400, or a 404 for what is not there",
        GITHUB + "openai/openai-python/blob/main/src/openai/_base_client.py"),
    "error-shape":         Check(error_shape,               "H07",
        "an error has message, type, param and code",
        "https://platform.openai.com/docs/guides/error-codes"),
    "error-param":         Check(error_param,               "",
        "an error names the parameter that was out of its range",
        GITHUB + "openai/openai-openapi"),
}
# fmt: on

CHECKS = {
    id_: Check(partial(judged, id_), rule.bugs, rule.title, rule.link) for id_, rule in rules.RULES.items()
} | EXCHANGES
