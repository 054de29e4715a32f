"""Our parser beside that of gpt-oss's makers, delta for delta.

tests/harmony.json, written by tests/harmony.py of commit c9a91f3 with openai-harmony, has legal outputs, and
some with a token dropped, doubled, moved or added. A row is the tokens, and what their parser says at each:
[number of the token, channel or "call NAME", text], or at last the error that it raises.
"""

import json
from typing import Any

import pytest

from channels import Arguments, Call, Delta, Parser, Piece
from dialects import families
from helpers.serving import ROOT

NAMES = ["functions.get_weather", "functions.web-browsing", "python"]
MARKERS = ["<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"]
ROWS: list[dict[str, Any]] = json.loads((ROOT / "tests" / "harmony.json").read_text(encoding="utf-8"))
DIALECT = families.find(families.DIALECTS["harmony"], MARKERS, "", tools=True)
KNOWN = {"analysis", "commentary", "final"} | {f"call {name.removeprefix('functions.')}" for name in NAMES}


def ours(tokens: list[str]) -> list[list[Any]]:
    """What our parser says at each token; {} of a call without arguments is left out, as theirs has it."""
    parser, found, who = Parser(DIALECT, DIALECT.start), list[list[Any]](), ""
    for n, token in enumerate(tokens):
        for output in parser.feed(Piece(token, token if token in MARKERS else "")):
            match output:
                case Call(name):
                    who = f"call {name}"
                case Arguments(text) if token not in MARKERS:
                    found.append([n, who, text])
                case Delta(channel, text) if token not in MARKERS:
                    found.append([n, channel, text])
    return found


@pytest.mark.bug("E13", "E16")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: "".join(row["tokens"]))
def test_what_the_makers_parser_says(row: dict[str, Any]) -> None:
    """From some damage on theirs raises, or takes a marker for text, any word for a channel, a word without
    "to=" for a recipient; there ours has its own rules (test_channels.py), and shows no markup.
    """
    sound = [who in KNOWN and not any(m in text for m in MARKERS) for _, who, text in row["said"]]
    n_sound = [*sound, False].index(False)
    found = ours(row["tokens"])
    theirs = row["said"] if row["legal"] else row["said"][: len(found)]  # ours drops what follows an object
    n = None if row["legal"] or n_sound >= len(theirs) else n_sound
    assert found[:n] == theirs[:n]
    assert not any(marker in text for _, _, text in found for marker in MARKERS)
