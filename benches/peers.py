"""Servers that are already running, asked in turns: prompts, first tokens and streams of chat completions.

    python bench.py peers http://localhost:8000/v1 http://localhost:8001/v1 --stream()--> Answer --> a table

Any server of /v1/chat/completions can be one of them; what it has is what a client gets over HTTP. Each is
asked for its first model at temperature 0, and while it answers the others have nothing to do. The ratios are
to the first. Where all use the same processors, start each with the same number of threads.

Rules of this file:
1. Every prompt is new, from its first word: no server finds it in a cache.
2. Tokens are counted by the servers, in the usage that ends a stream: a delta may have several.

Not here: what a server adds to its model (server.py), how fast a model is without HTTP (cpu.py).
"""

import argparse
import asyncio
import secrets
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import httpx2 as httpx

import sse
from benches.common import cpu_name, repeat_option, write

README = Path(__file__).parent.parent / "README.md"
N_STREAMS = 8
TIMEOUT_S = 600  # of a request
N_FIRST = 8  # tokens of an answer of which the first text counts: a marker has none
TEXTS = ("content", "reasoning_content", "reasoning")  # of a delta, by what servers call them


class Peer(NamedTuple):
    url: str  # with /v1
    model: str
    client: httpx.AsyncClient


class Answer(NamedTuple):
    first_s: float  # from the request to the first text
    last_at: float
    n_prompt: int  # tokens
    n_tokens: int  # of the answer


async def stream(peer: Peer, prompt: str, max_tokens: int) -> Answer:
    """Ask for an answer, and read it to its end."""
    body = {
        "model": peer.model,
        "messages": [{"role": "user", "content": f"{secrets.token_hex(4)}: {prompt}"}],
        "temperature": 0,
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    parser = sse.Parser()
    times: list[float] = []  # of the texts
    usage: dict[str, int] = {}
    asked_at = time.perf_counter()
    async with peer.client.stream("POST", f"{peer.url}/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise SystemExit(f"{peer.url}: {response.status_code} {(await response.aread())[:500]!r}")
        async for chunk in response.aiter_bytes():
            for event in parser.feed(chunk):
                if event.data == "[DONE]":
                    continue
                fields = sse.loads(event.data)
                usage = fields.get("usage") or usage
                for choice in fields.get("choices", ()):
                    if any(choice["delta"].get(name) for name in TEXTS):
                        times.append(time.perf_counter())
    if not times or not usage:
        raise SystemExit(f"{peer.url}: expected text and a usage; came {len(times)} texts, usage {usage}")
    return Answer(times[0] - asked_at, times[-1], usage["prompt_tokens"], usage["completion_tokens"])


# --- what is measured ---------------------------------------------------------------------------------------

Figures = dict[str, float]  # by row of the table


async def long_prompt(peer: Peer, args: argparse.Namespace) -> Figures:
    """A prompt of about 970 tokens."""
    prose = README.read_text(encoding="utf-8")[: args.characters]
    answer = await stream(peer, prose, N_FIRST)
    return {
        "a long prompt: tokens": answer.n_prompt,
        "a long prompt: its tokens/s": answer.n_prompt / answer.first_s,
        "a long prompt: first token, ms": 1e3 * answer.first_s,
    }


async def short_prompt(peer: Peer, args: argparse.Namespace) -> Figures:
    answer = await stream(peer, "Say hello.", N_FIRST)
    return {"a short prompt: first token, ms": 1e3 * answer.first_s}


async def streams(peer: Peer, args: argparse.Namespace, n: int) -> Figures:
    """Tokens a second of n streams together, from the question, which is short, to the last token."""
    prompt = "Write a long story about a lighthouse, its keeper and a storm."
    asked_at = time.perf_counter()
    answers = await asyncio.gather(*(stream(peer, prompt, args.new) for _ in range(n)))
    seconds = max(answer.last_at for answer in answers) - asked_at
    return {f"streams at once: {n}, tokens/s": sum(answer.n_tokens for answer in answers) / seconds}


async def one_stream(peer: Peer, args: argparse.Namespace) -> Figures:
    return await streams(peer, args, 1)


async def many_streams(peer: Peer, args: argparse.Namespace) -> Figures:
    return await streams(peer, args, N_STREAMS)


Measurement = Callable[[Peer, argparse.Namespace], Coroutine[Any, Any, Figures]]
MEASUREMENTS: tuple[Measurement, ...] = (long_prompt, short_prompt, one_stream, many_streams)

# --- rounds and their table ---------------------------------------------------------------------------------


async def measured(args: argparse.Namespace) -> tuple[list[Peer], list[dict[str, list[float]]]]:
    """All rounds but the first, which warms up: for each server the figures by row."""
    async with httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False) as client:
        peers: list[Peer] = []
        for url in args.urls:
            models = (await client.get(f"{url}/models")).raise_for_status().json()
            peers.append(Peer(url, models["data"][0]["id"], client))
        results: list[dict[str, list[float]]] = [{} for _ in peers]
        for number in range(args.repeat + 1):
            for measurement in MEASUREMENTS:
                for peer, rows in zip(peers, results, strict=True):
                    for row, value in (await measurement(peer, args)).items():
                        rows.setdefault(row, []).extend([value] if number else [])
                        print(
                            f"round {number}/{args.repeat}  {row:32} {peer.url} {value:.1f}", file=sys.stderr
                        )
        return peers, results


def table(peers: list[Peer], results: list[dict[str, list[float]]], n_rounds: int) -> Iterator[str]:
    names = [f"{peer.url} ({peer.model})" for peer in peers]
    yield f"| median of {n_rounds} (ratio to the first) | {' | '.join(names)} |"
    yield "|---" * (1 + len(peers)) + "|"
    for row in results[0]:
        values = [median(rows[row]) for rows in results]
        cells = [f"{values[0]:.0f}"]
        cells += [f"{value:.0f} ({value / values[0]:.2f})" for value in values[1:]]
        yield f"| {row} | {' | '.join(cells)} |"


def run(args: argparse.Namespace) -> None:
    peers, results = asyncio.run(measured(args))
    lines = [f"{date.today()}, {cpu_name()}.", "", *table(peers, results, args.repeat), ""]
    write(lines, args.out)


def options(add: argparse.ArgumentParser) -> None:
    add.add_argument("urls", nargs="+", metavar="URL", help="of a running server, with its /v1")
    repeat_option(add)
    add.add_argument("--new", type=int, default=64, metavar="N", help="tokens of a stream (default: 64)")
    length = "of the long prompt (default: 3040, about 970 tokens)"
    add.add_argument("--characters", type=int, default=3040, metavar="N", help=length)
