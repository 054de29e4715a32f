"""/metrics, /health, the log and what systemd is told: what those see who run the server."""

import json
import logging
import re
from contextlib import closing

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from helpers.asked import HI, NO_END, RESPONSES
from helpers.faulty_server import ENDS, RAISES, SLOW
from helpers.serving import Json, Server, http_bytes, http_frames, serve, until
from service import logs, metrics

ENDLESS: Json = HI | NO_END | {"seed": SLOW, "stream": True}

Sample = tuple[str, frozenset[tuple[str, str]]]
Samples = dict[Sample, float]


def scrape(server: Server) -> Samples:
    """Return the value of each name, without its prefix, and its labels, without the model."""
    reply = server.get("/metrics")
    assert (reply.status, reply.headers["content-type"]) == (200, prometheus_client.CONTENT_TYPE_LATEST)
    found: Samples = {}
    for family in text_string_to_metric_families(reply.body.decode()):
        for sample in family.samples:
            labels = frozenset(sample.labels.items() - {("model_name", "tiny")})
            found[sample.name.removeprefix(metrics.PREFIX), labels] = sample.value
    return found


def growth(server: Server, was: Samples) -> Samples:
    return {sample: value - was.get(sample, 0) for sample, value in scrape(server).items()}


def value(found: Samples, name: str, **labels: str) -> float:
    return found.get((name, frozenset(labels.items())), 0)


# --- metrics ------------------------------------------------------------------------------------------------


def test_requests_and_tokens(server: Server) -> None:
    was = scrape(server)
    changes: list[Json] = [{}, {"max_output_tokens": 5}, {"seed": RAISES}]
    answers = [server.post(RESPONSES, HI | more).json for more in changes]
    assert [answer["status"] for answer in answers] == ["completed", "incomplete", "failed"]
    usages = [answer["usage"] for answer in answers if answer["usage"]]
    served = {"handler": RESPONSES, "method": "POST", "status": "200"}
    asked = "http_requests_total"
    until(lambda: value(growth(server, was), asked, **served) == 3, "the last one has been counted")
    new = growth(server, was)
    assert value(new, "prompt_tokens_total") == sum(usage["input_tokens"] for usage in usages)
    assert value(new, "generation_tokens_total") == sum(usage["output_tokens"] for usage in usages)
    for reason, n in {"stop": 1, "length": 1, "error": 1, "abort": 0}.items():
        assert value(new, "request_success_total", finished_reason=reason) == n
    for name in ("e2e_request_latency_seconds", "time_to_first_token_seconds"):
        assert value(new, name + "_count") == value(new, name + "_bucket", le="+Inf") == 3
    to_first = value(new, "time_to_first_token_seconds_sum")
    assert 0 < to_first < value(new, "e2e_request_latency_seconds_sum")
    assert scrape(server)["process_resident_memory_bytes", frozenset()] > 10e6


@pytest.mark.bug("I04")
@pytest.mark.parametrize("background", [False, True])
def test_what_was_computed_is_counted_if_the_client_leaves(server: Server, background: bool) -> None:
    """The metrics counted no token of a stream that was left, or cancelled, and the log told of no output."""
    was = scrape(server)
    log = len(server.log())
    ask = http_bytes(RESPONSES, ENDLESS | {"background": background})
    with server.connect(ask) as client, closing(http_frames(client)) as chunks:
        id_ = json.loads(next(chunks).split(b"data: ")[1])["response"]["id"]
        for _ in range(40):
            next(chunks)
        held = scrape(server)
        assert value(held, "num_requests_running") == 1
        assert value(held, "background_responses", status="in_progress") == background
    if background:
        server.post(f"{RESPONSES}/{id_}/cancel", {})
    ends = {"name": "request_success_total", "finished_reason": "abort"}
    until(lambda: value(growth(server, was), **ends) == 1, "it is over")
    found = growth(server, was)
    n_prompt, n_generated = (value(found, f"{name}_tokens_total") for name in ("prompt", "generation"))
    assert n_prompt > 0
    assert n_generated > 30
    (line,) = (line for line in server.log()[log:].splitlines() if "cancelled: " in line)
    assert f"{n_prompt:.0f} tokens in, {n_generated:.0f} out" in line


def test_clients_cannot_make_series(server: Server) -> None:
    def ask(name: str) -> None:
        server.get(f"/v1/models/{name}?x={name}")
        server.get(f"/banana/{name}")
        server.request(f"BREW{name}", "/v1/models", None)

    ask("")
    server.get("/metrics")
    was = scrape(server).keys()
    for n in range(20):
        ask(str(n))
    assert scrape(server).keys() == was


# --- the log ------------------------------------------------------------------------------------------------


def test_each_line_of_json_knows_its_request() -> None:
    with serve("--log-format", "json") as server:
        replies = [server.post(RESPONSES, HI | more) for more in ({}, {"background": True}, {"seed": RAISES})]
        until(lambda: server.health()["background"] == 0, "it has ended")
        refused = server.post("/v1/ba%0Anana", {})
        until(lambda: refused.headers["x-request-id"] in server.log(), "it is noted, after its reply")
        lines: list[Json] = [json.loads(line) for line in server.log().splitlines()]
    for reply in (*replies, refused):
        own = [line for line in lines if line["request_id"] == reply.headers["x-request-id"]]
        assert [line["status"] for line in own if line["logger"] == "middleware"] == [reply.status]
        assert ("runs" in [line["logger"] for line in own]) == (reply is not refused)  # in the background too
    (failed,) = [line for line in lines if line["exception"]]
    assert "FloatingPointError" in failed["exception"]
    assert replies[2].headers["x-request-id"] in failed["message"]


def test_a_record_is_one_line_whatever_a_client_says(server: Server) -> None:
    forged = "x\x1b[2J\x9b2J\x7f\u2028\n2026-01-01 00:00:00,000 INFO front: forged"
    record = logging.LogRecord("middleware", logging.INFO, "", 0, "POST %s", (forged,), None)
    assert r"POST x\x1b[2J\x9b2J\x7f\u2028\n2026-01-01" in logs.Lines("text").format(record)
    was = len(server.log())
    server.post(RESPONSES, HI | {"tools": [{"type": forged}]})
    refused = server.post("/v1/x%0A2026-01-01", {})
    until(lambda: refused.headers["x-request-id"] in server.log(), "it is noted, after its reply")
    line = r"\d{4}-\d\d-\d\dT[\d:.]+Z [A-Z]+ \w+ \[req_\w+\]: .+"
    lines = server.log()[was:].splitlines()
    assert len(lines) >= 2
    assert [each for each in lines if not re.fullmatch(line, each)] == []
    assert not any(each.startswith("2026-01-01") for each in lines)


def test_without_its_engine_a_server_lives_but_is_not_ready(server: Server) -> None:
    """The last test of this server."""
    assert (server.get("/health").status, server.get("/health/live").status) == (200, 200)
    with server.connect(http_bytes(RESPONSES, HI | {"seed": ENDS})):
        until(lambda: server.get("/health").status == 503, "the engine's thread has ended")
    assert server.health()["status"] == "not ready"
    assert (server.get("/health/live").status, server.get("/health/live").json) == (200, {"status": "ok"})
