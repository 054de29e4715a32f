"""Rules on HTTP, and on what clients do besides asking: they read slowly, leave, come at once, compress.

    Peer --rule--> nothing, or AssertionError, or NotApplicable

Authority: that of each rule is the link in its docstring.

Not here: what a stream says (frames.py, events.py, chunks.py).
"""

import gzip
import json
import re
import time
from collections.abc import Callable

from audit.events import TERMINAL
from audit.peer import CUT, PATHS, STORY, Peer
from audit.rules import NoReply, NotApplicable, rules_of
from audit.schema import Typed, missing

PATIENCE_S = 2  # with what a server does when an answer is over

must, should, advice = rules_of("http", "chat responses")


@must
def stream_comes(peer: Peer) -> None:
    """stream-comes: stream: true is answered with an event stream

    the API reference: stream
    https://platform.openai.com/docs/api-reference/responses-streaming
    """
    # What may be refused is not asked for here.
    for reply in peer.of_each_api(stream=True):
        assert reply.is_stream, "expected a stream, as text/event-stream"
        assert reply.events, "expected events in the stream"


@must
def stream_ends(peer: Peer) -> None:
    """stream-ends: the body of a stream ends soon after its last event

    RFC 9112, section 6.3: a client that reads to the end waits as long as the server holds it open
    M01 M02 https://github.com/openai/codex/issues/43140
    """
    reasons = []
    for api in PATHS:
        peer.start()
        is_over = False
        try:
            with peer.live(api=api, said="Say goodbye.", limit=CUT) as events:
                for event in events:
                    if is_last(event):
                        is_over = True
                        peer.start(PATIENCE_S)
        except NotApplicable as reason:
            reasons.append(reason)
        except NoReply:
            assert not is_over
            raise
    if len(reasons) == len(PATHS):
        raise reasons[0]


def is_last(event: Typed) -> bool:
    """Return whether only usage and [DONE] can follow an event."""
    has_ended = any(choice["finish_reason"] for choice in event["choices"] or ())
    return has_ended or "error" in event or event["type"] in TERMINAL


@advice
def cache_control(peer: Peer) -> None:
    """cache-control: a stream is not kept by caches

    proxies may keep or collect what is not marked no-cache
    B06 https://github.com/open-metadata/OpenMetadata/pull/29532
    """
    got = peer.some_stream().headers.get("cache-control", "")
    is_kept_out = re.search(r"\b(no-cache|no-store)\b", got.lower())
    assert is_kept_out


@must
def stream_headers(peer: Peer) -> None:
    """stream-headers: a stream is text/event-stream in UTF-8, not encoded, of one length or chunked

    the HTML standard: text/event-stream, and UTF-8; RFC 9112 on lengths
    A09 B06 B07 https://github.com/open-metadata/OpenMetadata/pull/29532
    """
    headers = peer.some_stream().headers
    kind = headers["content-type"].replace(" ", "").lower()
    is_utf_8 = kind in ("text/event-stream", "text/event-stream;charset=utf-8")
    assert is_utf_8, f"expected no other charset, got {kind}"
    assert "content-encoding" not in headers, "expected no encoding that was not asked for"
    both = {"content-length", "transfer-encoding"} <= headers.keys()
    assert not both, "expected one of Content-Length and Transfer-Encoding"


@should
def writes(peer: Peer) -> None:
    """writes: an event is written when it is made, and whole

    clients that parse what one read brings, and proxies that pass on a write at a time
    B02 D21 https://github.com/openresponses/openresponses/blob/main/src/lib/sse-parser.ts
    """
    reply = peer.some_stream()
    if "chunked" not in reply.headers.get("transfer-encoding", ""):
        raise NotApplicable("the stream is not sent in chunks")
    for chunk in reply.chunks[:-1]:  # the rule whole-frames is about the end
        is_whole = chunk.endswith((b"\n\n", b"\r\n\r\n"))
        assert is_whole, f"expected whole frames a write, got {chunk[-200:]!r}"
    assert len(reply.chunks) > 2, "expected events as they are made, got all at once"


@advice
def request_id(peer: Peer) -> None:
    """request-id: every reply has an x-request-id

    the guide on debugging requests: x-request-id is what support asks for
    https://platform.openai.com/docs/api-reference/debugging-requests
    """
    for reply in (peer.some_stream(), peer.ask("GET", "/models"), peer.ask("POST", "/responses", b"{")):
        assert "x-request-id" in reply.headers


@should
def models(peer: Peer) -> None:
    """models: GET /models lists the models

    the API reference; user interfaces fill their lists with it
    https://platform.openai.com/docs/api-reference/models/list
    """
    reply = peer.ask("GET", "/models").if_there()
    faults = missing(reply.json, "models")
    assert not faults, f"expected a list of models with ids: {faults}"
    assert reply.json["data"], "expected a model at least"


# --- clients ------------------------------------------------------------------------------------------------

must, should, advice = rules_of("clients", "responses")


@must
def two_at_once(peer: Peer) -> None:
    """two-at-once: two streams at once are two responses, each on its own connection

    the API reference: a stream is of one response
    C07 https://platform.openai.com/docs/api-reference/responses-streaming
    """
    with peer.live(limit=2 * CUT) as one, peer.live(limit=2 * CUT) as other:
        ids = {last["response"]["id"] for *_, last in (one, other)} - {""}
    assert len(ids) == 2


TRIES = 3  # of what a busy machine may spoil


@advice
def first_event(peer: Peer) -> None:
    """first-event: the first event does not wait for a long prompt to be read

    proxies and clients end what says nothing for some seconds
    https://platform.openai.com/docs/api-reference/responses-streaming
    """
    waited_s: list[float] = []  # for the first event, and for the first delta
    for number in range(TRIES):  # each prompt is new to the prefix cache
        said = f"Text {number}. " + "The quick brown fox jumps over the lazy dog. " * 80
        started_at = time.monotonic()
        with peer.live(said=said, limit=CUT) as events:
            next(events)
            waited_s = [time.monotonic() - started_at]
            if not any(event["type"].endswith(".delta") for event in events):
                raise NotApplicable("the stream has no delta")
            waited_s.append(time.monotonic() - started_at)
        if waited_s[0] < 0.8 * waited_s[1]:
            return
    raise AssertionError(f"expected the first event well before the first delta, got them after {waited_s} s")


GAUGES = "num_requests_running|requests_processing|num_running_reqs"  # vLLM's and ours, llama.cpp's, SGLang's
RUNNING = re.compile(rf"^\w+:(?:{GAUGES})\S* ([\d.e+]+)", re.MULTILINE)


@should
def leaving(peer: Peer) -> None:
    """leaving: the work of a foreground stream ends when its client leaves

    what no client reads takes the place of others
    I01 https://github.com/vllm-project/vllm/pull/11190
    """
    # Seen if the server has metrics: the gauge of running requests falls before the answer's end.
    n_others = settled(peer, lambda n: n == 0)
    with peer.live(said=STORY, limit=2000, **peer.long) as events:
        next(events)
        n_with_ours = settled(peer, lambda n: n > n_others)
    if n_with_ours <= n_others:
        raise NotApplicable("the metrics do not show a running request")
    n_left = settled(peer, lambda n: n <= n_others)
    assert n_left <= n_others


def settled(peer: Peer, is_so: Callable[[float], bool]) -> float:
    """Count the running requests, once that is so, or after PATIENCE_S."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        reply = peer.ask("GET", "//metrics")
        counts = RUNNING.findall(reply.text)
        if reply.status != 200 or not counts:
            raise NotApplicable("there are no metrics of running requests")
        n_running = sum(map(float, counts))
        if is_so(n_running) or time.monotonic() > deadline:
            return n_running
        time.sleep(0.05)


@should
def compressed(peer: Peer) -> None:
    """compressed: a body in gzip is taken, or refused with 415

    RFC 9110, section 15.5.16: clients send it again without
    https://www.rfc-editor.org/rfc/rfc9110#section-15.5.16
    """
    path, body = peer.request()
    packed = gzip.compress(json.dumps(body).encode())
    reply = peer.ask("POST", path, packed, Content_Encoding="gzip").if_there()
    assert reply.status in (200, 415)


@must(profiles="chat responses")
def key(peer: Peer) -> None:
    """key: without the key the answer is a 401 with an error object

    the guide on error codes: SDKs raise AuthenticationError for 401
    https://platform.openai.com/docs/guides/error-codes
    """
    reply = peer.ask("POST", *peer.request(), **peer.without_key())
    assert reply.status == 401, "expected status 401 without the key"
    assert reply.error.get("message"), "expected an error object"
