"""Mixed traffic for some minutes: clients that leave, cancels, a server that is killed and started again.

    python tests/soak.py --minutes 5

In the end every background response that was accepted must be terminal, its events without a gap, nothing may
run any more, the log may hold no traceback, and memory and open files must be where they were when the last
process had warmed up. Prints what it did and found; the exit status says whether all of that held.

Not here: a quick test of any of it; those are in test_lifecycle.py and test_middleware.py.
"""

import argparse
import contextlib
import http.client
import json
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # the server's modules

from websockets.exceptions import WebSocketException
from websockets.sync.client import ClientConnection

from helpers.serving import PATIENCE_S, Json, Reply, Server, http_bytes, http_frames, serve, until
from store import TERMINAL

RESPONSES = "/v1/responses"
N_CLIENTS = 8
KILL_EVERY_S = 15  # on average; the lives of the server are random
CALM = 0.4  # share of the time, at its end, in which nothing is killed and memory is watched
MAX_GROWTH_MB = 40  # of the last process: caches fill, and the allocator keeps some memory
# How a client sees a killed server.
LOST = (OSError, http.client.HTTPException, ValueError, AssertionError, WebSocketException)
PROMPTS = ["hi", "Tell me a story about a cat.", "What is the weather in Tokyo?"]
PARAMETERS = {"type": "object", "properties": {"city": {}}}
TOOL = {"type": "function", "name": "get_weather", "parameters": PARAMETERS}


class Soak:
    """The state that the clients share: the server as it is now, and what it has promised."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.server: Server | None = None  # None while there is none
        self.epoch = 0  # number of the server's process
        self.over = threading.Event()
        self.accepted: dict[str, bool] = {}  # background responses: id, and whether it was streamed
        self.deleted: set[str] = set()
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []

    def client(self, seed: int) -> None:
        random = Random(seed)
        while not self.over.is_set():
            server = self.server
            epoch = self.epoch
            act = random.choice(ACTIONS)
            if server is None:
                time.sleep(0.05)
                continue
            try:
                act(self, server, random)
                self.done[act.__name__] += 1
            except LOST as error:
                if epoch == self.epoch and self.server is server:
                    time.sleep(0.5)  # the kill may have come just now
                if epoch == self.epoch and self.server is server:
                    self.wrong.append(f"{act.__name__}: {type(error).__name__}: {error}")
                self.done["interrupted"] += 1


# --- what clients do ----------------------------------------------------------------------------------------


def body(random: Random, **more: Any) -> Json:
    options: list[Json] = [{}, {"temperature": 1.2}, {"tools": [TOOL]}, {"reasoning": {"effort": "none"}}]
    length = {"max_output_tokens": random.choice([4, 40, 400])}
    return {"model": "tiny", "input": random.choice(PROMPTS)} | length | random.choice(options) | more


def events_of(server: Server, request: Json, n: int | None = None) -> list[Json]:
    """The first `n` events of a stream, or all of them; then leave."""
    events: list[Json] = []
    with server.connect(http_bytes(RESPONSES, request)) as connection:
        for chunk in http_frames(connection):
            if b"[DONE]" not in chunk and not chunk.startswith(b":"):
                events.append(json.loads(chunk.split(b"data: ", 1)[1]))
            if n is not None and len(events) >= n:
                break
    return events


def check_events(events: list[Json], first: int = 0) -> None:
    assert [event["sequence_number"] for event in events] == list(range(first, first + len(events))), "a gap"


def check_whole(events: list[Json], first: int = 0) -> None:
    check_events(events, first)
    ends = [event["response"]["status"] in TERMINAL for event in events if "response" in event]
    assert ends[-1:] == [True], "no end"
    assert ends.count(True) == 1, "two ends"
    assert "response" in events[-1], "something behind the end"


def ok(reply: Reply) -> Any:
    assert reply.status == 200, f"{reply.status} {reply.body!r}"
    return reply.json


def stream(soak: Soak, server: Server, random: Random) -> None:
    check_whole(events_of(server, body(random, stream=True)))


def leave(soak: Soak, server: Server, random: Random) -> None:
    check_events(events_of(server, body(random, stream=True), random.randint(1, 20)))


def whole(soak: Soak, server: Server, random: Random) -> None:
    response = ok(server.post(RESPONSES, body(random)))
    assert response["status"] in ("completed", "incomplete")
    calls = [item for item in response["output"] if item["type"] == "function_call"]
    outputs = [
        {"type": "function_call_output", "call_id": call["call_id"], "output": "12 C"} for call in calls
    ]
    chain = {"previous_response_id": response["id"], "truncation": "auto"}
    if calls:  # a conversation that leaves a call without its output is refused
        chain["input"] = outputs
    ok(server.post(RESPONSES, body(random, **chain)))


def background(soak: Soak, server: Server, random: Random) -> None:
    reply = server.post(RESPONSES, body(random, background=True))
    if reply.status != 429:
        soak.accepted[ok(reply)["id"]] = False


def resume(soak: Soak, server: Server, random: Random) -> None:
    events = events_of(server, body(random, background=True, stream=True), random.randint(3, 30))
    id_ = events[0]["response"]["id"]
    soak.accepted[id_] = True
    rest = replayed(server, id_, len(events) - 1)
    check_whole([*events, *rest])


def replayed(server: Server, id: str, after: int | None = None) -> list[Json]:
    """The events behind a number; [] when they are not kept any more, ten minutes after the end."""
    behind = "" if after is None else f"&starting_after={after}"
    reply = server.get(f"{RESPONSES}/{id}?stream=true{behind}")
    if b"expired" in reply.body and reply.status == 400:
        return []
    assert reply.status == 200, reply.body
    return [json.loads(data) for data in re.findall(rb"^data: (\{.*)$", reply.body, re.MULTILINE)]


def cancel(soak: Soak, server: Server, random: Random) -> None:
    id_ = ok(server.post(RESPONSES, body(random, background=True, max_output_tokens=1500)))["id"]
    soak.accepted[id_] = False
    time.sleep(random.random() / 4)
    reply = server.post(f"{RESPONSES}/{id_}/cancel", {})
    assert reply.status in (200, 400), reply.body
    assert ok(server.get(f"{RESPONSES}/{id_}"))["status"] in TERMINAL


def delete(soak: Soak, server: Server, random: Random) -> None:
    id_ = ok(server.post(RESPONSES, body(random)))["id"]
    ok(server.get(f"{RESPONSES}/{id_}/input_items"))
    ok(server.request("DELETE", f"{RESPONSES}/{id_}", None))
    soak.deleted.add(id_)  # now that it was promised


def websocket(soak: Soak, server: Server, random: Random) -> None:
    """Some turns, each behind the last one; then leave amid another."""
    with server.websocket() as connection:
        previous = None
        for _ in range(random.randint(1, 3)):
            request = body(random, store=False, previous_response_id=previous, tools=[], truncation="auto")
            connection.send(json.dumps({"type": "response.create"} | request))
            events = turn_of(connection)
            check_whole(events)
            previous = events[-1]["response"]["id"]
        connection.send(json.dumps({"type": "response.create"} | body(random)))
        leave_amid(connection, random)


def turn_of(connection: ClientConnection) -> list[Json]:
    events: list[Json] = []
    while not events or events[-1].get("response", {}).get("status") not in TERMINAL:
        events.append(json.loads(connection.recv(PATIENCE_S)))
        assert events[-1]["type"] != "error", events[-1]
    return events


def leave_amid(connection: ClientConnection, random: Random) -> None:
    """Leave with or without a word."""
    for _ in range(random.randint(0, 20)):
        with contextlib.suppress(TimeoutError):
            connection.recv(timeout=0.01)
    if random.random() < 0.5:
        connection.socket.shutdown(socket.SHUT_RDWR)


ACTIONS: list[Callable[[Soak, Server, Random], None]] = [
    stream, leave, leave, whole, background, background, resume, cancel, delete, websocket,
]  # fmt: skip

# --- what the operator does ---------------------------------------------------------------------------------


def used(server: Server) -> tuple[float, float]:
    """Resident memory in MB and open files, when nothing runs."""

    def idle() -> bool:
        health = server.health()
        return (health["running"], health["waiting"], health["background"]) == (0, 0, 0)

    until(idle, "nothing runs")
    lines = server.get("/metrics").body.decode().splitlines()
    metrics = dict(line.split() for line in lines if line.startswith("process_"))
    return float(metrics["process_resident_memory_bytes"]) / 1e6, float(metrics["process_open_fds"])


def check_end(soak: Soak, server: Server, was: tuple[float, float]) -> None:
    for id_, streamed in soak.accepted.items():
        status = ok(server.get(f"{RESPONSES}/{id_}"))["status"]
        if status not in TERMINAL:
            soak.wrong.append(f"{id_} is {status}")
        if streamed and (events := replayed(server, id_)):
            try:
                check_whole(events)
            except AssertionError as error:
                soak.wrong.append(f"{id_}: {error}")
    for id_ in soak.deleted:
        if server.get(f"{RESPONSES}/{id_}").status != 404:
            soak.wrong.append(f"{id_} was deleted, and is there")
    now = used(server)
    warm, ended = (f"{mb:.0f} MB and {files:.0f} files" for mb, files in (was, now))
    print(f"last process: {warm} when warm, {ended} at the end")
    if now[0] > was[0] + MAX_GROWTH_MB or now[1] > was[1] + 5:
        soak.wrong.append("memory or files have grown")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    soak = Soak(args.seed)
    end = time.monotonic() + 60 * args.minutes
    clients = [threading.Thread(target=soak.client, args=(args.seed * 1000 + n,)) for n in range(N_CLIENTS)]
    with tempfile.TemporaryDirectory() as folder:
        flags = ("--store", str(Path(folder) / "store.db"), "--store-max-responses", "1000000")
        was = None
        for client in clients:
            client.start()
        while time.monotonic() < end:
            calm = time.monotonic() > end - CALM * 60 * args.minutes
            life = soak.random.uniform(0.3, 1.7) * KILL_EVERY_S
            if calm:
                life = end - time.monotonic()
            with serve(*flags) as server:
                soak.server = server
                if calm:
                    soak.over.wait(life / 4)
                    soak.server = None  # the clients pause
                    was = used(server)
                    soak.server = server
                    soak.over.wait(end - time.monotonic())
                    soak.over.set()
                    for client in clients:
                        client.join()
                    check_end(soak, server, was)
                else:
                    soak.over.wait(life)
                    soak.server = None
                    soak.epoch += 1
                    server.interrupt(signal.SIGKILL)
                    server.exit_status()
                if "Traceback" in server.log():
                    soak.wrong.append("a traceback in the log:\n" + server.log()[-3000:])
    soak.over.set()  # in a run too short for a calm end the clients are still there
    print(f"{soak.epoch} kills, {len(soak.accepted)} background responses accepted;", dict(soak.done))
    print("\n".join(soak.wrong) or "nothing wrong")
    return 1 if soak.wrong or was is None else 0


if __name__ == "__main__":
    sys.exit(main())
