"""Servers beside each other over HTTP: whatever answers /v1/chat/completions. Ours, a front, vLLM, llama.cpp.

    python bench.py http URL URL ...  --stream()--> Answer --rounds()--> table

To measure what our front costs, start it before the other server, and give both URLs.

Rules of this file:
1. A prompt begins with characters that no prompt before it had, so that no server has it in its cache.
2. Time begins with the request, and tokens are those that the server counts in its usage.
"""

import argparse
import json
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import httpx2 as httpx

from benches.harness import Case, Figures, number_option, prose, report

TIMEOUT_S = 600  # of a request
N_FIRST = 8  # tokens of an answer whose first text counts: a marker has no text
TEXTS = ("content", "reasoning_content", "reasoning")  # of a delta, by what servers call them
STORY = "Write a long story about a lighthouse, its keeper and a storm."
STREAMS = (1, 8, 64)


class Answer(NamedTuple):
    first_s: float  # from the request to the first text
    last_at: float
    n_prompt: int  # tokens
    n_tokens: int  # of the answer


def stream(url: str, prompt: str, max_tokens: int) -> Answer:
    """Ask for an answer, and read it to its end."""
    models = httpx.get(f"{url}/models", timeout=TIMEOUT_S, trust_env=False).raise_for_status().json()
    body = {
        "model": models["data"][0]["id"],
        "messages": [{"role": "user", "content": f"{secrets.token_hex(4)}: {prompt}"}],
        "temperature": 0,
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    times: list[float] = []  # of the texts
    usage: dict[str, int] = {}
    asked_at = time.perf_counter()
    with (
        httpx.Client(timeout=TIMEOUT_S, trust_env=False) as client,
        client.stream("POST", f"{url}/chat/completions", json=body) as response,
    ):
        if response.status_code != 200:
            raise SystemExit(
                f"{url}: expected an answer, got {response.status_code} {response.read()[:500]!r}"
            )
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            usage = chunk.get("usage") or usage
            deltas = [choice["delta"] for choice in chunk.get("choices", ())]
            if any(delta.get(name) for delta in deltas for name in TEXTS):
                times.append(time.perf_counter())
    if not times or not usage:
        raise SystemExit(f"{url}: expected text and a usage, got {len(times)} texts and usage {usage}")
    return Answer(times[0] - asked_at, times[-1], usage["prompt_tokens"], usage["completion_tokens"])


def long_prompt(url: str, n_characters: int) -> Figures:
    answer = stream(url, prose(n_characters), N_FIRST)
    return {
        "a long prompt, tokens": answer.n_prompt,
        "a long prompt, its tokens/s": answer.n_prompt / answer.first_s,
        "a long prompt, first token, ms": 1e3 * answer.first_s,
    }


def short_prompt(url: str) -> Figures:
    return {"a short prompt, first token, ms": 1e3 * stream(url, "Say hello.", N_FIRST).first_s}


def streams(url: str, n: int, n_new: int) -> Figures:
    """Tokens a second of n streams together, from the question, which is short, to the last token."""
    asked_at = time.perf_counter()
    with ThreadPoolExecutor(n) as pool:
        answers = list(pool.map(lambda _: stream(url, STORY, n_new), range(n)))
    seconds = max(answer.last_at for answer in answers) - asked_at
    return {f"{n} streams, tokens/s": sum(answer.n_tokens for answer in answers) / seconds}


def run(args: argparse.Namespace) -> None:
    cases: list[Case] = [
        {url: partial(long_prompt, url, args.characters) for url in args.urls},
        {url: partial(short_prompt, url) for url in args.urls},
    ]
    for n in args.streams:
        cases.append({url: partial(streams, url, n, args.new) for url in args.urls})
    report(args, "Servers over HTTP, greedy.", cases)


def options(add: argparse.ArgumentParser) -> None:
    add.add_argument("urls", nargs="+", metavar="URL", help="of a running server, with its /v1")
    number_option(add, "--new", 64, "tokens of a stream")
    number_option(add, "--characters", 4000, "of the long prompt, some 1000 tokens")
    add.add_argument("--streams", type=int, nargs="+", default=STREAMS, metavar="N", help="default: 1 8 64")
