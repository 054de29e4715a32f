"""GET /debug/steps over the real server: what the engine did, step by step; what is kept, and who reads it.

That a step shows the scheduler's state is held where a scheduler has most to do: WatchedScheduler of
helpers/engines.py looks at each step of test_scheduling.py and test_engine.py.
"""

import asyncio
import itertools
import json
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import pytest

import service.steps
import sse
from helpers.engines import alone, endless, play, started
from helpers.serving import Json, Server, http_bytes, http_chunks
from request.room import Rooms, Visit
from service.steps import Steps

FLAGS = ("--debug-steps", "--speculate", "4", "--api-key", "ada", "--api-key", "bob")


@contextmanager
def events_of(server: Server, key: str) -> Iterator[Iterator[Json]]:
    """The events of /debug/steps, as they come."""
    request = http_bytes("/debug/steps", method="GET", Authorization=f"Bearer {key}")
    with server.connect(request) as connection:
        parser = sse.Parser()
        yield (json.loads(event.data) for chunk in http_chunks(connection) for event in parser.feed(chunk))


def ask(server: Server, key: str, prompt: str, **more: Any) -> tuple[str, Json]:
    """The id of a request, and its answer."""
    body = {"model": "tiny", "input": prompt, "temperature": 0} | more
    reply = server.post("/v1/responses", body, Authorization=f"Bearer {key}")
    assert reply.status == 200, reply.body
    return reply.headers["x-request-id"], reply.json


def shares_until_ended(server: Server, key: str, request_id: str) -> list[Json]:
    """What the steps did for all requests, up to the end of this one."""
    shares: list[Json] = []
    with events_of(server, key) as events:
        for event in events:
            shares += event["sequences"]
            if any(each.get("request_id") == request_id and "ended" in each for each in event["sequences"]):
                break
    return shares


def test_each_key_reads_its_own_texts(server: Server) -> None:
    """Of others the shapes: how many tokens, which pages, when."""
    assert server.get("/debug/steps").status == 401
    _, ada = ask(server, "ada", "Where did Ada hide the silver key?", top_logprobs=3)
    bob_id, _ = ask(server, "bob", "Say OK")
    shares = shares_until_ended(server, "bob", bob_id)
    (of_bob,) = {share["sequence"] for share in shares if share.get("request_id") == bob_id}
    of_ada = [share for share in shares if share["sequence"] == of_bob - 1]
    assert not any(word in json.dumps(of_ada) for word in ('"request_id"', '"tokens"', '"text"', "logprob"))
    assert sum(share["n_tokens"] for share in of_ada) == ada["usage"]["output_tokens"]
    assert of_ada[0]["page_table"]
    tokens = [token for share in shares if share["sequence"] == of_bob for token in share["tokens"]]
    assert tokens[0]["text"] == "<think>"


@pytest.mark.parametrize("is_slow", [False, True])
def test_a_reader_that_is_late_or_slow_loses_the_oldest_steps(
    monkeypatch: pytest.MonkeyPatch, is_slow: bool
) -> None:
    """And it holds up neither the engine nor the memory."""
    monkeypatch.setattr(service.steps, "MAX_STEPS", 20)

    async def main() -> list[int]:
        parser = sse.Parser()
        visit = Visit(Rooms(max_streams=1, max_body_bytes=2**20, is_shared=False), "")
        async with aclosing(steps.read(visit, asyncio.Event())) as reads:
            numbers = await some(reads, parser) if is_slow else []
            await asyncio.to_thread(alone, engine, endless(100, 200))  # it reads nothing meanwhile
            while not numbers or numbers[-1] < steps.steps[-1][0]["step"]:
                numbers += await some(reads, parser)
        return numbers

    async def some(reads: AsyncIterator[bytes], parser: sse.Parser) -> list[int]:
        """What comes in one turn of the event loop: few steps, however many readers there are.

        Bug: 20 readers of 2,000 steps stopped all streams for 0.6 s.
        """
        events = parser.feed(await anext(reads))
        assert len(events) <= service.steps.STEPS_A_TURN
        return [json.loads(event.data)["step"] for event in events]

    with started() as engine:
        steps = Steps(engine, lambda _: b"")
        alone(engine, endless(10, 20))
        numbers = play(main())
    assert numbers == sorted(set(numbers))
    assert max(b - a for a, b in itertools.pairwise([0, *numbers])) > 100


def test_a_stop_ends_the_stream(server: Server) -> None:
    """The last test of this server."""
    with events_of(server, "ada") as events:
        ask(server, "ada", "hi", max_output_tokens=1)
        assert next(events)["step"] == 0
        server.interrupt(signal.SIGTERM)
        list(events)  # ends as it should: http_chunks() has read the last chunk
        assert server.exit_status() == 0
