"""Around every endpoint: who asks, whether there is room, what a failure looks like, and what is noted of it.

    request --Front: key, room--> routes --> reply --Front: request id, log, metrics--> client

Authority: https://platform.openai.com/docs/guides/error-codes

Rules of this file:
1. Every reply has an x-request-id, every record that is logged for it the same, every error the same body.
2. A key is known by its digest alone, and all are compared each time: the time taken says nothing.
3. Requests that may hold on are bounded in number; those that end at once, a cancel above all, are let in.

Not here: the endpoints (api.py), bodies and streams (answers.py), limits of a parameter (params.py).
"""

import hashlib
import hmac
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import metrics
import page
from answers import STATUS, error_response, new_id
from api import Api
from checks import BadInput
from logs import REQUEST_ID
from relay import Refused

log = logging.getLogger("front")

OPEN = ("/", "/health", "/health/live")  # need no key: the page asks for one
GONE = 499  # nginx's number for a client that left before its reply began; it is noted, and nobody gets it
METHODS = ("GET", "POST", "DELETE", "HEAD", "OPTIONS")

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
    message = f"{error.detail}: {http.method} {http.url.path}"
    code = "method_not_allowed" if error.status_code == 405 else "unknown_url"
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


# --- who asks -----------------------------------------------------------------------------------------------


class Keys:
    """The keys that are let in, none: everybody is."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [digest(key.encode()) for key in keys]

    def owner(self, scope: Scope) -> str | None:
        """Whose key came: its digest, "" where none is demanded; None for any other."""
        if not self._digests:
            return ""
        scheme, _, key = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        given = digest(key.strip() if scheme.lower() == b"bearer" else b"")
        known = [hmac.compare_digest(given, each) for each in self._digests]
        return given if any(known) else None


def digest(key: bytes) -> str:
    return hashlib.sha256(b"llmref api key " + key).hexdigest()


# --- around every endpoint ----------------------------------------------------------------------------------


class Front:
    """The application as uvicorn calls it; endpoints find in scope["owner"] who asks."""

    def __init__(
        self,
        app: ASGIApp,
        paths: Mapping[Any, str],
        keys: Keys,
        counted: metrics.Metrics,
        max_streams: int,
    ) -> None:
        self._app, self._keys, self._metrics = app, keys, counted
        self._paths = paths  # of the endpoints
        self._max_streams, self._n_held = max_streams, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        id_, status, started = new_id("req"), GONE, time.perf_counter()
        REQUEST_ID.set(id_)  # of this task and those that it starts
        held = may_hold(scope)

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", id_.encode())]
            await send(message)

        answer = self._refusal(scope, held) or self._app
        self._n_held += held
        try:
            await answer(scope, receive, watched)
        finally:
            self._n_held -= held
            self._note(scope, status, time.perf_counter() - started)

    def _refusal(self, scope: Scope, held: bool) -> ASGIApp | None:
        owner = self._keys.owner(scope)
        if owner is None and scope["path"] not in OPEN:
            return unauthorized()
        scope["owner"] = owner
        return overloaded() if held and self._n_held >= self._max_streams else None

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        handler = self._paths.get(scope.get("endpoint"), "none")
        method = scope["method"] if scope["method"] in METHODS else "other"
        self._metrics.add("http_requests", 1, handler, method, str(status))
        self._metrics.observe("http_request_duration_seconds", seconds, handler)
        level = logging.DEBUG if scope["path"] in OPEN else logging.INFO
        path = scope["raw_path"].decode("ascii", "replace")
        fields = {"method": method, "path": path, "status": status, "seconds": round(seconds, 4)}
        log.log(level, "%s %s: %d in %.3f s", *fields.values(), extra={"fields": fields})


def may_hold(scope: Scope) -> bool:
    """Whether it may last as long as its client likes: by a body sent slowly, or a stream read slowly."""
    if scope["method"] == "POST":
        return not scope["path"].endswith("/cancel")
    return b"stream=" in scope["query_string"]


def make_app(api: Api, keys: Keys, max_streams: int, origins: Sequence[str] = ()) -> ASGIApp:
    async def on_page(_: HttpRequest) -> Response:
        return page.response()

    async def on_metrics(_: HttpRequest) -> Response:
        return Response(api.metrics.render(), media_type=metrics.CONTENT_TYPE)

    routes = [Route("/", on_page), Route("/metrics", on_metrics), *api.routes()]
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
    app = Front(inner, paths, keys, api.metrics, max_streams)
    if not origins:
        return app
    methods, exposed = ("GET", "POST", "DELETE"), ("x-request-id", "retry-after")
    return CORSMiddleware(  # around the keys, for a browser asks first, and without one
        app, origins, methods, allow_headers=["*"], expose_headers=exposed
    )
