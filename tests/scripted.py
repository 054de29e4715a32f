"""A model that says what it is told: an engine without weights, and a vocabulary of given tokens.

For tests of what comes behind the engine. A step may hold any number of tokens, as with speculative decoding,
and the engine's contract holds: a stop token or the last one that is wanted ends the step.
"""

import json
from collections.abc import AsyncGenerator, Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, cast

import tokenizers
from tokenizers import AddedToken, decoders, models

from channels import REASONING_MARKERS, TOOL_MARKERS
from engine import Engine, Job, Step
from model import Choice
from tokenizer import BYTE_OF, Tokenizer

MARKERS = (*REASONING_MARKERS, *TOOL_MARKERS)
END = "<|im_end|>"
SPELLED = {byte: character for character, byte in BYTE_OF.items()}


class ScriptedEngine:
    """Answers every job with the same tokens, as many a step as `step_sizes` says, over and over."""

    def __init__(self, tokenizer: Tokenizer, token_ids: Sequence[int], step_sizes: Sequence[int] = (1,)) -> None:
        end = frozenset([tokenizer.added[END]])
        self.config = SimpleNamespace(eos_token_ids=end, vocab_size=tokenizer.vocab_size)
        self.max_seq_len = 2048
        self._choices = [Choice(i, -1.0 - n) for n, i in enumerate(token_ids)]
        self._step_sizes = step_sizes

    async def generate(self, job: Job) -> AsyncGenerator[Step]:
        choices = self._choices[: job.max_tokens]
        stops = (n for n, choice in enumerate(choices, 1) if choice.token_id in job.stop_token_ids)
        n_stop = next(stops, None)
        choices = choices[:n_stop]
        for n in (size for _ in choices for size in self._step_sizes):
            step, choices = choices[:n], choices[n:]
            if choices:
                yield Step(step)
            else:
                yield Step(step, "length" if n_stop is None else "stop")
                return

    def as_engine(self) -> Engine:
        return cast(Engine, self)


def vocabulary(tokens: Iterable[bytes]) -> Tokenizer:
    """All bytes and these tokens; behind them the markers and the end, as added tokens."""
    words = dict.fromkeys([*(bytes([n]) for n in range(256)), *tokens])
    vocab = {"".join(SPELLED[byte] for byte in word): n for n, word in enumerate(words)}
    library = tokenizers.Tokenizer(models.BPE(vocab, []))
    library.decoder = decoders.ByteLevel()
    library.add_tokens([AddedToken(marker, normalized=False) for marker in MARKERS])
    library.add_special_tokens([AddedToken(END, normalized=False)])
    with TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        path.write_text(library.to_str())
        return Tokenizer(path)


def ids_of(tokenizer: Tokenizer, tokens: Sequence[bytes]) -> list[int]:
    """Of tokens as they are, markers too; a token is never found by its spelling alone."""
    ids = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    return [ids[token] for token in tokens]


def without_null(value: Any) -> Any:
    """For TOML, which has no null."""
    return json.loads(json.dumps(value), object_pairs_hook=lambda pairs: {k: "null" if v is None else v for k, v in pairs})
