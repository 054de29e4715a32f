"""Background responses through the registry and back, and the memory they take.

Not here: what a model costs beside it, but for one line.
"""

import argparse
import asyncio
import json
import os
import platform
import sys
import time
from contextlib import aclosing
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory

import responses
from api import encode_event
from background import Event, EventLog, Reason, Registry
from benches.common import (
    cpu_name,
    engine_run,
    model_option,
    prompts,
    resident_mb,
    with_pages,
    write,
)
from channels import Delta, Finish, Usage
from checkpoint import hub
from checkpoint.config import read_config
from checkpoint.weights import read_weights
from engine import Engine
from request import params
from request.ids import new_id
from service.loading import cpu_ops
from store import Retention, Row, Store
from tokenizer import Tokenizer

N_DELTAS = 64  # tokens of one response: a frame each, and eight around them


def run(args: argparse.Namespace) -> None:
    with TemporaryDirectory() as folder:
        lines = asyncio.run(store_run(Path(folder) / "store.db", args.responses))
    directory = hub.find(args.model)
    config = read_config(directory)
    ops = cpu_ops()
    engine = Engine(with_pages(ops, config, read_weights(directory, config, ops.pack), 256))
    rate = engine_run(engine)(prompts(Tokenizer(directory / "tokenizer.json"), 8, 32), N_DELTAS).decode
    engine.close()
    report = [
        f"{date.today()}, {args.responses} background responses of {N_DELTAS} tokens, stored in a file,",
        f"{cpu_name()}, {os.cpu_count()} cores, Python {platform.python_version()}.",
        "",
        "| what | how much |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in lines.items()),
        f"| {directory.name}, decode, batch 8 | {rate:.0f} tokens/s |",
        "",
    ]
    write(report, args.out)


async def store_run(path: Path, n_responses: int) -> dict[str, str]:
    """Events appended and written, events read back, and the resident memory on the way."""
    database = Store(str(path), Retention())
    registry = Registry(database, encode_event)
    ids, memory, started = [], {}, time.perf_counter()
    for n in range(1, n_responses + 1):
        row = background_row(f"resp_{n}")
        ids.append(row.id)
        job = await registry.start(row, ScriptedRun(row))
        async with aclosing(job.log.read()) as logged:
            n_events = sum([len(frames) async for frames in logged])
        if n in (n_responses // 10, n_responses):
            memory[n] = resident_mb()
            print(f"{n}/{n_responses} responses, {memory[n]:.0f} MB resident", file=sys.stderr)
    appended, started = time.perf_counter() - started, time.perf_counter()
    for id_ in ids:
        again = await registry.events(id_)
        assert again
        async with aclosing(again.read()) as logged:
            assert sum([len(frames) async for frames in logged]) == n_events
    replayed = time.perf_counter() - started
    await registry.close(persistent=True)
    database.close()
    n_all = n_responses * n_events
    at = {f"resident memory after {n} responses": f"{mb:.0f} MB" for n, mb in memory.items()}
    return {
        "appended and written": f"{n_all / appended:.0f} events/s",
        "replayed": f"{n_all / replayed:.0f} events/s",
    } | at


class ScriptedRun:
    """Makes a response whose tokens are already there."""

    def __init__(self, row: Row) -> None:
        self._builder = responses.Builder(row.response, new_id)

    def start(self) -> list[Event]:
        return self._builder.start(queued=True)

    async def fill(self, log: EventLog) -> None:
        log.extend(self._builder.in_progress())
        for _ in range(N_DELTAS):
            log.extend(self._builder.feed(Delta("final", " token")))
            await asyncio.sleep(0)  # as tokens come: one by one
        log.extend(self._builder.finish(Finish("stop", Usage(8, N_DELTAS)), 0))

    def end(self, reason: Reason, message: str) -> list[Event]:
        return self._builder.finish(Finish(reason, message=message), 0)


def background_row(id: str) -> Row:
    request = params.from_responses({"model": "bench", "input": "hi", "background": True}, {})
    head = {"id": id, "object": "response", "created_at": 0, "model": "bench"} | request.echo
    return Row(id, time.time(), None, True, True, True, "{}", "[]", json.dumps(head))


def options(add: argparse.ArgumentParser) -> None:
    model_option(add)
    add.add_argument("--responses", type=int, default=10_000, metavar="N", help="how many (default: 10000)")
