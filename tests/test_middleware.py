"""What stands around the endpoints: keys, whose responses are whose, other origins, limits, slow clients."""

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from http.client import HTTPResponse
from typing import Any, ClassVar

import pytest
from starlette.datastructures import Headers

import api
from api import Api
from background import Registry
from helpers.asked import CHAT, HI, MINE, NO_END, RESPONSES, YOURS, error
from helpers.faulty_server import SLOW
from helpers.limits import PATIENCE_S
from helpers.serving import Json, Reply, Server, http_bytes, http_frames, serve, until
from helpers.tables import table
from helpers.wire import UPGRADE
from middleware import digest, make_app, owner_of, turned_away
from request import params
from request.body import parsed
from request.room import Rooms, Visit
from store import Retention, Row, Store
from streaming import cancel
from worker import Workers

ENDLESS: Json = HI | NO_END | {"seed": SLOW, "stream": True}
PAGE = "https://example.org"
TABLE = table("middleware")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("mine\n\n yours \n")
    flags = ("--max-streams", "4", "--cors-origin", PAGE)
    with serve("--api-key-file", str(keys), *flags) as started:
        yield started
        assert "Traceback" not in started.log()


def test_to_another_key_neither_a_response_nor_an_item_exists(server: Server) -> None:
    """Nor an item that its client keeps for us. Paths with the id of another's response are simulate.py's."""
    said = {"role": "user", "content": "hi"}
    made, compacted = (server.post(RESPONSES + path, HI, **MINE).json for path in ("", "/compact"))
    stored = {"type": "item_reference", "id": made["output"][-1]["id"]}
    for more, status in (
        ({"previous_response_id": made["id"]}, 400),
        ({"input": [stored, said]}, 404),
        ({"input": [compacted["output"][-1], said]}, 400),
    ):
        assert server.post(RESPONSES, HI | more, **MINE).status == 200
        error(server.post(RESPONSES, HI | more, **YOURS), status)


# --- keys ---------------------------------------------------------------------------------------------------


def test_a_key_after_many_blanks_is_read_in_linear_time() -> None:
    """Bug: one header of 31,000 blanks stopped all for 3.3 s, and no key was needed for that.

    Ten million, and the time limit of every test: else it takes days.
    """
    for blanks in ("bearer x{}y", "bearer{}", "{}bearer{}x", "bearer x{}"):
        owner(["mine"], {"authorization": blanks.replace("{}", " " * 10**7)})


def owner(keys: list[str], headers: dict[str, str]) -> str | None:
    return owner_of(Headers(headers), {*map(digest, keys)})


@pytest.mark.parametrize(("headers", "whose"), TABLE["owners"])
def test_whose_a_key_is(headers: dict[str, str], whose: str) -> None:
    expected = owner([whose], {"authorization": f"Bearer {whose}"}) if whose else None
    assert not whose or whose not in str(expected)  # the store does not hold the key
    assert owner(["", "mine", "yours"], headers) == expected
    assert owner([], headers) == ""


def test_each_key_is_let_in_and_no_other(server: Server) -> None:
    assert server.get("/v1/models", **YOURS).status == 200
    for path in ("/metrics", "/v1/models", "/v1/responses/resp_1", "/docs"):
        refused = server.get(path, Authorization="Bearer theirs")
        assert error(refused, 401)["code"] == "invalid_api_key"
        assert refused.headers["www-authenticate"] == "Bearer"


def test_the_prefix_cache_says_nothing_of_the_prompts_of_another_key(server: Server) -> None:
    """`cached_tokens` told one key what another had sent, digit by digit."""
    secret = {"model": "tiny", "input": "The number is 4711. " * 30, "max_output_tokens": 1}
    replies = [server.post("/v1/responses", secret, **key) for key in (MINE, MINE, YOURS)]
    n_cached = [reply.json["usage"]["input_tokens_details"]["cached_tokens"] for reply in replies]
    assert n_cached[1] > 0
    assert (n_cached[0], n_cached[2]) == (0, 0)


# --- other origins ------------------------------------------------------------------------------------------


@pytest.mark.bug("H14")
def test_cors(server: Server) -> None:
    asked = {"Access_Control_Request_Method": "POST", "Access_Control_Request_Headers": "authorization"}
    allowed = "access-control-allow-origin"
    reply = server.request("OPTIONS", RESPONSES, None, Origin=PAGE, **asked)  # browsers ask without the key
    assert (reply.status, reply.headers[allowed]) == (200, PAGE)
    assert "authorization" in reply.headers["access-control-allow-headers"]
    assert_noted(server, reply)
    reply = server.post(RESPONSES, HI, Origin=PAGE, **MINE)
    assert (reply.status, reply.headers[allowed]) == (200, PAGE)
    assert reply.headers["access-control-expose-headers"] == "x-request-id, request-id, retry-after, warning"
    assert server.get("/v1/models", Origin=PAGE).headers[allowed] == PAGE  # the 401, too
    reply = server.post(RESPONSES, HI, Origin=ELSEWHERE, **MINE)
    assert (reply.status, allowed in reply.headers) == (200, False)
    reply = server.request("OPTIONS", RESPONSES, None, Origin=ELSEWHERE, **asked)
    assert (reply.status, reply.body, allowed in reply.headers) == (400, b"Disallowed CORS origin", False)
    assert_noted(server, reply)


def assert_noted(server: Server, reply: Reply) -> None:
    """A line of the log has the reply's id."""
    until(lambda: f"[{reply.headers['x-request-id']}]" in server.log(), "it is noted, after its reply")


ELSEWHERE = "https://elsewhere.org"


@pytest.mark.parametrize(("origin", "body_type", "status"), TABLE["origins"])
def test_pages_of_other_sites(server: Server, origin: str, body_type: str, status: int) -> None:
    """Bug: any page could have a server without keys compute, blindly: browsers send such bodies unasked."""
    sent = {"Origin": server.url if origin == "itself" else origin, "Content_Type": body_type}
    headers = {name: value for name, value in sent.items() if value != "-"}
    reply = server.request("POST", RESPONSES, json.dumps(HI).encode(), **headers, **MINE)
    assert reply.status == status, reply.body
    assert status == 200 or error(reply, status)["code"] == "origin_not_allowed"


# --- other names --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", TABLE["hosts"])
def test_without_keys_only_who_knows_the_address_is_served(host: str) -> None:
    """Bug: a page of evil.com, whose name suddenly points to this machine, had it compute (DNS rebinding)."""
    page = {"host": host, "origin": f"http://{host}", "content-type": "text/plain", "content-length": "2"}
    by_names = [*zip(({"localhost"}, {"localhost", "example.org"}), TABLE["hosts"][host], strict=True)]
    for path in ("/v1/models", "/metrics", "/health", "/"):
        rooms = Rooms(max_streams=1, max_body_bytes=2**20, is_shared=False)
        scope = {"type": "http", "method": "GET", "path": path, "visit": Visit(rooms, "")}
        for names, status in by_names:
            refused = turned_away(scope, Headers(page), set(), set(), names)
            assert (refused.status if refused else 200) == status
            assert refused is None or "Start it with --allowed-host" in refused.message
        assert turned_away(scope, Headers(page), set(), set(), {"*"}) is None
        assert turned_away(scope, Headers(), set(), set(), set()) is None  # HTTP/1.0


def test_health_without_a_key_counts_nothing(server: Server) -> None:
    """What other keys do is shown to those with a key alone."""
    assert server.get("/health").json == {"status": "ok"}
    assert server.get("/health", **MINE).json.keys() > {"status", "running", "background"}


# --- what is not an HTTP request ---------------------------------------------------------------------------

POST = "POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer mine\r\n"
NOT_HTTP = {name: (POST + data, why) for name, (data, why) in TABLE["not_http"]["after_post"].items()}
NOT_HTTP |= TABLE["not_http"]["whole"]


@pytest.mark.parametrize(("data", "why"), NOT_HTTP.values(), ids=NOT_HTTP)
def test_what_is_not_http_is_refused(server: Server, data: str, why: str) -> None:
    """What a proxy and we could read as different requests is none (RFC 9112, section 11.2): one answer."""
    with server.connect(data.encode()) as client:
        whole = HTTPResponse(client)
        whole.begin()
        error = json.loads(whole.read())["error"]
        with suppress(ConnectionResetError):  # if more was sent than was read
            assert client.recv(1) == b""
    assert (whole.status, error["code"]) == (400, "invalid_http")
    assert whole.headers["x-request-id"].startswith("req_")
    assert error["message"].startswith("Invalid HTTP request received: ")
    assert why in error["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses/resp_1", "/nope"])
def test_a_websocket_is_told_to_use_http(server: Server, path: str) -> None:
    """If the path has none: Codex falls back at this status alone."""
    reply = server.get(path, **UPGRADE, **MINE)
    assert "or POST /v1/responses" in error(reply, 426)["message"]
    assert reply.headers["upgrade"] == "HTTP/1.1"
    assert_noted(server, reply)
    assert "library" not in server.log()


# --- limits -------------------------------------------------------------------------------------------------


@pytest.mark.bug("I06")
def test_there_is_room_for_so_many_streams() -> None:
    with serve("--max-streams", "2") as server, ExitStack() as held:
        for more in ({}, {"background": True}):
            client = held.enter_context(server.connect(http_bytes(RESPONSES, ENDLESS | more)))
            first = json.loads(next(http_frames(client)).split(b"data: ")[1])
        path = f"{RESPONSES}/{first['response']['id']}"
        error(server.get(path + "?stream=true"), 503)
        assert server.get(path + "?stream=false").status == 200  # it ends at once
        for asked in (CHAT, f"{RESPONSES}/input_tokens", f"{RESPONSES}/compact", RESPONSES):
            refused = server.post(asked, HI)
            assert error(refused, 503)["code"] == "server_is_overloaded"
            assert int(refused.headers["retry-after"]) > 0
        held.close()
        until(lambda: server.post(RESPONSES, HI).status == 200, "there is room again")


@pytest.mark.bug("I01", "I06")
def test_a_reader_that_does_not_read_is_dropped() -> None:
    """Its stream ends with its connection, and nothing is computed for it any more."""
    shown = {"top_logprobs": 20, "include": ["message.output_text.logprobs"], "reasoning": {"effort": "none"}}
    with serve("--reader-timeout", "0.3") as server, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = server.url.removeprefix("http://").split(":")
        client.connect((host, int(port)))
        client.sendall(http_bytes(RESPONSES, ENDLESS | shown))
        until(lambda: server.health()["running"] == 1, "it runs")
        until(lambda: server.health()["running"] == 0, "it does not")
        client.settimeout(PATIENCE_S)
        assert client.recv(65536).startswith(b"HTTP/1.1 200 OK")
        *_, last = iter(lambda: client.recv(65536), b"")
        assert not last.endswith(b"0\r\n\r\n")  # no client takes that for the end of the answer


class SlowWorkers(Workers):
    """Workers whose prompts are never ready: their grammars wait for their turn."""

    defaults: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.begun = asyncio.Queue[str]()

    def find(self, model: str) -> Any:
        return self

    async def prepare(self, request: params.Request, conversation: Any = None) -> Any:
        self.begun.put_nowait(request.owner)
        await asyncio.Event().wait()


def api_of(workers: SlowWorkers) -> Api:
    return Api(Registry(Store(":memory:", Retention()), workers), b"", True, True, "openai", False, None)


async def test_a_crowd_of_one_key_does_not_keep_another_waiting() -> None:
    """Bug: amid 1,000 GETs at once another key's took half a second."""
    served: list[str] = []
    rooms = Rooms(max_streams=100, max_body_bytes=2**20, is_shared=True)
    app = make_app(api_of(SlowWorkers()), {digest("mine"), digest("yours")}, rooms, set(), set())

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def get(key: str) -> None:
        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                served.append(key)

        headers = [(b"authorization", f"Bearer {key}".encode())]
        scope = {"type": "http", "method": "GET", "path": "/", "headers": headers, "root_path": ""}
        await app(scope, receive, send)

    await asyncio.gather(*map(get, ["mine"] * 100 + ["yours"]))
    assert "yours" in served[:12]


async def test_a_large_body_keeps_no_place_while_its_grammar_waits() -> None:
    """Bug: those of other owners had none."""
    chat_body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * 2**16}]}).encode()
    workers, rooms = SlowWorkers(), Rooms(max_streams=100, max_body_bytes=2**20, is_shared=False)
    visits = [Visit(rooms, owner) for owner in "mmmmmmmmmmy"]
    asked = [api_of(workers)._prompt(parsed(chat_body, visit), visit, api.CHAT) for visit in visits]
    tasks = [asyncio.create_task(each) for each in asked]
    async with asyncio.timeout(PATIENCE_S):
        begun = [await workers.begun.get() for _ in tasks]
    assert begun.count("y") == 1
    await asyncio.gather(*map(cancel, tasks))


async def test_what_a_websocket_remembers_is_not_worked_on_in_the_event_loop() -> None:
    """A message of 100 bytes may continue a conversation of megabytes; else it is small."""
    row = Row("resp_1", "", 0, 1, False, False, False, "{}", "[]", "completed", '{"output": []}')

    async def small_after(**members: str) -> bool:
        rooms = Rooms(max_streams=100, max_body_bytes=2**20, is_shared=False)
        workers, visit = SlowWorkers(), Visit(rooms, "")
        text = json.dumps({"model": "m", "input": "hi"} | members).encode()
        begin = api_of(workers).begin(parsed(text, visit), visit, memory={"resp_1": row})
        beginning = asyncio.create_task(begin)
        await asyncio.wait_for(workers.begun.get(), PATIENCE_S)
        await cancel(beginning)
        return visit.is_small

    assert [await small_after(), await small_after(previous_response_id="resp_1")] == [True, False]
