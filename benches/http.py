"""Servers beside each other over HTTP: ours, a front, vLLM, llama.cpp; chat completions or Responses.

    python bench.py http URL URL ...  --ask()--> Answer --rounds()--> table

To measure what our front costs, start it before the other server, and give both URLs; bench.py relay does so
with a scripted upstream. The client costs little: it looks for events, texts and counts in the bytes.

Rules of this file:
1. A prompt begins with characters that no prompt before it had, so that no server has it in its cache.
2. Time begins with the request, and tokens are those that the server counts in its usage.
"""

import argparse
import asyncio
import json
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx2 as httpx

from benches.harness import Case, Figures, number_option, prose, report

RESPONSES = "/responses"
SETTLE_S = 1.5  # threads of the server before may spin on, those of vLLM for 1.2 s
N_CHARACTERS = 4000  # of a long prompt: some 1000 tokens
N_FIRST = 8  # tokens of an answer whose first text counts: a marker has no text
STORY = "Write a long story about a lighthouse, its keeper and a storm."
TEXT = re.compile(rb'"(?:content|reasoning_content|reasoning|delta)": ?"(?!")')  # that is not empty


class Target(NamedTuple):
    url: str  # of the endpoint
    model: str
    settle_s: float = 0  # before it is asked


class Answer(NamedTuple):
    """Times are of time.monotonic(), which all processes of a machine share."""

    asked_at: float
    text_times: list[float]
    n_events: int


async def ask(target: Target, prompt: str, n_new: int, **more: Any) -> Answer:
    """Ask for a stream, and read it to its end."""
    prompt = f"{secrets.token_hex(4)}: {prompt}"
    if target.url.endswith(RESPONSES):
        body: dict[str, Any] = {"input": prompt, "max_output_tokens": n_new, "store": False}
    else:
        body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": n_new}
    body |= {"model": target.model, "stream": True, "temperature": 0} | more
    raw = json.dumps(body).encode()
    address = urlsplit(target.url)
    head = (
        f"POST {address.path} HTTP/1.1\r\nHost: {address.netloc}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    )
    asked_at = time.monotonic()
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(head.encode() + raw)
    status = await reader.readline()
    if b" 200 " not in status:
        raise SystemExit(f"{target.url}: expected status 200, got {status!r} {await reader.read(1000)!r}")
    times: list[float] = []
    n_events = 0
    rest = b""
    while data := await reader.read(2**16):
        lines, _, rest = (rest + data).rpartition(b"\n")
        times += [time.monotonic()] * len(TEXT.findall(lines))
        n_events += lines.count(b"data: {")
    writer.close()
    return Answer(asked_at, times, n_events)


def together(target: Target, n_streams: int, prompt: str, n_new: int, **more: Any) -> list[Answer]:
    """Return the answers to as many requests at once."""
    time.sleep(target.settle_s)

    async def all_of() -> list[Answer]:
        return await asyncio.gather(*(ask(target, prompt, n_new, **more) for _ in range(n_streams)))

    return asyncio.run(all_of())


def first_text(target: Target, row: str, prompt: str) -> Figures:
    """Return how long it takes until the first text comes."""
    [answer] = together(target, 1, prompt, N_FIRST)
    return {row: 1e3 * (answer.text_times[0] - answer.asked_at)}


def rate(target: Target, row: str, prompt: str, n_streams: int, n_new: int, steady: bool = False) -> Figures:
    """Return what all streams together say in a second.

    `steady`: from when all have begun until one has ended; 0 if there is no such time.
    """
    answers = together(target, n_streams, prompt, n_new)
    times = [answer.text_times for answer in answers]
    start = max(one[0] for one in times) if steady else answers[0].asked_at
    end = (min if steady else max)(one[-1] for one in times)
    return {row: sum(start < time <= end for one in times for time in one) / (end - start or 1)}


def cases(urls: Mapping[str, str], streams: Sequence[int], n_new: int, settle_s: float = 0) -> Iterator[Case]:
    targets: dict[str, Target] = {}
    for name, url in urls.items():
        models = httpx.get(f"{url.removesuffix(RESPONSES)}/models", trust_env=False).raise_for_status().json()
        path = "" if url.endswith(RESPONSES) else "/chat/completions"
        targets[name] = Target(url + path, models["data"][0]["id"], settle_s)
    long = prose(N_CHARACTERS)
    yield targets, partial(first_text, row="a long prompt, first text, ms", prompt=long)
    yield targets, partial(first_text, row="a short prompt, first text, ms", prompt="Say hello.")
    for n in streams:
        yield targets, partial(rate, row=f"{n} streams, tokens/s", prompt=STORY, n_streams=n, n_new=n_new)
    row = "8 streams after long prompts, tokens/s"
    yield targets, partial(rate, row=row, prompt=long, n_streams=8, n_new=n_new, steady=True)


def run(args: argparse.Namespace) -> None:
    urls = {url: url for url in args.urls}
    found = cases(urls, args.streams, args.new, SETTLE_S)
    report(args, "Servers over HTTP, greedy.", found)


def options(add: argparse.ArgumentParser) -> None:
    add.add_argument(
        "urls", nargs="+", metavar="URL", help="of a running server: .../v1, or .../v1/responses"
    )
    number_option(add, "--new", 64, "tokens of a stream")
    number_option(add, "--streams", [1, 8, 64], "asked at once")
