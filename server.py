"""The server: start and stop of one process.

    argv --main()--> bind the port, open the store, load the model --serve()--> answer until a signal --stop()

What fails at once (an option, a port in use) comes before what takes minutes (the model). A stop accepts no
more requests, gives those that run a grace, and ends the rest; Ctrl-C at the start ends it.

Authority: the command line is in README.md and --help;
https://www.freedesktop.org/software/systemd/man/sd_notify.html

Rules of this file:
1. What cannot work is said in one line at the start, with exit status 2.
2. Everything ends: a stop lets what runs finish for a while, then gives every open stream its last event.

Not here: the options (service/options.py), loading a model (service/loading.py), connections
(service/connections.py), what stands around the endpoints (middleware.py), the endpoints (api.py).
"""

if __name__ == "__main__":  # before the imports below: they take a second, and may not be there
    from service import preflight

    preflight.check()

import argparse
import asyncio
import gc
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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import threadpoolctl

from api import Api
from background import Registry
from checkpoint import hub
from gateway.remote import RemoteWorker
from gateway.upstreams import Upstreams
from middleware import Keys, make_app
from request.room import N_THREADS, Rooms
from service import loading, logs, options
from service.connections import EventLoop, HttpServer, bind, http_config
from service.preflight import INTERRUPTED
from service.steps import Steps
from store import Retention, Store
from worker import ALIAS, LocalWorker, Worker

log = logging.getLogger("server")

MAX_DIGITS = 640  # of an integer, the least that Python allows: reading one takes the square of them

# How long a thread may keep Python's lock that another waits for. A step of the engine gives it up a hundred
# times: with Python's own 5 ms a busy event loop would make half a second of each step.
SWITCH_S = 0.0005

# New objects before the garbage collector looks at them. With Python's own 700 it takes a tenth of the time
# of each event, for all of them live as long as their stream; so many are looked at in a millisecond.
MAX_YOUNG_OBJECTS = 20_000

# --- start --------------------------------------------------------------------------------------------------


def main() -> int:
    """Run a server until it is stopped; return the exit status of the process."""
    interrupts: list[int] = []  # signals that have come before serve() answers them

    def on_interrupt(number: int, _: object) -> None:
        """A library that calls Python back may swallow what is raised here, as llvmlite does."""
        interrupts.append(number)
        raise KeyboardInterrupt

    try:
        signal.signal(signal.SIGINT, on_interrupt)
        return run(options.arguments().parse_args(), interrupts)
    except KeyboardInterrupt:
        return INTERRUPTED


def run(args: argparse.Namespace, interrupts: list[int]) -> int:
    """Start, serve, stop; raises KeyboardInterrupt where a start is interrupted."""
    sys.set_int_max_str_digits(MAX_DIGITS)
    logs.start(args.log_level, args.log_format)
    sys.setswitchinterval(SWITCH_S)
    if args.threads:
        threadpoolctl.threadpool_limits(args.threads, user_api="blas")
    try:
        args.device = loading.device(args.device)
        keys = Keys(options.read_keys(args))
        remote = remote_worker(args)
        listener = bind(args.host, args.port)
        store = open_store(args)
        local = local_worker(args)
    except (ValueError, OSError, MemoryError, sqlite3.Error) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if interrupts:
        raise KeyboardInterrupt
    with asyncio.Runner(loop_factory=EventLoop) as runner:
        runner.run(serve(args, keys, local, remote, store, listener))
    return 0


def local_worker(args: argparse.Namespace) -> LocalWorker | None:
    """The worker over a model of this machine; None where upstreams are all that is served."""
    if args.upstream and not args.model:
        if args.debug_steps:
            raise ValueError("--debug-steps: expected --model too; the steps of upstreams cannot be seen")
        return None
    return loading.load(hub.find(args.model, args.revision), args)


def remote_worker(args: argparse.Namespace) -> RemoteWorker | None:
    """The worker over the models of upstreams; None where there are none."""
    prices = options.prices(args)
    if not args.upstream:
        return None
    upstreams = Upstreams(args.upstream, options.upstream_keys(args), options.timeouts(args))
    return RemoteWorker(upstreams, prices)


def open_store(args: argparse.Namespace) -> Store:
    retention = Retention(args.store_max_responses, args.store_max_bytes, args.store_max_age)
    try:
        return Store(args.store, retention)
    except sqlite3.Error as error:
        raise sqlite3.Error(f"--store {args.store}: {error}") from error


# --- run ----------------------------------------------------------------------------------------------------


async def serve(
    args: argparse.Namespace,
    keys: Keys,
    local: LocalWorker | None,
    remote: RemoteWorker | None,
    store: Store,
    listener: socket.socket,
) -> None:
    """Answer requests until a signal stops the server."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(N_THREADS, "requests"))
    workers: list[Worker] = [worker for worker in (local, remote) if worker]
    is_shared = keys.n_owners > 1
    registry = Registry(store, is_shared)
    steps = None
    if local and args.debug_steps:
        steps = Steps(local.engine, local.tokenizer.token_bytes)
    api = make_api(args, local, remote, registry, steps)
    if remote:
        await remote.upstreams.start()
    await api.recover()
    rooms = Rooms(args.max_streams, args.max_body, is_shared)
    hosts = [args.host.lower(), *(args.allowed_host or ())]
    app = make_app(api, keys, rooms, args.cors_origin or (), hosts)
    server = HttpServer(http_config(app, args))
    end_grace = asyncio.Event()
    stopping: list[asyncio.Task[None]] = []  # the task that stops the server, once a signal has come

    def on_signal() -> None:
        """The first signal stops the server; the second one ends the grace."""
        if server.should_exit:
            end_grace.set()
            return
        notify("STOPPING=1")
        say_what_a_stop_waits_for(workers, rooms)
        server.should_exit = True  # uvicorn accepts no more connections
        if steps:
            steps.close()
        stopping.append(asyncio.create_task(stop(args, workers, registry, rooms, end_grace)))

    on_stop_signals(on_signal)
    tune_garbage_collector()
    asyncio.get_running_loop().call_soon(announce, args, keys, local, remote, listener)
    await server.serve(sockets=[listener])
    await asyncio.gather(*stopping)
    await registry.close_store()


def tune_garbage_collector() -> None:
    """To be called at the end of the start.

    A full collection stops all streams while it looks at every object that is not frozen. Those of the start
    are never garbage, and looking at them would take 0.1 s each time: sgl-project/sglang#9241.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(MAX_YOUNG_OBJECTS)


def make_api(
    args: argparse.Namespace,
    local: LocalWorker | None,
    remote: RemoteWorker | None,
    registry: Registry,
    steps: Steps | None,
) -> Api:
    return Api(
        local,
        remote,
        registry,
        sealing_key(options.read_secret(args)),
        done_line=not args.no_done_line,
        temporary=not args.no_temporary,
        reasoning_events=args.reasoning_events,
        image_texts=args.images == "placeholder",
        steps=steps,
        websocket_max_age_s=args.websocket_max_age,
    )


def sealing_key(secret: str | None) -> bytes:
    """The key that seals what clients keep for the server; without a secret a new one each start."""
    if secret is None:
        return secrets.token_bytes(32)
    return hashlib.sha256(secret.encode()).digest()


def announce(
    args: argparse.Namespace,
    keys: Keys,
    local: LocalWorker | None,
    remote: RemoteWorker | None,
    listener: socket.socket,
) -> None:
    """Say on stdout what is served and where, with a first request to try; tell systemd."""
    facts: dict[str, str] = {}
    names: list[str] = []
    if local:
        facts |= loading.facts(args, local)
        names += local.names
    if remote:
        models = list(remote.upstreams.models())
        facts["upstreams"] = f"{', '.join(args.upstream)} with {', '.join(models) or 'no model yet'}"
        names += models
    facts["store"] = args.store
    if args.store == options.IN_MEMORY:
        facts["store"] = "in memory: responses are lost at exit"
    key_header = ""
    if keys.n_owners:
        facts["keys"] = f"{keys.n_owners}: every request needs one, and sees only what was made with it"
        key_header = " -H 'Authorization: Bearer KEY'"
    url = url_of(listener)
    facts["listening"] = url
    facts["page"] = f"{url}/ to open in a browser"
    lines = [f"{name:10} {value}" for name, value in facts.items()]
    model = names[0] if names else ALIAS
    # Greedy: sampled answers of a small model go on until its context is full, one time in four.
    body = json.dumps({"model": model, "input": "What is the capital of France?", "temperature": 0})
    headers = f"-H 'Content-Type: application/json'{key_header}"
    lines.append(f"\ncurl {url}/v1/responses {headers} -d '{body}'\n")
    notify("READY=1")
    try:
        print("\n".join(lines), flush=True)
    except OSError as error:  # a pipe that nobody reads any more, a full disk
        log.warning("the start could not be told on stdout: %s", error)
        # Python would try again at its exit: https://docs.python.org/3/library/signal.html#note-on-sigpipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    if ":" in host:  # an IPv6 address: RFC 3986, section 3.2.2
        host = f"[{host}]"
    return f"http://{host}:{port}"


# --- stop ---------------------------------------------------------------------------------------------------


def on_stop_signals(on_signal: Callable[[], None]) -> None:
    """Have Ctrl-C and SIGTERM call on_signal in the event loop."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: loop.call_soon_threadsafe(on_signal))


def say_what_a_stop_waits_for(workers: list[Worker], rooms: Rooms) -> None:
    """Log how many requests a stop waits for.

    Those that are being prepared are in no worker yet. A worker whose engine has not seen its newest request
    counts none and is busy.
    """
    counts = [worker.counts() for worker in workers]
    n_in_workers = sum(count["running"] + count["waiting"] for count in counts)
    n_busy = sum(worker.busy() for worker in workers)
    n_requests = max(n_in_workers, len(rooms.unanswered), n_busy)
    if n_requests:
        noun = "request" if n_requests == 1 else "requests"
        log.warning("waiting for %d %s; again to stop at once", n_requests, noun)


async def stop(
    args: argparse.Namespace,
    workers: list[Worker],
    registry: Registry,
    rooms: Rooms,
    end_grace: asyncio.Event,
) -> None:
    """Let what runs finish, until the grace is over or `end_grace` is set, then end it."""
    registry.stopping.set()
    deadline = time.monotonic() + args.shutdown_grace
    while not end_grace.is_set() and time.monotonic() < deadline:
        if not rooms.unanswered and not any(worker.busy() for worker in workers):
            break
        await asyncio.sleep(0.02)
    await registry.close(persistent=args.store != options.IN_MEMORY)
    for worker in workers:
        await worker.close()  # what still runs, in the foreground, fails


def notify(state: str) -> None:
    """Tell systemd, if it has started us."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):  # an abstract socket
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.sendto(state.encode(), address)


if __name__ == "__main__":
    sys.exit(main())
