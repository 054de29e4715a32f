"""Rules on what clients do besides asking: they read slowly, leave, come several at once, compress.

    Peer --check--> nothing, or Failed, or NotApplicable

Authority: that of each rule is the link in its table.

Not here: what a stream says (checks_streams.py, rules.py).
"""

import gzip
import json
import re
import time
from collections.abc import Callable

from audit.peer import Failed, Json, NotApplicable, Peer, expect
from audit.probes import CUT, GITHUB, HI, OPENAI, STORY, Check
from audit.rules_events import TERMINAL

PAUSE_S = 1.5
LONG_STREAM: Json = STORY | {"max_output_tokens": 200}


def slow_reader(peer: Peer) -> None:
    """A client that pauses gets all of the stream: back-pressure loses nothing."""
    with peer.stream("/responses", LONG_STREAM | peer.long) as events:
        seen = [next(events)]
        time.sleep(PAUSE_S)
        seen += events
    last = seen[-1].get("type")
    expect(last in TERMINAL, f"expected a terminal event at the end of a pause, got {last}", seen[-1])
    numbers = [event.get("sequence_number") for event in seen]
    if None not in numbers:  # else the rule "numbers" has said so
        expect(numbers == list(range(len(seen))), "expected no event to be lost", numbers)


def two_at_once(peer: Peer) -> None:
    """Their events come on their own connections."""
    body = HI | {"max_output_tokens": 2 * CUT}
    with peer.stream("/responses", body) as one, peer.stream("/responses", body) as other:
        ends = [[*one][-1], [*other][-1]]
    ids = [(end.get("response") or {}).get("id") for end in ends]
    expect(all(ids) and ids[0] != ids[1], f"expected a response in each stream, got the ids {ids}", ends)


TRIES = 3  # of what a busy machine may spoil


def begins_at_once(peer: Peer) -> None:
    """The first event tells that the request was accepted; it need not wait for the prompt to be read."""
    shares = []
    for number in range(TRIES):  # each prompt is new to the prefix cache
        prompt = f"Text {number}. " + "The quick brown fox jumps over the lazy dog. " * 80
        first, first_delta = seconds_to_events(peer, HI | {"input": prompt, "max_output_tokens": CUT})
        shares.append(first / first_delta)
        if shares[-1] < 0.8:
            return
    message = "expected the first event well before the first delta"
    raise Failed(message, f"it took {min(shares):.0%} of the time to the first delta, or more")


def seconds_to_events(peer: Peer, body: Json) -> tuple[float, float]:
    """To the first event of a stream, and to its first delta."""
    started_at = time.monotonic()
    with peer.stream("/responses", body) as events:
        next(events)
        first = time.monotonic() - started_at
        for event in events:
            if str(event.get("type")).endswith(".delta"):
                return first, time.monotonic() - started_at
    raise NotApplicable("the stream has no delta")


GAUGES = "num_requests_running|requests_processing|num_running_reqs"  # vLLM's and ours, llama.cpp's, SGLang's
RUNNING = re.compile(rf"^\w+:(?:{GAUGES})\S* ([\d.e+]+)", re.MULTILINE)
PATIENCE_S = 2


def leaving_ends_the_work(peer: Peer) -> None:
    """Seen where the server has metrics: the gauge of running requests falls before the answer's end."""
    n_others = settled(peer, lambda n: n == 0)
    with peer.stream("/responses", STORY | {"max_output_tokens": 2000} | peer.long) as events:
        next(events)
        n_with_ours = settled(peer, lambda n: n > n_others)
    if n_with_ours <= n_others:
        raise NotApplicable("the metrics do not show a running request")
    n_left = settled(peer, lambda n: n <= n_others)
    message = "expected the work to end when its client left"
    expect(n_left <= n_others, message, f"{n_left:g} running, {PATIENCE_S} s later")


def settled(peer: Peer, is_so: Callable[[float], bool]) -> float:
    """How many requests run, once that is so, or after PATIENCE_S."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_so(n_running := running(peer)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return n_running


def running(peer: Peer) -> float:
    """Requests in flight, as Prometheus metrics have them."""
    reply = peer.at_root().ask("GET", "/metrics")
    counts = RUNNING.findall(reply.body.decode("utf-8", "replace"))
    if reply.status != 200 or not counts:
        raise NotApplicable("there are no metrics of running requests")
    return sum(map(float, counts))


def compressed_body(peer: Peer) -> None:
    """Codex and other clients compress; who cannot unpack says 415, and they send it again."""
    body = gzip.compress(json.dumps({"model": peer.model} | HI).encode())
    reply = peer.ask("POST", "/responses", body, Content_Encoding="gzip")
    if reply.status in (404, 405, 501):
        raise NotApplicable(f"no Responses API: {reply.refusal}")
    expect(reply.status in (200, 415), "expected an answer to a body in gzip, or a 415", reply)


def key_is_asked_for(peer: Peer) -> None:
    if not peer.has_key:
        raise NotApplicable("no key was given")
    reply = peer.without_key().ask("POST", "/responses", {"model": peer.model} | HI)
    expect(reply.status == 401, "expected status 401 without the key", reply)
    error = reply.json.get("error")
    expect(isinstance(error, dict) and error.get("message"), "expected an error object", reply)


# --- the table ----------------------------------------------------------------------------------------------

# fmt: off
CHECKS = {
    #  rule    what checks it, its profiles, its strength, bugs of tests/BUGS.md
    #      title
    #      source
    #      link
    "slow-reader": Check(slow_reader, "responses", "must", "",
        "a client that pauses loses nothing of its stream",
        "TCP: what waits is held back, not dropped",
        OPENAI + "responses-streaming"),
    "two-at-once": Check(two_at_once, "responses", "must", "C07",
        "two streams at once are two responses, each on its own connection",
        "the API reference: a stream is of one response",
        OPENAI + "responses-streaming"),
    "first-event": Check(begins_at_once, "responses", "advice", "",
        "the first event does not wait for a long prompt to be read",
        "proxies and clients end what says nothing for some seconds",
        OPENAI + "responses-streaming"),
    "leaving": Check(leaving_ends_the_work, "responses", "should", "I01",
        "the work of a foreground stream ends when its client leaves",
        "what nobody reads takes the place of others",
        GITHUB + "vllm-project/vllm/pull/11190"),
    "compressed": Check(compressed_body, "responses", "should", "",
        "a body in gzip is taken, or refused with 415",
        "RFC 9110, section 15.5.16: clients send it again without",
        "https://www.rfc-editor.org/rfc/rfc9110#section-15.5.16"),
    "key": Check(key_is_asked_for, "chat responses", "must", "",
        "without the key the answer is a 401 with an error object",
        "the guide on error codes: SDKs raise AuthenticationError for 401",
        "https://platform.openai.com/docs/guides/error-codes"),
}
# fmt: on
