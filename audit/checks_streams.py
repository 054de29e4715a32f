"""Rules on streams as they come: those of rules.py over each recorded one, and what the bytes cannot show.

    Peer --check--> nothing, or Failed, or NotApplicable

Authority: that of each rule is the link in checks.py.

Not here: the rules of one recorded stream (rules.py), what an answer says (checks_answers.py).
"""

import re

from audit import members, recordings, rules
from audit.peer import NOT_THERE, Failed, NoReply, NotApplicable, Peer, Reply, expect
from audit.probes import GITHUB, OPENAI, PATHS, STREAMS, Check, recorded, some_stream, stream, with_stream

# --- the rules of one stream --------------------------------------------------------------------------------


def judged(rule: str, peer: Peer) -> None:
    """The rule over every stream of its kind that the server makes, and of which the end was seen."""
    kind = rules.RULES[rule].kind
    paths = [PATHS[kind]] if kind else list(PATHS.values())
    names = [name for name, (path, _) in STREAMS.items() if path in paths]
    read = stream if rule == "whole-frames" else recorded
    reasons: list[NotApplicable | NoReply] = []  # why streams did not come
    for name in names:
        try:
            reply = read(peer, name)
        except (NotApplicable, NoReply) as reason:
            reasons.append(reason)
        else:
            check_stream(name, reply, rule)
    if len(reasons) == len(names):
        raise reasons[0]


def check_stream(name: str, reply: Reply, *names: str) -> None:
    try:
        capture = recordings.read(reply.body)
    except ValueError as error:
        raise NotApplicable(f"no events came: {error}") from error
    if violations := rules.violations(capture, names or rules.RULES):
        first = violations[0]
        frames = {f.number: f.raw.decode("utf-8", "backslashreplace").strip() for f in capture.frames}
        excerpt = frames.get(first.event, "(the end of the stream)")
        more = f", and {len(violations) - 1} more" if len(violations) > 1 else ""
        message = f"{name}: event {first.event}: {first.message}{more}"
        raise Failed(message, members.shortened(excerpt, 300))


def stream_comes(peer: Peer) -> None:
    """What may be refused is not asked for here."""
    for name in ("text", "chat"):
        path, body = STREAMS[name]
        reply = peer.once(path, with_stream(peer, body))
        if reply.status in NOT_THERE:
            continue
        expect(reply.is_stream, "expected a stream, as text/event-stream", reply)
        expect(reply.events, "expected events in the stream", reply)


def stream_headers(peer: Peer) -> None:
    headers = some_stream(peer).headers
    kind = headers["content-type"].replace(" ", "").lower()
    expect(
        kind in ("text/event-stream", "text/event-stream;charset=utf-8"), "expected no other charset", headers
    )
    expect("content-encoding" not in headers, "expected no encoding that nobody asked for", headers)
    both = {"content-length", "transfer-encoding"} <= headers.keys()
    expect(not both, "expected one of Content-Length and Transfer-Encoding", headers)


def cache_control(peer: Peer) -> None:
    headers = some_stream(peer).headers
    is_kept_out = {"no-cache", "no-store"} & {*re.split(r"[,\s]+", headers.get("cache-control", "").lower())}
    expect(is_kept_out, "expected Cache-Control: no-cache or no-store", headers)


def whole_frames_a_write(peer: Peer) -> None:
    reply = some_stream(peer)
    if not reply.chunks:
        raise NotApplicable("the stream is not sent in chunks")
    for n, chunk in enumerate(reply.chunks[:-1]):  # the rule whole-frames is about the end
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
    if reply.status in NOT_THERE:
        raise NotApplicable(f"models are not listed: {reply.refusal}")
    models = reply.json.get("data", [])
    expect(reply.status == 200 and reply.json.get("object") == "list", "expected a list", reply)
    named = all(isinstance(m.get("id"), str) and m.get("object") == "model" for m in models)
    expect(models and named, "expected objects of type model with ids", reply)


# --- the table ----------------------------------------------------------------------------------------------

# fmt: off
CHECKS = {
    #  rule    what checks it, its profiles, its strength, bugs of tests/BUGS.md
    #      title
    #      source
    #      link
    "stream-comes": Check(stream_comes, "chat responses", "must", "",
        "stream: true is answered with an event stream",
        "the API reference: stream",
        OPENAI + "responses-streaming"),
    "cache-control": Check(cache_control, "chat responses", "advice", "B06",
        "a stream is not kept by caches",
        "proxies may keep or collect what is not marked no-cache",
        GITHUB + "open-metadata/OpenMetadata/pull/29532"),
    "stream-headers": Check(stream_headers, "chat responses", "must", "A09 B06 B07",
        "a stream is text/event-stream in UTF-8, not encoded, of one length or chunked",
        "the HTML standard: text/event-stream, and UTF-8; RFC 9112 on lengths",
        GITHUB + "open-metadata/OpenMetadata/pull/29532"),
    "writes": Check(whole_frames_a_write, "chat responses", "should", "B02 D21",
        "an event is written when it is made, and whole",
        "clients that parse what one read brings, and proxies that pass on a write at a time",
        GITHUB + "openresponses/openresponses/blob/main/src/lib/sse-parser.ts"),
    "request-id": Check(request_id, "chat responses", "advice", "",
        "every reply has an x-request-id",
        "the guide on debugging requests: x-request-id is what support asks for",
        OPENAI + "debugging-requests"),
    "models": Check(lists_models, "chat responses", "should", "",
        "GET /models lists the models",
        "the API reference; user interfaces fill their lists with it",
        OPENAI + "models/list"),
}
# fmt: on
