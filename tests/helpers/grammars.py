"""A grammar followed token by token, in the process that the server would use.

Followed(grammars_of(tokenizer), Lark) --mask()--> tokens that may come next --advance()--> and so on
"""

import select
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dialects.matchers import Grammars
from dialects.structured_output import AnswerGrammar
from helpers.limits import PATIENCE_S

TOKENIZER = Path(__file__).parents[1] / "models" / "tiny" / "tokenizer.json"
STARTED: list[Grammars] = []


@cache
def grammars_of(tokenizer: Path = TOKENIZER, vocab_size: int = 2048) -> Grammars:
    """Return what follows grammars of a vocabulary. Its processes end with the test module: conftest.py."""
    STARTED.append(Grammars(tokenizer, vocab_size, (2041,)))
    return STARTED[-1]


def costly(multiple: int = 99_999_989) -> dict[str, Any]:
    """Return a schema that takes minutes to compile, and gigabytes."""
    return {"type": "integer", "multipleOf": multiple, "minimum": -1e15, "maximum": 1e15}


def end_all() -> None:
    """End the processes; whoever asks for a mask again starts them again."""
    for grammars in STARTED:
        grammars.close()


class Followed:
    """A Constraint whose masks are waited for."""

    def __init__(self, grammars: Grammars, lark: str) -> None:
        self._constraint = grammars.constraint(AnswerGrammar(lark))
        self._output: list[int] = []
        self._constraint.mask([])  # asks for the first

    def mask(self) -> NDArray[np.bool_]:
        while (mask := self._constraint.mask(self._output)) is None:
            assert select.select([self._constraint], [], [], PATIENCE_S)[0], "the mask has not come"
        return mask

    def advance(self, token_id: int) -> None:
        self._output = [*self._output, token_id]

    def __enter__(self) -> "Followed":
        return self

    def __exit__(self, *_: Any) -> None:
        self._constraint.close()
