"""The server: the command line, start and stop.

    python server.py --model DIR    (README.md; --help explains the rest)

Rules of this file:
1. What cannot work is said in one line at the start, with exit status 2.
2. Everything ends: a stop lets what runs finish for a while, then gives every open stream its last event.

Not here: the endpoints (api.py), what stands around them (middleware.py).
"""

import argparse
import asyncio
import hashlib
import json
import logging
import os
import secrets
import signal
import socket
import sqlite3
import sys
import time
from collections.abc import Sequence

import threadpoolctl

from api import Api, encode_event
from background import Registry
from checkpoint import hub
from gateway import upstreams
from gateway.metering import Counts, Prices
from gateway.remote import RemoteWorker
from middleware import Keys, make_app
from service import loading, logs
from service.connections import HttpServer, bind, http_config
from service.options import IN_MEMORY, arguments, read_keys
from store import Retention, Store
from worker import ALIAS, LocalWorker, Worker

log = logging.getLogger("server")


def main() -> int:
    args = arguments().parse_args()
    logs.start(args.log_level, args.log_format)
    if args.threads:
        threadpoolctl.threadpool_limits(args.threads, user_api="blas")
    try:
        args.device = loading.device(args.device)
        listener = bind(args.host, args.port)
        local = None if args.upstream and not args.model else loading.load(hub.find(args.model), args)
        store = open_store(args)
        keys = Keys(read_keys(args))
    except (ValueError, OSError, MemoryError, sqlite3.Error) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    asyncio.run(serve(args, keys, local, store, listener))
    return 0


def remote_worker(args: argparse.Namespace) -> RemoteWorker | None:
    if not args.upstream:
        return None
    limits = upstreams.Limits(
        args.upstream_connect, args.upstream_first_byte, args.upstream_idle, args.upstream_probe
    )
    prices = None
    if args.price_per_token is not None:
        weighed = Counts(args.price_prompt, args.price_cached, args.price_completion, args.price_reasoning)
        prices = Prices(args.price_per_token, weighed, args.price_coefficient)
    unlisted = args.upstream_model or []
    return RemoteWorker(upstreams.Upstreams(args.upstream, args.upstream_api_key, limits, unlisted), prices)


def open_store(args: argparse.Namespace) -> Store:
    try:
        return Store(
            args.store, Retention(args.store_max_responses, args.store_max_bytes, args.store_max_age)
        )
    except sqlite3.Error as error:
        raise sqlite3.Error(f"--store {args.store}: {error}") from error


async def serve(
    args: argparse.Namespace,
    keys: Keys,
    local: LocalWorker | None,
    store: Store,
    listener: socket.socket,
) -> None:
    registry = Registry(store, encode_event, max_queued=args.max_queued)
    remote = remote_worker(args)
    api = Api(
        local,
        remote,
        registry,
        sealing_key(args.secret),
        done_line=not args.no_done_line,
        temporary=not args.no_temporary,
        reasoning_events=args.reasoning_events,
    )
    if remote:
        await remote.upstreams.start()
    await api.take_over()
    config = http_config(make_app(api, keys, args.max_streams, args.cors_origin or ()), args)
    workers: list[Worker] = [worker for worker in (local, remote) if worker]
    server, hurry, stopping = HttpServer(config), asyncio.Event(), list[asyncio.Task[None]]()

    def on_signal() -> None:
        """Ctrl-C or SIGTERM: stop accepting, let what runs finish; the second time: end it now."""
        if server.should_exit:
            hurry.set()
        else:
            notify("STOPPING=1")
            server.should_exit = True
            stopping.append(asyncio.create_task(stop(args, workers, registry, hurry)))

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: loop.call_soon_threadsafe(on_signal))
    loop.call_soon(announce, args, local, remote, listener)
    await server.serve(sockets=[listener])
    await asyncio.gather(*stopping)
    store.close()


async def stop(
    args: argparse.Namespace, workers: Sequence[Worker], registry: Registry, hurry: asyncio.Event
) -> None:
    registry.hold()
    deadline = time.monotonic() + args.shutdown_grace
    while any(worker.busy() for worker in workers) and not hurry.is_set() and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    await registry.close(persistent=args.store != IN_MEMORY)
    for worker in workers:
        await worker.close()  # what still runs, in the foreground, fails


def notify(state: str) -> None:
    """Tell systemd, if it has started us: https://www.freedesktop.org/software/systemd/man/sd_notify.html"""
    if address := os.environ.get("NOTIFY_SOCKET"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
            systemd.sendto(state.encode(), address.replace("@", "\0", 1) if address[0] == "@" else address)


def sealing_key(secret: str | None) -> bytes:
    return hashlib.sha256(secret.encode()).digest() if secret else secrets.token_bytes(32)


def announce(
    args: argparse.Namespace,
    local: LocalWorker | None,
    remote: RemoteWorker | None,
    listener: socket.socket,
) -> None:
    host, port = listener.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    elsewhere = list(remote.upstreams.models()) if remote else []
    # A small model rambles when it is sampled, one time in four until its context is full.
    asked = {"input": "What is the capital of France?", "temperature": 0}
    names = [*(local.names if local else ()), *elsewhere, ALIAS]
    body = json.dumps({"model": names[0]} | asked)
    facts = loading.facts(args, local) if local else {}
    if remote:
        facts["upstreams"] = f"{', '.join(args.upstream)} with {', '.join(elsewhere) or 'no model yet'}"
    for name, value in {
        **facts,
        "store": "in memory: responses are lost at exit" if args.store == IN_MEMORY else args.store,
        "listening": url,
    }.items():
        print(f"{name:10} {value}")
    notify("READY=1")
    print(f"\ncurl {url}/v1/responses -H 'Content-Type: application/json' -d '{body}'\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
