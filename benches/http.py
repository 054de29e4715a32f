"""Servers beside each other over HTTP: ours, a front, vLLM, llama.cpp; chat completions or Responses.

    bench.py http NAME|URL ... --> [Client, ...] --converse()--> [Answer, ...] --figures of them--> table

A server is a row of PEERS, which is started, or the URL of an endpoint of one that runs.

Why not an HTTP library: 500 streams of one would cost more than the server that is measured. This client
looks for events and texts in the bytes.

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
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np

from benches.harness import CHAT, RESPONSES, Commands, Figures, Server, prose, report, running, started
from checkpoint import hub

# fmt: off
PEERS = {
    # name       what starts it on PORT with the MODEL
    "ours":      f"{sys.executable} server.py --model MODEL --port PORT",
    "vllm":      "vllm serve MODEL --dtype bfloat16 --max-model-len 8192 --port PORT",
    "llama.cpp": "llama-server --model MODEL/model.gguf --parallel 16 --ctx-size 131072 --port PORT",
}
# fmt: on
SETTLE_S = 1.5  # before a row: threads of the server before may spin on, those of vLLM for 1.2 s
LONG = prose(4000)  # some 1000 tokens
STORY = "Write a long story about a lighthouse, its keeper and a storm."
N_FIRST = 8  # tokens of an answer whose first text counts: a marker has no text
TEXT = re.compile(rb'"(?:content|reasoning_content|reasoning|delta)": ?"(?!")')  # that is not empty
TOOL = {"type": "function", "function": {"name": "find", "description": prose(500)}}
AGENT = [prose(14_000) + json.dumps([TOOL] * 20), *["And what do you do next?"] * 9]
N_CHATS = 24  # a second apart on average
CHAT_SIZE = 800, 64  # characters asked and tokens answered, the medians
GOOD_FIRST_S = 1
GOOD_BETWEEN_S = 0.1


class Client(NamedTuple):
    turns: Sequence[str]  # what it says
    n_new: int  # tokens of an answer
    more: Mapping[str, Any] = {"temperature": 0}
    start_s: float = 0


class Answer(NamedTuple):
    """Times are of time.monotonic(), which all processes of a machine share."""

    asked_at: float
    times: list[float]  # of its texts
    n_events: int


async def ask(server: Server, messages: list[dict[str, str]], client: Client) -> Answer:
    """Ask for a stream, and read it to its end."""
    if server.url.endswith(RESPONSES):
        body = {"input": messages, "max_output_tokens": client.n_new, "store": False}
    else:
        body = {"messages": messages, "max_tokens": client.n_new}
    raw = json.dumps({**body, "model": server.model, "stream": True, **client.more})
    address = urlsplit(server.url)
    asked_at = time.monotonic()
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    head = f"POST {address.path} HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Connection: close\r\nContent-Length: {len(raw)}\r\n\r\n{raw}".encode())
    if b" 200 " not in await reader.readline():
        raise SystemExit(f"{server.url}: expected status 200, got {await reader.read(1000)!r}")
    times: list[float] = []
    n_events = 0
    rest = b""
    while data := await reader.read(2**16):
        lines, _, rest = (rest + data).rpartition(b"\n")
        times += [time.monotonic()] * len(TEXT.findall(lines))
        n_events += lines.count(b"data: {")
    writer.close()
    return Answer(asked_at, times, n_events)


async def converse(server: Server, client: Client) -> list[Answer]:
    """Return the answers to one client's turns, each asked once the one before has ended."""
    await asyncio.sleep(client.start_s)
    messages = [{"role": "system", "content": secrets.token_hex(4)}]
    answers: list[Answer] = []
    for turn in client.turns:
        messages.append({"role": "user", "content": turn})
        answers.append(await ask(server, messages, client))
        messages.append({"role": "assistant", "content": STORY})
    return answers


def together(server: Server, clients: Sequence[Client]) -> list[Answer]:
    """Return the answers to all clients, which begin at once or at their start_s."""

    async def all_of() -> list[list[Answer]]:
        return await asyncio.gather(*(converse(server, client) for client in clients))

    return [answer for answers in asyncio.run(all_of()) for answer in answers]


# --- figures of the answers ---------------------------------------------------------------------------------


def first(answers: list[Answer]) -> Figures:
    waits_ms = [1e3 * (answer.times[0] - answer.asked_at) for answer in answers]
    return {"first text, ms": median(waits_ms), "last first text, ms": max(waits_ms)}


def rate(answers: list[Answer]) -> Figures:
    """Return the tokens a second from when all have begun until one has ended; 0 if one ended before that."""
    start = max(answer.times[0] for answer in answers)
    end = min(answer.times[-1] for answer in answers)
    n_tokens = sum(start < time <= end for answer in answers for time in answer.times)
    return {"tokens/s": n_tokens and n_tokens / (end - start)}


def goodput(answers: list[Answer]) -> Figures:
    n_good = 0
    for asked_at, times, _ in answers:
        n_good += times[0] - asked_at < GOOD_FIRST_S and times[-1] - times[0] < GOOD_BETWEEN_S * len(times)
    seconds = max(answer.times[-1] for answer in answers) - answers[0].asked_at
    return {"good answers/s": n_good / seconds}


# --- the rows -----------------------------------------------------------------------------------------------


def chat_mix() -> list[Client]:
    """Return the clients of a chat mix, the same in each round."""
    rng = np.random.default_rng(0)
    starts = rng.exponential(size=N_CHATS).cumsum().tolist()
    lengths = (np.array(CHAT_SIZE) * rng.lognormal(0, 0.8, (N_CHATS, 2))).astype(int).tolist()
    return [
        Client([prose(asked)], 1 + said, {}, start)
        for start, (asked, said) in zip(starts, lengths, strict=True)
    ]


def run(args: argparse.Namespace) -> None:
    """Measure servers beside each other over HTTP."""
    # fmt: off
    rows: list[tuple[str, list[Client], Callable[[list[Answer]], Figures]]] = [
        ("a short prompt",               [Client(["Say hello."], N_FIRST)], first),
        *[(f"{n} long prompts",          [Client([LONG], N_FIRST)] * n,     first) for n in args.prompts],
        *[(f"{n} streams",               [Client([STORY], args.new)] * n,   rate)  for n in args.streams],
        ("8 streams after long prompts", [Client([LONG], 4 * args.new)] * 8, rate),
        ("a chat mix",                   chat_mix(),                        goodput),
        ("an agent",                     [Client(AGENT, args.new)],         goodput),
    ]
    # fmt: on

    def measure(server: Server, row: int) -> Figures:
        name, clients, figures = rows[row]
        time.sleep(SETTLE_S)
        return {f"{name}, {what}": value for what, value in figures(together(server, clients)).items()}

    with ExitStack() as stack:
        servers: dict[str, Server] = {}
        for name in args.servers:
            if name in PEERS:
                command = PEERS[name].replace("MODEL", str(hub.find(args.model or None)))
                servers[name] = stack.enter_context(started(command, CHAT))
            else:
                servers[name] = running(name)
        cases = [(servers, partial(measure, row=row)) for row in range(len(rows))]
        report(args, "Servers over HTTP.", cases)


COMMANDS: Commands = {
    "http": (
        run,
        {
            "servers": ([""], f"of {', '.join(PEERS)}, or URLs that end with {CHAT} or {RESPONSES}"),
            "--model": ("", "as of server.py, a folder; without it, the default model"),
            "--new": (64, "tokens of a stream; after long prompts four times as many"),
            "--prompts": ([1, 8], "long ones asked at once"),
            "--streams": ([1, 8, 64], "asked at once"),
        },
    )
}
