"""The body of a request, from the bytes of a connection to JSON, within limits.

    request --read_json()--> value, or BadInput

Authority: RFC 8259; https://platform.openai.com/docs/guides/error-codes for what is refused.

Rules of this file:
1. Bytes, seconds and nesting are bounded before anything is built of them.
2. A large body is parsed in a thread: the streams go on meanwhile.

Not here: what the JSON may say (params.py).
"""

import asyncio
import zlib
from itertools import accumulate
from typing import Any

from starlette.requests import Request as HttpRequest

import sse
from request.refusals import BadInput

MAX_BODY_BYTES = 8 * 2**20
MAX_BODY_S = 60  # in which all of it must arrive
MAX_DEPTH = 128  # lists and objects within each other: a schema has two for each level that it describes
ENCODINGS = ("identity", "gzip", "x-gzip", "deflate")

NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


async def read_json(http: HttpRequest) -> Any:
    """Return the JSON value that a request's body holds; raises BadInput."""
    encoding = http.headers.get("content-encoding", "").strip().lower() or "identity"
    if encoding not in ENCODINGS:
        message = f"Expected a body encoded as {', '.join(ENCODINGS)}, got '{encoding}'."
        raise BadInput(message, None, "unsupported_content_encoding")
    too_large = BadInput(f"Expected a body of at most {MAX_BODY_BYTES} bytes.", None, "body_too_large")
    if int(http.headers.get("content-length", 0)) > MAX_BODY_BYTES:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(MAX_BODY_S):
            async for chunk in http.stream():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise too_large
    except TimeoutError as error:
        raise BadInput(f"Expected the body within {MAX_BODY_S} s.", None, "request_timeout") from error
    return await asyncio.to_thread(_parse, bytes(body), encoding)  # rule 2


def _parse(body: bytes, encoding: str) -> Any:
    plain = _decoded(body, encoding)
    if depth(plain) > MAX_DEPTH:
        message = f"Expected a body nested at most {MAX_DEPTH} deep."
        raise BadInput(message, None, "invalid_json")
    try:
        return sse.loads(plain.decode("utf-8-sig"))  # RFC 8259 section 8.1: JSON is UTF-8, never UTF-16
    except ValueError as error:
        raise BadInput(f"Could not parse the body as JSON: {error}", None, "invalid_json") from error


def _decoded(body: bytes, encoding: str) -> bytes:
    """Codex compresses its bodies: the limit holds for what they unpack to as well."""
    if encoding == "identity":
        return body
    unpacker = zlib.decompressobj(wbits=47)  # 32 + 15: gzip or zlib, by its header
    try:
        unpacked = unpacker.decompress(body, MAX_BODY_BYTES)
    except zlib.error as error:
        raise BadInput(f"Could not unpack the body: {error}", None, "invalid_json") from error
    if (not unpacker.eof and not unpacker.unconsumed_tail) or unpacker.unused_data:
        raise BadInput("Could not unpack the body: expected one whole stream.", None, "invalid_json")
    if unpacker.unconsumed_tail:
        raise BadInput(f"Expected at most {MAX_BODY_BYTES} bytes when unpacked.", None, "body_too_large")
    return unpacked


def depth(json_text: bytes) -> int:
    """Return how deep lists and objects nest, without recursion, which the nesting could exhaust."""
    unescaped = json_text.replace(b"\\\\", b"").replace(b'\\"', b"")
    outside_strings = b"".join(unescaped.split(b'"')[::2])
    brackets = outside_strings.translate(None, NO_BRACKETS)
    return max(accumulate(1 if bracket in b"[{" else -1 for bracket in brackets), default=0)
