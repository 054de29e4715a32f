"""Rules on HTTP, and on what clients do besides asking: they read slowly, leave, come at once, compress.

    Peer --rule--> nothing, or Failed, or NotApplicable

Authority: that of each rule is the link in its docstring.

Not here: what a stream says (frames.py, events.py, chunks.py).
"""

import gzip
import json
import re
import time
from collections.abc import Callable

from audit.asking import CUT, STORY, request, some_stream, with_stream
from audit.events import TERMINAL
from audit.peer import NOT_THERE, Peer
from audit.rules import Failed, NotApplicable, expect, rules_of
from audit.schema import Json

must, should, advice = rules_of("http", "chat responses")


@must("stream-comes")
def stream_comes(peer: Peer) -> None:
    """stream: true is answered with an event stream

    the API reference: stream
    https://platform.openai.com/docs/api-reference/responses-streaming
    """
    # What may be refused is not asked for here.
    for api in ("responses", "chat"):
        path, body = request(api)
        reply = peer.once(path, with_stream(peer, body))
        if reply.status not in NOT_THERE:
            expect(reply.is_stream, "expected a stream, as text/event-stream", reply)
            expect(reply.events, "expected events in the stream", reply)


@advice("cache-control")
def cache_control(peer: Peer) -> None:
    """a stream is not kept by caches

    proxies may keep or collect what is not marked no-cache
    B06 https://github.com/open-metadata/OpenMetadata/pull/29532
    """
    headers = some_stream(peer).headers
    is_kept_out = {"no-cache", "no-store"} & {*re.split(r"[,\s]+", headers.get("cache-control", "").lower())}
    expect(is_kept_out, "expected Cache-Control: no-cache or no-store", headers)


@must("stream-headers")
def stream_headers(peer: Peer) -> None:
    """a stream is text/event-stream in UTF-8, not encoded, of one length or chunked

    the HTML standard: text/event-stream, and UTF-8; RFC 9112 on lengths
    A09 B06 B07 https://github.com/open-metadata/OpenMetadata/pull/29532
    """
    headers = some_stream(peer).headers
    kind = headers["content-type"].replace(" ", "").lower()
    is_utf_8 = kind in ("text/event-stream", "text/event-stream;charset=utf-8")
    expect(is_utf_8, "expected no other charset", headers)
    expect("content-encoding" not in headers, "expected no encoding that was not asked for", headers)
    both = {"content-length", "transfer-encoding"} <= headers.keys()
    expect(not both, "expected one of Content-Length and Transfer-Encoding", headers)


@should("writes")
def writes(peer: Peer) -> None:
    """an event is written when it is made, and whole

    clients that parse what one read brings, and proxies that pass on a write at a time
    B02 D21 https://github.com/openresponses/openresponses/blob/main/src/lib/sse-parser.ts
    """
    reply = some_stream(peer)
    if "chunked" not in reply.headers.get("transfer-encoding", ""):
        raise NotApplicable("the stream is not sent in chunks")
    chunks = list(reply.pieces)
    for n, chunk in enumerate(chunks[:-1]):  # the rule whole-frames is about the end
        is_whole = chunk.endswith((b"\n\n", b"\r\n\r\n"))
        expect(is_whole, f"expected whole frames a write, got chunk {n}:", chunk[-200:])
    expect(len(chunks) > 2, "expected events as they are made, got all at once", f"{len(chunks)} writes")


@advice("request-id")
def request_id(peer: Peer) -> None:
    """every reply has an x-request-id

    the guide on debugging requests: x-request-id is what support asks for
    https://platform.openai.com/docs/api-reference/debugging-requests
    """
    for reply in (some_stream(peer), peer.ask("GET", "/models"), peer.ask("POST", "/responses", b"{")):
        shown = f"{reply.asked} -> {reply.headers}"
        expect("x-request-id" in reply.headers, "expected an x-request-id in every reply", shown)


@should("models")
def models(peer: Peer) -> None:
    """GET /models lists the models

    the API reference; user interfaces fill their lists with it
    https://platform.openai.com/docs/api-reference/models/list
    """
    reply = peer.ask("GET", "/models")
    if reply.status in NOT_THERE:
        raise NotApplicable(f"models are not listed: {reply.refusal}")
    expect(reply.status == 200 and reply.json.get("object") == "list", "expected a list", reply)
    listed = reply.json.get("data")
    is_named = listed and all(isinstance(m.get("id"), str) and m.get("object") == "model" for m in listed)
    expect(is_named, "expected objects of type model with ids", reply)


# --- clients ------------------------------------------------------------------------------------------------

must, should, advice = rules_of("clients", "responses")
LEAST_BYTES = 48_000  # of a stream for which a slow client makes its server wait


@must("slow-reader")
def slow_reader(peer: Peer) -> None:
    """a client that pauses loses nothing of its stream

    TCP: what waits is held back, not dropped
    https://platform.openai.com/docs/api-reference/responses-streaming
    """
    # While the slow client waits another one reads the same to its end: by then the server has had to wait.
    path, body = request("responses", said=STORY, limit=400, **peer.long)
    with peer.stream(path, body, is_slow=True) as events:
        seen = [next(events)]
        with peer.stream(path, body) as others:
            n_bytes = len(json.dumps([*others]))
        seen += events
    if n_bytes < LEAST_BYTES:
        raise NotApplicable("the stream is too short to make its server wait; try --long")
    last = seen[-1].get("type")
    expect(last in TERMINAL, f"expected a terminal event at the end of a pause, got {last}", seen[-1])
    numbers = [event.get("sequence_number") for event in seen]
    is_whole = None in numbers or numbers == [*range(len(seen))]  # see the rule numbers
    expect(is_whole, "expected no event to be lost", numbers)


@must("two-at-once")
def two_at_once(peer: Peer) -> None:
    """two streams at once are two responses, each on its own connection

    the API reference: a stream is of one response
    C07 https://platform.openai.com/docs/api-reference/responses-streaming
    """
    asked = request("responses", limit=2 * CUT)
    with peer.stream(*asked) as one, peer.stream(*asked) as other:
        ends = [[*one][-1], [*other][-1]]
    ids = [(end.get("response") or {}).get("id") for end in ends]
    expect(all(ids) and ids[0] != ids[1], f"expected a response in each stream, got the ids {ids}", ends)


TRIES = 3  # of what a busy machine may spoil


@advice("first-event")
def first_event(peer: Peer) -> None:
    """the first event does not wait for a long prompt to be read

    proxies and clients end what says nothing for some seconds
    https://platform.openai.com/docs/api-reference/responses-streaming
    """
    shares = []
    for number in range(TRIES):  # each prompt is new to the prefix cache
        said = f"Text {number}. " + "The quick brown fox jumps over the lazy dog. " * 80
        first, first_delta = seconds_to_events(peer, *request("responses", said=said, limit=CUT))
        shares.append(first / first_delta)
        if shares[-1] < 0.8:
            return
    shown = f"it took {min(shares):.0%} of the time to the first delta, or more"
    raise Failed("expected the first event well before the first delta", shown)


def seconds_to_events(peer: Peer, path: str, body: Json) -> tuple[float, float]:
    """Measure the seconds to the first event of a stream, and to its first delta."""
    started_at = time.monotonic()
    with peer.stream(path, body) as events:
        next(events)
        first = time.monotonic() - started_at
        for event in events:
            if str(event.get("type")).endswith(".delta"):
                return first, time.monotonic() - started_at
    raise NotApplicable("the stream has no delta")


GAUGES = "num_requests_running|requests_processing|num_running_reqs"  # vLLM's and ours, llama.cpp's, SGLang's
RUNNING = re.compile(rf"^\w+:(?:{GAUGES})\S* ([\d.e+]+)", re.MULTILINE)
PATIENCE_S = 2


@should("leaving")
def leaving(peer: Peer) -> None:
    """the work of a foreground stream ends when its client leaves

    what no client reads takes the place of others
    I01 https://github.com/vllm-project/vllm/pull/11190
    """
    # Seen if the server has metrics: the gauge of running requests falls before the answer's end.
    n_others = settled(peer, lambda n: n == 0)
    with peer.stream(*request("responses", said=STORY, limit=2000, **peer.long)) as events:
        next(events)
        n_with_ours = settled(peer, lambda n: n > n_others)
    if n_with_ours <= n_others:
        raise NotApplicable("the metrics do not show a running request")
    n_left = settled(peer, lambda n: n <= n_others)
    message = "expected the work to end when its client left"
    expect(n_left <= n_others, message, f"{n_left:g} running, {PATIENCE_S} s later")


def settled(peer: Peer, is_so: Callable[[float], bool]) -> float:
    """Count the running requests, once that is so, or after PATIENCE_S."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        reply = peer.ask("GET", "//metrics")
        counts = RUNNING.findall(reply.body.decode("utf-8", "replace"))
        if reply.status != 200 or not counts:
            raise NotApplicable("there are no metrics of running requests")
        n_running = sum(map(float, counts))
        if is_so(n_running) or time.monotonic() > deadline:
            return n_running
        time.sleep(0.05)


@should("compressed")
def compressed(peer: Peer) -> None:
    """a body in gzip is taken, or refused with 415

    RFC 9110, section 15.5.16: clients send it again without
    https://www.rfc-editor.org/rfc/rfc9110#section-15.5.16
    """
    path, body = request("responses")
    packed = gzip.compress(json.dumps({"model": peer.model} | body).encode())
    reply = peer.ask("POST", path, packed, Content_Encoding="gzip")
    if reply.status in NOT_THERE:
        raise NotApplicable(f"no Responses API: {reply.refusal}")
    expect(reply.status in (200, 415), "expected an answer to a body in gzip, or a 415", reply)


@must("key", profiles="chat responses")
def key(peer: Peer) -> None:
    """without the key the answer is a 401 with an error object

    the guide on error codes: SDKs raise AuthenticationError for 401
    https://platform.openai.com/docs/guides/error-codes
    """
    if not peer.has_key:
        raise NotApplicable("no key was given")
    path, body = request("responses")
    reply = peer.ask("POST", path, {"model": peer.model} | body, Authorization="")
    expect(reply.status == 401, "expected status 401 without the key", reply)
    expect(reply.error.get("message"), "expected an error object", reply)
