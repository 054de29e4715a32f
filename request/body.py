"""The body of a request: from the bytes of a connection to a JSON value, within limits.

    HTTP request --read_json()--> value, or BadInput

Authority: RFC 8259 (JSON), RFC 9110 section 8.4 (Content-Encoding); for what is refused,
https://platform.openai.com/docs/guides/error-codes.

Rules of this file:
1. Bytes, seconds and nesting are bounded before anything is built from them.
2. A large body is unpacked and parsed in a thread: the streams go on meanwhile.

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
MAX_BODY_S = 60  # from the head of the request to the last byte of its body
MAX_DEPTH = 128  # nested lists and objects: a schema nests two for each level of what it describes
ENCODINGS = ("identity", "gzip", "x-gzip", "deflate")
GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS  # zlib.decompressobj(): whichever of the two the header shows

STEP = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


async def read_json(http: HttpRequest) -> Any:
    """The body of a request; raises BadInput."""
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
    return await asyncio.to_thread(_parse, bytes(body), encoding)  # a large body must not stop the streams


def _parse(body: bytes, encoding: str) -> Any:
    json_text = body if encoding == "identity" else _unpacked(body)
    if depth(json_text) > MAX_DEPTH:
        message = f"Expected a body nested at most {MAX_DEPTH} deep."
        raise BadInput(message, None, "invalid_json")
    try:
        return sse.loads(json_text.decode("utf-8-sig"))  # not UTF-16, which json takes: RFC 8259, section 8.1
    except ValueError as error:
        raise BadInput(f"Could not parse the body as JSON: {error}", None, "invalid_json") from error


def _unpacked(body: bytes) -> bytes:
    """Codex compresses its bodies; what they unpack to is bounded like any other."""
    unpacker = zlib.decompressobj(wbits=GZIP_OR_ZLIB)
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
    """How deep lists and objects nest, before anything recurses into them."""
    unescaped = json_text.replace(b"\\\\", b"").replace(b'\\"', b"")
    outside_strings = b"".join(unescaped.split(b'"')[::2])
    brackets = outside_strings.translate(None, NO_BRACKETS)
    steps = [STEP[bracket] for bracket in brackets]
    return max(accumulate(steps), default=0)
