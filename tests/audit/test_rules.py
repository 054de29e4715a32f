"""The rules on one stream: a good one passes, a planted fault is named, and nothing makes them raise."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import completions
import responses
import sse
from audit import schema
from audit import stream as streams
from audit.recording import Violation, violations
from audit.rules import NotApplicable
from channels import Accepted, Arguments, Call, Delta, Finish, Output, TokenLogprob, Usage
from event_log import encode_event
from helpers.scripted import counted_ids, events_of
from helpers.serving import ROOT, Json, run

OUTPUTS: list[Output] = [
    Delta("analysis", "Hm."),
    Delta("final", "Caf\u00e9", (TokenLogprob("Caf\u00e9", -0.5, "Caf\u00e9".encode()),)),
    Delta("final", " here"),
    Call("f"),
    Arguments('{"a":'),
    Arguments("1}"),
]
STOP = Finish("stop", Usage(9, 8, 1, 2))


def responses_stream(finish: Finish = STOP) -> bytes:
    events = events_of([*OUTPUTS, finish])
    stream = b"".join(encode_event(n, event).frame for n, event in enumerate(events))
    return stream.replace(b'"instructions":null', rb'"instructions":"Be\u2028brief"')


def chat_stream(finish: Finish = STOP) -> bytes:
    head = {"id": "c_0", "created": 1, "model": "m"}
    chunks = completions.Chunks(head, counted_ids(), 2, include_usage=True)
    said = [(0, Accepted()), (1, Accepted()), *((0, one) for one in OUTPUTS), (0, finish), (1, finish)]
    made = [chunk for index, one in said for chunk in chunks.feed(index, one)]
    return b"".join(encode_event(0, chunk).frame for chunk in made) + sse.DONE


def lint(stream: bytes) -> list[Violation]:
    return violations(streams.read(stream))


GOOD = {"responses": responses_stream() + sse.DONE, "chat": chat_stream()}


BY_RULE = tomllib.loads((ROOT / "tests" / "faults.toml").read_text(encoding="utf-8"))
FAULTS = [(rule, fault) for rule, faults in BY_RULE.items() for fault in faults]


@pytest.mark.parametrize(("rule", "fault"), FAULTS, ids=[rule for rule, _ in FAULTS])
def test_a_planted_fault_is_named_by_its_rule_alone(rule: str, fault: dict[str, Any]) -> None:
    good = GOOD[fault["stream"]].decode("latin-1")
    bad, n = re.subn(fault["old"], fault["new"], good, count=1, flags=re.DOTALL)
    assert n == 1
    named = {violation.rule for violation in lint(bad.encode("latin-1"))}
    assert named == {rule, *fault.get("also", {})}


@pytest.mark.parametrize("name", ["newer_events", "newer_error", "newer_chunks"])
def test_newer_events_and_members_are_known(name: str) -> None:
    """What ours does not make: refusals, annotations, tools that the server runs, steering, moderation, an
    error before the failure, and what Azure's content filter tells."""
    lines = Path(__file__).with_name(f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines]
    assert violations(streams.captured(events)) == []
    alone = [event for event in events if event.get("output_index") != 3]  # a list of tools lacks its done
    assert alone == events or "order" in {each.rule for each in violations(streams.captured(alone))}


# --- nothing makes it raise ---------------------------------------------------------------------------------

TEXTS = ["", "message", "output_text", "function_call", "completed", "{", "\ud800", "</think>"]
texts = st.sampled_from(TEXTS)
numbers = st.integers(-1, 2) | st.booleans() | st.none() | st.floats()
names = st.sampled_from(
    sorted({name.strip("?") for rows in schema.ROWS.values() for row in rows.values() for name in row})
)
values: st.SearchStrategy[Any] = st.recursive(
    texts | numbers,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(names, inner, max_size=4),
    max_leaves=6,
)
types = st.fixed_dictionaries({"type": st.sampled_from(sorted(schema.EVENTS)), "choices": st.just([])})
anything = st.tuples(types, st.dictionaries(names, values, max_size=6)).map(lambda pair: pair[0] | pair[1])


@st.composite
def damaged(draw: st.DrawFn) -> list[Json]:
    """A good stream with one event changed or left out."""
    events = [*streams.events_of([draw(st.sampled_from(sorted(GOOD.values())))])]
    place = draw(st.integers(0, len(events) - 1))
    change = st.dictionaries(st.sampled_from(sorted(events[place])), values, min_size=1, max_size=1)
    changed = change.map(lambda member: [events[place] | member])
    return [*events[:place], *draw(changed | st.just([])), *events[place + 1 :]]


@given(st.lists(anything, max_size=4) | damaged(), st.sampled_from(["responses", "chat"]))
@example([{"choices": [{"index": 0, "delta": "Hi"}]}], "chat")  # the rule on roles must not ask it for one
def test_no_stream_makes_it_raise(events: list[Json], kind: str) -> None:
    typed = [schema.Typed(event, streams.EVENTS[kind]) for event in events]
    found = violations(streams.Capture(kind, [], events, [*enumerate(typed)]))
    assert all(0 <= violation.event <= len(events) or not events for violation in found)


@given(st.binary(max_size=60))
@example(b"<p>\x1b[2JUnsupported Media Type</p>\n")
def test_bytes_are_judged_or_refused(stream: bytes) -> None:
    """What is no recording is most often a refusal: it is shown on one line without control characters."""
    lint(b'data: {"choices":[]}\n\n' + stream)
    with pytest.raises(NotApplicable, match="expected server-sent events") as refused:
        lint(stream)
    assert str(refused.value).isprintable()


def test_a_recording_is_judged(tmp_path: Path) -> None:
    def judged(stream: bytes, *options: str) -> tuple[int, str]:
        ended = run("-m", "audit", "-", *options, input=stream.decode())
        return ended.returncode, ended.stdout

    summary = "21 events of a responses stream"
    assert judged(GOOD["responses"]) == (0, f"OK. {summary}\n")
    unknown = GOOD["responses"].replace(b"response.in_progress", b"response.in_progres")
    assert judged(unknown, "--html", str(tmp_path / "unknown.html"))[0] == 1
    bad = GOOD["responses"].replace(b'"item_id":"msg_2",', b"")
    status, text = judged(bad)
    fault, *_, last = text.splitlines()
    link = "https://github.com/lemonade-sdk/lemonade/issues/3607"
    assert fault == f"event 9: response.content_part.added lacks item_id (fields: {link})"
    assert (status, last) == (1, f"5 violations. {summary}")
    page = tmp_path / "page.html"
    _, printed = judged(bad, "--json", "--html", str(page))
    report = json.loads(printed)
    assert (report["kind"], report["events"], report["ok"]) == ("responses", 21, False)
    assert [(v["event"], v["rule"]) for v in report["violations"]] == [(n, "fields") for n in range(9, 14)]
    assert '"stream": [{"type": "response.created"' in page.read_text(encoding="utf-8")


lines = [b"data: a", b"data:", b"event: e", b"id: 1", b"id: \0", b": hi", b"x", b"\xff", streams.BOM]
ends = [b"\n", b"\r", b"\r\n", b"\n\n", b"\r\n\r\n"]
wire = st.lists(st.sampled_from(lines) | st.sampled_from(ends), max_size=12).map(b"".join)


@given(wire, st.integers(0, 80))
@example(GOOD["responses"], 500)
def test_the_judge_reads_as_the_judged_does(stream: bytes, place: int) -> None:
    """Its grammar and its reader of frames are its own, and agree with ours, however the bytes are cut."""
    assert responses.GRAMMAR.items() <= schema.GRAMMAR.items()
    parser = sse.Parser(len(stream))
    expected = [(event.type, event.data) for event in parser.feed(stream)]
    is_whole = True
    try:
        parser.close()
    except sse.Truncated:
        is_whole = False
    for pieces in ([stream], [stream[:place], stream[place:]]):
        read = list(streams.frames_of(pieces))
        assert [(f.type, f.data) for f in read if f.data is not None] == expected
        assert is_whole == (not any(f.fault for f in read)) or stream == streams.BOM
