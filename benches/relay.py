"""What the relay costs: a scripted upstream in another process, asked directly and through this server.

    upstream --"TIME token"--> [server.py --upstream] --times()--> latency and events a second, by way

The upstream writes the time into each of its deltas: the clock of all processes is one, CLOCK_MONOTONIC. The
client looks for these times in the bytes, whatever frame has them.
"""

import argparse
import asyncio
import json
import re
import time
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import sse
from benches.harness import Case, Figures, number_option, report
from benches.processes import started, stream

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
WRITTEN_AT = re.compile(rb'"(?:content|delta)":"(\d+\.\d+) ')
N_STREAMS = 32
PACE_S = 0.005  # between two events whose latency is measured

# --- the scripted upstream ----------------------------------------------------------------------------------


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer one request: with as many frames as its message says, or with the list of models."""
    request = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"content-length: *(\d+)", request, re.IGNORECASE)
    head = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nConnection: close\r\n\r\n"
    if length is None:
        writer.write(head % b"application/json" + b'{"object":"list","data":[{"id":"bench"}]}')
    else:
        body = json.loads(await reader.readexactly(int(length[1])))
        n_events, pace_s = json.loads(body["messages"][0]["content"])
        chunk = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "bench"}
        delta = {"choices": [{"index": 0, "delta": {"content": "%.6f token"}}]}
        frame = sse.encode(sse.dumps(chunk | delta))
        writer.write(head % b"text/event-stream")
        for _ in range(n_events):
            writer.write(frame % time.perf_counter())
            await writer.drain()
            if pace_s:
                await asyncio.sleep(pace_s)
        end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
        writer.write(sse.encode(sse.dumps(chunk | end)) + sse.DONE)
    await writer.drain()
    writer.close()


async def upstream() -> None:
    listening = await asyncio.start_server(answer, "127.0.0.1", 0)
    print(f"listening http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", flush=True)
    await listening.serve_forever()


# --- the client ---------------------------------------------------------------------------------------------


class DeltaTimes(NamedTuple):
    """Seconds of the common clock."""

    written_at: float  # by the upstream
    read_at: float  # by the client


async def times(url: str, path: str, n_events: int, pace_s: float) -> list[DeltaTimes]:
    """Return the times of each delta of one stream."""
    text = json.dumps([n_events, pace_s])
    body: dict[str, Any] = {"model": "bench", "stream": True, "store": False, "input": text}
    if path == CHAT:
        body["messages"] = [{"role": "user", "content": body.pop("input")}]
    deltas = []
    async for lines in stream(url, path, body):
        read_at = time.perf_counter()
        deltas += [DeltaTimes(float(written_at), read_at) for written_at in WRITTEN_AT.findall(lines)]
    return deltas


# --- what is measured ---------------------------------------------------------------------------------------


def latency(url: str, path: str, n_events: int) -> Figures:
    """From the question to the first delta, and from each write of the upstream to the client's read."""
    asked_at = time.perf_counter()
    deltas = asyncio.run(times(url, path, n_events, PACE_S))
    late_s = [delta.read_at - delta.written_at for delta in deltas]
    return {"first event, ms": 1e3 * (deltas[0].read_at - asked_at), "an event, ms": 1e3 * median(late_s)}


def rate(url: str, path: str, n_events: int, n_streams: int) -> Figures:
    async def together() -> list[list[DeltaTimes]]:
        return await asyncio.gather(*(times(url, path, n_events // n_streams, 0) for _ in range(n_streams)))

    asked_at = time.perf_counter()
    streams = asyncio.run(together())
    ended_at = max(deltas[-1].read_at for deltas in streams)
    return {f"events/s, {n_streams} streams": sum(map(len, streams)) / (ended_at - asked_at)}


def run(args: argparse.Namespace) -> None:
    with started("-m", "benches.relay") as direct:
        flags = ["--upstream", f"{direct.url}/v1", "--port", "0", "--log-level", "warning"]
        with started("server.py", *flags) as front:
            ways = {
                "direct": (direct.url, CHAT),
                "chat": (front.url, CHAT),
                "responses": (front.url, RESPONSES),
            }
            n = args.events
            cases: list[Case] = [{name: partial(latency, *way, n // 40) for name, way in ways.items()}]
            for n_streams in (1, N_STREAMS):
                cases.append({name: partial(rate, *way, n, n_streams) for name, way in ways.items()})
            report(args, "A scripted upstream, directly and through `server.py --upstream`.", cases)


def options(add: argparse.ArgumentParser) -> None:
    number_option(add, "--events", 8000, "of a stream")


if __name__ == "__main__":
    asyncio.run(upstream())
