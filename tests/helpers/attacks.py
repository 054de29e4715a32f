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

from websockets.frames import Frame, Opcode

from helpers.serving import Json, http_bytes
from helpers.upstream import DONE, Answer, event, head, says, upstream

RESPONSES, CHAT = "/v1/responses", "/v1/chat/completions"
VICTIM, ATTACKER, WITNESS = "victim-key", "attacker-key", "witness-key"  # three clients, by their keys
MB = 2**20
BODIES = (int(7.9 * MB), int(1.9 * MB))  # bytes of a large body: one of them is below the server's limit
FLOOD_S = 5
LATE_S = 2  # another's answer of one token, under a schema, comes sooner
MANY = 500  # sockets of a flood

# --- a client that attacks ----------------------------------------------------------------------------------


class Reply(NamedTuple):
    status: int  # 0: none has come
    body: bytes = b""

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def problem(self, statuses: tuple[int, ...]) -> str:
        """Return "" for one of these statuses, in few words of ours if it is a refusal; else what came."""
        is_ours = self.status < 400 or (len(self.body) < 4096 and b".rs:" not in self.body)
        if self.status in statuses and is_ours:
            return ""
        return f"{self.status}, {len(self.body)} bytes: {self.body[:80].decode(errors='replace')}"


class Client:
    """An attacker, who counts the bytes that it sends."""

    def __init__(self, url: str, upstream_port: int = 0) -> None:
        self.address = urlsplit(url).hostname, urlsplit(url).port
        self.upstream_port = upstream_port
        self.n_sent = 0
        self._held: list[socket.socket] = []

    def connect(self, opening: bytes = b"", wait_s: float = 6) -> socket.socket:
        """Open a connection that stays open until this process ends, unless it is closed.

        `opening` is the handshake of a WebSocket; raises OSError if the server does not let it in.
        """
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
        """Send bytes, read one reply."""
        try:
            with self.connect(wait_s=wait_s) as connection:
                with contextlib.suppress(ConnectionError):  # the refusal may come before all is sent
                    self.send(connection, request)
                response = http.client.HTTPResponse(connection)
                response.begin()
                return Reply(response.status, response.read())
        except (OSError, http.client.HTTPException):
            return Reply(0)

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

    def ask_upstream(self, answer: Answer) -> Reply:
        """Ask for an answer of an upstream that answers so."""
        with upstream(answer, port=self.upstream_port):
            deadline = time.monotonic() + 12
            while b'"m"' not in self.ask(get("/v1/models")).body and time.monotonic() < deadline:
                time.sleep(0.2)
            return self.ask(post(ask(model="m", max_output_tokens=50)))


def get(path: str, key: str = ATTACKER, method: str = "GET", body: Any = None, **headers: str) -> bytes:
    """Encode a request of the owner of a key, or of nobody."""
    if key:
        headers = {"Authorization": f"Bearer {key}"} | headers
    return http_bytes(path, body, method, **headers)


def post(body: Any, path: str = RESPONSES, key: str = ATTACKER, **headers: str) -> bytes:
    return get(path, key, "POST", body, **headers)


def large(body_of: Callable[[int], Json]) -> list[bytes]:
    """Encode a request that is larger than the limit, and one that is not."""
    return [post(body_of(n_bytes)) for n_bytes in BODIES]


def ask(input: Any = "hi", **more: Any) -> Json:
    """Return the body of a Response of one token."""
    return {"model": "default", "input": input, "max_output_tokens": 1, "temperature": 0} | more


def long_ask(n_tokens: int, **more: Any) -> Json:
    return ask(max_output_tokens=n_tokens, ignore_eos=True, **more)


def chat(n_tokens: int, **more: Any) -> Json:
    """Return the body of a chat that ends after so many tokens, not before."""
    body = {"model": "default", "messages": [USER], "temperature": 0, "max_tokens": n_tokens}
    return body | {"ignore_eos": True} | more


def schema(schema: Json) -> Json:
    return ask(text={"format": {"type": "json_schema", "name": "s", "strict": True, "schema": schema}})


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
NUMBER = {"type": "integer", "multipleOf": 99999989, "minimum": -1e15, "maximum": 1e15}
PRODUCT = {"allOf": [{"type": "integer", "multipleOf": n} for n in (9973, 9967)]}
REFERENCES = {"anyOf": [{"type": "integer"}, *[{"$ref": "#/anyOf/0"}] * 10_000]}
REFERRING_TOOL = {"type": "function", "name": "f", "parameters": {"properties": {"x": REFERENCES}}}
ATOMS = {"type": "grammar", "syntax": "regex", "definition": "Tell me a story about a fox and an owl. " * 150}
SEARCH: Json = {"type": "web_search"}
REGEX_TOOL = {"type": "custom", "name": "t", "format": ATOMS}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": ""}
OBJECTS = json.dumps({"x": [{}] * 450_000})
LONG_RUN = long_ask(1800, background=True)
PACKED_RUN = packed(LONG_RUN | {"zz": "ZZ"})
CHUNKED: Any = {"Transfer-Encoding": "chunked"}
CHUNKS = b"1\r\n \r\n" * (MB // 6)  # and no end
KEYLESS_CHUNKS = post(None, key="", **CHUNKED) + CHUNKS
MODELS = get("/v1/models")
MANY_HEADERS = get("/v1/models", "", **{f"X-{i}": "1" for i in range(16_000)})
CHAT_LOGPROBS = chat(500, n=15, logprobs=True, top_logprobs=20)

# --- attacks of several steps -------------------------------------------------------------------------------


def item_references(client: Client) -> Reply:
    item_id = client.ask(post(long_ask(1800))).json["output"][0]["id"]
    return client.ask(post(ask([{"type": "item_reference", "id": item_id}] * 4000, truncation="auto")))


def unknown_in_a_chain(client: Client) -> Reply:
    id_ = None
    for _ in range(8):
        body = ask([USER | {"zz": "ZZ"}], previous_response_id=id_, truncation="auto")
        reply = client.ask(packed(body))
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


# --- WebSockets ---------------------------------------------------------------------------------------------


def frame(data: bytes, opcode: Opcode = Opcode.TEXT, fin: bool = True) -> bytes:
    return Frame(opcode, data, fin).serialize(mask=True)


def turn(**more: Any) -> bytes:
    """Encode a message that asks for a response of one token."""
    return frame(json.dumps(ask(type="response.create", store=False) | more).encode())


def handshake(**headers: str) -> bytes:
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    return get(RESPONSES, **(upgrade | {"Sec-WebSocket-Key": "A" * 22 + "=="} | headers))


def ws_flood(client: Client, again: bytes, first: bytes = b"") -> None:
    """Send the same over and over on MANY WebSockets, read nothing, and come back when one is closed."""
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
            client.send(connection, frame(b"", Opcode.PING) * 60)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


WS = handshake()
EMPTY_FRAGMENT = frame(b"", Opcode.CONT, fin=False)
FIRST_FRAGMENT = frame(b"[", fin=False)
LARGE = turn(zz="x" * BODIES[1])
MANY_VALUES = turn(zz=[{}] * 49_000)
FRAGMENTS = FIRST_FRAGMENT + frame(b"{}," * 600, Opcode.CONT, fin=False) * 1000 + frame(b"{}]", Opcode.CONT)
LANES = b"".join(turn(stream_id=f"lane-{i}", model="none") for i in range(2500))
LONG_LANES = b"".join(turn(stream_id=str(i), **long_ask(1500, **LOGPROBS)) for i in range(16))


def chunk(delta: Json, **more: Any) -> bytes:
    common = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return event(common | {"choices": [{"index": 0, "delta": delta, "finish_reason": None} | more]})


def call(index: int, arguments: str, **more: Any) -> bytes:
    function = {"arguments": arguments} | more
    return chunk({"tool_calls": [{"index": index, "id": f"c{index}", "function": function}]})


LARGE_EVENT = chunk({"content": "a" * 15_000_000})
BYTES = chunk({"content": "a"}, logprobs={"content": [{"token": "a", "logprob": -1, "bytes": 30_000_000}]})
FIRST_PIECES = b"".join(call(i, '{"x": "' + "a" * 4 * MB, name="f") for i in (0, 1))
GROWING = FIRST_PIECES + (call(0, "a") + call(1, "a")) * 30

# --- the table ----------------------------------------------------------------------------------------------


class Attack(NamedTuple):
    name: str
    about: str  # what it tries; what must hold
    statuses: tuple[int, ...]  # of the replies, if they are right
    run: Callable[[Client], Any]  # returns replies, or what was wrong, or nothing
    flags: tuple[str, ...] = ()  # more options of the server; UPSTREAM: the upstream of the attack
    max_files: int | None = None  # limit of open files of the server
    may_hold_mb: int = 0  # more than the others, by the bounds of what waits
    goes_on: bool = False  # what was asked for outlives the client, rightly: background responses


UPSTREAM = "UPSTREAM"
FEW_STREAMS, SMALL_STORE = ("--max-streams", "256"), ("--store-max-bytes", "20000000")
ANY, ROOM = (0, 200, 400, 413, 429, 503), (200, 429, 503)
OK, NO, OK_OR_NO, NO_KEY = (200,), (400, 413), (200, 400, 413), (400, 401, 413, 414, 431)

# fmt: off
ATTACKS = [
    Attack("calm", "nothing; what this machine does by itself", OK, lambda c: time.sleep(FLOOD_S)),
    # work that runs away
    Attack("costly-schemas", "schemas whose check takes minutes; it is given up",
           ANY, lambda c: c.each([post(schema(NUMBER)), post(schema(PRODUCT))] * 4, 3)),
    Attack("costly-for-others", "50 costly schemas; the one of another key does not wait for all of them",
           OK, lambda c: c.hold(50, post(schema(NUMBER)))),
    Attack("schema-references", "a schema of 10,000 references; refused, or cheap",
           OK_OR_NO, lambda c: c.each([post(schema(REFERENCES)), post(with_tool(REFERRING_TOOL))])),
    Attack("large-enum", "an enum of 500 kB; refused, or answered, but no traceback",
           OK_OR_NO, lambda c: c.ask(post(schema({"enum": [f"{i:050}" for i in range(10_000)]})))),
    Attack("long-regex", "a regular expression of 6,000 atoms; no words of a library that panics",
           OK_OR_NO, lambda c: c.ask(post(with_tool(REGEX_TOOL)))),
    Attack("long-prompt", "megabytes of text; refused",
           NO, lambda c: c.each(large(lambda n: ask("a fox and an owl " * (n // 17))))),
    Attack("many-prompts", "24 prompts that nearly fill the context; answered",
           OK, lambda c: c.each([post(ask(f"{i} " + "fox owl " * 300)) for i in range(24)], 30)),
    Attack("item-references", "a body that refers to one item 4,000 times; it costs what its bytes cost",
           OK_OR_NO, item_references),
    Attack("many-logprobs", "20 logprobs a token, in 15 choices and in a stream; the other streams go on",
           OK, lambda c: c.each([post(CHAT_LOGPROBS, CHAT), post(long_ask(1800, stream=True, **LOGPROBS))])),
    Attack("many-biases", "bodies full of logit biases; refused",
           NO, lambda c: c.each(large(lambda n: ask(logit_bias={str(i): 1 for i in range(n // 14)})))),
    Attack("many-parts", "bodies full of parts of messages; refused",
           NO, lambda c: c.each(large(lambda n: ask([USER | {"content": [PART] * 78}] * (n // 3120))))),
    Attack("hosted-tool", "a large tool that the response would repeat in three events; the streams go on",
           OK_OR_NO, lambda c: c.each(large(lambda n: with_tool(SEARCH | {"filters": [0] * (n // 3)})))),
    Attack("wrong-type", "megabytes in place of a number; a short refusal",
           NO, lambda c: c.each(large(lambda n: ask(temperature=[{"a": 1}] * (n // 12))))),
    Attack("small-chunks", "millions of chunks of one byte, with a key and without; refused",
           NO_KEY, lambda c: c.each([post(None, **CHUNKED) + CHUNKS * 12, *[KEYLESS_CHUNKS] * 6])),
    Attack("many-headers", "16,000 headers; refused", NO_KEY, lambda c: c.each([MANY_HEADERS] * 3)),
    Attack("json-in-arguments", "arguments of calls that are JSON of 450,000 objects; refused",
           NO, lambda c: c.each([post(ask([CALL | {"arguments": OBJECTS}, OUTPUT]))] * 10)),
    Attack("long-queries", "without a key, 40 queries of 31,000 parameters; refused",
           NO_KEY, lambda c: c.each([get(f"{RESPONSES}/resp_1?" + "a&" * 31_000, "")] * 40)),
    Attack("scrapes", "400 scrapes at once; they take turns", OK, lambda c: c.each([get("/metrics")] * 400)),
    Attack("many-gets", "1,000 GETs at once; the streams go on", ROOM, lambda c: c.each([MODELS] * 1000)),
    Attack("many-posts", "600 POSTs at once; the streams go on", ROOM, lambda c: c.each([post(ask())] * 600)),
    Attack("pipelined", "1,000 requests at once on each of 100, no answer read; what they hold is bounded",
           OK, lambda c: c.hold(100, MODELS * 1000, 3)),
    # memory that piles up
    Attack("unknown-member", "packed bodies in the queue; what waits is what means something",
           ANY, lambda c: c.hold(8, post(LONG_RUN)) or c.each([PACKED_RUN] * 10), goes_on=True),
    Attack("unknown-in-a-chain", "8 packed turns, each continuing the last; a GET does not read all of them",
           OK_OR_NO, unknown_in_a_chain),
    Attack("continued-by-many", "300 small requests that continue a large one; what they hold is counted",
           ANY, continued_by_many, SMALL_STORE, may_hold_mb=256, goes_on=True),  # queue and bodies
    Attack("slow-bodies", "30 bodies of 7.9 MB without their last byte; what they hold is bounded",
           OK, lambda c: c.hold(30, post(None, Content_Length=str(BODIES[0])) + b" " * (BODIES[0] - 1), 3)),
    Attack("many-values", "200 bodies of many values, whose clients leave; they are parsed one at a time",
           ANY, lambda c: c.each([post(ask([USER | {"content": [PART] * 14}] * 1000))] * 200, 6)),
    Attack("read-again", "a large response for 400 who do not read; bounded", OK, read_again, FEW_STREAMS),
    Attack("upstream-bytes", "150 bytes that stand for 30 million zeros; they are not made",
           (200, 502), lambda c: c.ask_upstream(says(head() + BYTES + DONE)), (UPSTREAM,)),
    Attack("upstream-calls", "two calls of 4 MB that grow by turns; they are not copied for each piece",
           (200, 502), lambda c: c.ask_upstream(says(head() + GROWING + DONE)), (UPSTREAM,)),
    Attack("upstream-event", "one event of 15 MB; the streams go on",
           (200, 502), lambda c: c.ask_upstream(says(head() + LARGE_EVENT + DONE)), (UPSTREAM,)),
    # fairness and keys
    Attack("evict-others", "more is stored than is kept; another's stays", OK, evict_others, SMALL_STORE),
    Attack("fill-the-queue", "runs without end; another's is taken", OK, fill_the_queue, goes_on=True),
    Attack("half-sent-bodies", "1,500 requests whose bodies do not come; a stop does not wait for them",
           OK, lambda c: c.hold(1500, post(None, Content_Length="1000") + b"{")),
    Attack("many-choices", "3 requests of 16 choices each; another's token does not wait for all of them",
           OK, lambda c: c.hold(3, post(chat(1900, n=16, stream=True), CHAT))),
    Attack("idle-connections", "more connections than the server may have files; another is served",
           OK, lambda c: c.hold(300, seconds=3), max_files=256),
    # WebSockets
    Attack("ws-messages", "a flood of messages; the streams go on", OK, lambda c: ws_flood(c, frame(b"{}"))),
    Attack("ws-pings", "a flood of pings; after 1,000 in 20 s the connection is closed",
           OK, lambda c: ws_flood(c, frame(b"", Opcode.PING))),
    Attack("ws-few-pings", "40 pings, which is allowed, on each of 500; the streams go on",
           OK, lambda c: c.hold(MANY, frame(b"", Opcode.PING) * 40, 3, WS)),
    Attack("ws-fragments", "a flood of empty fragments; they are not kept",
           OK, lambda c: ws_flood(c, EMPTY_FRAGMENT, FIRST_FRAGMENT)),
    Attack("ws-turns", "a flood of turns; others have theirs", OK, lambda c: ws_flood(c, turn())),
    Attack("ws-large-messages", "4 messages of 1.9 MB on each of 200; they are taken one at a time",
           OK, lambda c: c.hold(200, LARGE * 4, 0, WS)),
    Attack("ws-open-messages", "200 such messages without their last byte; what they hold is bounded",
           OK, lambda c: c.hold(200, LARGE[:-1], 0, WS)),
    Attack("ws-in-fragments", "messages of 1.9 MB in 1,000 fragments; the streams go on",
           OK, lambda c: c.hold(20, FRAGMENTS * 2, 0, WS)),
    Attack("ws-turns-that-wait", "60 turns of many values after a long one; a turn that waits is its text",
           OK, lambda c: c.hold(8, turn(**long_ask(1900)) + MANY_VALUES * 60, 0, WS)),
    Attack("ws-lanes", "10,000 lanes by their names; refused", OK, lambda c: c.hold(4, LANES, 0, WS)),
    Attack("ws-handshakes", "1,000 halves of a handshake, 1,000 silent WebSockets; another has room",
           OK, lambda c: c.hold(1000, WS[:60]) or c.hold(1000, opening=WS)),
    Attack("ws-odd-handshakes", "a header that is not ASCII; refused, without a traceback",
           (400, 426), lambda c: c.each([handshake(X_Odd="\u00e9")] * 50)),
    Attack("ws-deaf-readers", "long answers on 16 lanes of 200 that do not read; what they hold is bounded",
           OK, lambda c: c.hold(200, LONG_LANES, 10, WS)),
    Attack("ws-resets", "pings, then a reset; no traceback", OK, ws_resets),
]
# fmt: on


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
        problem = found if isinstance(found, str) else ""
        replies = [found] if isinstance(found, Reply) else [] if problem else found
        problems = [problem, *(reply.problem(attack.statuses) for reply in replies)]
        began_at = time.monotonic()
        problems.append(client.ask(post(schema({"type": "boolean"}), key=WITNESS)).problem((200,)))
        took = time.monotonic() - began_at
        problems.append(f"another's answer took {took:.1f} s" if took > LATE_S else "")
    except Exception as error:  # an answer of another form than that of any server of ours
        problems = [f"{type(error).__name__}: {error}"[:120]]
    print(json.dumps({"problem": next(filter(None, problems), ""), "n_sent": client.n_sent}), flush=True)
    os._exit(0)  # threads of the attack may still wait for answers
