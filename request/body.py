"""The body of a request: from the bytes of a connection to a JSON value, within limits.

    HTTP request --receive()--> Body, or BadInput          Body --parse_json()--> value, or BadInput

Authority: RFC 8259 (JSON), RFC 9110 section 8.4 (Content-Encoding), RFC 8878 (zstd); for what is refused,
https://platform.openai.com/docs/guides/error-codes.

Rules of this file:
1. Bytes, nesting and the number of values are bounded before anything is built from them.
2. Large bodies are unpacked and parsed one at a time, in a thread of their own that rests half of the time:
   no other work waits for it.
3. What large bodies hold may take fifty times their bytes until there is a Request: so many have a place at a
   time, by turns of their owners.

Not here: what the JSON may say (params.py), how long a body may take to come, and how many bytes all of them
may have (service/admission.py).
"""

import asyncio
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from importlib import import_module
from itertools import accumulate
from typing import Any, NamedTuple

from starlette.requests import Request as HttpRequest

import sse
from request.refusals import BadInput
from request.room import Turns

MAX_BODY_BYTES = 2 * 2**20  # unless --max-body says otherwise: 500,000 tokens of text
SMALL_BODY_BYTES = 16 * 1024  # parsed at once, in less than 1 ms, however many large ones wait
MAX_DEPTH = 128  # nested lists and objects: a schema nests two for each level of what it describes
MAX_VALUES = 50_000  # of JSON: one takes 2 bytes of a body, and some 100 of memory
MAX_RATIO = 100  # bytes unpacked for one that came: text has 3 to 20, so that more is no text
SMALL_BYTES = 2**16  # what a body may unpack to whatever its ratio

GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS  # zlib.decompressobj(): whichever of the two the header shows
ZSTD_WINDOW_LOG = 23  # 8 MiB of memory, "recommended for decoders to support": RFC 8878, section 3.1.1.1.2

# Reading JSON holds Python's lock to its end, in a thread too: two at once would leave the streams no turn.
PARSER = ThreadPoolExecutor(1, "json")
N_PLACES = 4  # more than there are threads that work for them (server.py)
rested_at = 0.0  # when its thread may work again, by time.monotonic()

STEP = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
NOT_PUNCTUATION = bytes(set(range(256)) - set(b"[]{},"))


class Body(NamedTuple):
    """A body that has come, and how it is to be read."""

    content: bytes
    max_bytes: int  # also of what it unpacks to
    encoding: str = "identity"

    @property
    def is_small(self) -> bool:
        return len(self.content) <= SMALL_BODY_BYTES and self.encoding == "identity"


async def receive(http: HttpRequest) -> Body:
    """The body of a request; raises BadInput."""
    encoding = http.headers.get("content-encoding", "").strip().lower() or "identity"
    _check_encoding(encoding)
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
    return Body(bytes(body), max_bytes, encoding)


def place(body: Body, owner: str, places: Turns) -> AbstractAsyncContextManager[None]:
    """To be held from before a body is parsed until its Request is there: rule 3."""
    if body.is_small:
        return nullcontext()
    return places.turn(owner)


async def parse_json(body: Body) -> Any:
    """The JSON value of a body that has come; raises BadInput."""
    if body.is_small:
        return _parse(body.content, body.encoding, body.max_bytes)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(PARSER, _parse_rested, body.content, body.encoding, body.max_bytes)


def _parse_rested(body: bytes, encoding: str, max_bytes: int) -> Any:
    """Parse, when the thread has rested for as long as the body before took: others have half of the time."""
    global rested_at
    time.sleep(max(0.0, rested_at - time.monotonic()))
    began_at = time.thread_time()
    try:
        return _parse(body, encoding, max_bytes)
    finally:
        rested_at = time.monotonic() + time.thread_time() - began_at


def _parse(body: bytes, encoding: str, max_bytes: int) -> Any:
    json_text = body if encoding == "identity" else _unpacked(body, encoding, max_bytes)
    marks = punctuation(json_text)
    # A value has two marks at most, one that opens and one that closes it.
    if depth(marks[: 2 * MAX_VALUES]) > MAX_DEPTH:
        message = f"Expected a body nested at most {MAX_DEPTH} deep."
        raise BadInput(message, None, "invalid_json")
    if count(marks) > MAX_VALUES:
        raise too_many_values()
    try:
        return sse.loads(json_text.decode("utf-8-sig"))  # not UTF-16, which json takes: RFC 8259, section 8.1
    except ValueError as error:
        raise BadInput(f"Could not parse the body as JSON: {error}", None, "invalid_json") from error


# --- encodings ----------------------------------------------------------------------------------------------


def _zstd() -> Any:
    """The module that reads zstd, of Python 3.14 or of a package; None where there is none."""
    for name in ("compression.zstd", "backports.zstd"):
        try:
            return import_module(name)
        except ImportError:
            continue
    return None


ZSTD = _zstd()
GZIP = partial(zlib.decompressobj, GZIP_OR_ZLIB)

# Codex compresses its bodies. A reader has decompress(), eof and unused_data.
READERS: dict[str, Callable[[], Any]] = {"gzip": GZIP, "x-gzip": GZIP, "deflate": GZIP}
UNREADABLE: tuple[type[Exception], ...] = (zlib.error,)
if ZSTD:
    ZSTD_OPTIONS = {ZSTD.DecompressionParameter.window_log_max: ZSTD_WINDOW_LOG}
    READERS["zstd"] = partial(ZSTD.ZstdDecompressor, options=ZSTD_OPTIONS)
    UNREADABLE += (ZSTD.ZstdError,)


def _check_encoding(encoding: str) -> None:
    if encoding in READERS or encoding == "identity":
        return
    message = f"Expected a body encoded as {', '.join(['identity', *READERS])}, got '{encoding}'."
    if encoding == "zstd":
        message += " For that the server needs a package: pip install backports.zstd"
    raise BadInput(message, None, "unsupported_content_encoding")


def _unpacked(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """What a body unpacks to is bounded like any other, and by what came of it."""
    limit = min(max_bytes, max(SMALL_BYTES, len(body) * MAX_RATIO))
    reader = READERS[encoding]()
    try:
        unpacked: bytes = reader.decompress(body, limit + 1)
    except UNREADABLE as error:
        raise BadInput(f"Could not unpack the body: {error}", None, "invalid_json") from error
    if len(unpacked) > limit:
        message = f"Expected at most {limit} bytes when unpacked: {MAX_RATIO} for each that came."
        raise BadInput(message, None, "body_too_large")
    if not reader.eof or reader.unused_data:
        raise BadInput("Could not unpack the body: expected one whole stream.", None, "invalid_json")
    return unpacked


# --- what a JSON text holds, before it is parsed ------------------------------------------------------------


def punctuation(json_text: bytes) -> bytes:
    """The brackets and commas outside strings."""
    unescaped = json_text.replace(b"\\\\", b"").replace(b'\\"', b"")
    if unescaped.count(b'"') > 4 * MAX_VALUES:  # two for each value, two for its name
        raise too_many_values()
    outside_strings = b"".join(unescaped.split(b'"')[::2])
    return outside_strings.translate(None, NOT_PUNCTUATION)


def count(marks: bytes) -> int:
    """How many values there are, at most: each stands behind a comma or an opening bracket, but the first."""
    n_closing = marks.count(b"]") + marks.count(b"}")
    return 1 + len(marks) - n_closing


def n_values(text: str) -> int:
    """How many values a JSON text that stands in a body has, at most; raises BadInput for too many."""
    n = count(punctuation(text.encode(errors="replace")))
    if n > MAX_VALUES:
        raise too_many_values()
    return n


def too_many_values() -> BadInput:
    message = f"Expected a body of at most {MAX_VALUES} JSON values, and as many in the arguments of calls."
    return BadInput(message, None, "body_too_large")


def depth(marks: bytes) -> int:
    """How deep lists and objects nest, before anything recurses into them."""
    brackets = marks.replace(b",", b"")
    steps = [STEP[bracket] for bracket in brackets]
    return max(accumulate(steps), default=0)
