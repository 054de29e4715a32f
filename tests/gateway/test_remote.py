"""A relay, this project's server in front of another one of its kind: all that holds of one holds of both.

The tests that test_server.py has of Responses and chat run again here, over a front without a model of its
own, which asks the worker behind it by /v1/chat/completions. Then the tests of what only a relay does.
"""

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from helpers.asked import CHAT, RESPONSES, created
from helpers.serving import Server, serve, until
from helpers.upstream import DONE, STREAM, Exchange, delta, finish, hangs, head, says, upstream

# Those that are tests are collected again, with the fixtures of this file.
from test_server import ASKED, chat_body, events, responses_body, test_chat, test_responses, timeless  # noqa: F401
from test_server import says as says_in

QUICK = ("--upstream-timeout", "probe=1")  # a probe that takes longer is a failure, on a busy machine too


@pytest.fixture(scope="module")
def worker() -> Iterator[Server]:
    with serve() as started:
        yield started


@pytest.fixture(scope="module")
def server(worker: Server) -> Iterator[Server]:
    """The front: the tests that are imported know it by this name."""
    with serve("--upstream", worker.url + "/v1", "--price", "3", model=None) as started:
        yield started


@pytest.mark.parametrize("asked", ASKED)
def test_a_front_says_what_its_worker_says(server: Server, worker: Server, asked: str) -> None:
    there, here = (s.post(RESPONSES, responses_body(asked) | {"seed": 7}).json for s in (worker, server))
    for name in ("output", "usage", "status", "incomplete_details", "model"):
        assert timeless(here[name]) == timeless(there[name])


def test_chat_passes_byte_for_byte(server: Server, worker: Server) -> None:
    """But for what differs from one request to the next, and the cost."""
    body = chat_body("thought, call") | {"stream": True, "stream_options": {"include_usage": True}}
    *there, used = events(worker, CHAT, body)
    *here, priced = events(server, CHAT, body)
    assert timeless(here) == timeless(there)
    cost = {"prompt_total_cost", "completion_total_cost", "total_cost"}
    assert priced["usage"].keys() - used["usage"].keys() == cost
    assert priced["usage"]["total_cost"] == 3 * used["usage"]["total_tokens"]


def test_each_choice_of_a_relayed_chat_is_a_stream() -> None:
    """Bug: it was one stream, however many sequences an upstream computed for it."""
    keys = ("--api-key", "mine", "--api-key", "yours", "--max-streams", "4")
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "n": 2, "stream": True}
    with (
        upstream(hangs) as hanging,
        serve("--upstream", hanging.url, *keys, model=None) as front,
        ThreadPoolExecutor(1) as pool,
    ):
        pool.submit(front.post, CHAT, body, Authorization="Bearer mine")
        until(lambda: front.get("/health", Authorization="Bearer yours").json["running"] == 1, "it runs")
        refused = front.post(CHAT, body, Authorization="Bearer mine")
        assert (refused.status, refused.json["error"]["code"]) == (429, "rate_limit_exceeded")
        assert "2 of 4 open requests" in refused.json["error"]["message"]
        front.process.kill()


TOO_LONG = "hi" * 9000


def test_what_the_worker_refuses_in_the_background_has_failed(server: Server) -> None:
    made = created(server, {"model": "tiny", "input": TOO_LONG, "background": True})
    path = f"{RESPONSES}/{made['id']}"
    until(lambda: server.get(path).json["status"] == "failed", "it has failed")
    found = server.get(path).json
    assert found["error"]["code"] == "invalid_prompt"
    assert "context" in found["error"]["message"]
    counted = server.post(RESPONSES + "/input_tokens", {"model": "tiny", "input": "hi"})
    assert (counted.status, counted.json["error"]["param"]) == (404, None)


# --- what breaks --------------------------------------------------------------------------------------------


def test_two_workers_and_a_model_here(tmp_path: Path) -> None:
    """Each name goes where it is; what is here wins, and is what `default` means."""
    with ExitStack() as stack:
        a = stack.enter_context(upstream(says(head() + delta(content="a") + finish() + DONE), "m", "tiny"))
        b = stack.enter_context(upstream(says(head() + delta(content="b") + finish() + DONE), "n"))
        keys = tmp_path / "keys"
        keys.write_text(f"# of a\n{a.url} k\n{b.url}  l\n")
        front = stack.enter_context(
            serve("--upstream", a.url, "--upstream", b.url, "--upstream-api-key-file", str(keys))
        )
        assert [model["id"] for model in front.get("/v1/models").json["data"]] == ["tiny", "m", "n"]
        asked = ({"model": name, "input": "hi"} for name in ("m", "n", "tiny", "default"))
        texts = [created(front, body)["output"][-1]["content"][0]["text"] for body in asked]
        assert texts == ["a", "b", *["Hello! How can I help you today?"] * 2]
        sent = [exchange.headers["authorization"] for exchange in a.exchanges + b.exchanges]
        assert sent == ["Bearer k", "Bearer l"]
        counts = front.health()
        assert (counts["relayed_done"], counts["relayed_usage_unknown"], counts["running"]) == (2, 2, 0)
        scraped = front.get("/metrics").body.decode()
        assert 'llmref:relayed_requests_done_total{model_name="tiny"} 2.0' in scraped


def test_the_time_to_the_first_token_begins_before_an_upstream_is_asked() -> None:
    """Bug: it began when the upstream had begun to answer."""
    waited: list[float] = []

    def begin_late(exchange: Exchange) -> None:
        asked_at = time.perf_counter()
        front.health()
        waited.append(time.perf_counter() - asked_at)
        exchange.send(head() + STREAM)

    with upstream(begin_late) as late, serve("--upstream", late.url, model=None) as front:
        created(front, {"model": "m", "input": "hi"})
        scraped = front.get("/metrics").body.decode()
    found = re.search(r"time_to_first_token_seconds_sum\S* (\S+)", scraped)
    assert found
    assert float(found[1]) > waited[0]


def test_health_is_that_of_what_can_answer() -> None:
    """Bug: 200 "ok" while the only upstream is down and every request gets 503. It may come later."""
    with upstream() as early:
        early.close()
    with serve("--upstream", early.url, *QUICK, model=None) as front:
        assert front.get("/health").status == 503  # from the start: its models are not known
        assert front.get("/health/live").status == 200
        assert front.get("/v1/models").json["data"] == []
        for path_ in (CHAT, RESPONSES):  # not 404: it may have the model
            reply = front.post(path_, {"model": "m"} | says_in(path_, "hi"))
            assert (reply.status, reply.headers["retry-after"]) == (503, "10")
        with upstream(port=early.port):
            until(lambda: front.get("/health").status == 200, "one has come")
            assert created(front, {"model": "m", "input": "hi"})["status"] == "completed"
            assert front.post(CHAT, {"model": "nope", "messages": []}).status == 404
    with serve("--upstream", early.url, *QUICK) as front:  # and a model here
        until(lambda: front.health()["upstreams_down"] == 1, "the upstream is down")
        assert front.get("/health").status == 200
