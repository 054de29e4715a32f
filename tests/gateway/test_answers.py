"""The law of the reader: of one answer chat streamed, chat whole and a response say the same. And its limits.

That the events of a response add up to what it is made of is a law of test_responses.py. The answers are
those of the replays completions-deltas-* and relay-*.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import sse
from channels import Delta, Finish, Output, TokenLogprob
from gateway import answers
from gateway.answers import Answer as Reader
from gateway.answers import Asked
from gateway.metering import Meter
from gateway.outputs import Outputs
from gateway.refused import Refused
from gateway.relay import frames_of, whole
from helpers import laws
from helpers.scripted import events_of
from helpers.serving import Json
from helpers.tables import table
from helpers.upstream import DONE, STREAM, delta, event, finish
from request.tool_calls import Restorer
from test_replays import FOLDER, load

# --- the law ------------------------------------------------------------------------------------------------


@dataclass
class Answer:
    """What one way of answering says."""

    reasoning: str = ""
    text: str = ""
    refusal: str = ""
    calls: list[list[str]] = field(default_factory=list)  # [name, arguments]
    logprobs: list[Any] = field(default_factory=list)  # (token, logprob)
    end: str = "stop"
    usage: Any = None

    def add(self, delta: Json) -> None:
        """Add a delta as the `openai` package does: strings are appended."""
        self.reasoning += delta.get("reasoning_content") or delta.get("reasoning") or ""
        self.text += delta.get("content") or ""
        self.refusal += delta.get("refusal") or ""
        for n, call in enumerate(delta.get("tool_calls") or ()):
            index = call.get("index", n)
            assert index <= len(self.calls)
            if index == len(self.calls):
                assert call["id"]
                assert call["type"] == "function"
                self.calls.append(["", ""])
            assert index == len(self.calls) - 1 or not call.get("id")
            function = call.get("function") or {}
            self.calls[index][0] += function.get("name") or ""
            self.calls[index][1] += function.get("arguments") or ""


def read(data: bytes, one_call: bool = False) -> tuple[Reader, list[Json]]:
    reader = Reader(Meter(), Asked(one_call=one_call, shows_usage=True))
    return reader, [*reader.feed(data), *reader.close()]


def chat(data: bytes, stream: bool, **options: Any) -> Answer:
    """What the chunks of a stream add up to, or what a whole completion says."""
    reader, chunks = read(data, **options)
    try:
        sent = frames_of(chunks) if stream else event(json.loads(whole(chunks)))
    except Refused:
        return Answer(end="failed")
    answer = Answer(usage=reader.meter.usage)
    for found in sse.Parser(len(sent)).feed(sent):
        document = json.loads(found.data)
        if "error" in document:
            answer.end = "failed"
        for choice in document.get("choices") or ():
            assert choice["index"] == 0
            answer.add(choice["delta"] if stream else choice["message"])
            logprobs = choice.get("logprobs")
            entries = logprobs.get("content") if isinstance(logprobs, dict) else None
            answer.logprobs += [(p.get("token"), p.get("logprob")) for p in answers.objects(entries)]
            reason = choice.get("finish_reason")
            answer.end = reason if reason in answers.CUT else answer.end
    answer.calls = [call for call in answer.calls if call[0]]  # some were cut before their name
    return answer


def outputs_of(data: bytes, **options: Any) -> tuple[list[Output | Finish], Any]:
    """As remote.py reads an answer, and jobs.py restores its calls."""
    reader, chunks = read(data, **options)
    said, restorer = Outputs(reader, n_top_logprobs=20), Restorer({})
    made = [*said.read(chunks), *said.close(None)]
    return [cast(Any, output) for each in made for output in restorer.feed(each)], reader.meter.usage


def response_of(outputs: list[Output | Finish], usage: Any) -> Answer:
    """What a response is made of; it has logprobs of its text alone."""
    *said, finish = outputs
    assert isinstance(finish, Finish)
    answer = Answer(end=finish.reason, usage=usage)
    for kind, *more in laws.items(cast(Any, said)):
        if kind == "call":
            answer.calls.append(more)
        else:
            name = {"analysis": "reasoning", "refusal": "refusal"}.get(kind, "text")
            setattr(answer, name, getattr(answer, name) + more[0])
    deltas = [output for output in said if isinstance(output, Delta) and output.channel == "final"]
    answer.logprobs = [(p.token, p.logprob) for delta in deltas for p in delta.logprobs]
    return answer


def check_law(data: bytes, **options: Any) -> None:
    streamed, whole_ = (chat(data, stream, **options) for stream in (True, False))
    response = response_of(*outputs_of(data, **options))
    if streamed.reasoning or streamed.calls:
        kept = iter(streamed.logprobs)
        assert all(p in kept for p in response.logprobs)
        response.logprobs = streamed.logprobs
    if streamed.end == "failed":
        assert whole_.end == "failed"
    else:
        assert whole_ == streamed
    assert response == streamed


def recorded() -> Iterator[tuple[str, bytes, Json]]:
    """Those of the replays that ask for one choice."""
    for path in [*FOLDER.glob("completions-deltas-*"), *FOLDER.glob("relay-*")]:
        replay = load(path)
        options = cast(partial[Any], replay.run).keywords
        if "relay-headers" not in path.stem and not options.keys() & {"n", "dies", "max_bytes"}:
            used = options.keys() & {"one_call"}
            yield path.stem, b"".join(replay.chunks), {name: options[name] for name in used}


ANSWERS = {name: (data, options) for name, data, options in recorded()} | {"STREAM": (STREAM, {})}


@pytest.mark.parametrize("name", ANSWERS)
def test_three_ways_say_the_same(name: str) -> None:
    data, options = ANSWERS[name]
    check_law(data, **options)


def some(**members: st.SearchStrategy[Any]) -> st.SearchStrategy[Json]:
    """Objects with any of these members."""
    return st.fixed_dictionaries({}, optional=members)


texts = st.sampled_from(["", " ", "\n\n", "a", "b c", "4"])
contents = texts | st.none() | st.just([{"type": "text", "text": "p"}])
names = st.sampled_from([None, "", "f", "g", "fg"])
functions = some(name=names, arguments=st.sampled_from([None, "", "{}", '{"x":', '"}"}', "7"]))
indices = st.sampled_from([0, 1, 2, None, "1"])
calls = st.lists(some(index=indices, id=st.sampled_from([None, "a", "b"]), function=functions), max_size=2)
deltas = some(content=contents, reasoning_content=texts, reasoning=texts, tool_calls=calls)
reasons = st.sampled_from(["stop", "length", "tool_calls", "abort"])


@given(st.lists(deltas, max_size=8), reasons, st.booleans())
def test_whatever_an_upstream_streams_three_ways_say_the_same(
    said: list[Json], reason: str, one_call: bool
) -> None:
    check_law(b"".join(delta(**each) for each in said) + finish(reason) + DONE, one_call=one_call)


JUNK: list[Any] = [None, True, 0, 7, -1, 1e9, "", "x", [], {}, [[]], [7], [{}], {"x": 7}, [{"text": 7}]]
MEMBERS = [
    *("choices", "error", "message", "detail", "usage", "index", "delta", "finish_reason", "logprobs", "id"),
    *("content", "reasoning", "refusal", "tool_calls", "function", "custom", "name", "arguments", "text"),
    *("type", "thinking", "token", "logprob", "bytes", "top_logprobs", "object"),
]
documents = st.recursive(
    st.sampled_from(JUNK),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(MEMBERS), inner, max_size=4),
    max_leaves=20,
)
junk_objects = st.dictionaries(st.sampled_from(MEMBERS), documents, max_size=4)
others = dict.fromkeys(("index", "finish_reason", "logprobs", "message"), documents)
junk_choices = st.fixed_dictionaries({"delta": junk_objects}, optional=others)


@example([{"choices": [None]}])  # Bug: fold() took any list of this name for one of choices
@given(st.lists(junk_objects | junk_choices, max_size=4))
def test_nothing_that_an_upstream_sends_raises(sent: list[Json]) -> None:
    """Each as a document, and as the choice of one."""
    for said in (sent, [{"choices": [each]} for each in sent]):
        data = b"".join(map(event, said)) + finish() + DONE
        chat(data, stream=True)
        chat(data, stream=False)
        events_of(outputs_of(data)[0])


# --- limits -------------------------------------------------------------------------------------------------


@pytest.mark.bug("J05")
def test_interleaved_calls_take_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: two calls in 60 fragments took 6.9 s: all that had come was parsed again with each of them."""
    n_parsed = 0

    def counted(text: str) -> bool:
        nonlocal n_parsed
        n_parsed += len(text)
        return sse.is_object(text)

    monkeypatch.setattr(answers, "is_object", counted)
    parts = ['{"x":"', *["x" * 15_000] * 58, '"}']
    frames = [call(index, "f" * (part == parts[0]), part) for part in parts for index in (0, 1)]
    arguments = "".join(parts)
    outputs, _ = outputs_of(b"".join(frames) + finish("tool_calls"))
    said = laws.items(output for output in outputs if not isinstance(output, Finish))
    assert said == [["call", "f", arguments]] * 2
    assert n_parsed < 4 * len(arguments)


def call(index: int, name: str = "", arguments: str = "", id: str | None = None) -> bytes:
    return delta(tool_calls=[{"index": index, "id": id, "function": {"name": name, "arguments": arguments}}])


def logprobs(said: Json, *entries: Json) -> bytes:
    logprobs = [{"token": "a", "logprob": -0.5} | entry for entry in entries]
    return event({"choices": [{"delta": said, "logprobs": {"content": logprobs}}]})


ENTRIES = [*table("relay")["entries"], ['{"logprob": 1%s}' % ("0" * 400), "a", -9999.0, "a", []]]


@pytest.mark.parametrize(("entry", "token", "logprob", "spelled", "top"), ENTRIES)
def test_logprobs_are_taken_where_they_are_some(
    entry: str, token: str, logprob: float, spelled: str, top: list[str]
) -> None:
    """Bug: `"bytes": 300000000` made 10 GB of zeros of an event of 150 bytes, which took 105 s."""
    reader = Reader(Meter(), Asked())
    chunks = reader.feed(logprobs({"content": "a"}, json.loads(entry)))
    (said,) = Outputs(reader, n_top_logprobs=1).read(chunks)
    assert isinstance(said, Delta)
    assert len(said.logprobs[0].bytes) < 10  # on its own: pytest would show them all
    others = tuple(TokenLogprob(other, -9999.0, other.encode()) for other in top)
    expected = TokenLogprob(token, logprob, spelled.encode("latin-1"), others)
    assert said == Delta("final", "a", (expected,))


ENDLESS: dict[str, Callable[[int], bytes]] = {
    "a name":    lambda n: call(0, str(n + 100) * 1000),
    "calls":     lambda n: call(n, "f", id=str(n)),
    "indices":   lambda n: call(-n),
    "arguments": lambda n: call(0, "f", "[]," * 1000),
    "an id":     lambda n: call(0, "f", id="x" * 500_000 + str(n)),
}  # fmt: skip


@pytest.mark.parametrize("one_call", [False, True])
@pytest.mark.parametrize("endless", ENDLESS)
def test_what_is_kept_of_a_stream_is_bounded(endless: str, one_call: bool) -> None:
    reader = Reader(Meter(), Asked(one_call=one_call))
    for n in range(2 * answers.MAX_CALL_CHARACTERS // answers.CALL_CHARACTERS):
        (chunk,) = reader.feed(ENDLESS[endless](n)) or ({},)
        if "error" in chunk:
            break
    assert "expected" in chunk["error"]["message"]
    assert len(chunk["error"]["message"]) < 200


def test_blank_text_is_not_held_without_end() -> None:
    reader = Reader(Meter(), Asked())
    said = ""
    for _ in range(100):
        (chunk,) = reader.feed(delta(content=" " * 100))
        said += chunk["choices"][0]["delta"]["content"]
    assert len(said) > 10_000 - 2 * answers.MAX_BLANKS


def test_chunks_that_say_nothing_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: 5 million of them, each of 8 bytes, were held until the first text came."""
    monkeypatch.setattr(answers, "MAX_ANSWER_BYTES", 2**14)
    reader, chunks = Reader(Meter(), Asked()), list[Json]()
    while not reader.is_over:
        chunks += reader.feed(b"data:{}\n\n")
    assert len(chunks) < 2**14 / answers.CHUNK_BYTES
    assert "longer than" in chunks[-1]["error"]["message"]


LARGE = [b"data: " + b"x" * 2**20, b'{"x": "' + b"x" * 2**23, b"\n" * (answers.MAX_ANSWER_BYTES + 1)]


@pytest.mark.parametrize("large", LARGE, ids=["event", "object", "answer"])
def test_one_event_has_a_limit_in_bytes(large: bytes) -> None:
    """Bug: an event of 15 MB was read at once, and all streams stood still for 1.3 s."""
    (error,) = Reader(Meter(), Asked()).feed(large)
    assert "bytes" in error["error"]["message"]
