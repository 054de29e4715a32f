"""The body of a request: from the bytes of a connection to a JSON value, within limits.

    HTTP request --receive()--> Body, or BadInput          Body --parsed()--> value, or BadInput

Authority: RFC 8259 (JSON), RFC 9110 section 8.4 (Content-Encoding), RFC 8878 (zstd); for what is refused,
https://platform.openai.com/docs/guides/error-codes; MinRate of Apache's RequestReadTimeout for rule 1,
https://httpd.apache.org/docs/2.4/mod/mod_reqtimeout.html

Rules of this file:
1. A body must be whole within MAX_BODY_S, and the time that what has come takes at BODY_BYTES_A_S. If it is
   large it has room (room.py) before it is kept.
2. Bytes, nesting and the number of values are bounded before anything is built from them.
3. A large body may take fifty times its bytes until there is a Request: few are parsed at a time, by turns of
   their owners. After each the event loop has as much time for others as it took.

Not here: what the JSON may say (params.py).
"""

import asyncio
import time
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from importlib import import_module
from itertools import accumulate
from typing import Any, NamedTuple

from starlette.requests import Request as HttpRequest

import sse
from request.refusals import BadInput
from request.room import Visit

SMALL_BODY_BYTES = 16 * 1024  # parsed at once, in less than 1 ms, however many large ones wait
MAX_DEPTH = 128  # nested lists and objects: a schema nests two for each level of what it describes
MAX_VALUES = 50_000  # of JSON: one takes 2 bytes of a body, and some 100 of memory
MAX_RATIO = 100  # bytes unpacked for one that came: text has 3 to 20, so that more is no text
SMALL_BYTES = 2**16  # what a body may unpack to whatever its ratio
MAX_BODY_S = 30  # from its first byte to its last, if it is small
BODY_BYTES_A_S = 256 * 1024  # at least, after those: five times as many come over 200 ms, there and back

GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS  # zlib.decompressobj(): whichever of the two the header shows
ZSTD_WINDOW_LOG = 23  # 8 MiB of memory, "recommended for decoders to support": RFC 8878, section 3.1.1.1.2

STEP = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
NOT_PUNCTUATION = bytes(set(range(256)) - set(b"[]{},"))


class Body(NamedTuple):
    """A body that has come, and how it is to be read."""

    content: bytes
    max_bytes: int  # also of what it unpacks to
    encoding: str = "identity"


# --- what comes ---------------------------------------------------------------------------------------------


@asynccontextmanager
async def arriving(visit: Visit) -> AsyncIterator[Callable[[int], None]]:
    """Yield what is to be told how many bytes have come; raises BadInput if they are late or have no room."""
    loop = asyncio.get_running_loop()
    began_at = loop.time()
    try:
        async with asyncio.timeout(MAX_BODY_S) as timeout:

            def note(n_bytes: int) -> None:
                if n_bytes > SMALL_BODY_BYTES:
                    visit.hold(visit.rooms.bytes, n_bytes)
                timeout.reschedule(began_at + MAX_BODY_S + n_bytes / BODY_BYTES_A_S)

            yield note
    except TimeoutError as error:
        expected = f"within {MAX_BODY_S} s and a second for each {BODY_BYTES_A_S} bytes that came"
        raise BadInput(f"Expected all of it {expected}.", None, "request_timeout") from error


async def receive(http: HttpRequest, visit: Visit) -> Body:
    """Return the body of a request, which then takes a stream; raises BadInput."""
    encoding = http.headers.get("content-encoding", "").strip().lower() or "identity"
    if encoding not in READERS:
        raise unknown_encoding(encoding)
    max_bytes = visit.rooms.max_body_bytes
    expected = f"Expected a body of at most {max_bytes} bytes, see --max-body."
    too_large = BadInput(expected, None, "body_too_large")
    if int(http.headers.get("content-length", 0)) > max_bytes:
        raise too_large
    content = bytearray()
    async with arriving(visit) as note:
        async for chunk in http.stream():
            content += chunk
            if len(content) > max_bytes:
                raise too_large
            note(len(content))
    visit.enter()
    return Body(bytes(content), max_bytes, encoding)


# --- parsing ------------------------------------------------------------------------------------------------


@asynccontextmanager
async def parsed(body: Body, visit: Visit) -> AsyncIterator[Any]:
    """Yield the JSON value of a body. Leave when there is a Request: rule 3. Raises BadInput."""
    if len(body.content) <= SMALL_BODY_BYTES and body.encoding == "identity":
        yield parse(body)
        return
    async with visit.rooms.parsing.turn(visit.owner):
        began_at = time.thread_time()
        try:
            value = parse(body)
        finally:
            await asyncio.sleep(time.thread_time() - began_at)
        yield value


def parse(body: Body) -> Any:
    """Return the JSON value of a body; raises BadInput."""
    json_text = READERS[body.encoding](body)
    marks = punctuation(json_text)
    # A value has two marks at most, one that opens and one that closes it.
    if depth(marks[: 2 * MAX_VALUES]) > MAX_DEPTH:
        raise BadInput(f"Expected a body nested at most {MAX_DEPTH} deep.", None, "invalid_json")
    if count(marks) > MAX_VALUES:
        raise too_many_values()
    try:
        return sse.loads(json_text.decode("utf-8-sig"))  # not UTF-16, which json takes: RFC 8259, section 8.1
    except ValueError as error:
        raise BadInput(f"Could not parse the body as JSON: {error}", None, "invalid_json") from error


# --- encodings ----------------------------------------------------------------------------------------------


def zstd() -> Any:
    """Return the module that reads zstd, of Python 3.14 or of a package; None if there is none."""
    for name in ("compression.zstd", "backports.zstd"):
        try:
            return import_module(name)
        except ImportError:
            continue
    return None


def unpacked(make_reader: Callable[[], Any], body: Body) -> bytes:
    """Return what a body unpacks to, which is bounded like any other, and by what came; raises BadInput.

    A reader has decompress(), eof and unused_data.
    """
    limit = min(body.max_bytes, max(SMALL_BYTES, len(body.content) * MAX_RATIO))
    reader = make_reader()
    try:
        content: bytes = reader.decompress(body.content, limit + 1)
    except UNREADABLE as error:
        raise BadInput(f"Could not unpack the body: {error}", None, "invalid_json") from error
    if len(content) > limit:
        message = f"Expected at most {limit} bytes when unpacked: {MAX_RATIO} for each that came."
        raise BadInput(message, None, "body_too_large")
    if not reader.eof or reader.unused_data:
        raise BadInput("Could not unpack the body: expected one whole stream.", None, "invalid_json")
    return content


ZSTD = zstd()
GZIP = partial(unpacked, partial(zlib.decompressobj, GZIP_OR_ZLIB))
READERS: dict[str, Callable[[Body], bytes]] = {
    "identity": lambda body: body.content,
    "gzip": GZIP,
    "x-gzip": GZIP,
    "deflate": GZIP,
}
UNREADABLE: tuple[type[Exception], ...] = (zlib.error,)
if ZSTD:  # Codex compresses its bodies so
    ZSTD_OPTIONS = {ZSTD.DecompressionParameter.window_log_max: ZSTD_WINDOW_LOG}
    READERS["zstd"] = partial(unpacked, partial(ZSTD.ZstdDecompressor, options=ZSTD_OPTIONS))
    UNREADABLE += (ZSTD.ZstdError,)


def unknown_encoding(encoding: str) -> BadInput:
    message = f"Expected a body encoded as {', '.join(READERS)}, got '{encoding}'."
    if encoding == "zstd":
        message += " For that the server needs a package: pip install backports.zstd"
    return BadInput(message, None, "unsupported_content_encoding")


# --- what a JSON text holds, before it is parsed ------------------------------------------------------------


def punctuation(json_text: bytes) -> bytes:
    """Return the brackets and commas outside strings."""
    unescaped = json_text.replace(b"\\\\", b"").replace(b'\\"', b"")
    if unescaped.count(b'"') > 4 * MAX_VALUES:  # two for each value, two for its name
        raise too_many_values()
    outside_strings = b"".join(unescaped.split(b'"')[::2])
    return outside_strings.translate(None, NOT_PUNCTUATION)


def count(marks: bytes) -> int:
    """Return how many values there are, at most: each but the first follows a comma or an opening bracket."""
    n_closing = marks.count(b"]") + marks.count(b"}")
    return 1 + len(marks) - n_closing


def n_values(text: str) -> int:
    """Return how many values a JSON text in a body has, at most; raises BadInput for too many."""
    n = count(punctuation(text.encode(errors="replace")))
    if n > MAX_VALUES:
        raise too_many_values()
    return n


def too_many_values() -> BadInput:
    message = f"Expected a body of at most {MAX_VALUES} JSON values, and as many in the arguments of calls."
    return BadInput(message, None, "body_too_large")


def depth(marks: bytes) -> int:
    """Return how deep lists and objects nest, before anything recurses into them."""
    brackets = marks.replace(b",", b"")
    steps = [STEP[bracket] for bracket in brackets]
    return max(accumulate(steps), default=0)
