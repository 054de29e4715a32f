"""Refusals: an error in a request to its error object and status.

    what came --wrong_value(), ...--> BadInput --error_body()--> {"error": {message, type, param, code}}
                                              --messages_error()--> that of the Messages API

Authority: https://platform.openai.com/docs/guides/error-codes; openai-openapi, `Error`;
https://platform.claude.com/docs/en/api/errors

Rules of this file:
1. null means absent: a null in place of a required value is a missing value, never one of a wrong type.
2. An error that is about a value says what was expected and what came, and has the path of the parameter.
3. A message shows only the first characters of the received value, so it stays short for a long text.
"""

import json
from typing import Any

from sse import Object

MAX_MESSAGE = 1000  # characters: an id in it may be as long as the body


class BadInput(ValueError):
    """The request is refused. `param` is the path of the wrong value; None: the whole request.

    `code` says why; its status (STATUS), unless an upstream has chosen another, whether the client, its key,
    or the server is the reason.
    """

    def __init__(
        self, message: str, *, param: str | None = None, code: str = "invalid_value", status: int = 0
    ) -> None:
        self.message = message[:MAX_MESSAGE]
        super().__init__(self.message)
        self.param = param
        self.code = code  # as OpenAI spells it
        self.status = status or STATUS.get(code, 400)
        self.headers = Object()  # of the answer, besides those of its status

    @property
    def late_code(self) -> str:
        """The code of an error that comes after the response was accepted: the API allows only a few."""
        if self.status == 429:
            return "rate_limit_exceeded"
        if self.status >= 500:
            return "server_error"
        return "invalid_prompt"


# --- refusals -----------------------------------------------------------------------------------------------


MAX_SHOWN = 60  # characters
ENCODER = json.JSONEncoder(ensure_ascii=False, default=str)


def shown(value: Any) -> str:
    """Return a value for an error message; of a large list or object no more is written than is shown."""
    text = ""
    for piece in ENCODER.iterencode(value):
        text += piece[: MAX_SHOWN + 1]
        if len(text) > MAX_SHOWN:
            return text[: MAX_SHOWN - 3] + "..."
    return text


def wrong_value(path: str, expected: str, value: Any, kind: str = "value") -> BadInput:
    message = f"Invalid {kind} for '{path}': expected {expected}, got {shown(value)}."
    return BadInput(message, param=path, code=f"invalid_{kind}")


def missing(path: str, how: str = "") -> BadInput:
    message = f"Missing required parameter: '{path}'{how}."
    return BadInput(message, param=path, code="missing_required_parameter")


def unsupported(path: str, why: str) -> BadInput:
    return BadInput(f"Unsupported parameter: '{path}'. {why}", param=path, code="unsupported_parameter")


def no_images(path: str) -> BadInput:
    why = "This server reads no images; with --images placeholder it tells the model of one."
    return unsupported(path, why)


# --- errors -------------------------------------------------------------------------------------------------

# fmt: off
#  code of a BadInput               status     every other is 400
STATUS = {
    "invalid_api_key":              401,
    "origin_not_allowed":           403,
    "unknown_url":                  404,
    "model_not_found":              404,
    "response_not_found":           404,
    "item_not_found":               404,
    "method_not_allowed":           405,
    "request_timeout":              408,
    "body_too_large":               413,
    "unsupported_content_encoding": 415,
    "host_not_allowed":             421,
    "unsupported_protocol":         426,  # Codex takes this status alone for "use HTTP": openai/codex#43353
    "rate_limit_exceeded":          429,
    "server_error":                 500,
    "server_is_overloaded":         503,
}

#  status   type; other 5xx have the API's own
ERROR_TYPES = {
    401:    "authentication_error",
    429:    "rate_limit_error",
}

#  status   type in the Messages API
MESSAGES_TYPES = ERROR_TYPES | {
    403:    "permission_error",
    404:    "not_found_error",
    413:    "request_too_large",
    503:    "overloaded_error",
}
# fmt: on


def error_body(error: BadInput) -> Object:
    """Return the body of an error: one object with all four keys, as openai-openapi, `Error`, has it."""
    others = "server_error" if error.status >= 500 else "invalid_request_error"
    return {
        "error": {
            "message": error.message,
            "type": ERROR_TYPES.get(error.status, others),
            "param": error.param,
            "code": error.code or None,
        }
    }


def messages_error(error: BadInput, request_id: str) -> Object:
    """Return the body of an error of the Messages API."""
    message = error.message
    if error.code == "context_length_exceeded":  # by these words Claude Code knows that it has to compact
        message = f"prompt is too long: {message}"
    others = "api_error" if error.status >= 500 else "invalid_request_error"
    told: Object = {"type": MESSAGES_TYPES.get(error.status, others), "message": message}
    if error.param == "thread":  # so the `anthropic` package knows that it has to send the whole conversation
        told["details"] = {"error_code": "thread_unsupported_request"}
    return {"type": "error", "error": told, "request_id": request_id}
