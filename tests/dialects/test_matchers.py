"""The processes that follow grammars: what they cost is limited, and they end with whoever asked for them."""

import asyncio
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing, nullcontext, suppress
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from dialects import matchers
from dialects.families import DIALECTS
from dialects.json_schema import BadGrammar
from dialects.matcher_process import MAX_BYTES, MAX_COMPILE_S
from dialects.matchers import N_CHECKS, Constraint, Grammars, Mask
from dialects.structured_output import AnswerGrammar, answer_grammar
from helpers.grammars import Followed, costly
from helpers.serving import TINY, Json, http_bytes, serve, until
from request.tools import StructuredOutput


@pytest.fixture
def grammars() -> Iterator[Grammars]:
    with closing(Grammars(TINY / "tokenizer.json", 2048, (2041,))) as grammars:
        yield grammars


def of(schema: Json) -> AnswerGrammar:
    return answer_grammar(StructuredOutput("none", schema=schema), DIALECTS["hermes"], {}, "over")


def wait_for_mask(constraint: Constraint, output: list[int]) -> Mask:
    until(lambda: constraint.mask(output) is not None, "the mask has come")
    mask = constraint.mask(output)
    assert mask is not None
    return mask


def children(pid: int) -> list[int]:
    """The processes that one has started, and those that these have."""
    try:
        started = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    except OSError:  # it has ended
        return []
    return [descendant for child in map(int, started) for descendant in (child, *children(child))]


def forks(grammars: Grammars) -> list[int]:
    return children(grammars._root.process.pid)


async def test_what_is_too_costly_is_computed_once(grammars: Grammars) -> None:
    """Bug: each request with the same schema took a second of a processor again, and memory likewise."""
    for _ in range(2):
        with pytest.raises(BadGrammar, match=r"takes more than 0\.25 s of computing or 128 MB"):
            await grammars.check(of(costly()), "me")
        grammars._root.close()  # nothing can be computed any more


def test_computing_is_limited_by_the_system(grammars: Grammars) -> None:
    grammar = of(costly(99_991))
    for max_s, outcome in ((0.01, pytest.raises(BadGrammar)), (60.0, nullcontext())):
        with closing(Constraint(grammars, grammar, max_s)) as constraint, outcome:
            wait_for_mask(constraint, [])


def test_memory_is_limited_by_the_system(grammars: Grammars) -> None:
    with Followed(grammars, 'start: "a"') as followed:
        followed.mask()
        (pid,) = forks(grammars)
        limits = Path(f"/proc/{pid}/limits").read_text(encoding="ascii")
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    (allowed,) = re.findall(r"Max address space +(\d+)", limits)
    (mapped,) = re.findall(r"VmSize:\s+(\d+) kB", status)
    assert int(allowed) <= int(mapped) * 1024 + MAX_BYTES


def test_a_process_ends_with_its_connection(grammars: Grammars) -> None:
    """While it waits, and after what it computes."""
    for schema in ({"type": "integer"}, costly(99_991)):
        constraint = Constraint(grammars, of(schema), MAX_COMPILE_S)
        constraint.mask([])
        until(lambda: forks(grammars) != [], "it has begun")
        constraint.close()
        until(lambda: forks(grammars) == [], "the process has ended")


async def test_a_root_that_was_killed_is_not_held_against_the_grammar(grammars: Grammars) -> None:
    """The grammar was refused as too costly for ever after."""
    root = grammars._root.process
    root.send_signal(signal.SIGSTOP)  # the order waits
    threading.Timer(0.1, root.kill).start()
    with pytest.raises(RuntimeError, match="has ended"):
        await grammars.check(of({"type": "integer"}), "me")
    await grammars.check(of({"type": "integer"}), "me")


def test_a_stopped_process_holds_no_place(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a sequence waited for its mask for ever."""
    with closing(grammars.constraint(of({"const": 1}))) as constraint:
        wait_for_mask(constraint, [])
        (pid,) = forks(grammars)
        os.kill(pid, signal.SIGSTOP)
        monkeypatch.setattr(matchers, "MAX_ANSWER_S", 0.05)
        assert constraint.mask([1]) is None
        time.sleep(0.1)
        with pytest.raises(TimeoutError, match="expected an answer within"):
            constraint.mask([1])
    os.kill(pid, signal.SIGKILL)
    until(lambda: forks(grammars) == [], "the process has ended")


def test_a_mask_may_be_asked_for_again(grammars: Grammars) -> None:
    """Bug: a mask was given away once. Who asked again, because it had not looked, waited for ever."""
    with closing(grammars.constraint(of({"const": 1}))) as constraint:
        first = wait_for_mask(constraint, [])
        assert constraint.mask([]) is first
        assert wait_for_mask(constraint, first.nonzero()[0].tolist()) is not first


@pytest.mark.bug("P23")
@pytest.mark.parametrize("size", [2048 + 64, 2048 - 3])
def test_only_tokens_that_both_have_come_under_a_schema(size: int) -> None:
    """A model may have more tokens than the tokenizer, without a text, or fewer."""
    random, end, output = np.random.default_rng(size), 2041, list[int]()
    with closing(Grammars(TINY / "tokenizer.json", size, (end,))) as grammars:
        schema: Json = {"type": "array", "items": {"type": "string", "maxLength": 9}, "maxItems": 9}
        with closing(grammars.constraint(of(schema))) as constraint:
            while output[-1:] != [end]:
                allowed = wait_for_mask(constraint, output).nonzero()[0]
                assert allowed[-1] < min(size, 2048)
                output.append(int(random.choice(allowed)))
    said = json.loads(tokenizers.Tokenizer.from_file(str(TINY / "tokenizer.json")).decode(output[:-1]))
    assert len(said) <= 9
    assert all(len(text) <= 9 for text in said)


async def test_what_was_checked_is_remembered(grammars: Grammars) -> None:
    """An agent sends its tools with every turn: they do not wait for a slot again, nor fail again slowly."""
    ended: list[str] = []

    async def checked(schema: Json, name: str) -> None:
        with suppress(BadGrammar):
            await grammars.check(of(schema), "me")
        ended.append(name)

    await grammars.check(of({"type": "integer"}), "me")
    occupying = [checked(costly(1_000_003 + i), "costly") for i in range(N_CHECKS)]
    others = checked({"type": "boolean"}, "new"), checked({"type": "integer"}, "known")
    await asyncio.gather(*occupying, *others)
    assert ended == ["known", *["costly"] * N_CHECKS, "new"]


async def test_one_check_is_enough_for_all(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 64 requests at once with the same tools, each compiled them again, and half were refused."""
    compiled: list[AnswerGrammar] = []
    monkeypatch.setattr(grammars, "_compile", compiled.append)
    checks = [asyncio.create_task(grammars.check(of({"type": "integer"}), "me")) for _ in range(64)]
    await asyncio.sleep(0)
    checks.pop(0).cancel()  # the one that began it
    await asyncio.gather(*checks)
    assert len(compiled) == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_process_outlives_the_server(number: signal.Signals) -> None:
    """Neither the root, nor one that computes, nor one that waits for its next token."""

    def asked(schema: Json) -> bytes:
        text = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
        more = {"stream": True, "ignore_eos": True}
        return http_bytes("/v1/responses", {"model": "default", "input": "hi", "text": text} | more)

    with (
        serve() as server,
        server.connect(asked({"type": "array", "items": {"type": "integer"}})) as answering,
        server.connect(asked(costly())),
    ):
        assert answering.recv(1)
        until(lambda: len(children(server.pid)) >= 2, "processes follow the grammars")
        pids = children(server.pid)
        server.interrupt(number)
        if number == signal.SIGTERM:
            server.interrupt(number)  # the second one ends the grace
        server.exit_status()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "all have ended")
