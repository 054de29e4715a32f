"""Servers beside each other over HTTP: ours, a front, vLLM, llama.cpp; chat completions or Responses.

    bench.py http URL ... --> [Client, ...] --converse()--> [Answer, ...] --a figure of them--> table

The client costs little: it looks for events and texts in the bytes. To measure what our front costs, start it
before the other server, and give both URLs; bench.py relay does so with a scripted upstream.

Two rows are of a day's work, and of those answers only that begin within GOOD_FIRST_S and go on with
GOOD_BETWEEN_S between tokens, on average:

    a chat mix    requests come at random (Poisson), lengths are log-normal, sampling is the model's own
    an agent      instructions and 20 tools, together 6,000 tokens, and ten turns. What it has said in earlier
                  turns is made up, so all servers get the same prompts.

Rules of this file:
1. A conversation begins with characters that none before it had, so that no server has it in its cache.
2. Time begins with the request, and a token is a piece of text that comes.
"""

import argparse
import asyncio
import json
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx2 as httpx
import numpy as np

from benches.harness import Case, Commands, Figures, Options, prose, report

RESPONSES = "/responses"
SETTLE_S = 1.5  # threads of the server before may spin on, those of vLLM for 1.2 s
LONG = prose(4000)  # some 1000 tokens
STORY = "Write a long story about a lighthouse, its keeper and a storm."
N_FIRST = 8  # tokens of an answer whose first text counts: a marker has no text
TEXT = re.compile(rb'"(?:content|reasoning_content|reasoning|delta)": ?"(?!")')  # that is not empty
TOOL = {"type": "function", "function": {"name": "find", "description": prose(500)}}
AGENT = [prose(14_000) + json.dumps([TOOL] * 20), *["And what do you do next?"] * 9]
GOOD_FIRST_S = 1
GOOD_BETWEEN_S = 0.1


class Target(NamedTuple):
    url: str  # of the endpoint
    model: str
    settle_s: float = 0  # before it is asked


class Client(NamedTuple):
    turns: Sequence[str]  # what it says
    n_new: int  # tokens of an answer
    more: Mapping[str, Any] = {"temperature": 0}
    start_s: float = 0


class Answer(NamedTuple):
    """Times are of time.monotonic(), which all processes of a machine share."""

    asked_at: float
    text_times: list[float]
    n_events: int


# its name, who asks, and the figure of all answers
Row = tuple[str, list[Client], Callable[[list[Answer]], float]]


async def ask(target: Target, messages: list[dict[str, str]], client: Client) -> Answer:
    """Ask for a stream, and read it to its end."""
    if target.url.endswith(RESPONSES):
        body = {"input": messages, "max_output_tokens": client.n_new, "store": False}
    else:
        body = {"messages": messages, "max_tokens": client.n_new}
    raw = json.dumps({**body, "model": target.model, "stream": True, **client.more})
    address = urlsplit(target.url)
    asked_at = time.monotonic()
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    head = f"POST {address.path} HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Connection: close\r\nContent-Length: {len(raw)}\r\n\r\n{raw}".encode())
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


async def converse(target: Target, client: Client) -> list[Answer]:
    await asyncio.sleep(client.start_s)
    messages = [{"role": "system", "content": secrets.token_hex(4)}]
    answers: list[Answer] = []
    for turn in client.turns:
        messages.append({"role": "user", "content": turn})
        answers.append(await ask(target, messages, client))
        messages.append({"role": "assistant", "content": STORY})
    return answers


def together(target: Target, clients: Sequence[Client]) -> list[Answer]:
    """Return the answers to all clients, which begin at once."""
    time.sleep(target.settle_s)

    async def all_of() -> list[list[Answer]]:
        return await asyncio.gather(*(converse(target, client) for client in clients))

    return [answer for answers in asyncio.run(all_of()) for answer in answers]


# --- figures of the answers ---------------------------------------------------------------------------------


def first_ms(answers: list[Answer]) -> float:
    return 1e3 * (answers[0].text_times[0] - answers[0].asked_at)


def rate(answers: list[Answer], is_steady: bool = False) -> float:
    """Return how many tokens come in a second.

    `is_steady`: from when all have begun until one has ended; 0 if there is no such time.
    """
    all_times = [answer.text_times for answer in answers]
    start, end = answers[0].asked_at, max(times[-1] for times in all_times)
    if is_steady:
        start, end = max(times[0] for times in all_times), min(times[-1] for times in all_times)
    return sum(start < time <= end for times in all_times for time in times) / (end - start or 1)


def goodput(answers: list[Answer]) -> float:
    n_good = 0
    for asked_at, times, _ in answers:
        n_good += times[0] - asked_at < GOOD_FIRST_S and times[-1] - times[0] < GOOD_BETWEEN_S * len(times)
    return n_good / (max(answer.text_times[-1] for answer in answers) - answers[0].asked_at)


# --- the rows -----------------------------------------------------------------------------------------------


def chat_mix(n: int = 24, a_second: float = 1, n_characters: int = 800, n_new: int = 64) -> list[Client]:
    """Return clients with so many characters and tokens in the median: the same in each round."""
    rng = np.random.default_rng(0)
    starts = rng.exponential(1 / a_second, n).cumsum()
    scales = rng.lognormal(0, 0.8, (n, 2))
    return [
        Client([prose(int(n_characters * asked))], int(1 + n_new * said), {}, start)
        for start, (asked, said) in zip(starts, scales, strict=True)
    ]


def measure(
    target: Target, row: str, clients: Sequence[Client], figure: Callable[[list[Answer]], float]
) -> Figures:
    return {row: figure(together(target, clients))}


def cases(
    urls: Mapping[str, str], streams: Sequence[int], n_new: int, settle_s: float = 0, *more: Row
) -> Iterator[Case]:
    targets: dict[str, Target] = {}
    for name, url in urls.items():
        models = httpx.get(f"{url.removesuffix(RESPONSES)}/models", trust_env=False).raise_for_status().json()
        path = "" if url.endswith(RESPONSES) else "/chat/completions"
        targets[name] = Target(url + path, models["data"][0]["id"], settle_s)
    steady_rate = partial(rate, is_steady=True)
    at_once = [(f"{n} streams, tokens/s", [Client([STORY], n_new)] * n, rate) for n in streams]
    # fmt: off
    rows: list[Row] = [
        ("a long prompt, first text, ms",           [Client([LONG], N_FIRST)],         first_ms),
        ("a short prompt, first text, ms",          [Client(["Say hello."], N_FIRST)], first_ms),
        *at_once,
        ("8 streams after long prompts, tokens/s",  [Client([LONG], 4 * n_new)] * 8,   steady_rate),
        *more,
    ]
    # fmt: on
    for row, clients, figure in rows:
        yield targets, partial(measure, row=row, clients=clients, figure=figure)


def run(args: argparse.Namespace) -> None:
    urls = {url: url for url in args.urls}
    chat = ("a chat mix, good answers/s", chat_mix(), goodput)
    agent = ("an agent, good answers/s", [Client(AGENT, args.new)], goodput)
    report(args, "Servers over HTTP.", cases(urls, args.streams, args.new, SETTLE_S, chat, agent))


OPTIONS: Options = {
    "urls": ([""], "of running servers: .../v1, or .../v1/responses"),
    "--new": (64, "tokens of a stream; after long prompts four times as many"),
    "--streams": ([1, 8, 64], "asked at once"),
}
COMMANDS: Commands = {"http": (run, OPTIONS)}
