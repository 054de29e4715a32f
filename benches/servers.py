"""Servers beside each other: bench.py http for others' beside ours, bench.py server for what ours adds.

    names, URLs --started()--> servers; a Row --together()--> [Answer, ...] --figures()--> table

rows.toml has the servers and the rows. `least` is served.py's; `relayed` is ours before its scripted chat
completions; "N stored" is ours with N responses in a store that keeps no more.

Why not an HTTP library: 500 streams of one would cost more than the server that is measured. This client
looks for events and texts in the bytes.

Rules of this file:
1. A conversation begins with characters that none before it had, so that no server has it in its cache.
2. Time begins with the request, and a token is a piece of text that comes.

Not here: what a model costs without a server (decoding.py).
"""

import argparse
import asyncio
import json
import re
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from os import sysconf
from pathlib import Path
from socket import create_server
from typing import Any, NamedTuple
from urllib.parse import urljoin, urlsplit

import httpx2 as httpx

from benches.harness import ROOT, Answer, Case, figures, prose, report
from checkpoint import hub

TEXT = re.compile(rb'"(?:content|reasoning_content|reasoning|delta)": ?"(?!")')  # that is not empty
SAID = "It is a long story about a lighthouse, its keeper and a storm."  # in an earlier turn


class Row(NamedTuple):
    name: str
    figures: list[str]  # of figures()
    times: int
    # Seconds before it asks, its turns, tokens of an answer.
    clients: list[tuple[float, list[str | int], int]]
    more: Mapping[str, Any]  # of the body
    servers: Sequence[str] = ()  # (): all


class Server(NamedTuple):
    url: str  # of the endpoint
    model: str
    pid: int | str = "self"  # of one that we have not started we do not know it

    def spent(self) -> tuple[float, float, int]:
        """Return the seconds by the clock and of processors, and the most memory in kB that it has had."""
        folder = Path(f"/proc/{self.pid}")
        used = (folder / "stat").read_text().rpartition(")")[2].split()[11:13]
        peak = (folder / "status").read_text().split("VmHWM:")[1].split()[0]
        return time.monotonic(), sum(map(int, used)) / sysconf("SC_CLK_TCK"), int(peak)


# --- servers ------------------------------------------------------------------------------------------------


def running(url: str) -> Server:
    """Return the server that has this endpoint; raises httpx.HTTPError."""
    models = httpx.get(urljoin(url, "/v1/models"), trust_env=False).raise_for_status().json()
    return Server(url, models["data"][0]["id"])


@contextmanager
def started(path: str, command: str, **names: str) -> Iterator[Server]:
    """Run a server, ours or another, until the block ends."""
    with create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = shlex.split(command.format(port=port, python=sys.executable, **names))
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        try:
            while process.poll() is None:
                with suppress(httpx.HTTPError):
                    yield running(f"http://127.0.0.1:{port}{path}")._replace(pid=process.pid)
                    return
                time.sleep(0.1)
            raise SystemExit(f"{command}: it has ended before it could answer")
        finally:
            process.terminate()


# --- clients ------------------------------------------------------------------------------------------------


async def ask(server: Server, messages: list[dict[str, str]], n_new: int, more: Mapping[str, Any]) -> Answer:
    """Ask for a stream, and read it to its end."""
    if server.url.endswith("/responses"):
        body = {"input": messages, "max_output_tokens": n_new, "store": False}
    else:
        body = {"messages": messages, "max_tokens": n_new}
    raw = json.dumps({**body, "model": server.model, "stream": True, **more})
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


async def together(server: Server, row: Row) -> list[Answer]:
    """Return the answers to all clients of a row. A turn is asked once the one before has its answer."""
    answers: list[Answer] = []

    async def converse(wait_s: float, turns: list[str | int], n_new: int) -> None:
        await asyncio.sleep(wait_s)
        messages = [{"role": "system", "content": secrets.token_hex(4)}]
        for turn in turns:
            content = turn if isinstance(turn, str) else prose(turn)
            messages.append({"role": "user", "content": content})
            answers.append(await ask(server, messages, n_new, row.more))
            messages.append({"role": "assistant", "content": SAID})

    await asyncio.gather(*(converse(*client) for client in row.clients * row.times))
    return answers


# --- the measurements ---------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> None:
    """Measure each row of a table of rows.toml at its servers."""
    commands = args.table["servers"]
    names = {"model": str(hub.find(args.model or None))}
    servers: dict[str, Server] = {}

    def measure(name: str, row: Row) -> list[float]:
        is_fresh = "kB a stream" in row.figures  # of a server that has had no streams
        running_one = started(*commands[name], **names) if is_fresh else nullcontext(servers[name])
        with running_one as server:
            before = server.spent()
            answers = asyncio.run(together(server, row))
            spent = [after - at for at, after in zip(before, server.spent(), strict=True)]
        found = figures(answers, *spent)
        return [found[kind] for kind in row.figures]

    with ExitStack() as stack:
        for name in args.servers:
            if name in commands:
                servers[name] = stack.enter_context(started(*commands[name], **names))
                names[name] = urljoin(servers[name].url, "/v1")
            else:
                servers[name] = running(name)
        cases: list[Case] = []
        for row in [Row(*fields) for fields in args.table["rows"]]:
            contenders = {name: name for name in servers if name in (row.servers or servers)}
            if args.only in row.name:
                lines = [f"{row.name}, {kind}" for kind in row.figures]
                cases.append(Case(lines, contenders, partial(measure, row=row)))
        report(args, args.table["about"], cases)
