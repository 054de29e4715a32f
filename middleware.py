"""ASGI middleware around every endpoint: authentication, admission, errors, access log and metrics.

    request --logged()--> CORSMiddleware --turned_away(): name, key, site--> Starlette --> endpoint
    endpoint --reply, or an exception--> error body --logged(): x-request-id, log, metrics--> client

Authority: https://platform.openai.com/docs/guides/error-codes; for pages of other sites
https://fetch.spec.whatwg.org/#http-cors-protocol; for names RFC 9110, section 7.4.

Rules of this file:
1. Every reply has an x-request-id, and all log records of its request have it too (those of the engine's
   thread in their text); an error has the body of its API.
2. We compare the digest of a key with those of all keys each time: the time taken reveals nothing.
3. An endpoint gets a Visit (request/room.py): what its request holds of the server until it ends, a stream
   and bytes. A poll or a cancel needs no stream, so it gets in while all streams are taken.
4. A page of another site can do nothing unless --cors-origin allows it. A browser asks before it sends JSON
   for a page (a CORS preflight); it sends other content types and WebSockets at once, so those are refused.
5. Without keys a request must name this server by its address, or by a name from the command line: a page can
   point the name of its own site to our address, and then it is of the same site (DNS rebinding).
6. A few requests begin in a turn of the event loop, by turns of the owners: a thousand of one key do not keep
   another's waiting.

Why one function that turns requests away, and not a middleware for each check: each would be a layer in every
traceback and a call for every message of every stream, and the order of the checks would be spread over the
list that stacks them.
"""

import asyncio
import hashlib
import hmac
import logging
import re
import time
from collections.abc import Awaitable, Callable, Set
from functools import partial
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Match, Route, WebSocketRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api import Api
from request.ids import REQUEST_ID, new_id
from request.refusals import MAX_SHOWN, BadInput, error_body, messages_error, shown
from request.room import Rooms, Visit
from service import webpage
from service.metrics import Metrics
from streaming import json_response

log = logging.getLogger("middleware")

KEYLESS_PATHS = ("/", "/health", "/health/live")  # the page asks for a key itself
CLIENT_CLOSED_REQUEST = 499  # nginx's status for a client that left before its reply began: only logged
SWITCHING_PROTOCOLS = 101  # the status of a WebSocket that was accepted

# Matches the header without the blanks around it. A pattern for blanks at the end would try each character as
# their beginning: 31,000 blanks before the last character took 3 s.
BEARER = re.compile(r"(?i:bearer)\s+(\S.*)")
# A page cannot give a WebSocket a header: it offers the key as a subprotocol, as OpenAI's clients do.
OFFERED_KEY = re.compile(r"\bopenai-insecure-api-key\.([^\s,]+)")


# --- the application ----------------------------------------------------------------------------------------


def logged(app: ASGIApp, metrics: Metrics, unanswered: set[str]) -> ASGIApp:
    """Give each request its id, log and count its reply; `unanswered` is that of Rooms."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        request_id = new_id("req")
        REQUEST_ID.set(request_id)  # in the log records of this task and those that it starts
        unanswered.add(request_id)
        status = CLIENT_CLOSED_REQUEST
        started_at = time.perf_counter()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if "headers" in message:  # the start of a reply, or of a WebSocket
                unanswered.discard(request_id)
                status = message.get("status", SWITCHING_PROTOCOLS)
                ids = [(name, request_id.encode()) for name in (b"x-request-id", b"request-id")]
                message["headers"] = [*message["headers"], *ids]
            await send(message)

        try:
            await app(scope, receive, send_with_id)
        finally:
            unanswered.discard(request_id)
            seconds = round(time.perf_counter() - started_at, 4)
            method = scope.get("method", "GET")  # a WebSocket has none
            # As the routes spell it, "/v1/responses/{id}": a label must not have a value for each id.
            handler = scope["route"].path if "route" in scope else "none"
            metrics.add("http_requests", 1, handler, method, str(status))
            fields = {"method": method, "path": scope["path"], "status": status, "seconds": seconds}
            log.info("%s %s: %d in %.3f s", *fields.values(), extra={"fields": fields})

    return answer


def make_app(api: Api, keys: Set[str], rooms: Rooms, origins: Set[str], hosts: Set[str]) -> ASGIApp:
    """Return the endpoints, with everything around them.

    `keys`: digests of the API keys; without any, every client is let in. `origins`: sites whose pages may
    call. `hosts`: names of this server, in lower case; "*": any.
    """

    async def scrape(_: HttpRequest, visit: Visit) -> Response:
        await visit.until_its_turn()  # a scrape takes the event loop 5 ms: scrapes, too, come one by one
        return Response(api.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, unless it is refused; scope["visit"] counts its resources till the end."""
        headers = Headers(scope=scope)
        with rooms.visit(owner_of(headers, keys)) as visit:
            scope["visit"] = visit
            refusal = turned_away(scope, headers, keys, origins, hosts)
            app = error_response(scope, refusal) if refusal else inner
            async with rooms.begun.turn(visit.owner):  # rule 6
                await asyncio.sleep(0)
            await app(scope, receive, send)

    routes = [
        Route("/", webpage.RESPONSE, methods=["GET"]),
        Route("/metrics", partial(visited, scrape)),
        WebSocketRoute("/v1/responses", partial(visited, api.open_websocket)),
        *(
            Route(path, partial(visited, handler), methods=[method])
            for method, path, handler in api.endpoints()
        ),
    ]
    inner = Starlette(routes=routes, exception_handlers=dict.fromkeys(ERRORS, on_error))
    inner.router.redirect_slashes = False  # a redirect would go where the client's Host header says
    app = CORSMiddleware(
        guarded,
        origins,
        allow_methods=("GET", "POST", "DELETE"),
        allow_headers=["*"],
        expose_headers=["x-request-id, request-id, retry-after, warning"],
    )
    return logged(app, api.metrics, rooms.unanswered)


# --- who is let in ------------------------------------------------------------------------------------------


def owner_of(headers: Headers, keys: Set[str]) -> str | None:
    """Return the digest of a request's key; "" if the server has no keys, None if it is wrong or absent."""
    if not keys:
        return ""
    offered = OFFERED_KEY.search(headers.get("sec-websocket-protocol", ""))
    bearer = BEARER.fullmatch(headers.get("authorization", "").strip()) or offered
    key = bearer[1] if bearer else headers.get("x-api-key")  # Anthropic's
    if not key:
        return None
    owner = digest(key)
    matches = [hmac.compare_digest(owner, each) for each in keys]  # with all of them: rule 2
    return owner if any(matches) else None


def turned_away(
    scope: Scope, headers: Headers, keys: Set[str], origins: Set[str], hosts: Set[str]
) -> BadInput | None:
    """Return why a request must not reach an endpoint; None lets it in."""
    host = headers.get("host")
    if not keys and not is_ours(host, hosts):
        return BadInput(BAD_HOST.format(shown(host)), code="host_not_allowed")
    if not scope["visit"].has_key and scope["path"] not in KEYLESS_PATHS:
        return BadInput(BAD_KEY, code="invalid_api_key")
    is_socket = scope["type"] == "websocket" and scope["path"] == "/v1/responses"
    if headers.get("upgrade", "").lower() == "websocket" and not is_socket:
        return BadInput(NO_WEBSOCKET, code="unsupported_protocol")
    origin = headers.get("origin", "")
    if not origin or origin.partition("://")[2] == host or origins & {origin, "*"}:
        return None
    # A browser has sent this for a page of another site.
    content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if is_socket or (scope["method"] == "POST" and content_type != "application/json"):
        return BadInput(BAD_ORIGIN.format(shown(origin)), code="origin_not_allowed")
    return None


def is_ours(host: str | None, names: Set[str]) -> bool:
    """Return whether a Host header is a name of this server, or an address: rule 5."""
    if host is None or "*" in names:  # HTTP/1.0 needs none, but no browser speaks it
        return True
    name = re.sub(r":\d*$", "", host).rstrip(".").lower()
    return name in names or re.fullmatch(r"[\d.]+|\[[\da-f:.]+\]", name) is not None


async def visited(handler: Callable[..., Awaitable[Any]], http: HTTPConnection) -> Any:
    """Call an endpoint with the request and its visit; Starlette would pass the request alone."""
    return await handler(http, http.scope["visit"])


# --- the fold: a plain streamed request passes what stands above --------------------------------------------


# --- who is let in ------------------------------------------------------------------------------------------


def digest(key: str) -> str:
    return hashlib.sha256(f"llmref api key {key}".encode()).hexdigest()


BAD_HOST = (
    "Host {} is not allowed: without API keys this server answers only to its address and the names that it "
    "knows. Start it with --allowed-host NAME, or with --api-key-file FILE."
)
BAD_KEY = "Incorrect or missing API key: send 'Authorization: Bearer KEY', or 'x-api-key: KEY'."
NO_WEBSOCKET = (
    "There is no WebSocket here: expected its handshake (RFC 6455, section 4.1) as GET "
    "/v1/responses, or POST /v1/responses, with stream=true for events."
)
BAD_ORIGIN = "Expected 'Content-Type: application/json', or a site that --cors-origin names; got {}."

# --- errors -------------------------------------------------------------------------------------------------

# Of an error, by its status. What a full server says, 429 or 503, request/room.py decides.
HEADERS: dict[int, dict[str, str]] = {
    401: {"WWW-Authenticate": "Bearer"},  # "MUST send": RFC 9110, section 15.5.2
    426: {"Upgrade": "HTTP/1.1", "Connection": "Upgrade"},  # RFC 9110, section 15.5.22
    429: {"Retry-After": "10"},  # seconds
    503: {"Retry-After": "10"},
}


def error_response(scope: Scope, error: BadInput) -> Response:
    """Return an error in the form of the API that was called."""
    body = error_body(error)
    if scope["path"].startswith("/v1/messages"):
        body = messages_error(error, REQUEST_ID.get())
    return json_response(body, HEADERS.get(error.status, {}) | error.headers, error.status)


# Those of an endpoint become answers.
ERRORS = (BadInput, HTTPException, ClientDisconnect, Exception)


async def on_error(http: HttpRequest, error: Exception) -> Response:
    """Answer any exception with an error object."""
    path = http.url.path[:MAX_SHOWN]
    routes = http.app.routes
    match error:
        case BadInput():
            refusal = error
        case ClientDisconnect():
            return Response(status_code=CLIENT_CLOSED_REQUEST)  # its client has left
        case HTTPException(status_code=404):
            paths = ", ".join(dict.fromkeys(route.path for route in routes))
            refusal = BadInput(f"Not found: {http.method} {path}. There is {paths}.", code="unknown_url")
        case HTTPException():
            refusal = BadInput(f"Method Not Allowed: {http.method} {path}", code="method_not_allowed")
            # Of all routes with this path, while Starlette names the first one's: RFC 9110, section 15.5.6.
            allowed = [route.methods for route in routes if route.matches(http.scope)[0] is Match.PARTIAL]
            refusal.headers = {"Allow": ", ".join(sorted(set().union(*allowed)))}
        case _:
            message = f"{type(error).__name__} in the server; its log has the details."
            refusal = BadInput(message, code="server_error")
    return error_response(http.scope, refusal)
