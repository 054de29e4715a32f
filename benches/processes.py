"""Servers in processes of their own, and a client of their streams that costs little."""

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from benches.harness import ROOT


class Running(NamedTuple):
    url: str
    pid: int


@contextlib.contextmanager
def started(*command: str, checkout: Path = ROOT) -> Iterator[Running]:
    """Run a Python process of a checkout until the block ends; it announces its URL."""
    with subprocess.Popen(
        [sys.executable, *command], cwd=checkout, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout
            url = next(line.split()[1] for line in process.stdout if line.startswith("listening"))
            yield Running(url, process.pid)
        finally:
            process.kill()


async def stream(url: str, path: str, body: dict[str, Any]) -> AsyncIterator[bytes]:
    """POST, and yield the bytes of the answer as they come, whole lines at a time."""
    raw = json.dumps(body).encode()
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(raw)}\r\n\r\n"
    )
    writer.write(head.encode() + raw)
    rest = b""
    try:
        while data := await reader.read(2**16):
            lines, end, rest = (rest + data).rpartition(b"\n")
            yield lines + end
    finally:
        writer.close()
