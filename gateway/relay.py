"""An upstream's answer to a chat request, on its way through.

    chunk of bytes --Reader.feed()--> [Frame, ...]                 in either mode, SSE or one JSON object
    chunk of bytes --Relay.feed()---> [bytes for the client, ...]  its usage counted, and given its costs

Authority: https://platform.openai.com/docs/api-reference/chat-streaming; for the modes
https://github.com/TelegramMessenger/cocoon/issues/49, where a JSON parser met SSE and nothing came out.

Rules of this file:
1. The mode is decided once, by the content type, else by the first byte; nothing leaves before it is known.
2. Frames are cut out in bytes. One without usage leaves as it came, byte for byte, as soon as it is whole.
3. A frame with usage is counted and given its cost: its data is rewritten, its other lines stay as they are.
4. What we asked for and the client did not, the chunk with the usage, is counted and taken out.
5. [DONE] comes once and last. A worker that stops early leaves an error event behind, never half a frame and
   never what looks like an end.
6. What the client gets is what it asked for: a stream or one object, whichever of them the worker sent.

Not here: connections (upstreams.py), costs (metering.py), what the deltas mean (completions.py).
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import sse
from completions import fold
from gateway.deltas import Unreadable, objects
from gateway.metering import Document, Meter
from request.refusals import BadInput, error_object

# --- the mode -----------------------------------------------------------------------------------------------

Mode = Literal["sse", "json"]

CONTENT_TYPES: dict[str, Mode] = {"text/event-stream": "sse", "application/json": "json"}
SSE_STARTS = tuple(b"deir:")  # data, event, id, retry or a comment; no JSON text starts with one of these


def mode(content_type: str, start: bytes) -> Mode | None:
    """How the answer is written, by its content type or its first bytes; None: more of them must come."""
    if named := CONTENT_TYPES.get(content_type.partition(";")[0].strip().lower()):
        return named
    text = start.removeprefix(sse.BOM).lstrip()
    if not text or sse.BOM.startswith(start):
        return None
    return "sse" if text[0] in SSE_STARTS else "json"


# --- frames -------------------------------------------------------------------------------------------------

LINE_END = rb"(?>\r\n|\r|\n)"  # atomic: a CRLF is never taken for two
BLANK = re.compile(LINE_END + LINE_END)
LINES = re.compile(rb"(\r\n|\r|\n)")
LONE = re.compile(
    r"(?<!\\)((?:\\\\)*)\\ud[89a-f][0-9a-f]{2}"
)  # half a surrogate pair, as sse.dumps writes it


class Frame(NamedTuple):
    raw: bytes  # with its blank line
    document: Document | None  # its data, if that is a JSON object
    data: str  # "" for comments and for what is no data

    @property
    def is_done(self) -> bool:
        return self.data.strip() == "[DONE]"


def frame(raw: bytes) -> Frame:
    events = sse.Parser().feed(raw)
    if events:
        return Frame(raw, document(events[0].data), events[0].data)
    bare = raw.strip()
    if bare.startswith(b"{") and (found := document(bare.decode(errors="replace"))):
        # An error without its "data:", amid events: https://github.com/Atomic-Germ/OpenFlowLM-Next/issues/64
        return Frame(sse.encode(sse.dumps(found)), found, sse.dumps(found))
    return Frame(raw, None, "")


def document(text: str | bytes | bytearray) -> Document | None:
    """The JSON object that this is; None for everything else, and for what JSON cannot say again."""
    try:
        found = json.loads(text)
        said = sse.dumps(found)  # not NaN
    except (ValueError, RecursionError):
        return None
    if "\\ud" in said:
        found = json.loads(LONE.sub(r"\1\\ufffd", said))
    return found if isinstance(found, dict) else None


class Reader:
    """An answer to its frames; one that is no SSE is a single frame, at its end.

    Raises Unreadable; of no further use after that.
    """

    def __init__(self, content_type: str, max_bytes: int = sse.MAX_EVENT_BYTES) -> None:
        self.mode: Mode | None = mode(content_type, b"")
        self._content_type = content_type
        self._max_bytes = max_bytes  # of a frame, or of a whole JSON answer
        self._held = bytearray()  # what has come and not left; appending takes linear time
        self._looked = 0  # no blank line starts before here: a frame that comes bytewise is not read again
        self._at_start = True  # "\xef" | "\xbb\xbfdata": one BOM is dropped, many clients trip over it

    def feed(self, chunk: bytes) -> list[Frame]:
        """The frames that chunk completes; where one is too large, those before it, and then it raises."""
        self._held += chunk
        self.mode = self.mode or mode(self._content_type, bytes(self._held))
        frames: list[Frame] = []
        if self.mode == "sse" and self._past_bom():
            while (raw := self._cut()) and len(raw) <= self._max_bytes:
                frames.append(frame(raw))
            if raw:
                self._held[:0] = raw
        if not frames and len(self._held) > self._max_bytes:
            raise Unreadable(f"expected at most {self._max_bytes} bytes at a time")
        return frames

    def close(self) -> list[Frame]:
        """What stands behind the last frame: an event without its blank line, or the one JSON object."""
        if self.mode == "sse":
            frames = self.feed(b"")
            tail = bytes(self._held).rstrip(b"\r\n")
            last = frame(tail + b"\n\n")
            is_comment = all(line.startswith(b":") for line in LINES.split(tail)[::2] if line)
            if not (last.document or last.is_done or is_comment):
                raise Unreadable(f"the worker ended inside an event, {len(tail)} bytes of it")
            return [*frames, *([last] if last.data else [])]
        found = document(self._held.removeprefix(sse.BOM))
        if found is None:
            raise Unreadable("expected a JSON object from the worker, got " + shown(self._held))
        return [Frame(bytes(self._held), found, sse.dumps(found))]

    def _past_bom(self) -> bool:
        if self._at_start and not (len(self._held) < len(sse.BOM) and sse.BOM.startswith(self._held)):
            self._at_start = False
            if self._held.startswith(sse.BOM):
                del self._held[: len(sse.BOM)]
        return not self._at_start

    def _cut(self) -> bytes:
        """Take the first frame out; b"" where none is whole. A CR at the end waits: an LF may follow."""
        n = len(self._held) - self._held.endswith(b"\r")
        found = BLANK.search(self._held, self._looked, n)
        if found is None:
            self._looked = max(0, n - 2)
            return b""
        raw = bytes(self._held[: found.end()])
        del self._held[: found.end()]
        self._looked = 0
        return raw


def shown(data: bytes | bytearray) -> str:
    """The beginning of what cannot be read, for a message."""
    return repr(bytes(data[:60]).decode(errors="replace")) if data else "nothing"


# --- the relay ----------------------------------------------------------------------------------------------


class Relay:
    """One answer on its way to a client who asked for `n` choices and, if `shows_usage`, for their usage."""

    def __init__(
        self,
        content_type: str,
        wants_stream: bool,
        meter: Meter,
        shows_usage: bool = False,
        n: int = 1,
        max_bytes: int = sse.MAX_EVENT_BYTES,
    ) -> None:
        self._reader = Reader(content_type, max_bytes)
        self._wants_stream = wants_stream
        self._meter = meter
        self._shows_usage = shows_usage
        self._n = n
        self._finished: set[Any] = set()  # choices
        self._documents: list[Document] = []  # of a stream that is to become one object
        self._n_held = 0  # their bytes
        self._max_bytes = max_bytes
        self.done = False  # [DONE] came, and waits for what may follow it
        self._failed = False  # an error event has left

    def feed(self, chunk: bytes) -> list[bytes]:
        """What the client gets now, a write each. Raises Unreadable, after which fail() is to be called."""
        return self._out(self._reader.feed(chunk))

    def close(self) -> list[bytes]:
        """The worker has ended its answer: what is still to be said. Raises Unreadable as feed does."""
        if self.done:
            return self._end()
        out = self._out(self._reader.close())
        if self._reader.mode == "sse" and not (self.done or self._failed or len(self._finished) >= self._n):
            raise Unreadable("the worker ended its answer before it had finished")
        return [*out, *self._end()]

    def fail(self, message: str) -> list[bytes]:
        """The end of a stream whose worker has died; nothing follows an error that it told of itself."""
        if not self._failed:
            self._failed = True
            return [sse.encode(sse.dumps({"error": error_object(message)})), sse.DONE]
        return [sse.DONE]

    def _out(self, frames: Iterable[Frame]) -> list[bytes]:
        if self._wants_stream and self._reader.mode == "json":
            frames = (
                frame(sse.encode(sse.dumps(c))) for f in frames if f.document for c in chunks_of(f.document)
            )
        if self._wants_stream:
            return [raw for raw in map(self._passed, frames) if raw]
        for each in frames:
            self.done = self.done or each.is_done
            if each.document:
                self._note(each.document)
                self._documents.append(each.document)
            elif each.data and not each.is_done:
                raise Unreadable("expected JSON in each event, got " + shown(each.data.encode()))
            self._n_held += len(each.raw)
        if self._n_held > self._max_bytes:
            raise Unreadable(f"expected an answer of at most {self._max_bytes} bytes")
        return []

    def _passed(self, each: Frame) -> bytes:
        """A frame as the client gets it; nothing where it does not."""
        if each.is_done:
            self.done = True
            return b""
        if each.document is None:  # comments, and what is no JSON: the client sees what the worker sent
            return each.raw
        found = each.document
        self._note(found)
        usage = self._meter.read(found)
        is_chunk = usage is not None and found.get("usage") is usage and not found.get("choices")
        if is_chunk and not self._shows_usage:
            return b""
        return rewritten(each.raw, sse.dumps(found)) if usage is not None and self._meter.prices else each.raw

    def _note(self, found: Document) -> None:
        """What decides if the answer is whole."""
        self._failed = self._failed or bool(found.get("error"))
        self._finished.update(
            str(c.get("index")) for c in objects(found.get("choices")) if c.get("finish_reason")
        )

    def _end(self) -> list[bytes]:
        if self._wants_stream:
            return [sse.DONE]
        try:
            whole = self._documents[0] if self._reader.mode == "json" else fold(self._documents)
        except (AttributeError, KeyError, TypeError) as error:
            raise Unreadable("the worker's chunks are no chat completion") from error
        if whole.get("error"):
            raise refusal(502, {}, sse.dumps(whole).encode())
        self._meter.read(whole)
        return [sse.dumps(whole).encode()]


def rewritten(raw: bytes, data: str) -> bytes:
    """A frame with other data; `event:`, `id:`, `retry:` and comments keep their bytes and their places."""
    parts, out = LINES.split(raw), bytearray()
    has_data = False
    for line, end in zip(parts[::2], [*parts[1::2], b""], strict=True):
        if line.partition(b":")[0] != b"data":
            out += line + end
        elif not has_data:
            has_data = True
            out += b"data: " + data.encode() + end
    return bytes(out)


def chunks_of(completion: Document) -> Iterator[Document]:
    """The chunks that a whole completion amounts to."""
    if completion.get("error"):
        yield completion
        return
    head = completion | {"object": "chat.completion.chunk"}
    usage = head.pop("usage", None)
    choices = []
    for choice in objects(completion.get("choices")):
        delta = dict(choice.pop("message", None) or {})
        if calls := objects(delta.get("tool_calls")):
            delta["tool_calls"] = [{"index": i} | call for i, call in enumerate(calls)]
        choices.append({"index": 0, **choice, "delta": delta})
    yield head | {"choices": choices}
    if usage:
        yield head | {"choices": [], "usage": usage}


# --- errors and headers -------------------------------------------------------------------------------------


class Refused(BadInput):
    """An upstream does not serve the request, or none is there: what the client is told."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str = "",
        retry_after: str = "",
        elsewhere: bool = False,
    ) -> None:
        super().__init__(message, param, code)
        self.status = status
        self.retry_after = retry_after  # seconds or a date, as the upstream had it
        self.elsewhere = elsewhere  # another upstream may serve it

    @property
    def late_code(self) -> str:
        """The `error.code` of a response that had been accepted: there are few."""
        if self.status == 429:
            return "rate_limit_exceeded"
        return "server_error" if self.status >= 500 else "invalid_prompt"


# fmt: off
#  upstream's   ours    whatever is not here is a 502: the fault lies between the two servers
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
# fmt: on

ELSEWHERE = (429, 500, 502, 503, 504, 529)  # what another upstream may do better
SICK = (500, 502, 503, 504)  # what speaks against the upstream itself

# OpenAI has a code for it; vLLM, SGLang and llama.cpp say it in these words.
CONTEXT_LENGTH = re.compile(r"context_length|context length|context size|context_size|maximum context", re.I)


def refusal(status: int, headers: Mapping[str, str], body: bytes) -> Refused:
    """An upstream's error, whichever of the known shapes it has."""
    found = document(body) or {}
    inner = found.get("error") or found.get("detail") or found
    error = inner if isinstance(inner, dict) else {"message": inner}
    message, param, code = (error.get(name) for name in ("message", "param", "code"))
    code = code if isinstance(code, str) else ""  # vLLM's is the status once more
    if status in (400, 413, 422) and CONTEXT_LENGTH.search(f"{code} {error.get('type')} {message}"):
        code = "context_length_exceeded"
    if status in (401, 403):
        message = f"The upstream does not take this server's key ({status}); see --upstream-api-key."
    return Refused(
        400 if code == "context_length_exceeded" else STATUS.get(status, 502),
        message if isinstance(message, str) and message else f"The upstream answered with status {status}.",
        param if isinstance(param, str) else None,
        code,
        headers.get("retry-after", ""),
        status in ELSEWHERE,
    )


# Of the connection, of the body as it was, and what the server in front says itself.
NOT_FORWARDED = {
    "connection", "content-encoding", "content-length", "content-type", "date", "keep-alive",
    "proxy-authenticate", "proxy-connection", "server", "set-cookie", "te", "trailer", "transfer-encoding",
    "upgrade", "x-request-id",
}  # fmt: skip


def forwarded(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The headers that still hold, whatever their case: github.com/timoklimmer/powerproxy-aoai/issues/53"""
    lowered = [(name.lower(), value) for name, value in headers]
    named = {
        word.strip().lower() for name, value in lowered if name == b"connection" for word in value.split(b",")
    }
    return [(n, v) for n, v in lowered if n.decode("latin-1") not in NOT_FORWARDED and n not in named]
