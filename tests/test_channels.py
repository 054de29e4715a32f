"""Laws of channels.py, dialects/calls.py and dialects/families.py: what a model says does not depend on how
it came. Then cases, a rule a row; the documented bugs are in tests/replays/channels-*.toml.
"""

import ast
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import channels
from channels import Delta, Dialect, Finder, Finish, Output, Parser, Piece, State, TokenLogprob
from dialects import families
from dialects.families import DIALECTS
from helpers.laws import parse
from helpers.scripted import END, MARKERS, TEMPLATE, TEMPLATES, ids_of, in_steps, said, vocabulary
from request import tools

TYPES = {"s": "string", "n": "integer", "b": ["boolean", "null"]}
SCHEMA = {"type": "object", "properties": {name: {"type": of_type} for name, of_type in TYPES.items()}}
Options = dict[str, Any]
# The dialects with all their markers: each is a token, or none is.
SPELLED = {name: row._replace(tokens=frozenset()) for name, row in DIALECTS.items()}
TOKENS = {name: row._replace(tokens=row.markers) for name, row in DIALECTS.items()}


class ByMachines(Parser):
    """A parser that lets nothing through unread."""

    def _lets_through(self, piece: Piece) -> bool:
        return False


def parser(dialect: Dialect, of: type[Parser] = Parser, **options: Any) -> Parser:
    """As the worker makes it: one function is offered, f."""
    return of(dialect, **{"state": dialect.start, "schemas": {"f": SCHEMA}} | options)


# --- outputs of models: lists of units ----------------------------------------------------------------------

# fmt: off
# All that the rules speak of, so that every few units matter.
TEXT = [
    "\n", "\n\n", " ", "a", "b", "é", "日本", "<", "STOP", "ST", "OP", "aab",
    "{", "}", "[", '"', "\\", ":", ",", "null", "1", '"name"', '"arguments"', '"parameters"', '"f"',
    '{"name": "f", "arguments": ', '{"name": "f"}', '{"arguments": {}, "name": "g"}', '{"a": "}\\""}',
]
XML = ["<function=f>", "<function=", "f>", "<parameter=s>", "<parameter=n>", "</parameter>", "</function>"]
HEADERS = ["assistant", "analysis", "commentary", "final", " to=functions.f", " to=", "json", " "]
UNITS = {
    "harmony":     HEADERS * 2 + ["<|", "|>"],
    "mistral":     ["f", "[", "]", "[ARGS", "id"],
    "mistral-v3":  ["[", "]", ", "],
    "qwen3-coder": ["<think", "</", "tool_call>", *XML, *XML],
    "granite":     ["<|", "tool_call|>", "[", "]", ", "],
    "llama":       ["<|", "tag|>", "; ", '{"name": "f", "parameters": {}}'],
    "hermes":      ["<think", "</", "tool_call>"],
}
XML_CALL = "\n<function=f>\n<parameter=s>\na\n\n</parameter>\n<parameter=n>\n5\n</parameter>\n</function>\n"
ASSISTANT = "<|start|>assistant"
FINAL, THOUGHT = "<|channel|>final<|message|>", "<|channel|>analysis<|message|>"
TO_F = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
# fmt: on
names = st.sampled_from(list(DIALECTS))
units_of = {name: [*sorted(DIALECTS[name].markers) * 3, *UNITS[name] * 2, *TEXT] for name in DIALECTS}
outputs = names.flatmap(
    lambda name: st.tuples(st.just(name), st.lists(st.sampled_from(units_of[name]), max_size=14))
)
cut_places = st.lists(st.integers(1, 60))
stops = st.sampled_from([(), ("STOP",), ("\n",), ("aab", "ab"), ("b<", "{"), ("]", "^", "-", "\\")])
some_options = st.fixed_dictionaries(
    {"after_marker": st.booleans(), "stop": stops, "one_call": st.booleans()},
    optional={"state": st.sampled_from(["final", "analysis"])},
)


def as_tokens(units: Iterable[str], cuts: Iterable[int], markers: Iterable[str]) -> list[Piece]:
    """A marker is a token, text comes as it is cut."""
    pieces: list[Piece] = []
    for unit in re.split("(" + "|".join(map(re.escape, sorted(markers))) + ")", "".join(units)):
        pieces += [Piece(unit, unit)] if unit in markers else as_text([unit], cuts)
    return pieces


def as_text(units: Iterable[str], cuts: Iterable[int], markers: Iterable[str] = ()) -> list[Piece]:
    text = "".join(units)
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    return [Piece(text[i:j]) for i, j in itertools.pairwise(places) if text[i:j]]


WAYS: list[tuple[dict[str, Dialect], Callable[..., list[Piece]]]] = [(TOKENS, as_tokens), (SPELLED, as_text)]


def read(name: str, units: Iterable[str], cuts: Iterable[int], cut: bool, **options: Any) -> list[Any]:
    """The items, by both ways: with markers that are tokens, and spelled."""
    return [
        parse(pieces(units, cuts, rows[name].markers), parser(rows[name], **options), cut)
        for rows, pieces in WAYS
    ]


# --- law 2: how it was cut is not seen ----------------------------------------------------------------------


@given(outputs, cut_places, some_options, st.booleans())
def test_cuts_are_not_seen(
    output: tuple[str, list[str]], cuts: list[int], options: Options, cut_off: bool
) -> None:
    """Text in any pieces, in one and by character; with markers that are tokens or spelled."""
    name, units = output
    by_character = read(name, units, range(1, 1000), cut_off, **options)
    assert read(name, units, [], cut_off, **options) == by_character
    assert read(name, units, cuts, cut_off, **options) == by_character


@given(outputs, cut_places, some_options)
@example(("hermes", ["ab", "cSTOPb", "a", "b"]), [1, 2, 4, 6, 8, 9], {"stop": ("STOP",)})
@example(("hermes", ["ab", "\n", "\n", "a"]), [1, 2, 3], {})
@example(("hermes", ["ab", "<think", ">", "a"]), [1, 2, 8, 9], {})
def test_text_that_passes_the_machines_by_is_what_they_would_say(
    output: tuple[str, list[str]], cuts: list[int], options: Options
) -> None:
    name, units = output
    for rows, pieces in WAYS:
        at_once = parser(rows[name], **options)
        by_machines = parser(rows[name], of=ByMachines, **options)
        for piece in pieces(units, cuts, rows[name].markers):
            assert at_once.feed(piece) == by_machines.feed(piece)
        assert at_once.close(cut=False) == by_machines.close(cut=False)


sizes_of_steps = st.lists(st.integers(1, 9), min_size=1)
words = cache(lambda name: vocabulary([unit.encode() for unit in (*UNITS[name], *TEXT)], name))


@pytest.mark.bug("D01", "D04", "D06")
@given(outputs, sizes_of_steps, stops, st.booleans(), st.none() | st.just(5))
def test_steps_are_not_seen(
    output: tuple[str, list[str]], sizes: list[int], stop: tuple[str, ...], parallel: bool, limit: int | None
) -> None:
    """Through the worker: in steps of any sizes it says, counts and ends the same, delta by delta."""
    name, units = output
    token_ids = ids_of(words(name), [unit.encode() for unit in (*units, END)])  # a token a unit
    body: Options = {"stop": list(stop), "parallel_tool_calls": parallel, "max_output_tokens": limit}
    outputs = said(words(name), in_steps(token_ids, [1]), name, **body)
    assert said(words(name), in_steps(token_ids, sizes), name, **body) == outputs
    (finish,) = (output for output in outputs if isinstance(output, Finish))
    assert finish is outputs[-1]
    assert finish.usage
    assert finish.usage.reasoning_tokens <= finish.usage.output_tokens <= (limit or len(token_ids))


@given(st.text("ab<", max_size=20), st.lists(st.text("ab<", min_size=1, max_size=4), max_size=3))
def test_no_more_is_held_than_may_become_a_needle(text: str, needles: list[str]) -> None:
    """D18: the longest end of the text that begins a needle, not as much as the longest needle.

    So the buffer is bounded (E09).
    """
    finder, out = Finder(needles), ""
    for n, character in enumerate(text, 1):
        for found in finder.feed(Piece(character)):
            out += found if isinstance(found, str) else found.text
        may_begin = (i for i in range(len(out), n) if any(s.startswith(text[i:n]) for s in needles))
        assert out == text[: next(may_begin, n)]
    assert out + "".join(piece.text for piece in finder.flush()) == text


# fmt: off
#    dialect         it begins with                                 and goes on with
LONG = [
    ("hermes",      "",                                            "a \n"),
    ("hermes",      "",                                            "<tool_cal"),
    ("hermes",      '<tool_call>{"arguments": "',                  '\\"{'),
    ("hermes",      '<tool_call>{"name": "f", "arguments": {"a":', '[{"'),
    ("qwen3-coder", "<tool_call><function=f><parameter=s>",        "\n</parameter"),
    ("qwen3-coder", "<tool_call><function=f>",                     "<parameter=n>1</parameter>"),
    ("llama",       '{"a": ',                                      "[1, "),
    ("mistral",     "[TOOL_CALLS]",                                "get_"),
    ("mistral-v3",  "[TOOL_CALLS][",                               '{"name": "f"}, '),
    ("harmony",     "",                                            "<|channel|>"),
    ("harmony",     FINAL,                                         "a<|end"),
]
# fmt: on


@pytest.mark.bug("E09")
@pytest.mark.parametrize(("name", "start", "more"), LONG)
def test_the_work_is_linear(name: str, start: str, more: str) -> None:
    """E09: ten times the text is ten times the calls of functions, and what is held is not copied."""

    def work(n_characters: int) -> int:
        text, n_calls = start + more * (n_characters // len(more)), 0

        def count(*_: Any) -> None:
            nonlocal n_calls
            n_calls += 1

        reader = parser(SPELLED[name], stop=["STOP"])
        sys.setprofile(count)
        for i in range(0, len(text), 20):
            reader.feed(Piece(text[i : i + 20]))
        sys.setprofile(None)
        assert max(map(len, strings(reader))) < 100
        return n_calls

    assert work(100_000) < 11 * work(10_000)


def strings(held: Any) -> Iterator[str]:
    """All that an object holds, however deep; not what a dialect does."""
    if isinstance(held, str):
        yield held
    elif isinstance(held, list | tuple | set) and not isinstance(held, Dialect):
        for item in held:
            yield from strings(item)
    elif hasattr(held, "__dict__"):
        for value in vars(held).values():
            yield from strings(value)


spelled = st.sampled_from(sorted({marker for row in DIALECTS.values() for marker in row.markers}))
texts = spelled | st.text("ab <>/é{}\n", min_size=1).map(lambda text: text.strip("\n ")).filter(bool)
given_values = st.builds(lambda s, n: {"s": s, "n": n}, spelled | st.text("ab <>/é{}\n5"), st.integers())
NAME = "n" * tools.MAX_QUALIFIED_NAME  # Bug: the dialect of Mistral read a call of 65 characters as text


@given(names, texts | st.none(), texts | st.none(), st.lists(given_values, max_size=2))
def test_what_is_demanded_is_found(
    name: str, thought: str | None, text: str | None, calls: list[dict[str, Any]]
) -> None:
    """What the forms of a dialect write, by which grammars demand it, its parser reads.

    A marker that is a token is not found in text that spells it: not in the answer, the reasoning or a call.
    """
    forms = DIALECTS[name].forms
    xml = "<parameter=s>\n{s}\n</parameter>\n<parameter=n>\n{n}\n</parameter>\n"
    calls = calls[: 1 if forms.separator is None else 2]
    beside = forms.before if calls else forms.text
    pieces = filled(name, f"{forms.thought[0]}TEXT{forms.thought[1]}", TEXT=thought) if thought else []
    expected: list[Any] = [["analysis", thought]] if thought else []
    if text and beside:
        pieces += filled(name, beside, TEXT=text)
        expected.append(["commentary" if calls and name == "harmony" else "final", text])
    for n, values in enumerate(calls):
        form = (forms.separator or "") + forms.call if n else forms.calls[0] + forms.call
        form += forms.calls[1] if n == len(calls) - 1 else ""
        arguments = json.dumps(values) if forms.arguments == "json" else xml.format(**values)
        pieces += filled(name, form, NAME=NAME, ARGUMENTS=arguments)
        expected.append(["call", NAME, values])
    found = parse(pieces, parser(TOKENS[name], schemas={NAME: SCHEMA}))
    assert [[*item[:-1], json.loads(item[-1])] if item[0] == "call" else item for item in found] == expected


def filled(name: str, form: str, **places: str) -> list[Piece]:
    """The form's markers are tokens; what the places stand for is text, whatever it spells."""
    markers = DIALECTS[name].markers
    parts = re.split("(" + "|".join(map(re.escape, (*markers, *places))) + ")", form)
    return [Piece(places.get(part, part), part if part in markers else "") for part in parts]


ROW = re.compile(
    r"#     (?P<piece><\w+>|</\w+>|'.*?') {2,}(?P<state>\w+)(?: .*?)??(?P<outputs>[A-Z]\w+\(.*\))?"
)


def test_the_trace_is_what_happens() -> None:
    """Each row of the worked example in channels.py: the piece, the state after it, and what comes out."""
    source = Path(channels.__file__).read_text(encoding="utf-8")
    rows = [row for line in source.splitlines() if (row := ROW.fullmatch(line))]
    reader = parser(TOKENS["hermes"], stop=["END"])
    for row in rows:
        is_text = row["piece"].startswith("'")
        piece = Piece(ast.literal_eval(row["piece"])) if is_text else Piece(row["piece"], row["piece"])
        outputs = ", ".join(map(spelled_out, reader.feed(piece)))
        state = "stopped" if reader.stopped else reader.state
        assert (state, outputs) == (row["state"], row["outputs"] or ""), row[0]
    assert len(rows) == 13


def spelled_out(output: Output) -> str:
    fields = [repr(field) for field in output if field and isinstance(field, str)]
    return f"{type(output).__name__}({', '.join(fields)})"


# --- cases --------------------------------------------------------------------------------------------------


NONE = "<tool_call>[1]</tool_call>"  # a call that is none


def written_down(items: list[list[str]]) -> str:
    """As in the tables: [channel]text and [call name]arguments, with ' for " to be read."""
    return "".join(f"[{' '.join(item[:-1])}]{item[-1]}" for item in items).replace('"', "'")


# fmt: off
F, P = "<tool_call><function=f>", "<parameter=s>"  # of XML, and their ends
F_END, P_END = "</function></tool_call>", "</parameter>"
G = "<tool_call><function=g>"
CASES = {
    # dialect: text                                                   items
    "hermes": [
        ("<think>\n\na\n\n</think>\nb\n",                              "[analysis]a[final]b\n"),
        (" \n<think>a",                                                "[analysis]a"),
        ("<think>a<tool_call>{'name': 'f'}</tool_call>",               "[analysis]a[call f]{}"),
        ("<tool_call>{'name': 'f'}<tool_call>{'name': 'g'}",           "[call f]{}[call g]{}"),
        ("<tool_call>{'arguments': {'a': 1}, 'name': 'f'}",            "[call f]{'a': 1}"),
        ("<tool_call>{'name': 'f', 'parameters': {'a': 1}}",           "[call f]{'a': 1}"),
        ("<tool_call>{'name': 'f', 'arguments': null}",                "[call f]{}"),
        # Of two members of one name the first counts: it has left already.
        ("<tool_call>{'name': 'f', 'name': 'g'}",                      "[call f]{}"),
        ("<tool_call>{'name': 'f', 'arguments': {}, 'parameters': 1}", "[call f]{}"),
        # What is no call is text, to the letter, in the item that was open.
        (f"a\n\n{NONE}\nb",                                            f"[final]a\n\n{NONE}\nb"),
        (f"<think>a {NONE} b</think>c",                                f"[analysis]a {NONE} b[final]c"),
        (f"<tool_call>{{'name': 'f'}}</tool_call>{NONE}",              f"[call f]{{}}[final]{NONE}"),
        ("<tool_call>a<think>b",                                       "[final]<tool_call>a[analysis]b"),
    ],
    "qwen3-coder": [
        (f"<tool_call>{XML_CALL}</tool_call>\n\nb",                  "[call f]{'s': 'a\\n', 'n': 5}[final]b"),
        # A value is what its schema says: a string stays one, another is JSON if it can be read as such.
        (f"{F}{P}5{P_END}{F_END}",                                    "[call f]{'s': '5'}"),
        (f"{F}<parameter=b>\nTrue\n{P_END}{F_END}",                  "[call f]{'b': true}"),
        (f"{F}<parameter=b>None{P_END}{P}False{P_END}{F_END}",        "[call f]{'b': null, 's': 'False'}"),
        (f"{G}{P}True{P_END}{F_END}",                                 "[call g]{'s': 'True'}"),
        (f"{G}{P}\n[1, {{}}]\n{P_END}{F_END}",                        "[call g]{'s': [1, {}]}"),
        (f"{G}{P}[1e999]{P_END}{F_END}",                              "[call g]{'s': '[1e999]'}"),
        (f"a\n{F}{P}a</tool_call>{G}{P}b</tool_call>",     "[final]a[call f]{'s': 'a'}[call g]{'s': 'b'}"),
        (f"{F}{P}a{P_END}",                                           "[call f]{'s': 'a'}"),
        (f"{F}</function><function=g></function>",                    "[call f]{}[call g]{}"),
        ("<tool_call><fun>a</tool_call>",                             "[final]<tool_call><fun>a</tool_call>"),
    ],
    "llama": [
        # Bare JSON is a call at the very beginning, of a function that is offered.
        ("{'name': 'f', 'parameters': {'s': 'a'}}",                   "[call f]{'s': 'a'}"),
        ("\n{'type': 'function', 'name': 'f'} So.",                   "[call f]{}"),
        ("<think>a</think>\n\n{'name': 'f'}",                         "[analysis]a[call f]{}"),
        ("<think>a</think>\n\n{'name': 'Ann'}",                       "[analysis]a[final]{'name': 'Ann'}"),
        ("{'name': 'Ann', 'a': {}}",                                  "[final]{'name': 'Ann', 'a': {}}"),
        ("So.<|python_tag|>{'name': 'f'}; {'name': 'f'}",             "[final]So.[call f]{}[call f]{}"),
    ],
    "mistral": [
        ("a[TOOL_CALLS]f[ARGS]{'s': 1}[TOOL_CALLS]g[ARGS]{}",         "[final]a[call f]{'s': 1}[call g]{}"),
        ("[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{'s': 1}",             "[call f]{'s': 1}"),
        ("[TOOL_CALLS][ARGS]{}",                                      "[final][TOOL_CALLS][ARGS]{}"),
        ("[THINK]a[/THINK]b[ARGS]c",                                  "[analysis]a[final]b[final]c"),
    ],
    "mistral-v3": [
        ("[TOOL_CALLS][{'name': 'f', 'arguments': {'s': 1}}, {'name': 'g'}]",   "[call f]{'s': 1}[call g]{}"),
        ("[TOOL_CALLS][{'arguments': {}, 'name': 'f'}, 5, {'name': 'g'}",       "[call f]{}[call g]{}"),
    ],
    "harmony": [
        (f"{THOUGHT}\na\n<|end|>{ASSISTANT}{FINAL}\nb\n",             "[analysis]\na\n[final]\nb\n"),
        ("<|channel|>commentary to=assistant<|message|>a",            "[commentary]a"),
        ("<|channel|>musings<|message|>a<|end|>",                     "[final]a"),
        (f"{THOUGHT}a<|end|>b<|end|>\n{ASSISTANT}{FINAL}c",           "[analysis]a[final]b[final]c"),
        (f"{THOUGHT}a<|end|>commentary to=functions.f<|message|>{{}}", "[analysis]a[call f]{}"),
        (f"{TO_F}{{<|constrain|>}}<|call|>",                          "[call f]{}"),
        (f"{ASSISTANT}<|channel|>analysis<|end|>",                    ""),
    ],
}
CUT, AFTER, ONE_CALL = ({option: True} for option in ("cut", "after_marker", "one_call"))
STOPPED, GOES_ON = Options(stopped=True), Options(stopped=False)
ENDS = [
    # dialect      text                                               items                   options
    # What ends the turn ends the answer: https://github.com/openai/harmony/issues/60
    ("harmony",     f"{FINAL}a<|return|>more<|channel|>",              "[final]a",             STOPPED),
    ("harmony",     f"{TO_F}{{}}<|call|>more<|start|>",                "[call f]{}",           STOPPED),
    ("llama",       "a<|eot_id|>more<|eom_id|>",                       "[final]a",             STOPPED),
    # Cut off by a limit: half a tag is no answer, for the rest, which would tell call from text, is missing.
    *(("hermes",   f"a\n<tool_call>{body}", "[final]a", CUT) for body in ("", "\n", "{'na", "{'a': {}")),
    ("qwen3-coder", "<tool_call><function=f><parameter=s>a",           "[call f]{'s': 'a",     CUT),
    ("qwen3-coder", "<tool_call><function=f><parameter=n>1",           "[call f]{'n': ",       CUT),
    ("llama",       "{'name': 'f', 'parameters': {",                   "[call f]{",            CUT),
    ("mistral",     "[TOOL_CALLS]get_weath",                           "",                     CUT),
    ("harmony",     "<|start|>assistant to=functions.get_w",           "",                     CUT),
    ("harmony",     "<|channel|>commentary to=functions.f<|message|>", "[call f]",             CUT),
    ("harmony",     "comment",                                         "[final]comment",       CUT),
    ("hermes",      "a\n\n",     "[final]a",     STOPPED | {"stop": ["\n"]}),
    ("hermes",      "<think>a\nb",      "[analysis]a\nb",       GOES_ON | {"stop": ["\n"]}),
    ("hermes",      "\n\nb",     "[final]b",     AFTER | {"stop": ["\n"]}),
    ("hermes",      "ab c<think>d",      "[final]a",     STOPPED | {"stop": ["b"]}),
    ("hermes",      "a<think>b",   "[final]a[analysis]b",  GOES_ON | {"stop": ["ab"]}),
    ("hermes",      f"a{NONE}b",        f"[final]a{NONE}b",     GOES_ON | ONE_CALL),
    ("hermes",      "<tool_call>{'name': 'f'}</tool_call>a",    "[call f]{}",   STOPPED | ONE_CALL),
]
# fmt: on


@pytest.mark.bug("E01", "E05", "E12", "E14", "E15")
@pytest.mark.parametrize(
    ("name", "text", "items", "options"),
    [*((name, *case, {}) for name, cases in CASES.items() for case in cases), *ENDS],
)
def test_case(name: str, text: str, items: str, options: Options) -> None:
    """Whole, and cut anywhere. `cut`: by a limit. `stopped`: nothing that comes after is said."""
    given = {option: value for option, value in options.items() if option not in ("cut", "stopped")}
    for (rows, pieces), place in itertools.product(WAYS, range(len(text))):
        reader = parser(rows[name], **given)
        units = pieces([text.replace("'", '"')], [place], rows[name].markers)
        assert written_down(parse(units, reader, options.get("cut", False))) == items
        assert reader.stopped == options.get("stopped", reader.stopped)


def test_an_added_token_that_is_not_a_marker_is_text_outside_of_strings() -> None:
    """Harmony's arguments leave as they are written, whatever they are."""
    pieces = [*as_tokens([TO_F, "1"], [], DIALECTS["harmony"].markers), Piece("<|fim|>", "<|fim|>")]
    assert parse(pieces, parser(TOKENS["harmony"])) == [["call", "f", "1<|fim|>"]]


@pytest.mark.parametrize(("name", "state"), [("llama", "call"), ("hermes", "call"), ("harmony", "between")])
def test_logprobs_of_what_was_held_leave_with_it(name: str, state: State) -> None:
    """What might have been a call, or a header, has one logprob a token all the same."""
    reader = parser(TOKENS[name], state=state)
    said = [o for c in "Hi {}" for o in reader.feed(Piece(c, "", (TokenLogprob(c, -1.0, b""),)))]
    deltas = [output for output in [*said, *reader.close(cut=False)] if isinstance(output, Delta)]
    assert [p.token for delta in deltas for p in delta.logprobs] == [*"Hi {}"]


# --- which dialect it is, and where it begins ---------------------------------------------------------------


@pytest.mark.parametrize("file", TEMPLATES)
def test_the_template_says_which_dialect_it_is(file: str) -> None:
    found = families.recognised(TEMPLATES[file].source, TEMPLATES[file].takes_tools)
    assert found == {"deepseek-r1": "hermes"}.get(file, file)


@pytest.mark.bug("P13")
def test_a_template_that_teaches_other_calls_is_named_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    """It was taken for Hermes without a word, and its calls arrived as text."""
    assert families.recognised("<tool_call> {{ tools }}", takes_tools=True) == "hermes"
    assert caplog.text == ""
    assert families.recognised("Reply with [f(x=1)]. {{ tools }}", takes_tools=True) == "hermes"
    assert "no dialect here reads" in caplog.text


# fmt: off
FOUND = [
    # vocabulary           template             tools    markers,   and those that are tokens
    ([*MARKERS, END],      TEMPLATE.source,     True,    MARKERS,   MARKERS),
    ([*MARKERS, END],      TEMPLATE.source,     False,   MARKERS[:2], MARKERS[:2]),
    ([],                   "no reasoning",      False,   [],        []),
    ([],                   "<think></think>",   True,    MARKERS,   []),
]
OPENINGS = [
    # dialect        the prompt ends with                        state,      after a marker
    ("hermes",       "<|im_start|>assistant\n",                  "final",    False),
    ("hermes",       "<think> is a tag",                         "final",    False),
    ("qwen3-coder",  "<｜Assistant｜><think>\n",                 "analysis", True),
    ("llama",        "<|end_header_id|>\n\n",                    "call",     False),
    ("mistral",      "[/INST]",                                  "final",    False),
    ("mistral",      "[/INST][THINK]",                           "analysis", True),
    ("harmony",      "<|end|><|start|>assistant",                "between",  False),
]
# fmt: on


@pytest.mark.parametrize(("added", "template", "tools", "markers", "tokens"), FOUND)
def test_markers(
    added: Sequence[str], template: str, tools: bool, markers: Sequence[str], tokens: Sequence[str]
) -> None:
    found = families.find(DIALECTS["hermes"], added, template, tools)
    assert (found.markers, found.tokens) == (frozenset(markers), frozenset(tokens))


@pytest.mark.parametrize(("name", "tail", "state", "after_marker"), OPENINGS)
def test_opening(name: str, tail: str, state: State, after_marker: bool) -> None:
    assert families.opening("<think> [THINK]" + tail, TOKENS[name]) == (state, after_marker)


@pytest.mark.parametrize("name", DIALECTS)
def test_the_tables_agree(name: str) -> None:
    """The forms and lists of a dialect name its own markers, and rows leave states that rows reach."""
    row = DIALECTS[name]
    assert {*row.call_markers} <= row.markers
    written = re.findall(r"<\|\w+\|>|\[/?[A-Z_]{2,}\]|</?(?:think|tool_call)>", str(row.forms))
    assert {*written} <= row.markers
    assert ("content" in row.transitions.values()) == (row.header is not None)
    assert {state for state, _ in row.transitions} <= {"any", row.start, *row.transitions.values()}
