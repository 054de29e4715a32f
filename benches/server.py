"""What the server adds to an engine, or to an upstream: streams and requests by the hundred, a full store.

    servers of served.py --http.together()--> events/s, processor time, latency, memory --report()--> table

`relayed` is `server.py --upstream` before the scripted chat completions of `least`, asked by either API.
Columns with a number stored are ours with so many responses in a store that keeps no more.

Not here: what a model costs.
"""

import argparse
import sys
import time
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from statistics import quantiles
from tempfile import TemporaryDirectory

from benches.harness import CHAT, RESPONSES, Case, Commands, Figures, Server, prose, report, started
from benches.http import Answer, Client, together
from checkpoint import hub
from store import Retention, Row, Store

STREAMS = [(1, 2000), (50, 100), (500, 20), (500, 1)]  # and the tokens of each, when nothing paces them
LATE_STREAMS = [1, 50, 500]
MAX_STREAMS = 500
TICK_MS = 1000  # of the paced engine: all streams get a token then, as the sequences of a batch do
N_TICKS = 5
N_WARM = 2  # of them, while streams are still being opened
N_STORED = [0, 10_000, 100_000]
N_STORING = 400  # streams beside them
IDLE_S = 3


def hear(server: Server, n_streams: int, n_tokens: int, tick_ms: int = 0) -> list[Answer]:
    return together(server, [Client(["hi"], n_tokens, {"seed": tick_ms, "store": True})] * n_streams)


def speed(server: Server, n_streams: int, n_tokens: int) -> Figures:
    """Measure streams that have nothing to wait for; with one token each it is the price of requests."""
    began, used_s = time.perf_counter(), server.used_s()
    n_events = sum(answer.n_events for answer in hear(server, n_streams, n_tokens))
    wall_s, cpu_s = time.perf_counter() - began, server.used_s() - used_s
    row = f"{n_streams} streams of {n_tokens}"
    return {
        f"{row}, events/s": n_events / wall_s,
        f"{row}, CPU µs an event": 1e6 * cpu_s / n_events,
        f"{row}, CPU ms a stream": 1e3 * cpu_s / n_streams,
    }


def idleness(server: Server) -> Figures:
    used_s = server.used_s()
    time.sleep(IDLE_S)
    return {"idle, % of a core": 100 * (server.used_s() - used_s) / IDLE_S}


def lateness(server: Server, n_streams: int) -> Figures:
    """Measure the time from the tick of all streams to the arrival of each delta."""
    late_ms: list[float] = []
    for answer in hear(server, n_streams, N_TICKS, TICK_MS):
        late_ms += [1e3 * at % TICK_MS for at in answer.times[N_WARM:]]
    percentiles = quantiles(late_ms, n=100)
    return {
        f"{n_streams} streams, median late, ms": percentiles[49],
        f"{n_streams} streams, p99 late, ms": percentiles[98],
    }


def memory(command: str) -> Figures:
    """Measure what many open streams take in a fresh process."""
    with started(command, RESPONSES) as server:
        hear(server, 1, 2)
        kb = server.peak_kb()
        hear(server, MAX_STREAMS, N_TICKS, TICK_MS)
        return {f"{MAX_STREAMS} streams, kB a stream": (server.peak_kb() - kb) / MAX_STREAMS}


def fill(file: Path, n_rows: int) -> str:
    """Write so many responses into a store; return the options that serve it, and keep no more."""
    row = Row("", "", time.time(), time.time(), True, False, False, "{}", "[]", "completed", prose(2000))
    with closing(Store(str(file), Retention())) as store:
        for number in range(n_rows):
            store.write(row._replace(id=f"resp_{number}"))
    return f" --store {file} --store-max-bytes {2**40} --store-max-responses {n_rows or 10**9}"


def run(args: argparse.Namespace) -> None:
    """Measure what our server adds to an engine or an upstream, beside the least that any server does."""
    directory = hub.find(args.model or None)
    served = f"{sys.executable} -m benches.served"
    ours, least = [f"{served} {name} {directory} PORT" for name in ("ours", "least")]
    with ExitStack() as stack:

        def start(command: str) -> Server:
            return stack.enter_context(started(command, RESPONSES))

        servers = {"ours": start(ours), "least": start(least)}
        upstream = servers["least"].url.removesuffix("/responses")
        front = start(f"{sys.executable} server.py --upstream {upstream} --port PORT --log-level warning")
        chat = front._replace(url=front.url.replace(RESPONSES, CHAT))
        folder = Path(stack.enter_context(TemporaryDirectory()))
        stored = {f"{n} stored": start(ours + fill(folder / str(n), n)) for n in N_STORED}
        relayed = servers | {"relayed": front, "relayed, chat": chat}
        cases: list[Case] = [(relayed, partial(speed, n_streams=n, n_tokens=new)) for n, new in STREAMS]
        cases += [(servers, partial(lateness, n_streams=n)) for n in LATE_STREAMS]
        cases += [({"ours": ours, "least": least}, memory)]
        cases += [(stored, partial(speed, n_streams=N_STORING, n_tokens=1)), (stored, idleness)]
        report(args, "Streams with an engine that only says a token.", cases)


COMMANDS: Commands = {"server": (run, {"--model": ("", "as of server.py; without it, the default model")})}
