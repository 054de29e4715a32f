"""The body of a request: from the bytes of a connection to a JSON value, within limits.

    HTTP request --receive_body()--> its bytes --parsed()--> value, or BadInput

Authority: RFC 8259 (JSON), RFC 9110 section 8.4 (Content-Encoding), RFC 8878 (zstd); for the refusals,
https://platform.openai.com/docs/guides/error-codes; MinRate of Apache's RequestReadTimeout for rule 1,
https://httpd.apache.org/docs/2.4/mod/mod_reqtimeout.html

Rules of this file:
1. A body must arrive within MAX_BODY_S seconds plus one second per BODY_BYTES_A_S bytes received. We reserve
   room (room.py) for a large body before we keep it, and owners take turns to have its chunks read: reading a
   hundred large bodies at once would fill every turn of the event loop.
2. Bytes and the number of values are bounded before anything is built from them, and nesting before anything
   recurses into them.
3. A large body may take fifty times its bytes until it is a Request: we parse one at a time, by turns of
   their owners. After each, the event loop has as much time for others as the body took.
"""

import asyncio
import sys
import time
import zlib
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from importlib import import_module
from itertools import accumulate
from typing import Any

from starlette.requests import Request as HttpRequest

import sse
from request.refusals import BadInput
from request.room import Visit

# The JSON of a body. While it is open, a large body keeps others from theirs.
Parsing = AbstractAsyncContextManager[Any]

SMALL_BODY_BYTES = 16 * 1024  # parsed at once, in less than 1 ms, however many large ones wait
FEW_BYTES = 4 * 1024  # the work for such a body takes 1 ms of the event loop as a rule, and 5 at worst
MAX_DEPTH = 128  # nested lists and objects: a schema nests two for each level of what it describes
STEPS = bytes.maketrans(b"[{]}", b"\1\1\xff\xff")  # what a bracket adds to the depth: 1 or -1, a signed byte
NO_BRACKETS = bytes({*range(256)} - {*b"[]{}"})
MAX_VALUES = 50_000  # JSON values: one takes 2 bytes of a body, and some 100 of memory
MAX_BODY_S = 30  # from the first byte to the last of a small body
# Bytes a second that must come after that; a client with a round trip of 200 ms sends five times as many.
BODY_BYTES_A_S = 256 * 1024


# --- what comes ---------------------------------------------------------------------------------------------


async def receive_body(http: HttpRequest, visit: Visit) -> Parsing:
    """Receive the body of a request, and return it unparsed: `async with` parses it. Raises BadInput."""
    encoding = http.headers.get("content-encoding", "identity").lower()
    if encoding not in READERS:
        raise BadInput(
            f"Expected a body encoded as {', '.join(READERS)}, got '{encoding}'. {ZSTD_NEEDS}",
            code="unsupported_content_encoding",
        )
    content = bytearray()
    began_at = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout(MAX_BODY_S) as timeout:
            async for chunk in http.stream():
                content += chunk
                n_bytes = len(content)
                if n_bytes > visit.rooms.max_body_bytes:
                    raise too_large(visit)
                if n_bytes > SMALL_BODY_BYTES:
                    timeout.reschedule(began_at + MAX_BODY_S + n_bytes / BODY_BYTES_A_S)
                    visit.set_held(visit.rooms.bytes, n_bytes)
                    await visit.until_its_turn()
    except TimeoutError as error:
        raise BadInput(
            f"Expected the whole body within {MAX_BODY_S} s and a second for each {BODY_BYTES_A_S} bytes "
            "received; only a part came.",
            code="request_timeout",
        ) from error
    return parsed(bytes(content), visit, encoding)


# --- parsing ------------------------------------------------------------------------------------------------


@asynccontextmanager
async def parsed(content: bytes, visit: Visit, encoding: str = "identity") -> AsyncIterator[Any]:
    """Yield the JSON value of a body. Raises BadInput.

    Leave the block as soon as the Request is made: a large body keeps others waiting until then (rule 3).
    """
    if len(content) <= SMALL_BODY_BYTES and encoding == "identity":
        visit.is_small = len(content) <= FEW_BYTES
        yield parse(content)
        return
    async with visit.rooms.parsing.turn(visit.owner):
        began_at = time.thread_time()
        try:
            value = parse(unpacked(content, encoding, visit))
        finally:
            await asyncio.sleep(time.thread_time() - began_at)
        yield value


def parse(json_text: bytes) -> Any:
    """Return the value of a JSON text; raises BadInput."""
    outside = outside_strings(json_text)
    if n_values(outside) > MAX_VALUES:
        raise too_many_values()
    try:
        # UTF-8, not the UTF-16 which json takes: RFC 8259, section 8.1. Half a surrogate pair is U+FFFD.
        value = sse.loads(json_text, "replace")
        if nesting(outside) > MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
    except ValueError as error:
        raise BadInput(f"Could not parse the body as JSON: {error}", code="invalid_json") from error
    return value


def outside_strings(json_text: bytes) -> bytes:
    """Return a JSON text without its strings.

    A value has at most two strings: its name, and itself. So we stop after twice MAX_VALUES strings, and a
    text of millions of strings takes no more time.
    """
    unescaped = json_text.replace(b"\\\\", b"").replace(b'\\"', b"")
    return b"".join(unescaped.split(b'"', 4 * MAX_VALUES)[::2])


def n_values(outside: bytes) -> int:
    """Return how many values a JSON text holds, at most; `outside` is the text without its strings.

    Each value but the first follows a comma or an opening bracket.
    """
    return 1 + sum(map(outside.count, (b",", b"[", b"{")))


def nesting(outside: bytes) -> int:
    """Return how deep lists and objects nest in a JSON text; `outside` is the text without its strings."""
    steps = outside.translate(STEPS, delete=NO_BRACKETS)
    return max(accumulate(memoryview(steps).cast("b")), default=0)


# --- the fold: a plain streamed request passes what stands above --------------------------------------------


# --- what comes ---------------------------------------------------------------------------------------------


def too_large(visit: Visit) -> BadInput:
    expected = f"at most {visit.rooms.max_body_bytes} bytes, before and after decompression (--max-body)"
    return BadInput(f"Expected a body of {expected}.", code="body_too_large")


# --- parsing ------------------------------------------------------------------------------------------------


def too_many_values() -> BadInput:
    message = f"Expected a body of at most {MAX_VALUES} JSON values, and as many in the arguments of calls."
    return BadInput(message, code="body_too_large")


# --- encodings ----------------------------------------------------------------------------------------------

GZIP = 16 + zlib.MAX_WBITS  # zlib.decompressobj()

# Each has decompress(), eof and unused_data.
READERS: dict[str, Any] = {"identity": None, "gzip": partial(zlib.decompressobj, GZIP)}
ZSTD_NEEDS = "For zstd the server needs Python 3.14, or a package: pip install backports.zstd"
ZSTD_WINDOW_LOG = 23  # 8 MiB of memory, "recommended for decoders to support": RFC 8878, section 3.1.1.1.2

with suppress(ImportError):  # Codex compresses its bodies with zstd
    zstd: Any = import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")
    window = {zstd.DecompressionParameter.window_log_max: ZSTD_WINDOW_LOG}
    READERS["zstd"] = partial(zstd.ZstdDecompressor, options=window)


def unpacked(content: bytes, encoding: str, visit: Visit) -> bytes:
    """Return what a body unpacks to, which is bounded and held like any other; raises BadInput."""
    if encoding == "identity":
        return content
    reader = READERS[encoding]()
    try:
        json_text: bytes = reader.decompress(content, visit.rooms.max_body_bytes + 1)
    except Exception as error:  # a reader may raise anything: these bytes are the cause
        raise BadInput(f"Could not unpack the body: {error}", code="invalid_json") from error
    if len(json_text) > visit.rooms.max_body_bytes:
        raise too_large(visit)
    if not reader.eof or reader.unused_data:
        raise BadInput("Could not unpack the body: expected one whole stream.", code="invalid_json")
    visit.set_held(visit.rooms.bytes, len(json_text))
    return json_text
