"""Laws of channels.py: what a model says does not depend on how it came. Then cases, a rule a row; the
documented bugs are in tests/replays/channels-*.toml."""

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from channels import Finder, Finish, Parser, Piece, dialect
from laws import parse
from scripted import END, MARKERS, TEMPLATE, in_steps, said
from tokenizer import Tokenizer

TINY = Tokenizer(Path(__file__).parent / "models" / "tiny" / "tokenizer.json")
TOKEN_OF_BYTE = {TINY.token_bytes(i)[0]: i for i in range(TINY.vocab_size) if len(TINY.token_bytes(i)) == 1}
TOKENS = dict.fromkeys(MARKERS, True)
SPELLED = dict.fromkeys(MARKERS, False)
CALL = '{"name": "f", "arguments": {"a": "<think>\\n"}}'
Options = dict[str, Any]

# --- outputs of models: lists of units ----------------------------------------------------------------------

# fmt: off
# All that the rules speak of, so that every few units matter.
UNITS = [
    *MARKERS, *MARKERS,
    "\n", "\n\n", " ", "a", "b", "é", "日本", "<", "<think", "</", "tool_call>", "STOP", "ST", "OP", "aab",
    "{", "}", "[", '"', "\\", ":", ",", "null", "1", '"name"', '"arguments"', '"parameters"', '"f"',
    '{"name": "f", "arguments": ', '{"name": "f"}', '{"arguments": {}, "name": "g"}', '{"a": "}\\""}',
]
SAID = [
    ["<think>", "\na\n", "</think>", "\n\na\n", "<tool_call>", "\n" + CALL + "\n", "</tool_call>"],
    ["<tool_call>", CALL, "</tool_call>", "\n", "<tool_call>", CALL, "</tool_call>", "b"],
    ["a", "<tool_call>", "no call\n", "</tool_call>", "\n", "b"],
    ["a", "STOP", "b", "<think>", "c"],
    ["a", "\n\n"],
]
# fmt: on
units_of_outputs = st.lists(st.sampled_from(UNITS), max_size=14)
cut_places = st.lists(st.integers(1, 60))
stops = st.sampled_from([(), ("STOP",), ("\n",), ("aab", "ab"), ("b<", "{")])
some_options = st.fixed_dictionaries(
    {
        "state": st.sampled_from(["final", "analysis"]),
        "after_marker": st.booleans(),
        "stop": stops,
        "one_call": st.booleans(),
    }
)


def as_tokens(units: Iterable[str], cuts: Iterable[int] = ()) -> list[Piece]:
    """A marker is a token, text comes as it is cut."""
    pieces: list[Piece] = []
    for unit in at_markers(units):
        pieces += [Piece(unit, unit)] if unit in MARKERS else as_text([unit], cuts)
    return pieces


def at_markers(units: Iterable[str]) -> list[str]:
    """The same text, where each marker is a unit, and what lies between two is one."""
    text = "".join(units)
    for marker in MARKERS:
        text = text.replace(marker, f"\0{marker}\0")
    return [unit for unit in text.split("\0") if unit]


def as_text(units: Iterable[str], cuts: Iterable[int] = ()) -> list[Piece]:
    text = "".join(units)
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    return [Piece(text[i:j]) for i, j in itertools.pairwise(places) if text[i:j]]


# fmt: off
WAYS: list[tuple[dict[str, bool], Callable[[Iterable[str], Iterable[int]], list[Piece]]]] = [
    # markers   units, cuts -> pieces
    (TOKENS,    as_tokens),
    (SPELLED,   as_text),
]
# fmt: on

# --- law 2: how it was cut is not seen ----------------------------------------------------------------------


@given(units_of_outputs, cut_places, some_options, st.booleans())
@example(SAID[0], [], {}, False)
@example(SAID[1], [], {}, False)
@example(SAID[2], [], {}, False)
@example(SAID[3], [], {"stop": ("STOP",)}, False)
@example(SAID[4], [], {"stop": ("\n",)}, False)
def test_cuts_are_not_seen(units: list[str], cuts: list[int], options: Options, cut_off: bool) -> None:
    """Text in any pieces, in one and by character; with markers that are tokens or spelled."""
    for markers, pieces in WAYS:
        by_character = parse(pieces(units, range(1, 1000)), Parser(markers, **options), cut_off)
        assert parse(pieces(units, []), Parser(markers, **options), cut_off) == by_character
        assert parse(pieces(units, cuts), Parser(markers, **options), cut_off) == by_character


@pytest.mark.parametrize("stop", [(), ("STOP",), ("\n",)])
@pytest.mark.parametrize("units", SAID)
def test_no_two_cuts_are_seen(units: list[str], stop: tuple[str, ...]) -> None:
    whole = parse(as_text(units), Parser(SPELLED, stop=stop))
    for cuts in itertools.combinations(range(1, len("".join(units))), 2):
        assert parse(as_text(units, cuts), Parser(SPELLED, stop=stop)) == whole


@given(units_of_outputs, cut_places, some_options)
@example(SAID[0], [], {})
def test_how_it_was_tokenised_is_not_seen(units: list[str], cuts: list[int], options: Options) -> None:
    """Through the real vocabulary: the longest tokens, those of any substrings, and one token a byte."""

    def items(token_ids: Iterable[int]) -> list[list[str]]:
        decoder = TINY.decoder()
        pieces = [piece for token_id in token_ids for piece in decoder.feed(token_id)]
        return parse([*pieces, *decoder.close()], Parser(TOKENS, **options))

    whole = TINY.encode("".join(units))
    by_byte = [i for token_id in whole for i in in_bytes(token_id)]
    by_cuts = [i for piece in as_tokens(units, cuts) for i in TINY.encode(piece.text)]
    assert items(by_byte) == items(by_cuts) == items(whole)


def in_bytes(token_id: int) -> list[int]:
    added = token_id in TINY.added_by_id
    return [token_id] if added else [TOKEN_OF_BYTE[byte] for byte in TINY.token_bytes(token_id)]


sizes_of_steps = st.lists(st.integers(1, 9), min_size=1)


@given(units_of_outputs, sizes_of_steps, stops, st.booleans(), st.none() | st.just(5))
def test_steps_are_not_seen(
    units: list[str], sizes: list[int], stop: tuple[str, ...], parallel: bool, limit: int | None
) -> None:
    """Through the worker: in steps of any sizes it says, counts and ends the same, delta by delta."""
    token_ids = [*TINY.encode("".join(units)), TINY.added[END]]
    body: Options = {"stop": list(stop), "parallel_tool_calls": parallel, "max_output_tokens": limit}
    outputs = said(TINY, in_steps(token_ids, [1]), **body)
    assert said(TINY, in_steps(token_ids, sizes), **body) == outputs
    (finish,) = (output for output in outputs if isinstance(output, Finish))
    assert finish is outputs[-1]
    assert finish.usage
    assert finish.usage.reasoning_tokens <= finish.usage.output_tokens <= (limit or len(token_ids))


# --- law: what is certain leaves at once --------------------------------------------------------------------


@given(st.text("ab<", max_size=20), st.lists(st.text("ab<", min_size=1, max_size=4), max_size=3))
def test_no_more_is_held_than_may_become_a_needle(text: str, needles: list[str]) -> None:
    """D18: the longest end of the text that begins a needle, not as much as the longest needle.

    So the buffer is bounded, and a long text takes linear work (E09).
    """
    finder, out = Finder(needles), ""
    for n, character in enumerate(text, 1):
        for found in finder.feed(Piece(character)):
            out += found if isinstance(found, str) else found.text
        may_begin = (i for i in range(len(out), n) if any(s.startswith(text[i:n]) for s in needles))
        assert out == text[: next(may_begin, n)]
    assert out + "".join(piece.text for piece in finder.flush()) == text


# --- law: what was written is read --------------------------------------------------------------------------

words = st.text("ab <>/é{}\n", min_size=1).map(lambda text: text.strip("\n ")).filter(bool)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda values: st.lists(values) | st.dictionaries(st.text(), values),
    max_leaves=5,
)
arguments = st.builds(
    lambda value, style: json.dumps(value, **style),
    st.dictionaries(st.text(), json_values),
    st.sampled_from([{}, {"indent": 2}, {"ensure_ascii": False}, {"separators": (",", ":")}]),
)
thoughts = words.map(lambda text: ["analysis", text])
answers = words.map(lambda text: ["final", text])
calls = st.builds(lambda name, arguments: ["call", name, arguments], st.text("fg_1", min_size=1), arguments)
turns = st.tuples(thoughts | st.none(), answers | st.none(), calls, calls | st.none())


@given(st.lists(turns, max_size=3), answers | st.none(), st.booleans())
def test_what_is_written_is_read(turns: list[Any], last: list[str] | None, name_first: bool) -> None:
    """Reasoning, text and calls as the templates write them come back to the letter, arguments too."""
    items = [item for item in [*itertools.chain(*turns), last] if item]
    units = [unit for item in items for unit in written(item, name_first)]
    assert parse(as_tokens(units), Parser(TOKENS)) == items
    if not any(marker in text for item in items for text in item for marker in MARKERS):
        assert parse(as_text(units), Parser(SPELLED)) == items


def written(item: list[str], name_first: bool) -> Iterator[str]:
    match item:
        case ["analysis", text]:
            yield from ("<think>", "\n", text, "\n", "</think>", "\n\n")
        case ["call", name, arguments]:
            members = [f'"name": "{name}"', f'"arguments": {arguments}']
            body = ", ".join(members if name_first else members[::-1])
            yield from ("\n", "<tool_call>", "\n", "{" + body + "}", "\n", "</tool_call>", "\n")
        case [_, text]:
            yield text


# --- cases --------------------------------------------------------------------------------------------------


NONE = "<tool_call>[1]</tool_call>"  # a call that is none


def written_down(items: list[list[str]]) -> str:
    """As in the tables: [channel]text and [call name]arguments, with ' for " to be read."""
    return "".join(f"[{' '.join(item[:-1])}]{item[-1]}" for item in items).replace('"', "'")


# fmt: off
CASES = [
    # text                                                         items
    # What stands beside a marker.
    ("<think>\n\na\n\n</think>\nb\n",                              "[analysis]a[final]b\n"),
    (" \n<think>a",                                                "[analysis]a"),
    (" \n",                                                        "[final] \n"),
    ("a\n\n\nb",                                                   "[final]a\n\n\nb"),
    # What ends what.
    ("<think>a<tool_call>{'name': 'f'}</tool_call>",               "[analysis]a[call f]{}"),
    ("<tool_call>{'name': 'f'}<tool_call>{'name': 'g'}",           "[call f]{}[call g]{}"),
    ("<tool_call>{'name': 'f'}<think>a",                           "[call f]{}[analysis]a"),
    ("a</think>b</tool_call>c",                                    "[final]a[final]b[final]c"),
    # How calls are written.
    ("<tool_call>{'arguments': {'a': 1}, 'name': 'f'}",            "[call f]{'a': 1}"),
    ("<tool_call>{'name': 'f', 'parameters': {'a': 1}}",           "[call f]{'a': 1}"),
    ("<tool_call>{'name': 'f', 'arguments': '{\\'a\\': 1}'}",      "[call f]{'a': 1}"),
    ("<tool_call>{'name': 'f', 'arguments': null}",                "[call f]{}"),
    ("<tool_call>{'name': 'f', 'arguments': {'a': '<think>'}}",    "[call f]{'a': '<think>'}"),
    ("<tool_call>{'name': 'f'} or so</tool_call>",                 "[call f]{}"),
    # Of two members of one name the first counts: it has left already.
    ("<tool_call>{'name': 'f', 'name': 'g'}",                      "[call f]{}"),
    ("<tool_call>{'name': 'f', 'arguments': {}, 'parameters': 1}", "[call f]{}"),
    # What is no call is text, to the letter, in the item that was open.
    (f"a\n\n{NONE}\nb",                                            f"[final]a\n\n{NONE}\nb"),
    (f"<think>a {NONE} b</think>c",                                f"[analysis]a {NONE} b[final]c"),
    ("a<tool_call></tool_call>b",                                  "[final]a<tool_call></tool_call>b"),
    ("<tool_call>{'name': ''}",                                    "[final]<tool_call>{'name': ''}"),
    ("<tool_call>a<think>b",                                       "[final]<tool_call>a[analysis]b"),
]
STOPPED = [
    # options                                 text                      items, and has it stopped
    ({"stop": ["\n"]},                        "a\n\n",                  "[final]a",             True),
    ({"stop": ["\n"]},                        "<think>a\nb",            "[analysis]a\nb",       False),
    ({"stop": ["\n"], "after_marker": True},  "\n\nb",                 "[final]b",             False),
    ({"stop": ["b"]},                         "a\nbc",                  "[final]a\n",           True),
    ({"stop": ["b"]},                         "ab c<think>d",           "[final]a",             True),
    ({"stop": ["ab"]},                        "a<think>b",              "[final]a[analysis]b",  False),
    ({"one_call": True},                      f"a{NONE}b",              f"[final]a{NONE}b",     False),
    ({"one_call": True},    "<tool_call>{'name': 'f'}</tool_call>a",    "[call f]{}",           True),
]
# fmt: on


@pytest.mark.parametrize(("text", "items"), CASES)
def test_case(text: str, items: str) -> None:
    for markers, pieces in WAYS:
        assert written_down(parse(pieces([text.replace("'", '"')], []), Parser(markers))) == items


@pytest.mark.parametrize(("options", "text", "items", "stopped"), STOPPED)
def test_stop(options: Options, text: str, items: str, stopped: bool) -> None:
    for markers, pieces in WAYS:
        parser = Parser(markers, **options)
        assert written_down(parse(pieces([text.replace("'", '"')], []), parser)) == items
        assert parser.stopped == stopped


@pytest.mark.parametrize("body", ["", "\n", '{"na', '{"arguments": {}'])
def test_a_call_that_is_cut_off_before_its_name_is_not_said(body: str) -> None:
    """The rest of the output, which would tell call from text, is not to be had; half a tag is no answer."""
    for markers, pieces in WAYS:
        assert parse(pieces(["a\n", "<tool_call>", body], []), Parser(markers), cut=True) == [["final", "a"]]


def test_a_marker_that_is_a_token_is_not_found_in_text() -> None:
    """A document that spells it opens nothing, nor does the token where nobody asked for it."""
    text = "Write <think> or <tool_call>."
    assert parse(as_text([text]), Parser(TOKENS)) == [["final", text]]
    assert parse(as_tokens([text, "<think>"]), Parser({})) == [["final", text + "<think>"]]


def test_a_stop_string_stops_at_its_last_token() -> None:
    """Newlines are held for a marker that may follow, and yet a stop string of newlines ends at once."""
    parser = Parser(TOKENS, stop=["\n\n"])
    for piece, stopped in ((Piece("a"), False), (Piece("\n"), False), (Piece("\n"), True)):
        parser.feed(piece)
        assert parser.stopped == stopped


# fmt: off
DIALECTS = [
    # vocabulary           template             tools    markers: are they tokens?
    (TINY.added,           TEMPLATE.source,     True,    TOKENS),
    (TINY.added,           TEMPLATE.source,     False,   {"<think>": True, "</think>": True}),
    ([],                   "no reasoning",      False,   {}),
    ([],                   "<think></think>",   True,    SPELLED),
]
# fmt: on


@pytest.mark.parametrize(("added", "template", "tools", "markers"), DIALECTS)
def test_dialect(added: Sequence[str], template: str, tools: bool, markers: dict[str, bool]) -> None:
    assert dialect(added, template, tools) == markers
