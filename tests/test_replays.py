"""The documented bugs: each file of tests/replays/ is one, fed to the module that its name begins with.

    <module>-<the bug as words>.toml          pytest -k <words>

    title        the rule in one sentence
    went_wrong   what the buggy program did, in words
    source       https link to the bug or to the rule
    bug          its id in bugs.toml, or several; left out if the source is the rule itself and not a report
    result       "valid" | "invalid": it must raise | "disputed": the note says who differs
    input        array of chunks, as they came
    was          array of what comes out if the bug is put back, which mutants.py checks; if no mutant has
                 this replay as its test, of what came out of the buggy program
    expect       array of what must come out of ours; an exception is the last, as "raises <its class>"

    input_percent   instead of input, for bytes that are not text: ["caf%C3", "%A9"]; a percent sign is %25
    options         table of keyword arguments of the adapter; may be left out
    note            may be left out

The comment over `input` says what a chunk is and what comes out. Of the channels, analysis is the reasoning,
final the answer. A chunk is a sequence of units (bytes, characters, tokens, outputs), and it must make no
difference how it was cut: the input is fed as it came, whole, unit by unit, and cut in two at every place
(the judge of the course: at every ninth).
"""

import asyncio
import contextlib
import functools
import itertools
import operator
import os
import re
import tomllib
import urllib.parse
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest

import blocks
import completions
import sse
from channels import Accepted, Arguments, Call, Close, Delta, Finish, Output, Parser, Piece, Usage
from dialects import families
from dialects.structured_output import answer_grammar
from event_log import EventLog
from gateway import answers, metering, relay
from gateway.outputs import Outputs
from helpers import clients, laws, scripted
from helpers.grammars import Followed, grammars_of
from request import params, tool_calls
from request.tools import StructuredOutput
from streaming import KEEP_ALIVE
from tokenizer import Decoder, Tokenizer

FOLDER = Path(__file__).parent / "replays"
TINY_TOKENIZER = Tokenizer(scripted.TINY / "tokenizer.json")
REQUIRED = {"title", "went_wrong", "source", "result", "was", "expect"}
KEYS = REQUIRED | {"bug", "input", "input_percent", "options", "note"}

Run = Callable[..., Iterator[Any]]  # (chunks, **options) -> outputs, in the types of TOML, so without None

# --- Adapters -----------------------------------------------------------------------------------------------


def sse_parser(chunks: list[bytes], **options: Any) -> Iterator[Any]:
    parser = sse.Parser(**options)
    for chunk in chunks:
        yield from map(list, parser.feed(chunk))  # [type, data, id]
    parser.close()


def sse_writer(chunks: list[list[dict[str, Any]]]) -> Iterator[Any]:
    for frame in itertools.chain(*chunks):  # {comment = "keep-alive"} or {event = type, data = object}
        if "comment" in frame:
            yield KEEP_ALIVE.decode()
        else:
            yield sse.encode(frame["data"], frame.get("event")).decode()


def channels(
    chunks: list[Any], dialect: str = "hermes", prompt: str = "", cut: bool = False, **options: Any
) -> Iterator[Any]:
    """Items. A chunk of text is a piece, its markers are spelled; in one of tokens each is a piece."""
    row = families.DIALECTS[dialect]
    added = set() if isinstance(chunks[0], str) else row.markers
    found = families.find(row, added, "".join(row.markers), tools=True)
    pieces: list[Piece] = []
    for chunk in chunks:
        texts = [chunk] if isinstance(chunk, str) else chunk
        pieces += [Piece(text, text if text in added else "") for text in texts]
    yield from laws.parse(pieces, Parser(found, *families.opening(prompt, found), **options), cut)


def tokenizer(chunks: list[list[str]]) -> Iterator[Any]:
    """The text of the pieces; a chunk is a list of tokens, their bytes percent-encoded."""
    vocabulary, token_ids = tokenized(chunks, "hermes")
    decoder = Decoder(vocabulary)
    pieces = map(decoder.feed, itertools.chain(*token_ids))
    yield from (piece.text for piece in [*itertools.chain(*pieces), *decoder.close()])


def worker(chunks: list[list[str]], dialect: str = "hermes", **body: Any) -> Iterator[Any]:
    """Items, then ["finish", reason, output tokens, reasoning tokens]; a chunk is a step: its tokens."""
    vocabulary, steps = tokenized(chunks, dialect)
    *outputs, end = scripted.said(vocabulary, steps, dialect, **body)
    yield from laws.items(output for output in outputs if not isinstance(output, Finish))
    assert isinstance(end, Finish)
    assert end.usage
    yield ["finish", end.reason, end.usage.output_tokens, end.usage.reasoning_tokens]


def prompt(chunks: list[str], said_by: str = "user") -> Iterator[Any]:
    """The tiny model's prompt where somebody says the chunks: its texts, and [token] for a special token."""
    said = "".join(chunks)
    items = {
        "user": [{"role": "user", "content": said}],
        "assistant": [{"role": "assistant", "content": said}, {"role": "user", "content": "Thanks."}],
        "tool": [
            {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "call_1", "output": said},
        ],
    }[said_by]
    before = [] if said_by == "user" else [{"role": "user", "content": "Hi"}]
    request = params.from_responses({"model": "m", "input": before + items}, {})
    made = asyncio.run(scripted.worker_of(TINY_TOKENIZER, scripted.TEMPLATE).prepare(request))
    decoder = Decoder(TINY_TOKENIZER)
    pieces = [piece for token_id in made.token_ids for piece in decoder.feed(token_id)]
    for special, run in itertools.groupby(pieces, lambda piece: piece.special):
        text = "".join(piece.text for piece in run)
        yield [special] if special else text


def worker_events(chunks: list[list[str]], show: list[str], dialect: str = "hermes", **body: Any) -> Any:
    """As the adapter of responses, from tokens, the calls in the client's words."""
    vocabulary, steps = tokenized(chunks, dialect)
    restorer = tool_calls.Restorer(params.from_responses({"model": "m", "input": "hi"} | body, {}).called)
    said: Iterable[Any] = scripted.said(vocabulary, steps, dialect, **body)
    restored: Iterable[Any] = itertools.chain.from_iterable(map(restorer.feed, said))
    return shown(restored, show)


def tokenized(chunks: list[list[str]], dialect: str) -> tuple[Tokenizer, list[list[int]]]:
    tokens = [[urllib.parse.unquote_to_bytes(token) for token in chunk] for chunk in chunks]
    added = {name.encode() for name in (*families.DIALECTS[dialect].markers, scripted.END)}
    words = (token for chunk in tokens for token in chunk if token not in added)
    vocabulary = scripted.vocabulary(words, dialect)
    return vocabulary, [scripted.ids_of(vocabulary, chunk) for chunk in tokens]


def structured_output(chunks: list[str], schema: dict[str, Any]) -> Iterator[Any]:
    """The beginning of the text that an answer may have behind a prompt that ends with <think>."""
    demanded = StructuredOutput("none", schema=schema)
    dialect = families.find(families.DIALECTS["hermes"], TINY_TOKENIZER.added, "", tools=False)
    grammar = answer_grammar(demanded, dialect, TINY_TOKENIZER.added, "open").lark
    allowed: list[str] = []
    with Followed(grammars_of(), grammar) as followed:
        for text in re.findall("</think>|.", "".join(chunks), re.DOTALL):
            (token_id,) = TINY_TOKENIZER.encode(text)
            if not followed.mask()[token_id]:
                break
            followed.advance(token_id)
            allowed.append(text)
    yield "".join(allowed)


def responses_events(chunks: list[list[list[Any]]], show: list[str]) -> Iterator[Any]:
    """[type, values] of the events that have one of the members `show`; a chunk is a list of outputs."""
    return shown(map(to_output, itertools.chain(*chunks)), show)


def shown(outputs: Iterable[Output | Finish], show: list[str]) -> Iterator[Any]:
    for event in scripted.events_of(outputs):
        if values := members(event, show):
            yield [event["type"].removeprefix("response."), *values]


def client(chunks: list[list[list[Any]]], program: Callable[[Iterable[Any]], Iterator[Any]]) -> Iterator[Any]:
    """What a client's own rules (clients.py) make of our stream; a chunk is a list of outputs.

    The last is ["error", message] if the client's user is told of an error.
    """
    events = laws.on_the_wire(scripted.events_of(map(to_output, itertools.chain(*chunks))))
    try:
        yield from program(events)
    except clients.StreamError as error:
        yield ["error", str(error)]


def completions_chunks(chunks: list[list[list[Any]]], show: list[str], **options: Any) -> Iterator[Any]:
    return built(completions.Chunks({"id": "c_1"}, scripted.counted_ids(), 1, **options), chunks, show)


def messages_events(chunks: list[list[list[Any]]], show: list[str]) -> Iterator[Any]:
    return built(blocks.Builder({"id": "msg_1", "model": "m"}, "{}_1".format, "{}: {}".format), chunks, show)


def built(builder: Any, chunks: list[list[list[Any]]], show: list[str]) -> Iterator[Any]:
    """The members `show` of each event that has one; a chunk in the file is a list of outputs."""
    outputs = [Accepted(7), *map(to_output, itertools.chain(*chunks))]
    for event in itertools.chain.from_iterable(builder.feed(0, output) for output in outputs):
        if values := members(event, show):
            yield values


def background_log(chunks: list[list[Any]]) -> Iterator[Any]:
    """The frames of a log. A chunk is a list of events; one that cannot be written says so."""
    log = EventLog()
    for event in itertools.chain(*chunks):
        try:
            log.extend([event | {"text": "\ud800"} if "text" in event else event])
        except ValueError:
            yield "not written"
    log.close()
    yield from (frame.decode() for frame in asyncio.run(laws.read(log)))


def relayed(
    chunks: list[bytes],
    stream: bool = True,
    price: int | None = None,
    dies: bool = False,
    max_bytes: int = answers.MAX_EVENT_BYTES,
    **options: Any,
) -> Iterator[Any]:
    """The client's frames; then [prompt, cached, completion, reasoning, total] or "unknown"."""
    meter = metering.Meter(price)
    asked: Any = {"shows_usage": not stream, "new_id": scripted.counted_ids()} | options
    with mock.patch.object(answers, "MAX_EVENT_BYTES", max_bytes):
        answer = answers.Answer(meter, answers.Asked(**asked))
        made = [answer.feed(chunk) for chunk in chunks]
        made.append(answer.fail("it died") if dies else answer.close())
    said = itertools.chain(*made)
    if stream:
        yield from (relay.frames_of([chunk]).decode() for chunk in said)
        yield sse.DONE.decode()
    else:
        yield relay.whole(said)
    yield list(meter.used().values())[:5] if meter.usage else "unknown"


def relay_headers(chunks: list[list[list[str]]]) -> Iterator[Any]:
    """The headers that go on; a chunk is a list of [name, value]."""
    raw = [(name.encode(), value.encode()) for name, value in itertools.chain(*chunks)]
    opening: Any = SimpleNamespace(done=lambda: True, result=lambda: SimpleNamespace(headers=raw))
    yield from ([name.decode(), value.decode()] for name, value in relay.forwarded(opening))


def completions_deltas(chunks: list[bytes], logprobs: bool = False, **options: Any) -> Iterator[Any]:
    """Items, ["logprobs", token, ...] if they are asked for, then ["finish", reason, message]."""
    answer = answers.Answer(metering.Meter(), answers.Asked(**options))
    said = Outputs(answer, n_top_logprobs=20)
    read = [said.read(answer.feed(chunk)) for chunk in chunks]
    made = [*itertools.chain(*read, said.read(answer.close()), said.close(None))]
    yield from laws.items(output for output in made if not isinstance(output, Finish))
    if logprobs:
        yield ["logprobs", *(p.token for o in made if isinstance(o, Delta) for p in o.logprobs)]
    yield from (["finish", o.reason, o.message] for o in made if isinstance(o, Finish))


MADE: dict[str, Callable[..., Output]] = {"call": Call, "arguments": Arguments, "close": Close}


def to_output(row: list[Any]) -> Output | Finish:
    match row:
        case ["finish", reason, list(counts)]:
            return Finish(reason, Usage(*counts))
        case ["finish", reason, *message]:
            return Finish(reason, None, *message)
        case ["custom", name]:
            return Call(name, custom=True)
        case [kind, *values] if kind in MADE:
            return MADE[kind](*values)
    return Delta(*row)


def members(value: Any, paths: list[str]) -> list[Any]:
    """What stands at these paths, as TOML can say it; `*` gives the names of an object's members."""
    found = []
    for path in paths:
        with contextlib.suppress(LookupError, TypeError, ValueError):  # it does not stand there
            found.append(sayable(functools.reduce(member, path.split("."), value)))
    return found


def member(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        return " ".join(sorted(value)) if name == "*" else value[name]
    return value[int(name)]


def sayable(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: sayable(v) for k, v in value.items()}
    if isinstance(value, list):
        return [sayable(v) for v in value]
    return "null" if value is None else value


ADAPTERS: dict[str, tuple[Callable[[Any], Any], Run]] = {
    # module              (chunk in the file -> chunk, run)
    "sse":                (str.encode, sse_parser),
    "sse-writer":         (list,       sse_writer),
    "channels":           (lambda chunk: chunk, channels),
    "tokenizer":          (list,       tokenizer),
    "worker":             (list,       worker),
    "worker-events":      (list,       worker_events),
    "prompt":             (str,        prompt),
    "structured-output":  (str,        structured_output),
    "tools":              (list,       worker_events),
    "codex":              (list,       functools.partial(client, program=clients.codex)),
    "ai-sdk":             (list,       functools.partial(client, program=clients.ai_sdk)),
    "openai-sdk":         (list,       functools.partial(client, program=clients.openai_sdk)),
    "responses":          (list,       responses_events),
    "completions":        (list,       completions_chunks),
    "messages":           (list,       messages_events),
    "completions-deltas": (str.encode, completions_deltas),
    "relay":              (str.encode, relayed),
    "relay-headers":      (list,       relay_headers),
    "background":         (list,       background_log),
}  # fmt: skip

# --- Runner -------------------------------------------------------------------------------------------------


class Replay(NamedTuple):
    run: Run
    chunks: list[Any]
    expect: list[Any]
    was: list[Any]


def load(path: Path) -> Replay:
    """Read one replay; raises AssertionError if it breaks a rule of this file's first lines."""
    modules = [module for module in ADAPTERS if path.name.startswith(module + "-")]
    to_chunk, run = ADAPTERS[max(modules, key=len)]
    fields = tomllib.loads(path.read_text(encoding="utf-8"))
    assert REQUIRED <= fields.keys() <= KEYS
    assert ("input" in fields) != ("input_percent" in fields)
    assert fields["source"].startswith("https://")
    raises = str(fields["expect"][-1:]).startswith("['raises ")
    assert fields["result"] in ("disputed", "invalid" if raises else "valid")
    assert fields["result"] != "disputed" or "note" in fields
    assert fields["was"] != fields["expect"]
    if "input_percent" in fields:
        chunks = [urllib.parse.unquote_to_bytes(chunk) for chunk in fields["input_percent"]]
    else:
        chunks = [to_chunk(chunk) for chunk in fields["input"]]
    options = fields.get("options", {})
    return Replay(functools.partial(run, **options), chunks, fields["expect"], fields["was"])


def feedings(chunks: list[Any]) -> Iterator[tuple[str, list[Any]]]:
    whole = functools.reduce(operator.add, chunks)
    yield "as it came", chunks
    yield "whole", [whole]
    yield "unit by unit", [whole[i : i + 1] for i in range(len(whole))]
    for i in range(1, len(whole), int(os.environ.get("REPLAYS_CUT_EVERY", "1"))):
        yield f"cut at {i}", [whole[:i], whole[i:]]


def outputs(run: Run, chunks: list[Any]) -> Iterator[Any]:
    try:
        yield from run(chunks)
    except Exception as error:
        yield f"raises {type(error).__name__}"


@pytest.mark.parametrize("path", sorted(FOLDER.iterdir()), ids=lambda path: path.stem)
def test_replay(path: Path) -> None:
    replay = load(path)
    if os.environ.get("REPLAYS_YIELD") == "was":  # a mutant has brought the bug back that is told of here
        got = list(outputs(replay.run, replay.chunks))
        assert got != replay.expect, "SURVIVED"
        assert got == replay.was, f"got {got}"
        return
    for how, chunks in feedings(replay.chunks):
        assert list(outputs(replay.run, chunks)) == replay.expect, how
