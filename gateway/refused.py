"""What an upstream refuses: its error, in any of the known shapes, as the refusal that our client gets.

    status, headers, body --read_refusal()--> Refused    error of an answer with 200 --refusal_in()--> Refused

Authority: https://platform.openai.com/docs/guides/error-codes; RFC 9110, section 10.2.3, for Retry-After.

Rules of this file:
1. A refusal keeps its status as far as clients of OpenAI know it. Any other is a 502: the fault lies between
   the two servers.
2. An error that comes with status 200 has the status that it names.
"""

import re
from collections.abc import Mapping

from completions import Chunk
from gateway.answers import error_of, object_in
from request.refusals import BadInput

# fmt: off
#  upstream's   ours    any other is a 502
STATUS = {
    400:        400,
    404:        404,
    413:        413,
    415:        400,
    422:        400,   # FastAPI's, and no client of OpenAI's knows it
    429:        429,
    503:        503,
    529:        503,
}
#  type or code of an error    the status that it stands for; more often `code` is the status itself
ERROR_STATUS = {
    "invalid_request_error":     400,
    "context_length_exceeded":   400,
    "rate_limit_error":          429,
    "rate_limit_exceeded":       429,
}
# fmt: on

RETRYABLE = (429, 500, 502, 503, 504, 529)  # another upstream may answer better
FAILURES = (500, 502, 503, 504)  # the upstream is broken, or the request breaks it

# OpenAI has a code for it; vLLM, SGLang and llama.cpp say it in these words.
CONTEXT_LENGTH = re.compile(r"context_length|context length|context size|context_size|maximum context", re.I)
# Seconds or a date. Whatever else an upstream writes there is dropped.
RETRY_AFTER = re.compile(r"[0-9]{1,9}|[A-Z][a-z]{2}, [0-9]{2} [A-Z][a-z]{2} [0-9]{4} [0-9:]{8} GMT")
MAX_NAME = 100  # of a parameter, of a code


class Refused(BadInput):
    """An upstream does not serve the request, or none can be reached: what the client is told."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str = "", retry_after: str = ""
    ) -> None:
        super().__init__(message, param, code)
        self.status = status
        self.upstream_status = status
        self.retry_after = retry_after  # seconds or a date, as the upstream wrote it; "" for none
        self.is_failure = False  # the upstream is broken, or the request breaks it


def read_refusal(status: int, headers: Mapping[str, str], body: bytes) -> Refused:
    """Read an answer with another status than 200, of which not all may have come."""
    refused = refusal(status, error_of(object_in(body)) or {})
    retry_after = headers.get("retry-after", "")
    if RETRY_AFTER.fullmatch(retry_after):
        refused.retry_after = retry_after
    refused.is_failure = status in FAILURES
    return refused


def no_answer(error: Exception) -> Refused:
    """Make the refusal for an upstream that cannot be reached, or breaks off before it has said anything."""
    status = 504 if isinstance(error, TimeoutError) else 502
    refused = Refused(status, f"The upstream gave no answer to a request ({reason(error)}).")
    refused.is_failure = True
    return refused


def reason(error: Exception) -> str:
    """Return why there is no answer, or no more of it."""
    if isinstance(error, TimeoutError):
        return "it was silent for too long"
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def refusal_in(error: Chunk) -> Refused:
    """Read the error of an answer with status 200: the status that it names, 502 if it names none."""
    for value in map(str, (error.get("code"), error.get("type"))):
        if re.fullmatch("[45][0-9]{2}", value):  # vLLM has a number there, LiteLLM its digits
            return refusal(int(value), error)
        if value in ERROR_STATUS:
            return refusal(ERROR_STATUS[value], error)
    return refusal(502, error)


def refusal(status: int, error: Chunk) -> Refused:
    """Make the refusal; `error` is that of error_of(), {} if nothing could be read."""
    message = error.get("message") or f"The upstream answered with status {status}."
    if status in (401, 403):
        message = f"The upstream does not take this server's key ({status}); see --upstream-api-key."
    param = error.get("param")
    if not isinstance(param, str) or len(param) > MAX_NAME:
        param = ""
    param = param.removeprefix("body.") or None  # FastAPI puts the place in front of the name
    code = error.get("code")
    if not isinstance(code, str) or len(code) > MAX_NAME:  # vLLM repeats the status there
        code = ""
    our_status = STATUS.get(status, 502)
    if status in (400, 413, 422) and CONTEXT_LENGTH.search(f"{code} {error.get('type')} {message}"):
        code = "context_length_exceeded"
    if code == "context_length_exceeded":
        our_status = 400
    refused = Refused(our_status, message, param, code)
    refused.upstream_status = status
    return refused
