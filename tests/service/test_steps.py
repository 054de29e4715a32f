"""GET /debug/steps over the real server: what the engine did, step by step; what is kept, and who reads it.

That a step shows the scheduler's state is held where a scheduler has most to do: WatchedScheduler of
helpers/engines.py looks at each step of test_scheduler.py, test_scheduling.py and test_engine.py.
"""

import asyncio
import itertools
import json
import signal
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import pytest

import service.steps
import sse
from helpers.engines import alone, endless, play, started
from helpers.serving import Json, Server, http_chunks, serve
from service.steps import Steps

SECRET = "Where did Ada hide the silver key?"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve("--debug-steps", "--speculate", "4") as started:
        yield started


@contextmanager
def events_of(server: Server, key: str = "none") -> Iterator[Iterator[Json]]:
    """The events of /debug/steps, as they come."""
    request = f"GET /debug/steps HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n\r\n"
    with server.connect(request.encode()) as connection:
        parser = sse.Parser()
        yield (json.loads(event.data) for chunk in http_chunks(connection) for event in parser.feed(chunk))


def ask(server: Server, prompt: str, key: str = "none", **more: Any) -> tuple[str, Json]:
    """The id of a request, and its answer."""
    body = {"model": "tiny", "input": prompt, "temperature": 0} | more
    reply = server.post("/v1/responses", body, Authorization=f"Bearer {key}")
    assert reply.status == 200, reply.body
    return reply.headers["x-request-id"], reply.json


def until_ended(events: Iterator[Json], request_id: str) -> list[Json]:
    """The steps up to the one in which a request ends."""
    read: list[Json] = []
    for event in events:
        read.append(event)
        for share in event["sequences"]:
            if share.get("request_id") == request_id and "ended" in share:
                return read
    raise AssertionError(f"expected the end of {request_id}, got {read[-1]}")


def shares_of(steps: list[Json], request_id: str) -> list[Json]:
    """What the steps did for a request."""
    shares = [share for step in steps for share in step["sequences"] if share.get("request_id") == request_id]
    return [share for share in shares if "phase" in share or "ended" in share]


def seen(server: Server, request_id: str, key: str = "none") -> list[Json]:
    with events_of(server, key) as events:
        return shares_of(until_ended(events, request_id), request_id)


# --- what is seen -------------------------------------------------------------------------------------------


def test_the_tokens_of_the_steps_are_those_of_the_response(server: Server) -> None:
    request_id, response = ask(server, "What is 2+2?")
    shares = seen(server, request_id)
    usage = response["usage"]
    tokens = [token for share in shares for token in share["tokens"]]
    assert len(tokens) == usage["output_tokens"]
    text = "".join(token["text"] for token in tokens)
    reasoning_text, answer = (item["content"][0]["text"] for item in response["output"])
    assert text == f"<think>\n{reasoning_text}\n</think>\n\n{answer}<|im_end|>"
    assert [share["phase"] for share in shares] == ["prefill", *["decode"] * (len(shares) - 1)]
    assert (shares[0]["start"], shares[0]["end"]) == (0, usage["input_tokens"])
    assert shares[-1]["ended"] == "stop"


# --- who may see it, and who is late or slow ----------------------------------------------------------------


def test_each_key_reads_its_own_texts() -> None:
    """Of others the shapes: how many tokens, which pages, when."""
    with serve("--debug-steps", "--api-key", "ada", "--api-key", "bob") as server:
        assert server.get("/debug/steps").status == 401
        ada_id, ada = ask(server, SECRET, "ada", top_logprobs=3)
        bob_id, _ = ask(server, "Say OK", "bob")
        with events_of(server, "bob") as events:
            steps = until_ended(events, bob_id)
        of_ada = [share for step in steps for share in step["sequences"] if share["sequence"] == 0]
        shared = json.dumps(of_ada)
        assert not any(word in shared for word in (ada_id, '"tokens"', "text", 'id"', "logprob"))
        assert sum(share["n_tokens"] for share in of_ada) == ada["usage"]["output_tokens"]
        assert of_ada[0]["page_table"][:1] == [0]
        assert shares_of(steps, bob_id)[0]["tokens"][0]["text"] == "<think>"


@pytest.mark.parametrize("is_slow", [False, True])
def test_a_reader_that_is_late_or_slow_loses_the_oldest_steps(
    monkeypatch: pytest.MonkeyPatch, is_slow: bool
) -> None:
    """And it holds up neither the engine nor the memory."""
    monkeypatch.setattr(service.steps, "MAX_STEPS", 20)

    async def main() -> list[int]:
        parser = sse.Parser()
        async with aclosing(steps.read("", asyncio.Event())) as frames:
            got = [await anext(frames)] if is_slow else []
            await asyncio.to_thread(alone, engine, endless(100, 200))  # it reads nothing meanwhile
            got += [await anext(frames) for _ in range(25 if is_slow else 20)]
        return [json.loads(event.data)["step"] for frame in got for event in parser.feed(frame)]

    with started() as engine:
        steps = Steps(engine, lambda _: b"")
        alone(engine, endless(10, 20))
        numbers = play(main())
    assert numbers == sorted(set(numbers))
    assert max(b - a for a, b in itertools.pairwise([0, *numbers])) > 100


def test_a_stop_ends_the_stream() -> None:
    with serve("--debug-steps") as server, events_of(server) as events:
        ask(server, "hi", max_output_tokens=1)
        assert next(events)["step"] == 0
        server.interrupt(signal.SIGTERM)
        list(events)  # ends as it should: http_chunks() has read the last chunk
        assert server.exit_status() == 0
