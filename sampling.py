"""Logits to a token: penalties, temperature, top-k, top-p, min-p, and the draw.

    logits (vocab_size,), Context --pick()--> Choice

Authority: https://platform.openai.com/docs/api-reference/chat/create for penalties and logit_bias; top-p is
arXiv 1904.09751, repetition_penalty 1909.05858, min-p 2407.01082.

Rules of this file:
1. What is drawn depends on logits, seed, choice and the number of the output token alone.
2. Logprobs are the model's own, before temperature, penalties and bias.

Not here: the logits (model.py), masks of a grammar (structured_output.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]


@dataclass(frozen=True)
class Sampling:
    """How to choose a token. The defaults choose from the model's own distribution."""

    temperature: float = 1.0  # 0 = the likeliest token
    top_p: float = 1.0
    top_k: int = 0  # 0 = all
    min_p: float = 0.0
    seed: int = 0
    choice: int = 0  # which of the request's n choices: they share the seed and nothing else
    presence_penalty: float = (
        0.0  # both as platform.openai.com/docs/api-reference/chat/create has them: of the output
    )
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0  # arXiv 1909.05858: of prompt and output, as in generation_config.json
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    n_top_logprobs: int | None = None  # None = no logprobs, 0 = the chosen token's only


class Context(NamedTuple):
    """What a choice depends on besides the logits."""

    sampling: Sampling
    prompt: Sequence[int]
    output: Sequence[int]
    mask: NDArray[np.bool_] | None = None  # (vocab_size,) the tokens that may be chosen; None: all
    n_unread: int = 0  # tokens at the end of the output that are chosen, but not read: of chained spans only

    @property
    def n_output(self) -> int:
        """The number of the token to choose, from 0."""
        return len(self.output) + self.n_unread


class Choice(NamedTuple):
    """A chosen token; logprobs are the model's own, before temperature, penalties and bias."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()  # (token_id, logprob), likeliest first


# --- sampling -----------------------------------------------------------------------------------------------


def pick_token(raw: Array, context: Context) -> Choice:
    """Choose a token by its logits, (vocab_size,)."""
    if not np.isfinite(raw.max()):
        raise ArithmeticError("the model's logits are no finite numbers")
    s = context.sampling
    logits = penalised(raw, context)
    if s.temperature == 0:
        token_id = int(logits.argmax())
    else:
        token_id = draw(filtered(logits, s), uniform(s.seed, s.choice, context.n_output))
    if s.n_top_logprobs is None:
        return Choice(token_id)
    logprobs = raw - raw.max()
    logprobs -= np.log(np.exp(logprobs, dtype=np.float64).sum())
    return Choice(token_id, float(logprobs[token_id]), likeliest(logprobs, s.n_top_logprobs))


def penalised(logits: Array, context: Context) -> Array:
    s = context.sampling
    if s.repetition_penalty != 1 or s.presence_penalty or s.frequency_penalty or s.logit_bias:
        logits = logits.copy()
    if s.repetition_penalty != 1:
        seen = np.unique(np.array([*context.prompt, *context.output], np.int64))
        logits[seen] = np.where(
            logits[seen] > 0, logits[seen] / s.repetition_penalty, logits[seen] * s.repetition_penalty
        )
    if (s.presence_penalty or s.frequency_penalty) and context.output:
        said, count = np.unique(np.array(context.output, np.int64), return_counts=True)
        logits[said] -= (s.presence_penalty + s.frequency_penalty * count).astype(np.float32)
    if s.logit_bias:
        logits[list(s.logit_bias)] += np.array(list(s.logit_bias.values()), np.float32)
    return logits if context.mask is None else np.where(context.mask, logits, np.float32(-np.inf))


def filtered(logits: Array, s: Sampling) -> NDArray[np.float64]:
    """Unnormalised probabilities, (vocab_size,), 0 where top_k, top_p or min_p forbid the token.

    All three keep the likeliest tokens, so each is a threshold. top_p counts what top_k has left, as vLLM
    does.
    """
    with np.errstate(over="ignore"):  # a temperature near 0 leaves the likeliest token alone
        p: NDArray[np.float64] = np.exp(
            (logits - logits.max()).astype(np.float64) / s.temperature
        )  # at most 1
    threshold = s.min_p
    if 0 < s.top_k < len(p):
        threshold = max(threshold, np.partition(p, -s.top_k)[-s.top_k])
    if s.top_p < 1:
        total = p[p >= threshold].sum()
        tail = (1 - s.top_p) * total / len(p)  # all tokens below this together do not make up 1 - top_p
        falling = np.sort(p[p >= max(threshold, tail)])[::-1]
        n_nucleus = np.searchsorted(np.cumsum(falling), s.top_p * total) + 1
        threshold = falling[: int(n_nucleus)][-1]
    p[p < threshold] = 0
    return p


def draw(p: NDArray[np.float64], u: float) -> int:
    """The token in whose part of [0, sum of p) the number u * sum lies."""
    total = np.cumsum(p)
    return int(np.searchsorted(total, min(u * total[-1], np.nextafter(total[-1], 0)), side="right"))


def uniform(seed: int, choice: int, number: int) -> float:
    """A number in [0, 1) that depends on its arguments alone: Philox is a function of key and counter."""
    key = np.array([seed & 0xFFFF_FFFF_FFFF_FFFF, choice], np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key, counter=number)).random())


def likeliest(logprobs: Array, n: int) -> tuple[tuple[int, float], ...]:
    if n == 0:
        return ()
    unordered = np.argpartition(logprobs, -n)[-n:]
    token_ids = unordered[np.argsort(-logprobs[unordered], kind="stable")]
    return tuple((int(token_id), float(logprobs[token_id])) for token_id in token_ids)
