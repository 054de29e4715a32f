"""Mixed traffic for some minutes: clients that leave, cancels, a server that is killed and started again.

    python tests/soak.py --minutes 5

In the end every background response that was accepted must be terminal, its events without a gap, nothing may
run any more, the log may hold no traceback, and memory and open files must be where they were when the last
process had warmed up. Prints what it did and found; the exit status says whether all of that held.
"""

import argparse
import http.client
import json
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # the server's modules

import sse
from helpers.laws import check_rules
from helpers.serving import Json, Reply, Server, http_bytes, http_frames, serve, until
from store import TERMINAL

RESPONSES = "/v1/responses"
N_CLIENTS = 8
KILL_EVERY_S = 15  # on average; the lives of the server are random
CALM = 0.4  # share of the time, at its end, in which nothing is killed and memory is watched
MAX_GROWTH_MB, MAX_GROWTH_FILES = 40, 5  # of the last process: caches fill, the allocator keeps some memory
LOST = (OSError, http.client.HTTPException, ValueError, AssertionError)  # as a client sees a killed server
PROMPTS = ["hi", "Tell me a story about a cat.", "What is the weather in Tokyo?"]
PARAMETERS = {"type": "object", "properties": {"city": {}}}
TOOL = {"type": "function", "name": "get_weather", "parameters": PARAMETERS}
OPTIONS: list[Json] = [{}, {"temperature": 1.2}, {"tools": [TOOL]}, {"reasoning": {"effort": "none"}}]


class Soak:
    """The state that the clients share: the server as it is now, and what it has promised."""

    def __init__(self) -> None:
        self.server: Server | None = None  # None while there is none
        self.over = threading.Event()
        self.accepted: set[str] = set()  # background responses
        self.deleted: set[str] = set()
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []

    def client(self, seed: int) -> None:
        random = Random(seed)
        while not self.over.is_set():
            server = self.server
            if server is None:
                time.sleep(0.05)
                continue
            act = random.choice(ACTIONS)
            try:
                act(self, server, random)
                self.done[act.__name__] += 1
            except LOST as error:
                time.sleep(0.5)  # the kill may have come just now
                if self.server is server:
                    self.wrong.append(f"{act.__name__}: {type(error).__name__}: {error}")


# --- what clients do ----------------------------------------------------------------------------------------


def body(random: Random, **more: Any) -> Json:
    length = {"max_output_tokens": random.choice([4, 40, 400])}
    return {"model": "tiny", "input": random.choice(PROMPTS)} | length | random.choice(OPTIONS) | more


def events_of(server: Server, request: Json, n: int | None = None) -> list[Json]:
    """Return the first `n` events of a stream, or all of them; then leave."""
    with server.connect(http_bytes(RESPONSES, request | {"stream": True})) as connection:
        frames = (frame for frame in http_frames(connection) if frame.startswith(b"event: "))
        events = [json.loads(sse.data(frame)) for frame in islice(frames, n)]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def ok(reply: Reply) -> Any:
    assert reply.status == 200, f"{reply.status} {reply.body!r}"
    return reply.json


def stream(soak: Soak, server: Server, random: Random) -> None:
    check_rules(events_of(server, body(random)), "order", "terminal")


def leave(soak: Soak, server: Server, random: Random) -> None:
    events_of(server, body(random), random.randint(1, 20))


def whole(soak: Soak, server: Server, random: Random) -> None:
    """A response and the next one of its chain; a call without its output would be refused."""
    response = ok(server.post(RESPONSES, body(random)))
    calls = [item["call_id"] for item in response["output"] if item["type"] == "function_call"]
    chain: Json = {"previous_response_id": response["id"], "truncation": "auto"}
    if calls:
        chain["input"] = [{"type": "function_call_output", "call_id": id_, "output": "12 C"} for id_ in calls]
    ok(server.post(RESPONSES, body(random, **chain)))


def background(soak: Soak, server: Server, random: Random) -> None:
    reply = server.post(RESPONSES, body(random, background=True))
    if reply.status != 429:
        soak.accepted.add(ok(reply)["id"])


def resume(soak: Soak, server: Server, random: Random) -> None:
    events = events_of(server, body(random, background=True), random.randint(3, 30))
    id_ = events[0]["response"]["id"]
    soak.accepted.add(id_)
    reply = server.get(f"{RESPONSES}/{id_}?stream=true&starting_after={len(events) - 1}")
    assert reply.status == 200, reply.body
    frames = [event.data for event in sse.Parser().feed(reply.body) if event.data != "[DONE]"]
    check_rules([*events, *map(json.loads, frames)], "order", "numbers", "terminal")


def cancel(soak: Soak, server: Server, random: Random) -> None:
    id_ = ok(server.post(RESPONSES, body(random, background=True, max_output_tokens=1500)))["id"]
    soak.accepted.add(id_)
    time.sleep(random.random() / 4)
    assert server.post(f"{RESPONSES}/{id_}/cancel", {}).status in (200, 400)
    assert ok(server.get(f"{RESPONSES}/{id_}"))["status"] in TERMINAL


def delete(soak: Soak, server: Server, random: Random) -> None:
    id_ = ok(server.post(RESPONSES, body(random)))["id"]
    ok(server.request("DELETE", f"{RESPONSES}/{id_}", None))
    soak.deleted.add(id_)  # now that it was promised


ACTIONS = [stream, leave, leave, whole, background, background, resume, cancel, delete]

# --- what the operator does ---------------------------------------------------------------------------------


def used(server: Server) -> tuple[float, float]:
    """Return resident memory in MB and open files, when nothing runs."""
    until(lambda: not any(map(server.health().get, ("running", "waiting", "background"))), "nothing runs")
    lines = server.get("/metrics").body.decode().splitlines()
    metrics = dict(line.split() for line in lines if line.startswith("process_"))
    return float(metrics["process_resident_memory_bytes"]) / 1e6, float(metrics["process_open_fds"])


def check_end(soak: Soak, server: Server, warm: tuple[float, float]) -> None:
    statuses = {id_: ok(server.get(f"{RESPONSES}/{id_}"))["status"] for id_ in soak.accepted}
    soak.wrong += [f"{id_} is {status}" for id_, status in statuses.items() if status not in TERMINAL]
    there = [id_ for id_ in soak.deleted if server.get(f"{RESPONSES}/{id_}").status != 404]
    soak.wrong += [f"{id_} was deleted, and is there" for id_ in there]
    ended = used(server)
    print(f"last process, MB and files: {warm} when warm, {ended} at the end")
    if ended[0] > warm[0] + MAX_GROWTH_MB or ended[1] > warm[1] + MAX_GROWTH_FILES:
        soak.wrong.append("memory or files have grown")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    soak, random = Soak(), Random(args.seed)
    calm_s = CALM * 60 * args.minutes
    calm_at = time.monotonic() + 60 * args.minutes - calm_s
    n_kills = 0
    with ThreadPoolExecutor(N_CLIENTS) as threads, tempfile.TemporaryDirectory() as folder:
        clients = threads.map(soak.client, range(args.seed * 1000, args.seed * 1000 + N_CLIENTS))
        flags = ("--store", f"{folder}/store.db", "--store-max-responses", "1000000")
        while time.monotonic() < calm_at:
            with serve(*flags) as soak.server:
                soak.over.wait(random.uniform(0.3, 1.7) * KILL_EVERY_S)
                server, soak.server = soak.server, None
                server.interrupt(signal.SIGKILL)
                soak.wrong += ["a traceback:\n" + server.log()] * ("Traceback" in server.log())
            n_kills += 1
        with serve(*flags) as server:
            soak.server = server
            soak.over.wait(calm_s / 4)
            soak.server = None  # the clients pause
            warm = used(server)
            soak.server = server
            soak.over.wait(calm_s)
            soak.over.set()
            list(clients)  # wait for them
            check_end(soak, server, warm)
            soak.wrong += ["a traceback:\n" + server.log()] * ("Traceback" in server.log())
    print(f"{n_kills} kills, {len(soak.accepted)} background responses accepted;", dict(soak.done))
    print("\n".join(soak.wrong) or "nothing wrong")
    return int(bool(soak.wrong))


if __name__ == "__main__":
    sys.exit(main())
