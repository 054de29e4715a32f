"""The server: start and stop of one process.

    argv --main()--> bind the port, open the store, load the model --serve()--> answer until a signal

What fails at once (an option, a port in use) comes before what takes minutes (the model). A stop accepts no
more requests, gives those that run a grace, and ends the rest; Ctrl-C at the start ends it.

Authority: the command line is in docs/operating.md and --help.

Rules of this file:
1. An option that cannot work ends the start with exit status 2 and a line that says what was expected.
2. Everything ends: a stop gives running requests some time to finish, then each open stream its last event.

Why one process and one event loop, and not workers that share a socket: the weights and the KV cache exist
once, and a background response must be found by every request. More machines: --upstream.

Not here: the options (service/options.py), loading a model (service/loading.py), connections
(service/connections.py), the middleware (middleware.py), the endpoints (api.py).
"""

import os
import signal
import sys
from importlib.util import find_spec

if __name__ == "__main__":
    if sys.version_info < (3, 11) or not find_spec("uvicorn"):
        sys.exit("error: expected Python 3.11 or later, and its packages: pip install -e '.[fast]'")
    # Ctrl-C ends a start at once, with a shell's exit status for it and without a traceback, also while the
    # modules below are imported and while a model is loaded. A library may swallow an exception raised here,
    # as llvmlite does.
    signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))

import asyncio
import gc
import hashlib
import logging
import secrets
import socket
import sqlite3
from argparse import Namespace
from collections.abc import Set
from concurrent.futures import ThreadPoolExecutor

import threadpoolctl

from api import Api
from background import Registry
from checkpoint import hub
from gateway.remote import RemoteWorker
from gateway.upstreams import Timeouts
from middleware import digest, make_app
from request.room import N_THREADS, Rooms
from service import loading, logs, options
from service.connections import EventLoop, HttpServer, bind, http_config, max_connections
from service.steps import Steps
from store import IN_MEMORY, Retention, Store
from worker import LocalWorker, Workers

log = logging.getLogger("server")

MAX_DIGITS = 640  # of an integer, the smallest limit that Python allows: reading one takes quadratic time

# After so many new objects the garbage collector runs, for a millisecond. With Python's own 700 it would take
# a tenth of the time of each event, in vain: the objects live as long as their stream.
MAX_YOUNG_OBJECTS = 20_000

# --- start --------------------------------------------------------------------------------------------------


def main() -> int:
    """Run a server until it is stopped; return the exit status of the process."""
    args = options.arguments().parse_args()
    sys.set_int_max_str_digits(MAX_DIGITS)
    threadpoolctl.threadpool_limits(args.threads, user_api="blas")
    logs.start(args.log_level, args.log_format)
    local = remote = None
    try:
        keys = {*map(digest, options.secrets(args, "api_key"))}
        args.secret = [*options.secrets(args, "secret"), secrets.token_hex()]
        if args.upstream:
            timeouts = Timeouts(**dict(args.upstream_timeout))
            remote = RemoteWorker(args.upstream, options.upstream_keys(args), timeouts, args.price)
        max_connections(args.max_streams)  # raises if the system allows too few files
        listener = bind(args.host, args.port)
        retention = Retention(args.store_max_responses, args.store_max_bytes)
        try:
            store = Store(args.store, retention)
        except (OSError, sqlite3.Error) as error:
            raise ValueError(f"--store {args.store}: {error}") from error
        if args.model or not args.upstream:
            local = loading.load(hub.find(args.model, args.revision), args)
        elif args.debug_steps:
            raise ValueError("--debug-steps: expected --model too; the steps of upstreams cannot be seen")
    except (ValueError, OSError, MemoryError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with asyncio.Runner(loop_factory=EventLoop) as runner:
        runner.run(serve(args, keys, local, remote, store, listener))
    return 0


# --- the garbage collector ----------------------------------------------------------------------------------


def tune_garbage_collector() -> None:
    """Freeze the objects of the start, which never become garbage, and collect less often.

    A full collection stops all streams while it looks at every object that is not frozen: 0.1 s for those of
    the start (sgl-project/sglang#9241).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(MAX_YOUNG_OBJECTS)


# --- run and stop -------------------------------------------------------------------------------------------


async def serve(
    args: Namespace,
    keys: Set[str],
    local: LocalWorker | None,
    remote: RemoteWorker | None,
    store: Store,
    listener: socket.socket,
) -> None:
    """Answer requests until a signal stops the server. A second signal ends the grace of what still runs."""
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(N_THREADS, "requests"))
    is_shared = len(keys) > 1
    registry = Registry(store, Workers(local, remote), is_shared, args.store != IN_MEMORY, args.max_batch)
    steps = Steps(local.engine, local.tokenizer.token_bytes) if local and args.debug_steps else None
    api = Api(
        registry,
        hashlib.sha256(args.secret[0].encode()).digest(),
        done_line=not args.no_done_line,
        temporary=not args.no_temporary,
        reasoning_events=args.reasoning_events,
        image_texts=args.images == "placeholder",
        steps=steps,
    )
    if remote:
        await remote.start()
    await registry.recover(api.revive)
    rooms = Rooms(args.max_streams, args.max_body, is_shared)
    names = {name.lower() for name in ("localhost", args.host, *args.allowed_host)}
    app = make_app(api, keys, rooms, {*args.cors_origin}, names)
    server = HttpServer(http_config(app, args))

    def is_busy() -> bool:
        """Return whether an answer has not begun, or a worker has something to do."""
        return bool(rooms.unanswered) or any(worker.busy() for worker in api.workers.all)

    signals = asyncio.Semaphore(0)  # released by each signal
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signals.release)
    tune_garbage_collector()
    async with asyncio.TaskGroup() as group:
        group.create_task(server.serve(sockets=[listener]))
        evicting = group.create_task(registry.evict())
        announce(local, listener)

        await signals.acquire()
        server.should_exit = True  # uvicorn accepts no more connections
        registry.stopping.set()
        deadline = loop.time() + args.shutdown_grace
        if is_busy():
            log.warning("stopping: requests have %g s to end; a second signal ends them", args.shutdown_grace)
        while is_busy() and signals.locked() and loop.time() < deadline:  # until another signal comes
            await asyncio.sleep(0.02)
        await registry.close()
        for worker in api.workers.all:
            await worker.close()  # what still runs, in the foreground, fails
        server.drop_clients()
        evicting.cancel()
    await registry.close_store()


def announce(local: LocalWorker | None, listener: socket.socket) -> None:
    """Print the model and the address."""
    host, port, *_ = listener.getsockname()
    if ":" in host:  # an IPv6 address: RFC 3986, section 3.2.2
        host = f"[{host}]"
    url = f"http://{host}:{port}"
    facts = loading.facts(local) if local else {}
    facts |= {"listening": url, "page": f"{url}/ to open in a browser"}
    print("\n".join(f"{name:10} {value}" for name, value in facts.items()), flush=True)


if __name__ == "__main__":
    sys.exit(main())
