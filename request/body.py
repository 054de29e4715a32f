"""The body of a request: from the bytes of a connection to a JSON value, within limits.

    HTTP request --read_json()--> value, or BadInput

Authority: RFC 8259 (JSON), RFC 9110 section 8.4 (Content-Encoding); for what is refused,
https://platform.openai.com/docs/guides/error-codes.

Rules of this file:
1. Bytes and nesting are bounded before anything is built from them.
2. Large bodies are unpacked and parsed one at a time, in a thread of their own: no other work waits for it.

Not here: what the JSON may say (params.py), how long a body may take to come, and how many bytes all of them
may have (service/admission.py).
"""

import asyncio
import zlib
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import Any

from starlette.requests import Request as HttpRequest

import sse
from request.refusals import BadInput

MAX_BODY_BYTES = 2 * 2**20  # unless --max-body says otherwise: 500,000 tokens of text
SMALL_BODY_BYTES = 16 * 1024  # parsed at once, in less than 1 ms, however many large ones wait
MAX_DEPTH = 128  # nested lists and objects: a schema nests two for each level of what it describes
ENCODINGS = ("identity", "gzip", "x-gzip", "deflate")
GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS  # zlib.decompressobj(): whichever of the two the header shows

# Reading JSON holds Python's lock to its end, in a thread too: two at once would leave the streams no turn.
PARSER = ThreadPoolExecutor(1, thread_name_prefix="json")

STEP = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


async def read_json(http: HttpRequest) -> Any:
    """The body of a request; raises BadInput."""
    encoding = http.headers.get("content-encoding", "").strip().lower() or "identity"
    if encoding not in ENCODINGS:
        message = f"Expected a body encoded as {', '.join(ENCODINGS)}, got '{encoding}'."
        raise BadInput(message, None, "unsupported_content_encoding")
    max_bytes: int = http.scope["max_body_bytes"]
    too_large = BadInput(
        f"Expected a body of at most {max_bytes} bytes, see --max-body.", None, "body_too_large"
    )
    if int(http.headers.get("content-length", 0)) > max_bytes:
        raise too_large
    body = bytearray()
    async for chunk in http.stream():
        body += chunk
        if len(body) > max_bytes:
            raise too_large
    if len(body) <= SMALL_BODY_BYTES and encoding == "identity":
        return _parse(bytes(body), encoding, max_bytes)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(PARSER, _parse, bytes(body), encoding, max_bytes)


def _parse(body: bytes, encoding: str, max_bytes: int) -> Any:
    json_text = body if encoding == "identity" else _unpacked(body, max_bytes)
    if depth(json_text) > MAX_DEPTH:
        message = f"Expected a body nested at most {MAX_DEPTH} deep."
        raise BadInput(message, None, "invalid_json")
    try:
        return sse.loads(json_text.decode("utf-8-sig"))  # not UTF-16, which json takes: RFC 8259, section 8.1
    except ValueError as error:
        raise BadInput(f"Could not parse the body as JSON: {error}", None, "invalid_json") from error


def _unpacked(body: bytes, max_bytes: int) -> bytes:
    """Codex compresses its bodies; what they unpack to is bounded like any other."""
    unpacker = zlib.decompressobj(wbits=GZIP_OR_ZLIB)
    try:
        unpacked = unpacker.decompress(body, max_bytes)
    except zlib.error as error:
        raise BadInput(f"Could not unpack the body: {error}", None, "invalid_json") from error
    if (not unpacker.eof and not unpacker.unconsumed_tail) or unpacker.unused_data:
        raise BadInput("Could not unpack the body: expected one whole stream.", None, "invalid_json")
    if unpacker.unconsumed_tail:
        raise BadInput(f"Expected at most {max_bytes} bytes when unpacked.", None, "body_too_large")
    return unpacked


def depth(json_text: bytes) -> int:
    """How deep lists and objects nest, before anything recurses into them."""
    unescaped = json_text.replace(b"\\\\", b"").replace(b'\\"', b"")
    outside_strings = b"".join(unescaped.split(b'"')[::2])
    brackets = outside_strings.translate(None, NO_BRACKETS)
    steps = [STEP[bracket] for bracket in brackets]
    return max(accumulate(steps), default=0)
