"""A text fits a grammar exactly where its JSON fits the grammar as grammar_in_json.py rewrites it."""

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer, regex_to_lark

from dialects import grammar_in_json
from dialects.json_schema import BadGrammar
from helpers.scripted import TINY
from tokenizer import Tokenizer

TOKENIZER = Tokenizer(TINY / "tokenizer.json")
LIBRARY = LLTokenizer(str(TINY / "tokenizer.json"), n_vocab=2048, eos_token=[2041])
AMBIGUOUS = 'start: A | B\nA: /[a-z]+"/\nB: /[a-z]+;/ | "abc" /.*c/'
STRINGS = "start: S WS S\nS: ESCAPED_STRING\n%import common (ESCAPED_STRING, WS)"
NUMBERS = "start: SIGNED_NUMBER ' ' -> x\n%import common.SIGNED_NUMBER".replace("'", '"')

# fmt: off
#  regular expression            texts that fit and texts that do not
REGEXES: list[tuple[str, list[str]]] = [
    (r"^a.c$",                   ['a"c', "a\\c", "abc", "a\nc", "a\x01c", "a\x7fc", "ac"]),
    (r"[^x]*",                   ['"\\\n\x00\x1f\x7f\u20ac\U0001f600', "x", ""]),
    (r"\s+|\S",                  [" \t\n\x0b", "\x1c", '"', "a"]),
    (r"[\p{L} ]+",               ["ab é", 'a"']),
    (r"a/b[/]\/",                ["a/b//", "a/b/"]),
    (r"[\\/]+[/\\]\\/",          ["/\\\\/", "\\/\\/", "a"]),
    (r"(?P<m>Jan|Feb) (?P<d>[0-9]+)", ["Jan 1", "Feb 22", "May 1"]),
    ("a\nb",                     ["a\nb", "a\\nb"]),
    (r"\x22\u005c\tA",      ['"\\\tA']),
    (r"[]a]+[^]\"]",             ["]a\n", ']a"', "b"]),
    (r"[\"\\][\n-\r][\[-\]]",    ['"\n\\', "\\\r]", "a\n["]),
]

#  Lark                                           texts that fit               texts that do not
LARKS: list[tuple[str, list[str], list[str]]] = [
    ('start: "a\\n"+ "q\\"" C\nC: "\\x20".."~"',    ['a\na\nq"\\', 'a\nq"a'],    ['a\nq"\n', 'aq"a']),
    ('start: "" "a/b" # "\n | "c//d"',              ["a/b", "c//d"],             ["", "C//D"]),
    ('start: I LF "x" NL\n%import common.INT -> I\n%import common.NEWLINE -> NL\n%import common (LF)',
                                                    ["12\nx\r\n\n", "1\nx\n"],  ["12\nx", "\nx\n"]),
    ('start: /a.b/s C*\nC: /["x]/',                 ["a\nb", 'a"b"x'],           ["a\nbn"]),
    (STRINGS,                                       ['"a\\"b" \n"\\\\"'],        ['"a"', '"a" "b', '"a""b"']),
    (AMBIGUOUS,                                     ['abc"', "abcd;", "abcxc"],  ["abc", 'abc";', '"']),
    (NUMBERS,                                       ["-1.5e+7 ", "12 ", ".5 "],  ["- ", "1e ", "1"]),
    ('start: a "\\""\na: "x" a | /./',              ['xx""', 'x"'],              ["xx", '"']),
]

REFUSED = [
    ("regex", r"[a&&b]"),         ("regex", r"(?x)a b"),          ("regex", r"(?-u:\xff)"),
    ("regex", r"\p{P}"),          ("regex", r"[a-z--b]"),         ("regex", r"[[a]b]"),
    ("regex", r"[^\P{L}]"),       ("regex", r"\z"),               ("regex", r"[[:alpha:]]"),
    ("lark",  "start: <think>"),  ("lark",  "start: @other"),     ("lark",  "start: %json {}"),
    ("lark",  "start: /a/x"),     ("lark",  'start: "a'),         ("lark",  r'start: "\q"'),
    ("lark",  "%ignore /a/"),     ("lark",  "start: /a/ & /b/"),  ("regex", "a^b"),
    ("regex", r"a\b"),            ("regex", r"a(?=b)"),           ("regex", r"(?<!a)b"),
    ("regex", r"(?P<x>a)(?P=x)"), ("regex", r"(a)\1"),            ("regex", r"a{x}"),
    ("regex", r"(?i)a"),          ("lark",  'start: "a"i'),       ("lark",  "start: /a/i"),
    ("lark",  "%declare A"),      ("lark",  "%import other.A"),   ("lark",  "start: %lark {start: A}"),
]
# fmt: on


def fits(lark: str, text: str) -> bool:
    matcher = LLMatcher(LIBRARY, LLMatcher.grammar_from_lark(lark))
    assert not matcher.is_error(), matcher.get_error()
    token_ids = TOKENIZER.encode(text)
    return bool(matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting())


def fits_quoted(syntax: str, definition: str, text: str) -> bool:
    inside = grammar_in_json.grammar(syntax, definition)
    quoted = json.dumps(text, ensure_ascii=False)
    return fits(f'start: "\\"" text "\\""\ntext: %lark {{\n{inside}\n}}', quoted)


@pytest.mark.parametrize(("regex", "texts"), REGEXES)
def test_regex(regex: str, texts: list[str]) -> None:
    found = [fits(f"start: /{regex_to_lark(regex, '')}/", text) for text in texts]
    assert [fits_quoted("regex", regex, text) for text in texts] == found
    assert any(found)


@pytest.mark.parametrize(("lark", "good", "bad"), LARKS)
def test_lark(lark: str, good: list[str], bad: list[str]) -> None:
    assert [text for text in good + bad if fits_quoted("lark", lark, text)] == good


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


@pytest.mark.parametrize(("syntax", "definition"), REFUSED)
def test_refused(syntax: str, definition: str) -> None:
    with pytest.raises(BadGrammar):
        grammar_in_json.grammar(syntax, definition)


# fmt: off
CLASSES_OF_ONE = "".join(f"[{chr(0x4E00 + i)}]" for i in range(20_000))
BOUNDS = [
    # syntax, fits,                  does not,               as the message says
    ("lark",  "start: " + "a " * 1999, "start: " + "a " * 2000, "at most 2000 names"),
    ("regex", "." * 20_000,            "." * 65_000,            "at most 262144 characters inside JSON"),
    ("regex", CLASSES_OF_ONE[:3000],   CLASSES_OF_ONE,          "at most 2000 different classes"),
]
# fmt: on


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
