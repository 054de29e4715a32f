"""Servers that are slow, busy, moody or hostile: by that none breaks a rule, and none holds the audit up."""

import itertools

import pytest

from audit.peer import Peer
from audit.session import ENOUGH, judge, look
from audit.stream import frames_of
from helpers.upstream import CHUNKED, DONE, Answer, Exchange, event, head, json_answer, says, upstream

NEVER_DONE = {"id": "resp_1", "background": True, "status": "in_progress", "output": []}
N_ASKED = itertools.count(1)


def moody(exchange: Exchange) -> None:
    """Say something else each time."""
    n = next(N_ASKED)
    usage = {"prompt_tokens": 3, "completion_tokens": n, "total_tokens": 3 + n}
    message = {"role": "assistant", "content": f"I have been asked {n} times."}
    choice = {"index": 0, "message": message, "delta": message, "finish_reason": "stop"}
    answer = {"object": "chat.completion", "choices": [choice], "usage": usage}
    frames = event({"choices": [choice]}) + event({"choices": [], "usage": usage}) + DONE
    exchange.send(head() + frames if exchange.body["stream"] else json_answer(answer))


ELSE = "answers differently each time"
MOODS: list[tuple[str, Answer, str, str]] = [
    ("background-completes", says(json_answer(NEVER_DONE)), "error", "NoReply: "),
    ("background", says(head(status="503 Busy")), "error", "the server is busy"),
    ("chat-usage", moody, "n/a", ELSE),
    ("stop-string", moody, "n/a", ELSE),
    ("chat-stream-is-answer", moody, "n/a", ELSE),
]


@pytest.mark.parametrize(("rule", "answer", "verdict", "reason"), MOODS)
def test_a_slow_busy_or_moody_server_breaks_no_rule(
    rule: str, answer: Answer, verdict: str, reason: str
) -> None:
    with upstream(answer) as server:
        result = judge(Peer(server.url, "m", budget=0.5 if rule == "background-completes" else 9), rule)
    assert (result.verdict, reason in result.reason) == (verdict, True)


def test_a_server_too_slow_for_a_long_answer_is_audited() -> None:
    """Bug: the request that looks for a way to long answers ended the audit when its time was over."""
    message = {"role": "assistant", "content": "Hi."}
    said = json_answer({"object": "chat.completion", "choices": [{"index": 0, "message": message}]})

    def answer(exchange: Exchange) -> None:
        if ENOUGH in exchange.body.values():
            exchange.wait_closed()
        else:
            exchange.send(said)

    with upstream(answer) as server:
        peer = Peer(server.url, "m", budget=0.5)
        assert look(peer)
        assert peer.long == {}


#                              what it sends first, then again and again: more than is read in time
HOSTILE = {
    "a body without end":      (head(), b" " * 65536),
    "a chunk of a terabyte":   (head("text/plain", "200 OK", CHUNKED) + b"ffffffffff\r\n", b" " * 65536),
    "chunks without end":      (head("text/plain", "200 OK", CHUNKED), b"5\r\nabcde\r\n" * 10_000),
    "headers by the byte":     (b"HTTP/1.1 200 OK\r\nx: ", b"y"),
    "half a body":             (head("text/plain", "200 OK", "Content-Length: -1"), b""),
    "a body that never comes": (head("text/plain", "200 OK", "Content-Length: 9"), b""),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_server_is_left_in_time(kind: str) -> None:
    first, more = HOSTILE[kind]

    def answer(exchange: Exchange) -> None:
        exchange.send(first)
        while more:
            exchange.send(more)
        exchange.wait_closed()

    with upstream(answer) as server:
        result = judge(Peer(server.url, "m", budget=0.5), "effort")
    assert (result.verdict, result.reason[:9]) == ("error", "NoReply: ")


def test_a_frame_without_an_end_is_read() -> None:
    """Bug: each piece was searched from each of its lines: 400 pieces took 28 s, and these did not end."""
    (rest,) = frames_of([b"data: x\n"] * 3000)
    assert rest.fault
