"""Refusals of an upstream: its error becomes the error that our client gets.

    status, headers, body --read_refused()--> Refused    error of an answer with 200 --refused_by()--> Refused

Authority: https://platform.openai.com/docs/guides/error-codes; RFC 9110, section 10.2.3, for Retry-After.

Rules of this file:
1. A refusal keeps its status as far as clients of OpenAI know it, or gets the one that means the same to
   them (STATUS). Any other is a 502: the fault lies between the two servers. Retry-After goes on.
2. An error that comes with status 200 has the status that is its code, 502 if that is none.
3. First we ask with the body as the client sent it. If the refusal names something that we added, or that
   another spelling would mend, we ask the upstream once more: once for each row of ONCE_MORE.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from email.utils import format_datetime, parsedate_to_datetime
from math import ceil

from completions import Chunk
from gateway.answers import Unreadable, document, error_of
from request.messages import content_text, paragraphs
from request.refusals import BadInput

# fmt: off
#  upstream's   ours    any other is a 502
STATUS = {
    400:        400,
    402:        402,
    404:        404,
    408:        408,
    409:        400,   # the SDK would try again
    413:        413,
    422:        400,   # FastAPI's, and no client of OpenAI's knows it
    429:        429,
    503:        503,
    504:        504,
    529:        503,   # Anthropic's: overloaded
}
# fmt: on

# OpenAI has a code for it; vLLM, SGLang and llama.cpp say it in these words.
CONTEXT_LENGTH = re.compile(r"context_length|context length|context size|context_size|maximum context", re.I)


class Refused(BadInput):
    """An upstream refuses the request, or none can be reached: the error for the client."""


def read_refused(status: int, headers: Mapping[str, str], body: bytes) -> Refused:
    """Read an answer whose status is not 200, and which may be incomplete."""
    error: Chunk = {}
    with suppress(Unreadable):
        error = error_of(document(body)) or {}
    found = refused_by(status, error)
    retry_after = headers.get("retry-after", "")
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]+)?", retry_after):
        found.headers = {"Retry-After": str(ceil(float(retry_after)))}
    with suppress(ValueError):
        found.headers = {"Retry-After": format_datetime(parsedate_to_datetime(retry_after), usegmt=True)}
    return found


def refused_by(status: int, error: Chunk) -> Refused:
    """Make the refusal; `error` is that of error_of(), {} if nothing could be read."""
    code = error.get("code")
    # vLLM has a number there, LiteLLM its digits.
    if status == 200 and re.fullmatch("[45][0-9]{2}", str(code)):
        status = int(str(code))
    message = error.get("message") or f"The upstream answered with status {status}."
    if status in (401, 403):
        message = f"The upstream does not take this server's key ({status}); see --upstream-api-key."
    our_status = STATUS.get(status, 502)
    if status < 500 and CONTEXT_LENGTH.search(f"{code} {error.get('type')} {message}"):
        our_status, code = 400, "context_length_exceeded"
    param = error.get("param")
    return Refused(
        message,
        param=param if isinstance(param, str) else None,
        code=code if isinstance(code, str) else "",
        status=our_status,
    )


# --- what an upstream does not take -------------------------------------------------------------------------


def one_system_message(body: Chunk) -> Chunk:
    """Put all system messages into one at the beginning, as templates want it that know no later one."""
    messages = body["messages"]
    told = [message for message in messages if message.get("role") in ("system", "developer")]
    others = [message for message in messages if message not in told]
    text = paragraphs(*(content_text(message.get("content"), "messages") for message in told))
    return body | {"messages": [{"role": "system", "content": text}, *others]}


def with_newer_limit(body: Chunk) -> Chunk:
    body.setdefault("max_completion_tokens", body.pop("max_tokens"))
    return body


# fmt: off
#  words of an upstream's refusal       the change to the body, with which we ask once more
ONCE_MORE = {
    "max_completion_tokens":             with_newer_limit,
    "system message|system role":        one_system_message,
}
# fmt: on


def without_what_is_refused(body: Chunk, refused: Refused) -> Chunk:
    """Return the body as an upstream may take it that has refused it with 400, else the same."""
    for words, changed in ONCE_MORE.items():
        if refused.status == 400 and re.search(words, f"{refused.message} {refused.param}", re.I):
            with suppress(
                LookupError, TypeError, AttributeError, BadInput
            ):  # the client's body may be no chat
                return changed({**body})
    return body
