"""What the relay costs: a scripted upstream in another process, asked directly and through this server.

    python bench.py relay --> results: latency and events a second, by way

A contender is a way to the same upstream, which writes the time into each of its deltas: the clock of all
processes is one, CLOCK_MONOTONIC. A client reads the times where they arrive, whatever frame has them.

Not here: how fast a model behind the relay is.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import sse
from benches.common import cpu_name, repeat_option, write

#  way to the upstream: endpoint
WAYS = {"direct": "/v1/chat/completions", "chat": "/v1/chat/completions", "responses": "/v1/responses"}
WRITTEN_AT = re.compile(rb'"(?:content|delta)":"(\d+\.\d+) ')
N_STREAMS = 32


class Load(NamedTuple):
    """What the upstream is asked to write."""

    n_events: int
    pace_s: float  # between two events


# --- the scripted upstream ----------------------------------------------------------------------------------


async def upstream_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer one request: with as many frames as its message says, or with the list of models."""
    request = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"content-length: *(\d+)", request, re.IGNORECASE)
    head = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nConnection: close\r\n\r\n"
    if length is None:
        writer.write(head % b"application/json" + b'{"object":"list","data":[{"id":"bench"}]}')
    else:
        body = json.loads(await reader.readexactly(int(length[1])))
        load = Load(*json.loads(body["messages"][0]["content"]))
        writer.write(head % b"text/event-stream")
        chunk = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "bench"}
        frame = sse.encode(sse.dumps(chunk | {"choices": [{"index": 0, "delta": {"content": "%.6f token"}}]}))
        for n in range(load.n_events):
            if n and load.pace_s:
                await asyncio.sleep(load.pace_s)
            writer.write(frame % time.perf_counter())
            await writer.drain()
        end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
        writer.write(sse.encode(sse.dumps(chunk | end)) + sse.DONE)
    await writer.drain()
    writer.close()


async def upstream_process() -> None:
    listening = await asyncio.start_server(upstream_connection, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    print(f"listening http://127.0.0.1:{port}", flush=True)
    await listening.serve_forever()


@contextlib.contextmanager
def started(*command: str) -> Iterator[str]:
    """A process of this folder that announces its URL."""
    folder = Path(__file__).parent.parent
    with subprocess.Popen(
        [sys.executable, *command], cwd=folder, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout
            yield next(line.split()[1] for line in process.stdout if line.startswith("listening"))
        finally:
            process.kill()


# --- what is measured ---------------------------------------------------------------------------------------


class DeltaTimes(NamedTuple):
    """Seconds of the common clock."""

    written_at: float  # by the upstream
    read_at: float  # by the client


def request_body(path: str, load: Load) -> bytes:
    text = json.dumps(load)
    body: dict[str, Any] = {"model": "bench", "stream": True, "store": False}
    if path.endswith("responses"):
        body["input"] = text
    else:
        body["messages"] = [{"role": "user", "content": text}]
    return json.dumps(body).encode()


async def times(url: str, path: str, load: Load) -> list[DeltaTimes]:
    """The times of each delta of one stream."""
    deltas = []
    body = request_body(path, load)
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=2**26)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    async for line in reader:
        if match := WRITTEN_AT.search(line):
            deltas.append(DeltaTimes(float(match[1]), time.perf_counter()))
        if line.startswith((b"data: [DONE]", b"event: response.output_text.done")):
            break
    writer.close()
    return deltas


async def first_event(url: str, path: str, _: int) -> float:
    """Milliseconds from the request to the first delta."""
    asked_at = time.perf_counter()
    (delta,) = await times(url, path, Load(1, 0))
    return 1e3 * (delta.read_at - asked_at)


async def latency(url: str, path: str, n_events: int) -> float:
    """Milliseconds from the upstream's write to the client's read, the median of a stream of 200 events/s."""
    deltas = await times(url, path, Load(n_events // 40, 0.005))
    return 1e3 * median(delta.read_at - delta.written_at for delta in deltas)


async def rate(url: str, path: str, n_events: int, n_streams: int = 1) -> float:
    """Events a second, of all streams together."""
    load = Load(n_events // n_streams, 0)
    asked_at = time.perf_counter()
    streams = await asyncio.gather(*(times(url, path, load) for _ in range(n_streams)))
    ended_at = max(deltas[-1].read_at for deltas in streams)
    return sum(map(len, streams)) / (ended_at - asked_at)


async def before_the_second(url: str, path: str, _: int) -> float:
    """1 if the client had the upstream's first frame before the second was written."""
    first, second = await times(url, path, Load(2, 0.1))
    return float(first.read_at < second.written_at)


# fmt: off
RELAYED: dict[str, Callable[[str, str, int], Any]] = {
    "first event, ms":                                first_event,
    "an event, ms":                                   latency,
    "events/s":                                       rate,
    f"events/s, {N_STREAMS} streams":                 partial(rate, n_streams=N_STREAMS),
    "first one is here before the second is written": before_the_second,
}
# fmt: on


# --- rounds and their table ---------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> None:
    results: dict[str, dict[str, list[float]]] = {name: {way: [] for way in WAYS} for name in RELAYED}
    with (
        started("-m", "benches.relay") as direct,
        started("server.py", "--upstream", direct + "/v1", "--port", "0", "--log-level", "warning") as relay,
    ):
        urls = {"direct": direct, "chat": relay, "responses": relay}
        for number in range(args.repeat + 1):
            for name, measure in RELAYED.items():
                for way, path in WAYS.items():
                    value = asyncio.run(measure(urls[way], path, args.events))
                    if number > 0:  # the first round warms up
                        results[name][way].append(value)
            print(f"round {number}/{args.repeat}", file=sys.stderr)
    medians = {name: [median(values) for values in ways.values()] for name, ways in results.items()}
    lines = [
        f"{date.today()}, a scripted worker, asked directly and through `server.py --upstream`,",
        f"{cpu_name()}, {os.cpu_count()} cores,",
        f"Python {platform.python_version()}, httpx2 {version('httpx2')}, uvicorn {version('uvicorn')}.",
        "",
        f"| median of {args.repeat} | direct | chat | responses | chat / direct | responses / direct |",
        "|---|---|---|---|---|---|",
        *(table_row(name, values) for name, values in medians.items()),
        "",
    ]
    write(lines, args.out)


def table_row(name: str, medians: list[float]) -> str:
    """A row of the table; `medians` has a value for each of WAYS."""
    if RELAYED[name] is before_the_second:
        cells = ["yes" if value == 1 else "no" for value in medians]
        return f"| {name} | " + " | ".join(cells) + " | | |"
    direct, *relayed = medians
    cells = [f"{value:.0f}" if value > 100 else f"{value:.2f}" for value in medians]
    ratios = [f"{value / direct:.2f}" for value in relayed]
    return f"| {name} | " + " | ".join(cells + ratios) + " |"


def options(add: argparse.ArgumentParser) -> None:
    repeat_option(add)
    add.add_argument("--events", type=int, default=8000, metavar="N", help="in a stream (default: 8000)")


if __name__ == "__main__":
    asyncio.run(upstream_process())
