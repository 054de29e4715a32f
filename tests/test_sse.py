"""Laws of sse.py, then tables of cases; the documented bugs are in tests/replays/sse-*.toml."""

import itertools
import json
import re
from typing import Any
from unittest import mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import sse
from helpers.tables import table
from sse import Event, EventTooLarge, Parser, Truncated, dumps, encode

Outcome = tuple[list[Event], type[Exception] | None]


def parse(chunks: list[bytes], max_event_bytes: int = sse.MAX_EVENT_BYTES) -> Outcome:
    """Return all events, and what was raised after them."""
    parser, events = Parser(max_event_bytes), []
    try:
        for chunk in chunks:
            events += parser.feed(chunk)
        parser.close()
    except (Truncated, EventTooLarge) as error:
        return events, type(error)
    return events, None


def by_the_spec(stream: bytes) -> list[Event]:
    """The spec's own steps (9.2.6) on a whole stream, buffers as the strings that they are there."""
    events, type_, data, id_ = [], "", "", ""
    text = stream.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "replace")
    for line in re.split("\r\n|\n|\r", text)[:-1]:
        if line == "":
            if data != "":
                events.append(Event(type_ or "message", data.removesuffix("\n"), id_))
            type_, data = "", ""
        elif not line.startswith(":"):
            field, _, value = line.partition(":")
            value = value.removeprefix(" ")
            match field:
                case "event":
                    type_ = value
                case "data":
                    data += value + "\n"
                case "id" if "\0" not in value:
                    id_ = value
    return events


# --- Laws ---------------------------------------------------------------------------------------------------

# Streams made of all that the rules speak of, so that every few bytes matter.
FRAGMENTS = [
    b"data", b"event", b"id", b"retry", b"x", b":", b" ", b"\r", b"\n", b"\r\n", b"\n\n", b"data:a\n",
    b"id:1\r", b"\0", "\ufeff".encode(), "é".encode(), "\u2028".encode(), b"\xef", b"\xe2\x80", b"\xff",
]  # fmt: skip
streams = st.lists(st.sampled_from(FRAGMENTS), max_size=24).map(b"".join)
texts = st.text(st.characters(exclude_categories=["Cs"]))  # all of Unicode but surrogates


@example(b"id:1\ndata:a\n\nid\ndata:b\n\nid:2\0\ndata:c\n\n")  # an id is not set to what has NUL in it
@example(b"\xef\xbb\xbf\xef\xbb\xbfdata:a\n\n\xef\xbb\xbfdata:b\n\n")  # any but the first BOM is data
@example(b"event:a\n\ndata:b\n\ndata:\xc3\n\ndata:\xa9\n\n")
@given(streams)
def test_parser_does_what_the_spec_says(stream: bytes) -> None:
    assert parse([stream])[0] == by_the_spec(stream)


@given(streams, st.lists(st.integers(0, 60)), st.sampled_from([8, sse.MAX_EVENT_BYTES]))
def test_cuts_are_not_seen(stream: bytes, cuts: list[int], max_event_bytes: int) -> None:
    """Any cuts, empty chunks among them, and byte by byte; with errors too."""
    whole = parse([stream], max_event_bytes)
    places = [0, *sorted(cuts), len(stream)]
    assert parse([stream[i:j] for i, j in itertools.pairwise(places)], max_event_bytes) == whole
    assert parse([stream[i : i + 1] for i in range(len(stream))], max_event_bytes) == whole


types = texts.filter(lambda text: not re.search("[\r\n]", text))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda values: st.lists(values) | st.dictionaries(st.text(), values),
    max_leaves=5,
)


@given(json_values, st.none() | types)
def test_round_trip(value: Any, event: str | None) -> None:
    """What is written is read: one line whoever splits it, and UTF-8."""
    line = dumps(value)
    assert line.splitlines() == [line]
    assert json.loads(line) == json.loads(json.dumps(value))
    frame = encode(value, event)
    assert parse([frame]) == ([Event(event or "message", line, "")], None)
    if event is None:
        assert sse.data(frame) == line


class CountingLine(bytearray):
    n_copied = 0

    def __bytes__(self) -> bytes:
        self.n_copied += len(self)
        return bytes(memoryview(self))


@pytest.mark.bug("A18")
def test_a_long_line_in_small_chunks_takes_linear_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: it was copied or searched anew with each chunk: https://github.com/praxis-proxy/praxis/pull/739"""
    frame = encode("x" * 10_000)
    parser, line, line_end = Parser(), CountingLine(), mock.Mock(wraps=sse.LINE_END)
    parser.line = line
    monkeypatch.setattr(sse, "LINE_END", line_end)
    events = [event for i in range(len(frame)) for event in parser.feed(frame[i : i + 1])]
    assert events == [Event("message", dumps("x" * 10_000), "")]
    assert parser.line is line  # appended to in place
    n_searched = sum(len(call.args[0]) for call in line_end.split.call_args_list)
    assert (n_searched, line.n_copied) == (len(frame), len(frame.strip()))


# --- Cases --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "n_events", "raised"), table("sse")["sizes"])
def test_max_event_bytes(text: str, n_events: int, raised: str) -> None:
    """In three chunks in every way, and so whole and in two, as chunks may be empty."""
    stream = text.encode()
    for i, j in itertools.combinations_with_replacement(range(len(stream) + 1), 2):
        events, error = parse([stream[:i], stream[i:j], stream[j:]], max_event_bytes=10)
        assert (len(events), error and error.__name__) == (n_events, raised or None), (i, j)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_dumps_writes_nothing_but_json(number: float) -> None:
    """RFC 8259, 6: "Numeric values that cannot be represented in the grammar [...] are not permitted"."""
    assert dumps({"logprob": number}) == '{"logprob":null}'
