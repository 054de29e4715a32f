"""What one client can do to others, from outside: attacks on a server, the rows of ATTACKS; for hostile.py.

    Attack.run(Client) --> replies --run()--> "" if the server answered as it should, else what it said

An attack knows HTTP and nothing of the server's modules, so any version can be attacked. After each of them a
client with another key must be served. All its connections are closed when its process ends: so it leaves.
"""

import contextlib
import gzip
import http.client
import json
import os
import socket
import struct
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, NoReturn
from urllib.parse import urlsplit

from websockets.frames import Opcode

from helpers.serving import Json, Reply, http_bytes
from helpers.upstream import DONE, event, head, says, upstream
from helpers.wire import UPGRADE, frame

RESPONSES, CHAT = "/v1/responses", "/v1/chat/completions"
VICTIM, ATTACKER, WITNESS = "victim-key", "attacker-key", "witness-key"  # three clients, by their keys
MB = 2**20
BODIES = (int(7.9 * MB), int(1.9 * MB))  # bytes of a large body: one of them is below the server's limit
FLOOD_S = 5
LATE_S = 2  # another's answer of one token, under a schema, comes sooner
MANY = 500  # sockets of a flood


NO_REPLY = Reply(0, {}, b"")


def problem(reply: Reply, statuses: tuple[int, ...]) -> str:
    """Return "" for one of these statuses, in few words of ours if it is a refusal; else what came."""
    is_ours = reply.status < 400 or (len(reply.body) < 4096 and b".rs:" not in reply.body)
    said = f"{reply.status}, {len(reply.body)} bytes: {reply.body[:80].decode(errors='replace')}"
    return "" if reply.status in statuses and is_ours else said


class Client:
    """An attacker, who counts the bytes that it sends."""

    def __init__(self, url: str, upstream_port: int = 0) -> None:
        self.address = urlsplit(url).hostname, urlsplit(url).port
        self.upstream_port = upstream_port
        self.n_sent = 0
        self._held: list[socket.socket] = []

    def connect(self, opening: bytes = b"", wait_s: float = 6) -> socket.socket:
        """Open a connection, with this handshake of a WebSocket, that is kept open; raises OSError."""
        connection = socket.create_connection(self.address, timeout=wait_s)
        self._held.append(connection)
        if opening:
            self.send(connection, opening)
            if not connection.recv(4096).startswith(b"HTTP/1.1 101 "):
                raise ConnectionError
        return connection

    def send(self, connection: socket.socket, data: bytes) -> None:
        for start in range(0, len(data), 64 * 1024):
            piece = data[start : start + 64 * 1024]
            connection.sendall(piece)
            self.n_sent += len(piece)

    def ask(self, request: bytes, wait_s: float = 20) -> Reply:
        try:
            with self.connect(wait_s=wait_s) as connection:
                with contextlib.suppress(ConnectionError):  # the refusal may come before all is sent
                    self.send(connection, request)
                response = http.client.HTTPResponse(connection)
                response.begin()
                return Reply(response.status, {}, response.read())
        except (OSError, http.client.HTTPException):
            return NO_REPLY

    def each(self, requests: Iterable[bytes], wait_s: float = 20) -> list[Reply]:
        """Return the replies to requests, each of a client of its own, at the same time."""
        with ThreadPoolExecutor(MANY) as pool:
            return [future.result() for future in [pool.submit(self.ask, one, wait_s) for one in requests]]

    def hold(self, n: int, data: bytes = b"", seconds: float = 1, opening: bytes = b"") -> list[Reply]:
        """Send the same on so many connections as fast as it is taken, read no reply, and keep them open."""

        def hold_one(_: int) -> None:
            with contextlib.suppress(OSError):
                self.send(self.connect(opening), data)

        with ThreadPoolExecutor(200) as pool:
            list(pool.map(hold_one, range(n)))
        time.sleep(seconds)
        return []

    def large(self, body_of: Callable[[int], Json]) -> list[Reply]:
        """Return the replies to a body that is larger than the limit, and to one that is not."""
        return self.each([post(body_of(n_bytes)) for n_bytes in BODIES])

    def ask_upstream(self, frames: bytes) -> Reply:
        with upstream(says(head() + frames + DONE), port=self.upstream_port):
            deadline = time.monotonic() + 12
            while b'"m"' not in self.ask(get("/v1/models")).body and time.monotonic() < deadline:
                time.sleep(0.2)
            return self.ask(post(ask(model="m", max_output_tokens=50)))


def get(path: str, key: str = ATTACKER, method: str = "GET", body: Any = None, **headers: str) -> bytes:
    """Encode a request of the owner of a key; "": without one."""
    authorization = {"Authorization": f"Bearer {key}"} if key else {}
    return http_bytes(path, body, method, **(authorization | headers))


def post(body: Any, path: str = RESPONSES, key: str = ATTACKER, **headers: str) -> bytes:
    return get(path, key, "POST", body, **headers)


def ask(input: Any = "hi", **more: Any) -> Json:
    """Return the body of a Response of one token."""
    return {"model": "default", "input": input, "max_output_tokens": 1, "temperature": 0} | more


def long_ask(n_tokens: int, **more: Any) -> Json:
    return ask(max_output_tokens=n_tokens, ignore_eos=True, **more)


def chat(n_tokens: int, **more: Any) -> Json:
    """Return the body of a chat that ends after so many tokens, not before."""
    body = {"model": "default", "messages": [USER], "temperature": 0, "max_tokens": n_tokens}
    return body | {"ignore_eos": True} | more


def schema(schema: Json, key: str = ATTACKER) -> bytes:
    wanted = {"type": "json_schema", "name": "s", "strict": True, "schema": schema}
    return post(ask(text={"format": wanted}), key=key)


def with_tool(tool: Json) -> Json:
    return ask(tools=[tool], tool_choice="auto" if tool["type"] == "web_search" else "required")


def packed(body: Json) -> bytes:
    """Encode a request of some kB of gzip, in which "ZZ" stands for megabytes of empty objects."""
    raw = json.dumps(body).encode()
    raw = raw.replace(b'"ZZ"', b"[" + b",".join([b"{}"] * (BODIES[1] // 3)) + b"]")
    raw = raw.replace(b'"MANY"', json.dumps(["example.org"] * 100_000).encode())
    return post(gzip.compress(raw), Content_Encoding="gzip")


LOGPROBS: Json = {"top_logprobs": 20, "include": ["message.output_text.logprobs"]}
USER = {"role": "user", "content": "hi"}
PART = {"type": "input_text", "text": ""}
NUMBER = schema({"type": "integer", "multipleOf": 99999989, "minimum": -1e15, "maximum": 1e15})
PRODUCT = schema({"allOf": [{"type": "integer", "multipleOf": n} for n in (9973, 9967)]})
REFERENCES = {"anyOf": [{"type": "integer"}, *[{"$ref": "#/anyOf/0"}] * 10_000]}
REFERRING_TOOL = {"type": "function", "name": "f", "parameters": {"properties": {"x": REFERENCES}}}
ENUM = schema({"enum": [f"{i:050}" for i in range(10_000)]})
ATOMS = {"type": "grammar", "syntax": "regex", "definition": "Tell me a story about a fox and an owl. " * 150}
REGEX = post(with_tool({"type": "custom", "name": "t", "format": ATOMS}))
LONG_PROMPTS = [post(ask(f"{i} " + "fox owl " * 300)) for i in range(24)]
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": json.dumps({"x": [{}] * 450_000})}
ARGUMENTS = post(ask([CALL, {"type": "function_call_output", "call_id": "c", "output": ""}]))
MANY_PARTS = USER | {"content": [PART] * 78}
MANY_VALUES = post(ask([USER | {"content": [PART] * 14}] * 1000))
LONG_RUN = long_ask(1800, background=True)
UNKNOWN = LONG_RUN | {"zz": "ZZ"}
CHUNKED: Any = {"Transfer-Encoding": "chunked"}
CHUNKS = b"1\r\n \r\n" * (MB // 6)  # and no end
KEYLESS_CHUNKS = post(None, key="", **CHUNKED) + CHUNKS
MODELS = get("/v1/models")
MANY_HEADERS = get("/v1/models", "", **{f"X-{i}": "1" for i in range(16_000)})
BLANKS = get("/v1/models", "", Authorization=f"Bearer x{' ' * 31_000}y")
LONG_QUERY = get(f"{RESPONSES}/resp_1?" + "a&" * 31_000, "")
LONG_CHAT = post(chat(500, n=15, logprobs=True, top_logprobs=20), CHAT)
MANY_LOGPROBS = [LONG_CHAT, post(long_ask(1800, stream=True, **LOGPROBS))]

# --- attacks of several steps -------------------------------------------------------------------------------


def item_references(client: Client) -> Reply:
    item_id = client.ask(post(long_ask(1800))).json["output"][0]["id"]
    return client.ask(post(ask([{"type": "item_reference", "id": item_id}] * 4000, truncation="auto")))


def unknown_in_a_chain(client: Client) -> Reply:
    id_ = None
    for _ in range(8):
        reply = client.ask(packed(ask([USER | {"zz": "ZZ"}], previous_response_id=id_, truncation="auto")))
        if reply.status != 200:
            return reply
        id_ = reply.json["id"]
    return client.ask(get(f"{RESPONSES}/{id_}"))


def continued_by_many(client: Client) -> list[Reply]:
    first = client.ask(post(ask([USER | {"content": "hi " * 300_000}, USER], truncation="auto"))).json
    body = ask(previous_response_id=first["id"], truncation="auto", background=True)
    return client.each([post(body)] * 300)


def read_again(client: Client) -> None:
    events = client.ask(post(long_ask(1800, background=True, stream=True, **LOGPROBS))).body
    id_ = events.split(b'"id":"', 1)[1].split(b'"', 1)[0].decode()
    client.hold(400, get(f"{RESPONSES}/{id_}?stream=true"), 3)


def evict_others(client: Client) -> Reply:
    kept = client.ask(post(ask(), key=WITNESS)).json["id"]
    for _ in range(24):
        client.ask(packed(ask(tools=[{"type": "web_search", "filters": {"allowed_domains": "MANY"}}])))
    time.sleep(1.5)
    client.ask(post(ask()))
    return client.ask(get(f"{RESPONSES}/{kept}", WITNESS))


def fill_the_queue(client: Client) -> Reply:
    for _ in range(300):
        if client.ask(post(long_ask(1500, background=True))).status == 429:
            break
    return client.ask(post(long_ask(1, background=True), key=WITNESS))


def watch_steps(client: Client) -> None:
    """Read the steps of the engine many times, and leave."""
    for _ in range(3):
        client.ask(post(long_ask(700)))
    client.hold(20, get("/debug/steps"), 2)


# --- WebSockets ---------------------------------------------------------------------------------------------


def turn(**more: Any) -> bytes:
    """Encode a message that asks for a response of one token."""
    return frame(json.dumps(ask(type="response.create", store=False) | more).encode())


def ws_flood(client: Client, again: bytes, first: bytes = b"") -> None:
    """Send the same over and over on MANY WebSockets, read nothing, and come back if one is closed."""
    block = again * (4096 // len(again) + 1)
    sockets: dict[int, socket.socket] = {}
    n_sent = [0] * MANY  # of the block, on each
    deadline = time.monotonic() + FLOOD_S
    while time.monotonic() < deadline:
        for i in range(MANY):
            try:
                if i not in sockets:
                    sockets[i], n_sent[i] = client.connect(WS), 0
                    client.send(sockets[i], first)
                    sockets[i].setblocking(False)
                n_more = sockets[i].send(block[n_sent[i] :])
                n_sent[i] = (n_sent[i] + n_more) % len(block)
                client.n_sent += n_more
            except BlockingIOError:
                pass
            except OSError:
                sockets.pop(i, None)


def ws_resets(client: Client) -> None:
    deadline = time.monotonic() + FLOOD_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), client.connect(WS) as connection:
            client.send(connection, PING * 60)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


WS = get(RESPONSES, **UPGRADE)
OLD_WS = WS.replace(b"Version: 13", b"Version: 12")
ODD_WS = WS[:-2] + "X-Odd: \u00e9\r\n\r\n".encode()
PING = frame(b"", Opcode.PING)
EMPTY_FRAGMENT = frame(b"", Opcode.CONT, fin=False)
BEGINNING = frame(b"[", fin=False)
LARGE = turn(zz="x" * BODIES[1])
LARGE_TURNS = turn(**long_ask(1900)) + turn(zz=[{}] * 49_000) * 60
FRAGMENTS = BEGINNING + frame(b"{}," * 600, Opcode.CONT, fin=False) * 1000 + frame(b"{}]", Opcode.CONT)
LANES = b"".join(turn(stream_id=f"lane-{i}", model="none") for i in range(2500))
LONG_LANES = b"".join(turn(stream_id=str(i), **long_ask(1500, **LOGPROBS)) for i in range(16))


def chunk(delta: Json, **more: Any) -> bytes:
    common = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return event(common | {"choices": [{"index": 0, "delta": delta, "finish_reason": None} | more]})


def call(index: int, arguments: str, **more: Any) -> bytes:
    function = {"arguments": arguments} | more
    return chunk({"tool_calls": [{"index": index, "id": f"c{index}", "function": function}]})


BYTES = chunk({"content": "a"}, logprobs={"content": [{"token": "a", "logprob": -1, "bytes": 30_000_000}]})
FIRST_PIECES = b"".join(call(i, '{"x": "' + "a" * 4 * MB, name="f") for i in (0, 1))
GROWING = FIRST_PIECES + (call(0, "a") + call(1, "a")) * 30


class Attack(NamedTuple):
    name: str
    about: str  # what it tries
    statuses: tuple[int, ...]  # of the replies, if they are right
    run: Callable[[Client], Any]  # returns replies, one, or none
    flags: tuple[str, ...] = ()  # more options of the server; UPSTREAM: the upstream of the attack
    may_hold_mb: int = 0  # more than the others, by the bounds of what waits
    goes_on: bool = False  # what was asked for outlives the client, rightly: background responses


UPSTREAM = "UPSTREAM"
RELAY, FEW_STREAMS = (UPSTREAM,), ("--max-streams", "256")
SMALL_STORE = ("--store-max-bytes", "20000000")
ANY, ROOM = (0, 200, 400, 413, 429, 503), (200, 429, 503)
RELAYED, OK, NO, EITHER, NO_KEY = (200, 502), (200,), (400, 413), (200, 400, 413), (400, 401, 413, 414, 431)

ATTACKS = [
    Attack("calm", "nothing; what this machine does by itself", OK, lambda c: time.sleep(FLOOD_S)),
    # work that runs away
    Attack("costly-schemas", "their check takes minutes", ANY, lambda c: c.each([NUMBER, PRODUCT] * 4, 3)),
    Attack("costly-for-others", "50; that of another key does not wait", OK, lambda c: c.hold(50, NUMBER)),
    Attack("schema-references", "a schema of 10,000 references", EITHER,
           lambda c: c.each([schema(REFERENCES), post(with_tool(REFERRING_TOOL))])),
    Attack("large-enum", "an enum of 500 kB", EITHER, lambda c: c.ask(ENUM)),
    Attack("long-regex", "a regular expression of 6,000 atoms", EITHER, lambda c: c.ask(REGEX)),
    Attack("long-prompt", "megabytes of text", NO, lambda c: c.large(lambda n: ask("a fox " * (n // 6)))),
    Attack("many-prompts", "24 that nearly fill the context", OK, lambda c: c.each(LONG_PROMPTS, 30)),
    Attack("item-references", "4,000 to one item; they cost what their bytes cost", EITHER, item_references),
    Attack("many-logprobs", "20 a token, in 15 choices and a stream", OK, lambda c: c.each(MANY_LOGPROBS)),
    Attack("many-biases", "bodies full of logit biases", NO,
           lambda c: c.large(lambda n: ask(logit_bias={str(i): 1 for i in range(n // 14)}))),
    Attack("many-parts", "of messages", NO, lambda c: c.large(lambda n: ask([MANY_PARTS] * (n // 3120)))),
    Attack("hosted-tool", "a large one, which three events repeat", EITHER,
           lambda c: c.large(lambda n: with_tool({"type": "web_search", "filters": [0] * (n // 3)}))),
    Attack("wrong-type", "for a number", NO, lambda c: c.large(lambda n: ask(temperature=[{}] * (n // 4)))),
    Attack("small-chunks", "millions of chunks of one byte, with a key and without", NO_KEY,
           lambda c: c.each([post(None, **CHUNKED) + CHUNKS * 12, *[KEYLESS_CHUNKS] * 6])),
    Attack("many-headers", "16,000 headers", NO_KEY, lambda c: c.each([MANY_HEADERS] * 3)),
    Attack("json-in-arguments", "450,000 objects in those of a call", NO, lambda c: c.each([ARGUMENTS] * 10)),
    Attack("long-queries", "40 of 31,000 parameters, no key", NO_KEY, lambda c: c.each([LONG_QUERY] * 40)),
    Attack("blanks-in-a-key", "8 headers of 31,000, no key", NO_KEY, lambda c: c.each([BLANKS] * 8)),
    Attack("steps", "20 who read all of them", OK, watch_steps, ("--debug-steps",)),
    Attack("scrapes", "400 at once; they take turns", OK, lambda c: c.each([get("/metrics")] * 400)),
    Attack("many-gets", "1,000 GETs at once", ROOM, lambda c: c.each([MODELS] * 1000)),
    Attack("many-posts", "600 POSTs at once", ROOM, lambda c: c.each([post(ask())] * 600)),
    Attack("pipelined", "1,000 requests at once on each of 100", OK, lambda c: c.hold(100, MODELS * 1000, 3)),
    # memory that piles up
    Attack("unknown-member", "packed bodies in the queue; what waits is what means something", ANY,
           lambda c: c.hold(8, post(LONG_RUN)) or c.each([packed(UNKNOWN)] * 10), goes_on=True),
    Attack("unknown-in-a-chain", "8 packed turns; a GET does not read them", EITHER, unknown_in_a_chain),
    Attack("continued-by-many", "300 requests that continue a large one; what they hold is counted", ANY,
           continued_by_many, SMALL_STORE, may_hold_mb=256, goes_on=True),  # queue and bodies
    Attack("slow-bodies", "30 bodies of 7.9 MB without their last byte", OK,
           lambda c: c.hold(30, post(None, Content_Length=str(BODIES[0])) + b" " * (BODIES[0] - 1), 3)),
    Attack("half-sent-large-bodies", "30 of 1.9 MB without their last byte", OK,
           lambda c: c.hold(30, post(None, Content_Length=str(BODIES[1])) + b" " * (BODIES[1] - 1), 3)),
    Attack("many-values", "200 bodies; their clients leave", ANY, lambda c: c.each([MANY_VALUES] * 200, 6)),
    Attack("read-again", "a large response for 400 who do not read", OK, read_again, FEW_STREAMS),
    Attack("upstream-bytes", "30 million zeros in few", RELAYED, lambda c: c.ask_upstream(BYTES), RELAY),
    Attack("upstream-calls", "two that grow by turns", RELAYED, lambda c: c.ask_upstream(GROWING), RELAY),
    Attack("upstream-empty-events", "3 MB of 8 bytes each", RELAYED,
           lambda c: c.ask_upstream(b"data:{}\n\n" * 400_000), RELAY),
    Attack("upstream-event", "one event of 15 MB", RELAYED,
           lambda c: c.ask_upstream(chunk({"content": "a" * 15_000_000})), RELAY),
    # fairness and keys
    Attack("evict-others", "more is stored than is kept; another's stays", OK, evict_others, SMALL_STORE),
    Attack("fill-the-queue", "runs without end; another's is taken", OK, fill_the_queue, goes_on=True),
    Attack("half-sent-bodies", "1,500 requests whose bodies do not come", OK,
           lambda c: c.hold(1500, post(None, Content_Length="1000") + b"{")),
    Attack("many-choices", "3 requests of 16 choices each; another's token does not wait for all of them", OK,
           lambda c: c.hold(3, post(chat(1900, n=16, stream=True), CHAT))),
    Attack("idle-connections", "1,500, more than there may be", OK, lambda c: c.hold(1500, seconds=3)),
    # WebSockets
    Attack("ws-messages", "a flood of messages", OK, lambda c: ws_flood(c, frame(b"{}"))),
    Attack("ws-pings", "after 1,000 pings in 20 s the connection ends", OK, lambda c: ws_flood(c, PING)),
    Attack("ws-few-pings", "40 are allowed, on each of 500", OK, lambda c: c.hold(MANY, PING * 40, 3, WS)),
    Attack("ws-fragments", "a flood of empty ones", OK, lambda c: ws_flood(c, EMPTY_FRAGMENT, BEGINNING)),
    Attack("ws-turns", "a flood of turns; others have theirs", OK, lambda c: ws_flood(c, turn())),
    Attack("ws-large-messages", "4 of 1.9 MB on each of 200", OK, lambda c: c.hold(200, LARGE * 4, 0, WS)),
    Attack("ws-open-messages", "200 without the last byte", OK, lambda c: c.hold(200, LARGE[:-1], 0, WS)),
    Attack("ws-in-fragments", "1.9 MB in 1,000 fragments", OK, lambda c: c.hold(20, FRAGMENTS * 2, 0, WS)),
    Attack("ws-turns-that-wait", "60 large after a long one", OK, lambda c: c.hold(8, LARGE_TURNS, 0, WS)),
    Attack("ws-lanes", "10,000 lanes by their names", OK, lambda c: c.hold(4, LANES, 0, WS)),
    Attack("ws-handshakes", "1,000 halves of a handshake, 1,000 silent WebSockets; another has room", OK,
           lambda c: c.hold(1000, WS[:60]) or c.hold(1000, opening=WS)),
    Attack("ws-odd-handshakes", "a header not in ASCII", (101, 400, 426), lambda c: c.each([ODD_WS] * 50)),
    Attack("ws-old-handshakes", "version 12", (426,), lambda c: c.each([OLD_WS] * 50)),
    Attack("ws-deaf-readers", "16 answers for each of 200", OK, lambda c: c.hold(200, LONG_LANES, 10, WS)),
    Attack("ws-resets", "pings, then a reset; no traceback", OK, ws_resets),
]  # fmt: skip


def run(name: str, url: str, upstream_port: int, again: bool) -> NoReturn:
    """Attack in a process that gives way to all others, and print how it was answered; or go on for ever."""
    os.nice(10)
    (attack,) = (attack for attack in ATTACKS if attack.name == name)
    client = Client(url, upstream_port)
    while again:
        with contextlib.suppress(Exception):
            attack.run(client)
    try:
        found = attack.run(client) or []
        replies = [found] if isinstance(found, Reply) else found
        problems = [problem(reply, attack.statuses) for reply in replies]
        began_at = time.monotonic()
        problems.append(problem(client.ask(schema({"type": "boolean"}, WITNESS)), OK))
        took = time.monotonic() - began_at
        problems.append(f"another's answer took {took:.1f} s" if took > LATE_S else "")
    except Exception as error:  # an answer of another form than that of any server of ours
        problems = [f"{type(error).__name__}: {error}"[:120]]
    print(json.dumps({"problem": next(filter(None, problems), ""), "n_sent": client.n_sent}), flush=True)
    os._exit(0)  # threads of the attack may still wait for answers
