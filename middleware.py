"""Around every endpoint: who asks, whether there is room, what a failure looks like, and what is noted of it.

    request --Front--> preflights --Gate: key, room--> routes --> reply --Front: id, log, metrics--> client

Authority: https://platform.openai.com/docs/guides/error-codes; for pages of other sites
https://fetch.spec.whatwg.org/#http-cors-protocol.

Rules of this file:
1. Every reply has an x-request-id, every record that is logged for it the same, every error the same body.
2. A key is known by its digest alone, and all are compared each time: the time taken says nothing.
3. Long-lived requests are limited in number; short ones, such as a cancel, always get in.
4. A page of another site gets nothing done without being allowed to: browsers send what is no JSON unasked.

Not here: the endpoints (api.py), bodies and streams (streaming.py), limits of a parameter
(request/params.py).
"""

import hashlib
import hmac
import logging
import time
from collections.abc import Mapping, Sequence, Set
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers, QueryParams
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api import Api
from gateway.relay import Refused
from request.ids import new_id
from request.refusals import STATUS, BadInput
from service import metrics, webpage
from service.logs import REQUEST_ID
from streaming import error_response, wants_stream

log = logging.getLogger("front")

OPEN = ("/", "/health", "/health/live")  # need no key: the page asks for one
GONE = 499  # nginx's number for a client that left before its reply began; it is noted, and nobody gets it
METHODS = ("GET", "POST", "DELETE", "HEAD", "OPTIONS")
BODIES = {  # posted, and read as slowly as the client sends
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/v1/responses/compact",
    "/v1/chat/completions",
}

# --- what a failure looks like ------------------------------------------------------------------------------


async def on_bad_input(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, BadInput)
    return error_response(STATUS.get(error.code, 400), error.message, error.param, error.code)


async def on_refused(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, Refused)
    response = error_response(error.status, error.message, error.param, error.code or None)
    response.headers.update({"Retry-After": error.retry_after} if error.retry_after else {})
    return response


async def on_http_error(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message, code = f"{error.detail}: {http.method} {http.url.path}", "method_not_allowed"
    if error.status_code == 404:
        there = dict.fromkeys(route.path for route in http.app.routes if route.path.startswith("/v1/"))
        message, code = f"{message}; there is {', '.join(there)}", "unknown_url"
    response = error_response(error.status_code, message, code=code)
    response.headers.update(error.headers or {})
    return response


async def on_recursion(_: HttpRequest, error: Exception) -> Response:
    return error_response(400, "The body is nested too deeply.", code="invalid_json")


async def on_disconnect(_: HttpRequest, error: Exception) -> Response:
    return Response(status_code=GONE)  # nobody reads it


async def on_exception(_: HttpRequest, error: Exception) -> Response:
    message = f"{type(error).__name__} in the server; its log has the details."
    return error_response(500, message, code="server_error")


def unauthorized() -> Response:
    message = "Incorrect or missing API key: send 'Authorization: Bearer KEY'."
    return error_response(401, message, None, "invalid_api_key")


def overloaded() -> Response:
    return error_response(503, "Too many requests are open; try again later.", None, "server_is_overloaded")


def no_websocket() -> Response:
    """Codex tries a WebSocket first, and takes this status alone for "use HTTP": openai/codex#43353."""
    message = "There is no WebSocket here: POST to /v1/responses, with stream=true for events."
    response = error_response(426, message, None, "unsupported_protocol")
    response.headers.update({"Upgrade": "HTTP/1.1", "Connection": "Upgrade"})  # RFC 9110, section 15.5.22
    return response


def no_json() -> Response:
    message = (
        "Expected 'Content-Type: application/json' from a page of a site that --cors-origin does not name."
    )
    return error_response(415, message, None, "unsupported_content_type")


# --- who asks -----------------------------------------------------------------------------------------------


class Keys:
    """The keys that are let in, none: everybody is."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [digest(key.encode()) for key in keys]

    def owner(self, scope: Scope) -> str | None:
        """Whose key came: its digest, "" where none is demanded; None for any other, and for none."""
        if not self._digests:
            return ""
        scheme, _, key = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer" or not key.strip():
            return None
        given = digest(key.strip())
        known = [hmac.compare_digest(given, each) for each in self._digests]
        return given if any(known) else None


def digest(key: bytes) -> str:
    return hashlib.sha256(b"llmref api key " + key).hexdigest()


# --- around every endpoint ----------------------------------------------------------------------------------


class Front:
    """The application as uvicorn calls it: gives each request its id, and notes what became of it."""

    def __init__(self, app: ASGIApp, paths: Mapping[Any, str], counted: metrics.Metrics) -> None:
        self._app, self._metrics = app, counted
        self._paths = paths  # of the endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        id_, status, started = new_id("req"), GONE, time.perf_counter()
        REQUEST_ID.set(id_)  # of this task and those that it starts

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", id_.encode())]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            self._note(scope, status, time.perf_counter() - started)

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        handler = self._paths.get(scope.get("endpoint"), "none")
        method = scope["method"] if scope["method"] in METHODS else "other"
        self._metrics.add("http_requests", 1, handler, method, str(status))
        self._metrics.observe("http_request_duration_seconds", seconds, handler)
        level = logging.DEBUG if scope["path"] in OPEN else logging.INFO
        path = scope["raw_path"].decode("ascii", "replace")
        fields = {"method": method, "path": path, "status": status, "seconds": round(seconds, 4)}
        log.log(level, "%s %s: %d in %.3f s", *fields.values(), extra={"fields": fields})


class Preflights(CORSMiddleware):
    """Answers what browsers ask before a page's request, without a key; a refusal looks like any other."""

    def preflight_response(self, request_headers: Headers) -> Response:
        answer = super().preflight_response(request_headers)
        if answer.status_code == 200:
            return answer
        refusal = error_response(answer.status_code, f"{bytes(answer.body).decode()}.", None, "cors")
        refusal.headers["Vary"] = answer.headers["Vary"]
        return refusal


class Gate:
    """Lets in whom it knows, as far as there is room; endpoints find in scope["owner"] who asks."""

    def __init__(self, app: ASGIApp, keys: Keys, max_streams: int, origins: Sequence[str]) -> None:
        self._app, self._keys, self._origins = app, keys, {*origins}
        self._max_streams, self._n_held = max_streams, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        held = may_hold(scope)
        answer = self._refusal(scope, held) or self._app
        self._n_held += held
        try:
            await answer(scope, receive, send)
        finally:
            self._n_held -= held

    def _refusal(self, scope: Scope, held: bool) -> ASGIApp | None:
        scope["owner"] = self._keys.owner(scope)
        headers = dict(scope["headers"])
        if scope["owner"] is None and scope["path"] not in OPEN:
            return unauthorized()
        if headers.get(b"upgrade", b"").lower() == b"websocket":
            return no_websocket()
        if scope["method"] == "POST" and scope["path"] in BODIES and is_unasked(headers, self._origins):
            return no_json()
        return overloaded() if held and self._n_held >= self._max_streams else None


def may_hold(scope: Scope) -> bool:
    """Whether it may last as long as its client likes: by a body sent slowly, or a stream read slowly."""
    if scope["method"] == "POST":
        return scope["path"] in BODIES
    return scope["path"].startswith("/v1/responses/") and wants_stream(QueryParams(scope["query_string"]))


def is_unasked(headers: Mapping[bytes, bytes], origins: Set[str]) -> bool:
    """Whether a browser may have sent it for a page of another site without a preflight."""
    origin = headers.get(b"origin", b"").decode("latin-1")
    is_ours = origin.partition("://")[2] == headers.get(b"host", b"").decode("latin-1")
    content_type = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    is_elsewhere = bool(origin) and not is_ours and not origins & {origin, "*"}
    return is_elsewhere and content_type != b"application/json"


def make_app(api: Api, keys: Keys, max_streams: int, origins: Sequence[str] = ()) -> ASGIApp:
    async def on_page(_: HttpRequest) -> Response:
        return webpage.response()

    async def on_metrics(_: HttpRequest) -> Response:
        return Response(api.metrics.render(), media_type=metrics.CONTENT_TYPE)

    routes = [
        Route("/", on_page),
        Route("/metrics", on_metrics),
        *(Route(e.path, e.handler, methods=[e.method]) for e in api.endpoints()),
    ]
    handlers = {
        BadInput: on_bad_input,
        Refused: on_refused,
        HTTPException: on_http_error,
        RecursionError: on_recursion,
        ClientDisconnect: on_disconnect,
        Exception: on_exception,
    }
    paths = {route.endpoint: route.path for route in routes}
    inner = Starlette(routes=routes, exception_handlers=handlers)
    inner.router.redirect_slashes = False  # to where the Host header says, which is the client's
    app: ASGIApp = Gate(inner, keys, max_streams, origins)
    if origins:
        methods, exposed = ("GET", "POST", "DELETE"), ("x-request-id", "retry-after")
        app = Preflights(app, origins, methods, allow_headers=["*"], expose_headers=exposed)
    return Front(app, paths, api.metrics)
