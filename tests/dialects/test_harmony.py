"""Our parser beside that of gpt-oss's makers, delta for delta.

tests/harmony.json was written by tests/harmony.py of commit c9a91f3 with the package openai-harmony: legal
outputs, and the same with a token dropped, doubled, moved or added. A row is the tokens, and what their
parser says at each: [number of the token, channel or "call NAME", text], or at last the error that it raises.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from channels import Arguments, Call, Delta, Output, Parser, Piece
from dialects import families
from helpers.serving import ROOT

Row = dict[str, Any]

NAMES = ["functions.get_weather", "functions.web-browsing", "python"]
MARKERS = ["<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"]
ROWS: list[Row] = json.loads((ROOT / "tests" / "harmony.json").read_text(encoding="utf-8"))
DIALECT = families.find(families.DIALECTS["harmony"], MARKERS, "", tools=True)


def ours(tokens: list[str]) -> list[list[Any]]:
    """What our parser says at each token, as the file has it.

    Of a call without arguments theirs says nothing, ours {}, which is left out.
    """
    parser, found, who = Parser(DIALECT, DIALECT.start), list[list[Any]](), ""
    steps = [parser.feed(Piece(token, token if token in MARKERS else "")) for token in tokens]
    for n, outputs in enumerate([*steps, parser.close(cut=False)]):
        for output in outputs:
            who = f"call {output.name}" if isinstance(output, Call) else who
            found += ([n, *delta] for delta in deltas(output, who))
    return [[n, who, text] for n, who, text in found if n < len(tokens) and tokens[n] not in MARKERS]


def deltas(output: Output, who: str) -> Iterator[list[str]]:
    match output:
        case Delta(channel, text, _):
            yield [channel, text]
        case Arguments(text):
            yield [who, text]


CHANNELS = {"analysis", "commentary", "final"}
KNOWN = CHANNELS | {f"call {name.removeprefix('functions.')}" for name in NAMES}


def n_sound(row: Row) -> int:
    """How many of their deltas mean something. From some damage on they raise, or take a marker for text, any
    word for a channel, a word without "to=" for a recipient; there ours has its own rules (test_channels.py).
    """
    unsound = (
        i
        for i, (_, who, text) in enumerate(row["said"])
        if who not in KNOWN or any(m in text for m in MARKERS)
    )
    return next(unsound, len(row["said"]))


LEGAL, DAMAGED = ([row for row in ROWS if row["legal"] == legal] for legal in (True, False))
READ, UNREAD = ([r for r in DAMAGED if (n_sound(r) == len(r["said"])) == sound] for sound in (True, False))


def test_there_are_enough_of_each() -> None:
    assert min(len(LEGAL), len(READ), len(UNREAD)) > 50


@pytest.mark.parametrize("row", LEGAL, ids=lambda row: "".join(row["tokens"]))
def test_legal_outputs(row: Row) -> None:
    assert ours(row["tokens"]) == row["said"]


@pytest.mark.parametrize("row", READ, ids=lambda row: "".join(row["tokens"]))
def test_damaged_outputs_that_they_read(row: Row) -> None:
    assert ours(row["tokens"]) == row["said"]


@pytest.mark.bug("E13", "E16")
@pytest.mark.parametrize("row", UNREAD, ids=lambda row: "".join(row["tokens"]))
def test_damaged_outputs_that_they_do_not_read(row: Row) -> None:
    """Ours goes on, and shows no markup; what was said before is the same."""
    found, n = ours(row["tokens"]), n_sound(row)
    assert found[:n] == row["said"][:n]
    assert not any(marker in text for _, _, text in found for marker in MARKERS)
