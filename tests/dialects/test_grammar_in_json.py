"""A text fits a grammar exactly where its JSON fits the grammar as grammar_in_json.py rewrites it."""

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer, regex_to_lark

from dialects import grammar_in_json
from dialects.json_schema import BadGrammar
from helpers.scripted import TINY
from helpers.tables import table
from tokenizer import Tokenizer

TOKENIZER = Tokenizer(TINY / "tokenizer.json")
LIBRARY = LLTokenizer(str(TINY / "tokenizer.json"), n_vocab=2048, eos_token=[2041])
TABLE = table("grammar_in_json")


def fits(lark: str, text: str) -> bool:
    matcher = LLMatcher(LIBRARY, LLMatcher.grammar_from_lark(lark))
    assert not matcher.is_error(), matcher.get_error()
    token_ids = TOKENIZER.encode(text)
    return bool(matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting())


def fits_quoted(syntax: str, definition: str, text: str) -> bool:
    inside = grammar_in_json.grammar(syntax, definition)
    quoted = json.dumps(text, ensure_ascii=False)
    return fits(f'start: "\\"" text "\\""\ntext: %lark {{\n{inside}\n}}', quoted)


@pytest.mark.parametrize(("regex", "texts"), TABLE["regexes"])
def test_regex(regex: str, texts: list[str]) -> None:
    found = [fits(f"start: /{regex_to_lark(regex, '')}/", text) for text in texts]
    assert [fits_quoted("regex", regex, text) for text in texts] == found
    assert any(found)


@pytest.mark.parametrize("row", TABLE["larks"])
def test_lark(row: dict[str, Any]) -> None:
    texts = row["good"] + row["bad"]
    assert [text for text in texts if fits_quoted("lark", row["lark"], text)] == row["good"]


def test_names_of_the_library_mean_the_same_in_both() -> None:
    """Those of Lark that llguidance knows too."""
    samples = ["", "a", "Ab", "_a1", "12", "-1.5e3", "1e", ".5", " \t", "\n\r\n", '"a\\"b"', '"', "fF"]
    for name in grammar_in_json.COMMON:
        lark = f"start: {name}\n%import common.{name}"
        found = [fits(lark, text) for text in samples]
        assert [fits_quoted("lark", lark, text) for text in samples] == found, name


CLASSES = [r"\n", r"\"", r"\\", "a", ".", r"\s", r"\D", '[^"]', r"[\t-\r]", r"[\\\]]", r"\x1f"]
UNIVERSE = 'a "\\\n\t\r\x00\x1f]/é'
some = st.lists(st.sampled_from([*CLASSES, *(f"({c})*" for c in CLASSES)]), min_size=1, max_size=3)


@given(some, st.text(UNIVERSE, max_size=4))
def test_any_concatenation(pieces: list[str], text: str) -> None:
    regex = "".join(pieces)
    assert fits_quoted("regex", regex, text) == fits(f"start: /{regex}/", text)


@pytest.mark.parametrize("syntax", TABLE["refused"])
def test_refused(syntax: str) -> None:
    for definition in TABLE["refused"][syntax]:
        with pytest.raises(BadGrammar):
            print(grammar_in_json.grammar(syntax, definition), "is taken for", definition)


CLASSES_OF_ONE = "".join(f"[{chr(0x4E00 + i)}]" for i in range(20_000))
BOUNDS = [
    # syntax, fits,                  does not,               as the message says
    ("lark",  "start: " + "a " * 1999, "start: " + "a " * 2000, "at most 2000 names"),
    ("regex", "." * 20_000,            "." * 65_000,            "at most 262144 characters inside JSON"),
    ("regex", CLASSES_OF_ONE[:3000],   CLASSES_OF_ONE,          "at most 2000 different classes"),
]  # fmt: skip


@pytest.mark.parametrize(("syntax", "good", "bad", "message"), BOUNDS, ids=[row[3] for row in BOUNDS])
def test_what_is_written_is_bounded(syntax: str, good: str, bad: str, message: str) -> None:
    """The library dies of rules that nest deep; 65,000 dots of 90 characters each took it 20 s and 2 GB."""
    grammar_in_json.grammar(syntax, good)
    with pytest.raises(BadGrammar, match=message):
        grammar_in_json.grammar(syntax, bad)


@pytest.mark.parametrize("unit", ['"\\', "(?<a", "[", "(?", "/\\", "<a", "{1", "\\p{", '"a".."', "(?s)"])
def test_linear_time(unit: str) -> None:
    """What is never closed is looked for once: 16 Ki characters, and pytest's time limit."""
    for syntax in ("lark", "regex"):
        with contextlib.suppress(BadGrammar):
            grammar_in_json.grammar(syntax, unit * (2**14 // len(unit)))
