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
from helpers.tables import table
from request import tools

TYPES = {"s": "string", "n": "integer", "b": ["boolean", "null"]}
SCHEMA = {"type": "object", "properties": {name: {"type": of_type} for name, of_type in TYPES.items()}}
Options = dict[str, Any]
TABLE = table("channels")
# The dialects with all their markers: each is a token, or none is.
SPELLED = {name: row._replace(tokens=frozenset()) for name, row in DIALECTS.items()}
TOKENS = {name: row._replace(tokens=row.markers) for name, row in DIALECTS.items()}


class ByMachines(Parser):
    """A parser that lets nothing through unread."""

    feed = Parser._by_machines


def parser(dialect: Dialect, of: type[Parser] = Parser, **options: Any) -> Parser:
    """As the worker makes it: one function is offered, f."""
    return of(dialect, **{"state": dialect.start, "schemas": {"f": SCHEMA}} | options)


# --- outputs of models: lists of units ----------------------------------------------------------------------

UNITS, TEXT = TABLE["units"], TABLE["units"]["text"]
TO_F = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
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


@pytest.mark.bug("E09")
@pytest.mark.parametrize(("name", "start", "more"), TABLE["long"])
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

    assert work(30_000) < 11 * work(3_000)


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
    values = [getattr(output, name) for name in type(output).__match_args__]
    fields = [repr(value) for value in values if value and isinstance(value, str)]
    return f"{type(output).__name__}({', '.join(fields)})"


# --- cases --------------------------------------------------------------------------------------------------


CASES = [(name, *case) for kind in ("cases", "ends") for name, rows in TABLE[kind].items() for case in rows]


@pytest.mark.bug("E01", "E05", "E12", "E14", "E15")
@pytest.mark.parametrize("case", CASES)
def test_case(case: Sequence[Any]) -> None:
    """Whole, and cut anywhere. `cut`: by a limit. `stopped`: nothing that comes after is said."""
    name, text, expected, *more = case
    options: Options = {"cut": False} | dict(*more)
    given = {option: value for option, value in options.items() if option not in ("cut", "stopped")}
    for (rows, pieces), place in itertools.product(WAYS, range(len(text))):
        reader = parser(rows[name], **given)
        items = parse(pieces([text], [place], rows[name].markers), reader, options["cut"])
        assert "".join(f"[{' '.join(item[:-1])}]{item[-1]}" for item in items) == expected
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


FOUND = [
    # vocabulary           template             tools    markers,   and those that are tokens
    ([*MARKERS, END],      TEMPLATE.source,     True,    MARKERS,   MARKERS),
    ([*MARKERS, END],      TEMPLATE.source,     False,   MARKERS[:2], MARKERS[:2]),
    ([],                   "no reasoning",      False,   [],        []),
    ([],                   "<think></think>",   True,    MARKERS,   []),
]  # fmt: skip


@pytest.mark.parametrize(("added", "template", "tools", "markers", "tokens"), FOUND)
def test_markers(
    added: Sequence[str], template: str, tools: bool, markers: Sequence[str], tokens: Sequence[str]
) -> None:
    found = families.find(DIALECTS["hermes"], added, template, tools)
    assert (found.markers, found.tokens) == (frozenset(markers), frozenset(tokens))


@pytest.mark.parametrize(("name", "tail", "state", "after_marker"), TABLE["openings"])
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
