"""ASGI middleware around every endpoint: authentication, admission, errors, access log and metrics.

    request --AccessLog--> Preflights --Admission: API key, room--> endpoint
    endpoint --reply, or an exception--> error body --AccessLog: x-request-id, log, metrics--> client

Authority: https://platform.openai.com/docs/guides/error-codes; for pages of other sites
https://fetch.spec.whatwg.org/#http-cors-protocol; for names RFC 9110, section 7.4.

Rules of this file:
1. Every reply has an x-request-id, every log record of its request the same; every error has the same body.
2. A key is kept as its digest alone, and compared with all of them each time: the time taken says nothing.
3. Admission limits how many requests clients hold open at once, and apart from them how many stored answers
   are on their way: a poll or a cancel gets in while all streams are taken.
4. A page of another site can do nothing unless --cors-origin allows it. A browser asks before it sends JSON
   for a page (a CORS preflight), but sends other types at once, and opens WebSockets: so from such a page
   they are refused.
5. Without keys a request must name this server by its address, or by a name that the command line knows: a
   page can have the name of its own site point to our address, and be of the same site (DNS rebinding).

Not here: the endpoints, and which of them a client may hold open (api.py), how much room there is
(service/admission.py), bodies and streams (streaming.py), limits of a parameter (request/params.py).
"""

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import time
from collections.abc import Mapping, Sequence, Set
from contextlib import ExitStack
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.datastructures import Headers, QueryParams
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Match, Route, WebSocketRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api import Api, Endpoint
from gateway.refused import Refused
from request.ids import REQUEST_ID, new_id
from request.query import STREAMED
from request.refusals import MAX_SHOWN, BadInput, shown
from request.room import Turns
from service import webpage
from service.admission import Room
from service.metrics import CONTENT_TYPE, Metrics
from streaming import error_response, while_connected

log = logging.getLogger("middleware")

KEY_SUBPROTOCOL = "openai-insecure-api-key."
LOCALHOST = "localhost"
BETWEEN_SCRAPES_S = 0.01  # one takes the event loop for 5 ms: a storm of them gets a third of it
KEYLESS_PATHS = ("/", "/health", "/health/live")  # the page asks for a key itself
CLIENT_CLOSED_REQUEST = 499  # nginx's status for a client that left before its reply began: only logged
SWITCHING_PROTOCOLS = 101  # the status of a WebSocket that was accepted
REPLIES = ("http.response.start", "websocket.accept", "websocket.http.response.start")
METHODS = ("GET", "POST", "DELETE", "HEAD", "OPTIONS")  # others are one label in the metrics

# --- the application ----------------------------------------------------------------------------------------


def make_app(
    api: Api, keys: "Keys", room: Room, origins: Sequence[str] = (), hosts: Sequence[str] = ()
) -> ASGIApp:
    """The endpoints, with everything around them.

    `room`: for what clients hold open at once. `origins`: sites whose pages may call. `hosts`: names of this
    server, in lower case; "*": any.
    """

    async def on_page(_: HttpRequest) -> Response:
        return webpage.response()

    scrapes = Turns(1)

    async def on_metrics(http: HttpRequest) -> Response:
        async def scrape() -> bytes:
            async with scrapes.turn(http.scope["owner"]):
                text = api.metrics.render()
                await asyncio.sleep(BETWEEN_SCRAPES_S)
            return text

        return Response(await while_connected(scrape(), http.receive), media_type=CONTENT_TYPE)

    endpoints = [Endpoint("GET", "/", on_page), Endpoint("GET", "/metrics", on_metrics), *api.endpoints()]
    handlers = {
        BadInput: on_bad_input,
        Refused: on_refused,
        HTTPException: on_http_error,
        RecursionError: on_recursion,
        ClientDisconnect: on_disconnect,
        Exception: on_exception,
    }
    inner = Starlette(routes=[*map(route_of, endpoints)], exception_handlers=handlers)
    inner.router.redirect_slashes = False  # it would go to where the Host header says, which is the client's
    app: ASGIApp = Admission(inner, endpoints, keys, room, origins, hosts)
    if origins:
        app = Preflights(
            app,
            origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=["*"],
            expose_headers=("x-request-id", "retry-after"),
        )
    path_of = {endpoint.handler: endpoint.path for endpoint in endpoints}
    return AccessLog(app, path_of, api.metrics, room.unanswered)


def route_of(endpoint: Endpoint) -> Route | WebSocketRoute:
    if endpoint.slow_part == "socket":
        return WebSocketRoute(endpoint.path, endpoint.handler)
    return Route(endpoint.path, endpoint.handler, methods=[endpoint.method])


# --- around every endpoint ----------------------------------------------------------------------------------


class AccessLog:
    """The application as uvicorn calls it: gives each request its id, logs and counts its reply.

    `path_of` is the path of each endpoint, by its handler, as the routes spell it: "/v1/responses/{id}". It
    becomes a label of the metrics, which must not have a value for each id. `unanswered` is Room's.
    """

    def __init__(
        self, app: ASGIApp, path_of: Mapping[Any, str], metrics: Metrics, unanswered: set[str]
    ) -> None:
        self._app = app
        self._path_of = path_of
        self._metrics = metrics
        self._unanswered = unanswered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = new_id("req")
        REQUEST_ID.set(request_id)  # in the log records of this task and those that it starts
        status = CLIENT_CLOSED_REQUEST
        started_at = time.perf_counter()
        self._unanswered.add(request_id)

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] in REPLIES:
                self._unanswered.discard(request_id)
                status = message.get("status", SWITCHING_PROTOCOLS)
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            self._unanswered.discard(request_id)
            self._record(scope, status, time.perf_counter() - started_at)

    def _record(self, scope: Scope, status: int, seconds: float) -> None:
        endpoint = self._path_of.get(scope.get("endpoint"), "none")
        method = scope.get("method", "GET")  # a WebSocket has none
        if method not in METHODS:
            method = "other"
        self._metrics.add("http_requests", 1, endpoint, method, str(status))
        if status != SWITCHING_PROTOCOLS:  # a connection is no request: its turns are
            self._metrics.observe("http_request_duration_seconds", seconds, endpoint)
        level = logging.INFO
        if scope["path"] in KEYLESS_PATHS:
            level = logging.DEBUG
        path = scope["raw_path"].decode("ascii", "replace")
        fields = {"method": method, "path": path, "status": status, "seconds": round(seconds, 4)}
        log.log(level, "%s %s: %d in %.3f s", *fields.values(), extra={"fields": fields})


class Preflights(CORSMiddleware):
    """Answers CORS preflights, which carry no key; their refusals look like all other errors."""

    def preflight_response(self, request_headers: Headers) -> Response:
        answer = super().preflight_response(request_headers)
        if answer.status_code == 200:
            return answer
        refusal = error_response(answer.status_code, f"{bytes(answer.body).decode()}.", None, "cors")
        refusal.headers["Vary"] = answer.headers["Vary"]
        return refusal


class Admission:
    """Lets requests with an API key in, while there is room.

    Endpoints find its owner in scope["owner"], and how long a body may be in scope["max_body_bytes"].
    Those whose answer may be large call scope["hold"] with its size before they load it; those with several
    choices call scope["enter"] with the number of streams that they need beside their first.
    """

    def __init__(
        self,
        app: ASGIApp,
        endpoints: Sequence[Endpoint],
        keys: "Keys",
        room: Room,
        origins: Sequence[str],
        hosts: Sequence[str],
    ) -> None:
        self._app = app
        self._slow = [(endpoint, route_of(endpoint)) for endpoint in endpoints if endpoint.slow_part]
        self._keys = keys
        self._room = room
        self._origins = {*origins}
        self._hosts = {LOCALHOST, *hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["owner"] = self._keys.owner(scope)
        scope["max_body_bytes"] = self._room.max_body_bytes
        slow_part = self._slow_part(scope)
        refusal = self._refusal(scope, slow_part)
        if refusal:
            await refusal(scope, receive, send)
            return
        if not slow_part:
            await self._app(scope, receive, send)
            return
        if slow_part == "socket":
            await self._admit_socket(scope, receive, send)
            return
        with self._room.visit(scope["owner"]) as visit:
            scope["hold"] = partial(self._room.hold, visit)
            scope["enter"] = partial(self._room.enter, visit)
            if slow_part == "body":
                receive = partial(self._room.receive, visit, receive)
            else:
                enter = self._room.enter_for_answer if slow_part == "answer" else self._room.enter
                try:
                    enter(visit)
                except BadInput as error:
                    await bad_input(error)(scope, receive, send)
                    return
            await self._app(scope, receive, send)

    async def _admit_socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A WebSocket finds in scope["room"] the room for its turns, and what they may have it remember."""
        with ExitStack() as stack:
            try:
                visit = stack.enter_context(self._room.socket(scope["owner"]))
            except BadInput as error:
                await bad_input(error)(scope, receive, send)
                return
            scope["room"] = self._room
            scope["hold_message"] = partial(self._room.hold_message, visit)
            try:
                await self._app(scope, receive, send)
            finally:
                del scope["hold_message"]  # what still comes is nobody's

    def _slow_part(self, scope: Scope) -> str:
        """Endpoint.slow_part of this request; "" where it is short, "answer" where it asks for no stream."""
        for endpoint, route in self._slow:
            match, _ = route.matches(scope)
            if match is Match.FULL:
                if endpoint.slow_part != "stream":
                    return endpoint.slow_part
                query = QueryParams(scope["query_string"])
                return "stream" if query.get("stream") in STREAMED else "answer"
        return ""

    def _refusal(self, scope: Scope, slow_part: str) -> Response | None:
        headers = dict(scope["headers"])
        if self._keys.n_owners == 0 and not is_ours(headers.get(b"host"), self._hosts):
            return misdirected(headers[b"host"])
        if scope["owner"] is None and scope["path"] not in KEYLESS_PATHS:
            return unauthorized()
        if headers.get(b"upgrade", b"").lower() == b"websocket" and slow_part != "socket":
            return no_websocket()
        if slow_part == "socket" and is_foreign(headers, self._origins):
            return foreign_page(headers[b"origin"])
        if slow_part == "body" and is_without_preflight(headers, self._origins):
            return not_json()
        return None


def is_ours(host: bytes | None, names: Set[str]) -> bool:
    """Whether a Host header names this server: rule 5."""
    if host is None or "*" in names:  # HTTP/1.0 needs none, but no browser speaks it
        return True
    try:
        name = urlsplit("//" + host.decode("latin-1")).hostname or ""
        if name.rstrip(".") not in names:
            ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_foreign(headers: Mapping[bytes, bytes], origins: Set[str]) -> bool:
    """Whether a browser has sent this for a page of a site that is neither ours nor one of these."""
    origin = headers.get(b"origin", b"").decode("latin-1")
    if not origin or origins & {origin, "*"}:
        return False
    return origin.partition("://")[2] != headers.get(b"host", b"").decode("latin-1")


def is_without_preflight(headers: Mapping[bytes, bytes], origins: Set[str]) -> bool:
    """Whether a browser may have sent this for such a page without asking first: rule 4."""
    content_type = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    return content_type != b"application/json" and is_foreign(headers, origins)


# --- authentication -----------------------------------------------------------------------------------------


class Keys:
    """The API keys that are let in; where there are none everybody is."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [digest(key.encode()) for key in keys]

    @property
    def n_owners(self) -> int:
        return len({*self._digests})

    def owner(self, scope: Scope) -> str | None:
        """The digest of a request's key; "" where none is needed, None where it is wrong or absent."""
        if not self._digests:
            return ""
        key = key_of(scope)
        if not key:
            return None
        owner = digest(key)
        matches = [hmac.compare_digest(owner, each) for each in self._digests]  # with all of them: rule 2
        return owner if any(matches) else None


def key_of(scope: Scope) -> bytes:
    """The API key of a request; b"" for none.

    A page cannot give a WebSocket a header: it offers the key as a subprotocol, as OpenAI's clients do.
    """
    for subprotocol in scope.get("subprotocols", ()):
        if subprotocol.startswith(KEY_SUBPROTOCOL):
            key: str = subprotocol.removeprefix(KEY_SUBPROTOCOL)
            return key.encode()
    scheme, _, bearer = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
    return bearer.strip() if scheme.lower() == b"bearer" else b""


def digest(key: bytes) -> str:
    return hashlib.sha256(b"llmref api key " + key).hexdigest()


# --- what errors and refusals look like ---------------------------------------------------------------------


def bad_input(error: BadInput) -> Response:
    return error_response(error.status, error.message, error.param, error.code)


async def on_bad_input(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, BadInput)
    return bad_input(error)


async def on_refused(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, Refused)
    response = error_response(error.status, error.message, error.param, error.code or None)
    if error.retry_after:
        response.headers["Retry-After"] = error.retry_after
    return response


async def on_http_error(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{error.detail}: {http.method} {http.url.path[:MAX_SHOWN]}"
    code = "method_not_allowed"
    if error.status_code == 404:
        paths = dict.fromkeys(route.path for route in http.app.routes if route.path.startswith("/v1/"))
        message += f"; there is {', '.join(paths)}"
        code = "unknown_url"
    response = error_response(error.status_code, message, code=code)
    if error.status_code == 405:
        # Of all routes with this path, where Starlette names the first one's: RFC 9110, section 15.5.6.
        routes = [route for route in http.app.routes if route.matches(http.scope)[0] is Match.PARTIAL]
        methods = {method for route in routes for method in route.methods}
        response.headers["Allow"] = ", ".join(sorted(methods))
    return response


async def on_recursion(_: HttpRequest, error: Exception) -> Response:
    return error_response(400, "The body is nested too deeply.", code="invalid_json")


async def on_disconnect(_: HttpRequest, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)  # nobody reads it


async def on_exception(_: HttpRequest, error: Exception) -> Response:
    message = f"{type(error).__name__} in the server; its log has the details."
    return error_response(500, message, code="server_error")


def unauthorized() -> Response:
    message = "Incorrect or missing API key: send 'Authorization: Bearer KEY'."
    response = error_response(401, message, None, "invalid_api_key")
    response.headers["WWW-Authenticate"] = "Bearer"  # "MUST send": RFC 9110, section 15.5.2
    return response


def misdirected(host: bytes) -> Response:
    name = shown(host.decode("latin-1"))
    message = (
        f"This server has no API keys, and answers only where it is called by its address or a name that it "
        f"knows, not by {name}: start it with --allowed-host NAME, or with --api-key KEY."
    )
    return error_response(421, message, None, "host_not_allowed")


def no_websocket() -> Response:
    """Codex tries a WebSocket first, and takes this status alone for "use HTTP": openai/codex#43353."""
    message = (
        "There is no WebSocket here: expected its handshake (RFC 6455, section 4.1) as GET /v1/responses, or "
        "POST /v1/responses, with stream=true for events."
    )
    response = error_response(426, message, None, "unsupported_protocol")
    response.headers.update({"Upgrade": "HTTP/1.1", "Connection": "Upgrade"})  # RFC 9110, section 15.5.22
    return response


def foreign_page(origin: bytes) -> Response:
    site = shown(origin.decode("latin-1"))
    message = f"Expected a page of this server, or of a site that --cors-origin names, got one of {site}."
    return error_response(403, message, None, "origin_not_allowed")


def not_json() -> Response:
    message = (
        "Expected 'Content-Type: application/json' from a page of a site that --cors-origin does not name."
    )
    return error_response(415, message, None, "unsupported_content_type")
