"""The relay, a proxy for one chat completion: an upstream's answer on its way to the client.

    chunk of bytes --Reader.feed()--> [Frame, ...]                 in either mode, SSE or one JSON object
    chunk of bytes --Relay.feed()---> [bytes for the client, ...]  its usage counted, and given its costs

Authority: https://platform.openai.com/docs/api-reference/chat-streaming; for the modes
https://github.com/TelegramMessenger/cocoon/issues/49, where a JSON parser met SSE and nothing came out.

Rules of this file:
1. The mode is decided once, by the content type, else by the first byte; nothing leaves before it is known.
2. Frames are cut out in bytes. One without usage leaves as it came, byte for byte, as soon as it is complete.
3. A frame with usage is counted and given its cost: its data is rewritten, its other lines stay as they are.
4. The usage chunk that we asked for and the client did not is counted and taken out.
5. [DONE] comes once and last. An upstream that stops early leaves an error event behind, never half a frame
   and never what looks like an end.
6. The client gets what it asked for, a stream or one object, whichever of them the upstream has sent.

Not here: connections (upstreams.py), costs (metering.py), what the deltas mean (deltas.py).
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

import sse
from completions import fold
from gateway.deltas import Unreadable, objects
from gateway.metering import Document, Meter
from request.refusals import BadInput, error_object

# --- the mode -----------------------------------------------------------------------------------------------

Mode = Literal["sse", "json"]

CONTENT_TYPES: dict[str, Mode] = {"text/event-stream": "sse", "application/json": "json"}
SSE_STARTS = tuple(b"deir:")  # data, event, id, retry or a comment; no JSON text starts with one of these


def mode(content_type: str, beginning: bytes) -> Mode | None:
    """The mode of an answer, by its content type or its first bytes; None: more of them must come."""
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type in CONTENT_TYPES:
        return CONTENT_TYPES[media_type]
    text = beginning.removeprefix(sse.BOM).lstrip()
    if not text or sse.BOM.startswith(beginning):
        return None
    return "sse" if text[0] in SSE_STARTS else "json"


# --- frames -------------------------------------------------------------------------------------------------

LINE_END = rb"(?>\r\n|\r|\n)"  # atomic: a CRLF is never taken for two line ends
BLANK_LINE = re.compile(LINE_END + LINE_END)
LINES = re.compile(rb"(\r\n|\r|\n)")  # split() gives line, end, line, end, ..., line
# Half a surrogate pair, as sse.dumps writes it.
LONE_SURROGATE = re.compile(r"(?<!\\)((?:\\\\)*)\\ud[89a-f][0-9a-f]{2}")


# Of a frame: while its JSON is read all streams stand still, 20 ms a MiB of text, 200 a MiB of the smallest
# objects. The longest events have the whole arguments of a call, such as a file to write, the longest objects
# the logprobs of a whole answer.
MAX_FRAME_BYTES: dict[Mode, int] = {"sse": 2**19, "json": 2**22}


class Frame(NamedTuple):
    raw: bytes  # with its blank line
    document: Document | None  # its data, if that is a JSON object
    data: str  # "" where the frame has none, as a comment

    @property
    def is_done(self) -> bool:
        return self.data.strip() == "[DONE]"


def frame(raw: bytes) -> Frame:
    events = sse.Parser().feed(raw)
    if events:
        data = events[0].data
        return Frame(raw, document(data), data)
    text = raw.strip()
    if text.startswith(b"{"):
        # An error without its "data:", amid events: https://github.com/Atomic-Germ/OpenFlowLM-Next/issues/64
        error = document(text.decode(errors="replace"))
        if error:
            data = sse.dumps(error)
            return Frame(sse.encode(data), error, data)
    return Frame(raw, None, "")


def document(text: str | bytes | bytearray) -> Document | None:
    """The JSON object that a text is; None for any other text, and for an object that JSON cannot write."""
    try:
        value = sse.loads(text)
    except UnicodeEncodeError:  # it has half a surrogate pair, which the client gets as U+FFFD
        escaped = sse.dumps(json.loads(text))
        value = json.loads(LONE_SURROGATE.sub(r"\1\\ufffd", escaped))
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


class Reader:
    """An answer to its frames; one that is no SSE is a single frame, at its end.

    Raises Unreadable; of no further use after that.
    """

    def __init__(self, content_type: str, max_bytes: int = sse.MAX_EVENT_BYTES) -> None:
        self.mode: Mode | None = mode(content_type, b"")
        self._content_type = content_type
        self._max_bytes = max_bytes  # of a frame, or of a whole JSON answer
        self._buffer = bytearray()  # bytes that have come and not left; appending takes linear time
        self._n_searched = 0  # no blank line starts before here: a frame that comes bytewise is searched once
        self._at_start = True  # "\xef" | "\xbb\xbfdata": one BOM is dropped, many clients trip over it

    def feed(self, chunk: bytes) -> list[Frame]:
        """The frames that chunk completes.

        Where one is too large those before it are returned, and the next call raises.
        """
        self._buffer += chunk
        self.mode = self.mode or mode(self._content_type, bytes(self._buffer))
        if self.mode:
            self._max_bytes = min(self._max_bytes, MAX_FRAME_BYTES[self.mode])
        frames: list[Frame] = []
        if self.mode == "sse" and self._past_bom():
            while (raw := self._cut()) and len(raw) <= self._max_bytes:
                frames.append(frame(raw))
            if raw:
                self._buffer[:0] = raw
        if not frames and len(self._buffer) > self._max_bytes:
            raise Unreadable(f"expected at most {self._max_bytes} bytes at a time")
        return frames

    def close(self) -> list[Frame]:
        """What follows the last frame: an event without its blank line, or the one JSON object."""
        if self.mode == "sse":
            return self._close_sse()
        answer = document(self._buffer.removeprefix(sse.BOM))
        if answer is None:
            raise Unreadable("expected a JSON object from the worker, got " + quoted(self._buffer))
        return [Frame(bytes(self._buffer), answer, sse.dumps(answer))]

    def _close_sse(self) -> list[Frame]:
        frames = self.feed(b"")
        tail = bytes(self._buffer).rstrip(b"\r\n")
        last = frame(tail + b"\n\n")
        if last.document or last.is_done:
            return [*frames, last]
        lines = LINES.split(tail)[::2]
        is_comment = all(line.startswith(b":") for line in lines if line)
        if not is_comment:
            raise Unreadable(f"the worker ended inside an event, {len(tail)} bytes of it")
        return frames

    def _past_bom(self) -> bool:
        """Drop the BOM, once enough bytes have come to know whether there is one."""
        is_cut = len(self._buffer) < len(sse.BOM) and sse.BOM.startswith(self._buffer)
        if self._at_start and not is_cut:
            self._at_start = False
            if self._buffer.startswith(sse.BOM):
                del self._buffer[: len(sse.BOM)]
        return not self._at_start

    def _cut(self) -> bytes:
        """Take out the first frame; b"" where none is complete. A CR at the end waits: an LF may follow."""
        n_bytes = len(self._buffer)
        if self._buffer.endswith(b"\r"):
            n_bytes -= 1
        blank_line = BLANK_LINE.search(self._buffer, self._n_searched, n_bytes)
        if blank_line is None:
            self._n_searched = max(0, n_bytes - 2)
            return b""
        raw = bytes(self._buffer[: blank_line.end()])
        del self._buffer[: blank_line.end()]
        self._n_searched = 0
        return raw


def quoted(data: bytes | bytearray) -> str:
    """The beginning of what cannot be read, for a message."""
    if not data:
        return "nothing"
    return repr(bytes(data[:60]).decode(errors="replace"))


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
        self.is_done = False  # [DONE] came; it leaves last, behind what the upstream may still send
        self._reader = Reader(content_type, max_bytes)
        self._wants_stream = wants_stream
        self._meter = meter
        self._shows_usage = shows_usage
        self._n = n
        self._finished: set[str] = set()  # indices of the choices that have a finish_reason
        self._failed = False  # an error event has left
        # Where a client that wants one object gets a stream from the upstream: what it is folded from.
        self._documents: list[Document] = []
        self._n_bytes = 0  # size of the documents
        self._max_bytes = max_bytes

    def feed(self, chunk: bytes) -> list[bytes]:
        """What the client gets now, a write each. Raises Unreadable, after which fail() is to be called."""
        return self._pass(self._reader.feed(chunk))

    def close(self) -> list[bytes]:
        """The upstream has ended its answer: what the client still gets. Raises Unreadable as feed does."""
        if self.is_done:
            return self._end()
        writes = self._pass(self._reader.close())
        is_complete = self.is_done or self._failed or len(self._finished) >= self._n
        if self._reader.mode == "sse" and not is_complete:
            raise Unreadable("the worker ended its answer before it had finished")
        return [*writes, *self._end()]

    def fail(self, message: str) -> list[bytes]:
        """End a stream whose upstream has died; an error event that the upstream has sent is the only one."""
        if self._failed:
            return [sse.DONE]
        self._failed = True
        return [sse.encode(sse.dumps({"error": error_object(message)})), sse.DONE]

    def _pass(self, frames: Iterable[Frame]) -> list[bytes]:
        if not self._wants_stream:
            for each in frames:
                self._keep(each)
            return []
        if self._reader.mode == "json":
            frames = chunk_frames(frames)
        return [raw for raw in map(self._write, frames) if raw]

    def _write(self, each: Frame) -> bytes:
        """A frame as a client that wants a stream gets it; b"" where it does not get it."""
        if each.is_done:
            self.is_done = True
            return b""
        chunk = each.document
        if chunk is None:  # comments, and what is no JSON: the client sees what the upstream sent
            return each.raw
        self._note_end(chunk)
        usage = self._meter.read(chunk)
        if usage is None:
            return each.raw
        is_usage_chunk = chunk.get("usage") is usage and not chunk.get("choices")
        if is_usage_chunk and not self._shows_usage:
            return b""
        if self._meter.prices:
            return with_data(each.raw, sse.dumps(chunk))
        return each.raw

    def _keep(self, each: Frame) -> None:
        """Keep a frame for a client that wants one object."""
        if each.is_done:
            self.is_done = True
        elif each.document:
            self._note_end(each.document)
            self._documents.append(each.document)
        elif each.data:
            raise Unreadable("expected JSON in each event, got " + quoted(each.data.encode()))
        self._n_bytes += len(each.raw)
        if self._n_bytes > self._max_bytes:
            raise Unreadable(f"expected an answer of at most {self._max_bytes} bytes")

    def _note_end(self, chunk: Document) -> None:
        """Note what decides whether the answer is complete."""
        if chunk.get("error"):
            self._failed = True
        for choice in objects(chunk.get("choices")):
            if choice.get("finish_reason"):
                self._finished.add(str(choice.get("index")))

    def _end(self) -> list[bytes]:
        if self._wants_stream:
            return [sse.DONE]
        completion = self._completion()
        if completion.get("error"):
            raise read_refusal(502, {}, sse.dumps(completion).encode())
        self._meter.read(completion)
        return [sse.dumps(completion).encode()]

    def _completion(self) -> Document:
        if self._reader.mode == "json":
            return self._documents[0]
        try:
            return fold(self._documents)
        except (AttributeError, KeyError, TypeError) as error:
            raise Unreadable("the worker's chunks are no chat completion") from error


def with_data(raw: bytes, data: str) -> bytes:
    """A frame with other data; `event:`, `id:`, `retry:` and comments keep their bytes and their places."""
    parts = LINES.split(raw)  # the last line has no end
    out = bytearray()
    has_data = False
    for line, end in zip(parts[::2], [*parts[1::2], b""], strict=True):
        if line.partition(b":")[0] != b"data":
            out += line + end
        elif not has_data:
            has_data = True
            out += b"data: " + data.encode() + end
    return bytes(out)


def chunk_frames(frames: Iterable[Frame]) -> Iterator[Frame]:
    """The frames of the stream that a completion in one object amounts to."""
    for each in frames:
        if each.document:
            for chunk in chunks_of(each.document):
                yield frame(sse.encode(sse.dumps(chunk)))


def chunks_of(completion: Document) -> Iterator[Document]:
    """The chunks that a completion amounts to."""
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
    """An upstream does not serve the request, or none can be reached: what the client is told."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str = "",
        retry_after: str = "",
        is_retryable: bool = False,
    ) -> None:
        super().__init__(message, param, code)
        self.status = status
        self.retry_after = retry_after  # seconds or a date, as the upstream wrote it; "" for none
        self.is_retryable = is_retryable  # another upstream may serve the request

    @property
    def late_code(self) -> str:
        """The `error.code` of a response that was accepted before: the API allows only a few."""
        if self.status == 429:
            return "rate_limit_exceeded"
        if self.status >= 500:
            return "server_error"
        return "invalid_prompt"


# fmt: off
#  upstream's   ours    any other is a 502: the fault lies between the two servers
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
FAILURES = (500, 502, 503, 504)  # the circuit breaker counts these against the upstream

# OpenAI has a code for it; vLLM, SGLang and llama.cpp say it in these words.
CONTEXT_LENGTH = re.compile(r"context_length|context length|context size|context_size|maximum context", re.I)


# Seconds or a date: RFC 9110, section 10.2.3. Whatever else an upstream writes there is dropped.
RETRY_AFTER = re.compile(r"[0-9]{1,9}|[A-Z][a-z]{2}, [0-9]{2} [A-Z][a-z]{2} [0-9]{4} [0-9:]{8} GMT")
# Characters of an upstream's error that a client is told.
MAX_MESSAGE = 1000
MAX_NAME = 100  # of a parameter, of a code


def refusal_in(answer: Document) -> Refused | None:
    """The refusal that an answer with status 200 holds in its first event; None where it is no error."""
    error = answer.get("error")
    if not error and answer.get("object") != "error":
        return None
    if not isinstance(error, dict):
        error = answer
    return read_refusal(_stated_status(error), {}, sse.dumps(answer).encode())


def _stated_status(error: Document) -> int:
    """The status that an error names; 502 where it names none."""
    for member in ("code", "type"):
        value = str(error.get(member))
        if re.fullmatch("[45][0-9]{2}", value):  # vLLM has a number there, LiteLLM its digits
            return int(value)
        if value in ERROR_STATUS:
            return ERROR_STATUS[value]
    return 502


def read_refusal(status: int, headers: Mapping[str, str], body: bytes) -> Refused:
    """An upstream's error, in whichever of the known shapes it comes."""
    answer = document(body) or {}
    error = answer.get("error") or answer.get("detail") or answer
    if not isinstance(error, dict):
        error = {"message": error}
    message = error.get("message")
    param = error.get("param")
    code = error.get("code")
    if not isinstance(code, str) or len(code) > MAX_NAME:  # vLLM repeats the status there
        code = ""
    our_status = STATUS.get(status, 502)
    if status in (400, 413, 422) and CONTEXT_LENGTH.search(f"{code} {error.get('type')} {message}"):
        code = "context_length_exceeded"
    if code == "context_length_exceeded":
        our_status = 400
    if status in (401, 403):
        message = f"The upstream does not take this server's key ({status}); see --upstream-api-key."
    if not isinstance(message, str) or not message:
        message = f"The upstream answered with status {status}."
    if not isinstance(param, str) or len(param) > MAX_NAME:
        param = ""
    param = param.removeprefix("body.") or None  # FastAPI puts the place in front of the name
    retry_after = headers.get("retry-after", "")
    if not RETRY_AFTER.fullmatch(retry_after):
        retry_after = ""
    message = message[:MAX_MESSAGE]
    return Refused(our_status, message, param, code, retry_after, is_retryable=status in RETRYABLE)


# What says something of the answer or of the account, and holds for the client too. All others describe the
# connection, or make the client's browser trust or keep what only this server may tell it to.
# https://platform.openai.com/docs/api-reference/debugging-requests
FORWARDED = {
    b"openai-model", b"openai-processing-ms", b"openai-version",
    b"x-ratelimit-limit-requests", b"x-ratelimit-remaining-requests", b"x-ratelimit-reset-requests",
    b"x-ratelimit-limit-tokens", b"x-ratelimit-remaining-tokens", b"x-ratelimit-reset-tokens",
}  # fmt: skip


def forwarded(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The headers that the client gets, their names in lower case.

    Names have no case: https://github.com/timoklimmer/powerproxy-aoai/issues/53
    """
    lowered = [(name.lower(), value) for name, value in headers]
    return [(name, value) for name, value in lowered if name in FORWARDED]
