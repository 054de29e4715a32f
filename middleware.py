"""ASGI middleware around every endpoint: authentication, admission, errors, access log and metrics.

    request --AccessLog--> CORSMiddleware --Guard: name, API key--> Starlette --Admitted: room--> endpoint
    endpoint --reply, or an exception--> error body --AccessLog: x-request-id, log, metrics--> client

Authority: https://platform.openai.com/docs/guides/error-codes; for pages of other sites
https://fetch.spec.whatwg.org/#http-cors-protocol; for names RFC 9110, section 7.4.

Rules of this file:
1. Every reply has an x-request-id, every log record of its request the same; every error has the same body.
2. A key is kept as its digest alone, and compared with all of them each time: the time taken says nothing.
3. An endpoint is given a Visit, which holds what the request takes: a stream, or, counted apart, an answer
   that is stored. So a poll or a cancel gets in while all streams are taken.
4. A page of another site can do nothing unless --cors-origin allows it. A browser asks before it sends JSON
   for a page (a CORS preflight), but sends other types at once, and opens WebSockets: so from such a page
   they are refused.
5. Without keys a request must name this server by its address, or by a name that the command line knows: a
   page can have the name of its own site point to our address, and be of the same site (DNS rebinding).

Not here: the endpoints, and which of them a client may hold open (api.py), how much room there is
(request/room.py), bodies and streams (streaming.py), limits of a parameter (request/params.py).
"""

import hashlib
import hmac
import ipaddress
import logging
import math
import time
from collections.abc import Mapping, Sequence, Set
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Match, Route, WebSocketRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from api import Api, Endpoint
from gateway.refused import Refused
from request.ids import REQUEST_ID, new_id
from request.query import STREAMED
from request.refusals import MAX_SHOWN, BadInput, shown
from request.room import Rooms, Visit
from service import webpage
from service.metrics import CONTENT_TYPE, Metrics
from streaming import error_response

log = logging.getLogger("middleware")

KEY_SUBPROTOCOL = "openai-insecure-api-key."
LOCALHOST = "localhost"
BETWEEN_SCRAPES_S = 0.25  # one takes the event loop for 5 ms
WEBSOCKET_PATH = "/v1/responses"
KEYLESS_PATHS = ("/", "/health", "/health/live")  # the page asks for a key itself
CLIENT_CLOSED_REQUEST = 499  # nginx's status for a client that left before its reply began: only logged
SWITCHING_PROTOCOLS = 101  # the status of a WebSocket that was accepted
REPLIES = ("http.response.start", "websocket.accept", "websocket.http.response.start")
METHODS = ("GET", "POST", "DELETE", "HEAD", "OPTIONS")  # others are one label in the metrics

# --- the application ----------------------------------------------------------------------------------------


def make_app(
    api: Api, keys: "Keys", rooms: Rooms, origins: Sequence[str] = (), hosts: Sequence[str] = ()
) -> ASGIApp:
    """The endpoints, with everything around them.

    `origins`: sites whose pages may call. `hosts`: names of this server, in lower case; "*": any.
    """

    async def on_page(_: HttpRequest, __: Visit) -> Response:
        return webpage.response()

    rendered_at = -math.inf
    metrics = b""

    async def on_metrics(_: HttpRequest, __: Visit) -> Response:
        nonlocal rendered_at, metrics
        if time.monotonic() > rendered_at + BETWEEN_SCRAPES_S:
            metrics = api.metrics.render()
            rendered_at = time.monotonic()
        return Response(metrics, media_type=CONTENT_TYPE)

    endpoints = [Endpoint("GET", "/", on_page), Endpoint("GET", "/metrics", on_metrics), *api.endpoints()]
    admitted = [Admitted(endpoint, rooms, {*origins}) for endpoint in endpoints]
    kinds = (BadInput, Refused, HTTPException, RecursionError, ClientDisconnect, Exception)
    inner = Starlette(
        routes=[each.route() for each in admitted], exception_handlers=dict.fromkeys(kinds, on_error)
    )
    inner.router.redirect_slashes = False  # it would go to where the Host header says, which is the client's
    app: ASGIApp = Guard(inner, keys, hosts)
    if origins:
        app = CORSMiddleware(
            app,
            origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=["*"],
            expose_headers=("x-request-id", "retry-after"),
        )
    return AccessLog(app, api.metrics, rooms.unanswered)


# --- around every endpoint ----------------------------------------------------------------------------------


class AccessLog:
    """The application as uvicorn calls it: gives each request its id, logs and counts its reply.

    `unanswered` is that of Rooms.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, unanswered: set[str]) -> None:
        self._app = app
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
        # As the routes spell it, "/v1/responses/{id}": a label must not have a value for each id.
        endpoint = scope["endpoint"].path if "endpoint" in scope else "none"
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


class Guard:
    """Lets requests in that name this server, and have one of its keys: scope["owner"] is whose they are."""

    def __init__(self, app: ASGIApp, keys: "Keys", hosts: Sequence[str]) -> None:
        self._app = app
        self._keys = keys
        self._hosts = {LOCALHOST, *hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        scope["owner"] = self._keys.owner(scope)
        app = self._app
        if self._keys.n_owners == 0 and not is_ours(headers.get(b"host"), self._hosts):
            app = misdirected(headers[b"host"])
        elif scope["owner"] is None and scope["path"] not in KEYLESS_PATHS:
            app = unauthorized()
        elif headers.get(b"upgrade", b"").lower() == b"websocket" and (
            scope["type"] == "http" or scope["path"] != WEBSOCKET_PATH
        ):
            app = no_websocket()
        await app(scope, receive, send)


class Admitted:
    """An endpoint, as Starlette calls it: while it runs, and is answered, it holds what it takes."""

    def __init__(self, endpoint: Endpoint, rooms: Rooms, origins: Set[str]) -> None:
        self.path = endpoint.path
        self._endpoint = endpoint
        self._rooms = rooms
        self._origins = origins

    def route(self) -> Route | WebSocketRoute:
        if self._endpoint.slow_part == "socket":
            return WebSocketRoute(self.path, self)
        return Route(self.path, self, methods=[self._endpoint.method])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        rooms = self._rooms
        slow_part = self._endpoint.slow_part
        if slow_part == "stream" and QueryParams(scope["query_string"]).get("stream") not in STREAMED:
            slow_part = "answer"
        with rooms.visit(scope["owner"]) as visit:
            match slow_part:
                case "socket":
                    if is_foreign(headers, self._origins):
                        await foreign_page(headers[b"origin"])(scope, receive, send)
                        return
                    try:
                        visit.hold(rooms.sockets, 1)
                    except BadInput as refusal:  # before a handshake Starlette has no handlers of errors
                        await refused(refusal)(scope, receive, send)
                        return
                    await self._endpoint.handler(WebSocket(scope, receive, send), visit)
                    return
                case "body" if is_without_preflight(headers, self._origins):
                    await not_json()(scope, receive, send)
                    return
                case "stream" | "endless stream":
                    visit.enter()
                case "answer":
                    visit.hold(rooms.answers, 1)
            http = HttpRequest(scope, receive, send)
            response = await self._endpoint.handler(http, visit)
            assert response
            await response(scope, receive, send)


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


def refused(error: BadInput) -> Response:
    return error_response(error.status, error.message, error.param, error.code or None)


async def on_error(http: HttpRequest, error: Exception) -> Response:
    """Answer with an error object, whatever was raised."""
    match error:
        case Refused():  # a BadInput too
            response = refused(error)
            if error.retry_after:
                response.headers["Retry-After"] = error.retry_after
            return response
        case BadInput():
            return refused(error)
        case HTTPException(status_code=404):
            paths = dict.fromkeys(route.path for route in http.app.routes if route.path.startswith("/v1/"))
            there_is = f"; there is {', '.join(paths)}"
            return error_response(404, what_is_wrong(http, error) + there_is, code="unknown_url")
        case HTTPException():
            response = error_response(
                error.status_code, what_is_wrong(http, error), code="method_not_allowed"
            )
            # Of all routes with this path, while Starlette names the first one's: RFC 9110, section 15.5.6.
            routes = [route for route in http.app.routes if route.matches(http.scope)[0] is Match.PARTIAL]
            methods = {method for route in routes for method in route.methods}
            response.headers["Allow"] = ", ".join(sorted(methods))
            return response
        case RecursionError():
            return error_response(400, "The body is nested too deeply.", code="invalid_json")
        case ClientDisconnect():
            return Response(status_code=CLIENT_CLOSED_REQUEST)  # its client has left
        case _:
            message = f"{type(error).__name__} in the server; its log has the details."
            return error_response(500, message, code="server_error")


def what_is_wrong(http: HttpRequest, error: HTTPException) -> str:
    return f"{error.detail}: {http.method} {http.url.path[:MAX_SHOWN]}"


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
