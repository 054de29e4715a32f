"""Laws of channels.py: what a model says does not depend on how it came. The documented bugs are in
tests/replays/channels-*.toml."""

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from channels import REASONING_MARKERS, TOOL_MARKERS, Finder, Parser, Piece, dialect, opening_state
from laws import parse
from tokenizer import Tokenizer

TINY = Tokenizer(Path(__file__).parent / "models" / "tiny" / "tokenizer.json")
MARKERS = (*REASONING_MARKERS, *TOOL_MARKERS)
TOKENS = dict.fromkeys(MARKERS, True)
SPELLED = dict.fromkeys(MARKERS, False)

# --- outputs of models --------------------------------------------------------------------------------------

# All that the rules speak of, so that every few units matter: a list of units is what a model writes.
# fmt: off
UNITS = [
    *MARKERS, *MARKERS,
    "\n", "\n\n", " ", "a", "b", "é", "日本", "<", "<think", "</", "tool_call>", "STOP", "ST", "OP", "aab",
    "{", "}", "[", '"', "\\", ":", ",", "null", "1", '"name"', '"arguments"', '"parameters"', '"f"',
    '{"name": "f", "arguments": ', '{"name": "f"}', '{"arguments": {}, "name": "g"}', '{"a": "}\\""}', '{"b": [1, {}]}',
]
# fmt: on
outputs = st.lists(st.sampled_from(UNITS), max_size=14)
CALL = '{"name": "f", "arguments": {"a": "<think>\\n"}}'
SAID = [
    ["<think>", "\n", "a", "\n", "</think>", "\n\n", "a", "\n", "<tool_call>", "\n", CALL, "\n", "</tool_call>"],
    ["<tool_call>", CALL, "</tool_call>", "\n", "<tool_call>", CALL, "</tool_call>", "b"],
    ["a", "<tool_call>", "no call\n", "</tool_call>", "\n", "b"],
    ["a", "STOP", "b", "<think>", "c"],
    ["a", "\n\n"],
]
options = st.fixed_dictionaries(
    {
        "state": st.sampled_from(["final", "final", "analysis"]),
        "after_marker": st.booleans(),
        "stop": st.sampled_from([(), ("STOP",), ("\n",), ("aab", "ab"), ("b<", "{")]),
        "one_call": st.booleans(),
    }
)
Options = dict[str, Any]
PLAIN: Options = {}
NEWLINE: Options = {"stop": ("\n",)}


def as_tokens(units: Sequence[str], cuts: Sequence[int]) -> Iterator[Piece]:
    """A marker is a token, text comes as it is cut."""
    for is_marker, run in itertools.groupby(units, MARKERS.__contains__):
        if is_marker:
            yield from (Piece(marker, marker) for marker in run)
        else:
            yield from as_text("".join(run), cuts)


def as_text(text: str, cuts: Sequence[int]) -> Iterator[Piece]:
    places = [0, *sorted(cut for cut in cuts if 0 < cut < len(text)), len(text)]
    return (Piece(text[i:j]) for i, j in itertools.pairwise(places) if text[i:j])


# --- law 2: how it was cut is not seen ----------------------------------------------------------------------


@given(outputs, st.lists(st.integers(1, 60)), options, st.booleans())
@example(SAID[0], [], PLAIN, False)
@example(SAID[1], [], PLAIN, False)
@example(SAID[2], [], PLAIN, False)
@example(SAID[3], [], {"stop": ("STOP",)}, False)
@example(SAID[4], [], NEWLINE, False)
def test_cuts_are_not_seen(units: list[str], cuts: list[int], options: Options, cut_off: bool) -> None:
    """As any pieces, as one, and by character; with markers that are tokens, and with markers that are spelled."""
    for markers, pieces in ((TOKENS, lambda c: as_tokens(units, c)), (SPELLED, lambda c: as_text("".join(units), c))):
        by_character = parse(pieces(range(1, 1000)), Parser(markers, **options), cut_off)
        for other in ([], cuts):
            assert parse(pieces(other), Parser(markers, **options), cut_off) == by_character


@pytest.mark.parametrize("units", SAID)
@pytest.mark.parametrize("stop", [(), ("STOP",), ("\n",)])
def test_no_two_cuts_are_seen(units: list[str], stop: tuple[str, ...]) -> None:
    text = "".join(units)
    whole = parse(as_text(text, []), Parser(SPELLED, stop=stop))
    for i, j in itertools.combinations(range(1, len(text)), 2):
        assert parse(as_text(text, [i, j]), Parser(SPELLED, stop=stop)) == whole


@given(outputs, st.lists(st.integers(1, 60)), options)
@example(SAID[0], [], PLAIN)
def test_how_it_was_tokenised_is_not_seen(units: list[str], cuts: list[int], options: Options) -> None:
    """Through the real vocabulary: the longest tokens, those of any substrings, and one token a byte."""
    text = "".join(units)
    token_ids = TINY.encode(text)
    by_byte = [i for unit in split_at_markers(text) for i in ([TINY.added[unit]] if unit in MARKERS else bytes_of(unit))]
    by_cuts = [i for unit in split_at_markers(text) for piece in as_text(unit, cuts if unit not in MARKERS else []) for i in TINY.encode(piece.text)]
    whole = parse(decode(token_ids), Parser(TOKENS, **options))
    assert parse(decode(by_byte), Parser(TOKENS, **options)) == whole
    assert parse(decode(by_cuts), Parser(TOKENS, **options)) == whole


def split_at_markers(text: str) -> list[str]:
    for marker in MARKERS:
        text = text.replace(marker, f"\0{marker}\0")
    return [unit for unit in text.split("\0") if unit]


def bytes_of(text: str) -> list[int]:
    return [TOKEN_OF_BYTE[byte] for byte in text.encode()]


TOKEN_OF_BYTE = {TINY.token_bytes(i)[0]: i for i in range(TINY.vocab_size) if len(TINY.token_bytes(i)) == 1}


def decode(token_ids: Sequence[int]) -> Iterator[Piece]:
    decoder = TINY.decoder()
    for token_id in token_ids:
        yield from decoder.feed(token_id)
    yield from decoder.close()


# --- law: what was written is read --------------------------------------------------------------------------

words = st.text(st.sampled_from("ab <>/é{}\n"), min_size=1).map(lambda text: text.strip("\n ")).filter(bool)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda values: st.lists(values) | st.dictionaries(st.text(), values),
    max_leaves=5,
)
calls = st.builds(
    lambda name, arguments, style: ["call", name, json.dumps(arguments, **style)],
    st.from_regex(r"[a-zA-Z0-9_-]{1,9}", fullmatch=True),
    st.dictionaries(st.text(), json_values),
    st.sampled_from([{}, {"indent": 2}, {"ensure_ascii": False}, {"separators": (",", ":")}]),
)
turns = st.lists(
    st.tuples(
        words.map(lambda text: ["analysis", text]) | st.none(),
        words.map(lambda text: ["final", text]) | st.none(),
        st.lists(calls, min_size=1, max_size=2),
    ),
    max_size=3,
)


@given(turns, words.map(lambda text: ["final", text]) | st.none(), st.booleans())
def test_what_is_written_is_read(turns: list[Any], last: list[str] | None, name_first: bool) -> None:
    """Reasoning, text and calls as the templates write them come back to the letter, arguments too."""
    said = [item for reasoning, text, calls in turns for item in (reasoning, text, *calls) if item]
    said += [last] if last else []
    pieces = [piece for item in said for piece in written(item, name_first)]
    assert parse(pieces, Parser(TOKENS)) == said
    assert parse([Piece(char) for piece in pieces for char in piece.text if "\0" not in piece.text], Parser(SPELLED)) in (
        said,
        parse([Piece("".join(piece.text for piece in pieces))], Parser(SPELLED)),  # a text may spell a marker
    )


def written(item: list[str], name_first: bool) -> list[Piece]:
    match item:
        case ["analysis", text]:
            return [*as_tokens(["<think>", "\n", text, "\n", "</think>", "\n\n"], [])]
        case ["call", name, arguments]:
            members = [f'"name": "{name}"', f'"arguments": {arguments}']
            body = ", ".join(members if name_first else members[::-1])
            return [*as_tokens(["\n", "<tool_call>", "\n", "{" + body + "}", "\n", "</tool_call>", "\n"], [])]
        case _:
            return [Piece(item[1])]
