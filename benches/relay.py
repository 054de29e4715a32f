"""A scripted worker in another process, asked directly and through `server.py --upstream`.

Not here: how fast a model behind it is.
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

# A contender is a way to the same worker, which writes the time into each of its deltas: the clock of all
# processes is one, CLOCK_MONOTONIC. A client reads the times where they arrive, whatever is around them.
WAYS = {"direct": "/v1/chat/completions", "chat": "/v1/chat/completions", "responses": "/v1/responses"}
WRITTEN_AT = re.compile(rb'"(?:content|delta)":"(\d+\.\d+) ')
N_STREAMS = 32


class Load(NamedTuple):
    """What the worker is asked to write."""

    n_events: int
    pace_s: float  # between two of them


async def worker_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One request to the worker: as many frames as its message says."""
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


async def worker_process() -> None:
    listening = await asyncio.start_server(worker_connection, "127.0.0.1", 0)
    print(f"listening http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", flush=True)
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


async def times(url: str, path: str, load: Load) -> list[tuple[float, float]]:
    """When each delta was written, and when it was here."""
    found = []
    text = json.dumps(load)
    says = (
        {"input": text} if path.endswith("responses") else {"messages": [{"role": "user", "content": text}]}
    )
    body = json.dumps({"model": "bench", "stream": True, "store": False} | says).encode()
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port, limit=2**26)
    head = f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    async for line in reader:
        if written := WRITTEN_AT.search(line):
            found.append((float(written[1]), time.perf_counter()))
        if line.startswith((b"data: [DONE]", b"event: response.output_text.done")):
            break
    writer.close()
    return found


async def first_event(url: str, path: str, _: int) -> float:
    """Milliseconds from the request to the first delta."""
    asked_at = time.perf_counter()
    return 1e3 * ((await times(url, path, Load(1, 0)))[0][1] - asked_at)


async def latency(url: str, path: str, n_events: int) -> float:
    """Milliseconds from the worker's write to the client's read, the median of a stream of 200 events/s."""
    found = await times(url, path, Load(n_events // 40, 0.005))
    return 1e3 * median(here - written for written, here in found)


async def rate(url: str, path: str, n_events: int, n_streams: int = 1) -> float:
    """Events a second, of all streams together."""
    load = Load(n_events // n_streams, 0)
    asked_at = time.perf_counter()
    found = await asyncio.gather(*(times(url, path, load) for _ in range(n_streams)))
    return sum(map(len, found)) / (max(pairs[-1][1] for pairs in found) - asked_at)


async def before_the_second(url: str, path: str, _: int) -> float:
    """1 if the client had the worker's first frame before the second was written."""
    (_written, first_here), (second_written, _here) = await times(url, path, Load(2, 0.1))
    return float(first_here < second_written)


# fmt: off
RELAYED: dict[str, Callable[[str, str, int], Any]] = {
    "first event, ms":                                first_event,
    "an event, ms":                                   latency,
    "events/s":                                       rate,
    f"events/s, {N_STREAMS} streams":                 partial(rate, n_streams=N_STREAMS),
    "first one is here before the second is written": before_the_second,
}
# fmt: on


def run(args: argparse.Namespace) -> None:
    found: dict[str, dict[str, list[float]]] = {name: {way: [] for way in WAYS} for name in RELAYED}
    with (
        started("-m", "benches.relay") as direct,
        started("server.py", "--upstream", direct + "/v1", "--port", "0", "--log-level", "warning") as front,
    ):
        for number in range(args.repeat + 1):  # the first round warms up
            for name, measured in RELAYED.items():
                for way, path in WAYS.items():
                    value = asyncio.run(measured(direct if way == "direct" else front, path, args.events))
                    found[name][way] += [value] if number else []
            print(f"round {number}/{args.repeat}", file=sys.stderr)
    lines = [
        f"{date.today()}, a scripted worker, asked directly and through `server.py --upstream`,",
        f"{cpu_name()}, {os.cpu_count()} cores,",
        f"Python {platform.python_version()}, httpx2 {version('httpx2')}, uvicorn {version('uvicorn')}.",
        "",
        f"| median of {args.repeat} | direct | chat | responses | chat / direct | responses / direct |",
        "|---|---|---|---|---|---|",
        *(relayed_row(name, [median(values) for values in ways.values()]) for name, ways in found.items()),
        "",
    ]
    write(lines, args.out)


def relayed_row(name: str, medians: list[float]) -> str:
    if RELAYED[name] is before_the_second:
        return f"| {name} | " + " | ".join("yes" if m == 1 else "no" for m in medians) + " | | |"
    cells = [f"{m:.0f}" if m > 100 else f"{m:.2f}" for m in medians]
    ratios = [f"{m / medians[0]:.2f}" for m in medians[1:]]
    return f"| {name} | " + " | ".join(cells + ratios) + " |"


def options(add: argparse.ArgumentParser) -> None:
    repeat_option(add)
    add.add_argument("--events", type=int, default=8000, metavar="N", help="in a stream (default: 8000)")


if __name__ == "__main__":
    asyncio.run(worker_process())
