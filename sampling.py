"""Logits to a token: penalties, temperature, top-k, top-p, min-p, and the draw.

    logits --apply_penalties()--> logits --candidates()--> token ids, and of these
    logits --apply_temperature()--> probabilities --apply_top_p()--> probabilities --draw()--> one of them
    logits, Context --pick_token()--> Choice, by all of these

Authority: https://platform.openai.com/docs/api-reference/chat/create for penalties, logit_bias and logprobs;
each other method names its paper.

Rules of this file:
1. What is drawn depends on the logits, on the request (its parameters, its seed, which of its n choices this
   is), on the output so far and on the mask: never on the other sequences of the batch, nor on how the output
   was cut into steps.
2. Logprobs are the model's own, before temperature, penalties and bias.
3. These functions are the spec: devices/cpu_sampling.py and kernels.cu choose the same tokens, faster. So the
   result must not hang on the order of a sum or on whose exponential it is: probabilities are float32, by
   exp(), which the former compiles; their sums are float64.

Why functions over one row of logits, and not processors that each rewrite all logits: top_k, top_p and min_p
each keep the likeliest tokens, so each is a threshold, and most tokens never reach the exponential. The price
is that the order of the steps is fixed here.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
NO_TOKEN = -1  # the choice if logits are not finite numbers: that sequence fails, and no other


@dataclass(frozen=True)
class Sampling:
    """How to choose the tokens of a request; the defaults draw from the model's own distribution."""

    temperature: float = 1.0  # 0: the likeliest token (greedy)
    top_p: float = 1.0
    top_k: int = 0  # 0, -1: all tokens
    min_p: float = 0.0
    seed: int = 0
    choice: int = 0  # which of the request's n choices: they share the seed and nothing else
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    n_top_logprobs: int | None = None  # None: no logprobs; 0: the chosen token's only


class Context(NamedTuple):
    """Everything besides the logits on which the choice of one token depends."""

    sampling: Sampling
    prompt: Sequence[int] | NDArray[np.int64]  # token ids
    output: Sequence[int]  # token ids of the answer, as far as the host has read them
    mask: NDArray[np.bool_] | None = None  # (vocab_size,) the tokens that structured output allows; None: all
    n_unread: int = 0  # tokens that the device has chosen in steps that the host has not read

    # --- the fold of this class: a request goes on with the next one ----------------------------------------

    @property
    def n_output(self) -> int:
        """The number of the token to choose, from 0."""
        return len(self.output) + self.n_unread


class Choice(NamedTuple):
    """A chosen token, with the logprobs that were asked for."""

    token_id: int  # or NO_TOKEN
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()  # (token_id, logprob), likeliest first


def pick_token(logits: Array, context: Context) -> Choice:
    """Choose a token by the logits, (vocab_size,). A pure function: any thread may call it."""
    sampling = context.sampling
    penalised = apply_penalties(logits, context)
    if not np.isfinite([logits.max(), penalised.max()]).all():  # -inf: a mask that allows nothing
        return Choice(NO_TOKEN)
    token_id = sample(penalised, context) if sampling.temperature else int(penalised.argmax())
    if sampling.n_top_logprobs is None:
        return Choice(token_id)
    logprobs = log_softmax(logits)  # the model's own: rule 2
    top = top_logprobs(logits, logprobs, sampling.n_top_logprobs)
    return Choice(token_id, float(logprobs[token_id]), top)


# --- logits to probabilities --------------------------------------------------------------------------------


def apply_penalties(logits: Array, context: Context) -> Array:
    """Return the logits after penalties, bias and mask, applied in this order.

    repetition_penalty counts tokens of the prompt and the output: https://arxiv.org/abs/1909.05858, section
    4.1, as transformers computes it. presence_penalty and frequency_penalty count tokens of the output;
    https://platform.openai.com/docs/api-reference/chat/create has both, and logit_bias.
    """
    sampling = context.sampling
    logits = logits.copy()
    if sampling.repetition_penalty != 1:
        is_repeated = np.zeros(len(logits), np.bool_)
        is_repeated[np.asarray(context.prompt, np.int64)] = True
        is_repeated[np.asarray(context.output, np.int64)] = True
        repeated = logits[is_repeated]
        lowered = repeated / sampling.repetition_penalty
        logits[is_repeated] = np.where(repeated > 0, lowered, repeated * sampling.repetition_penalty)
    if sampling.presence_penalty or sampling.frequency_penalty:
        token_ids, counts = np.unique(np.array(context.output, np.int64), return_counts=True)
        penalties = sampling.presence_penalty + sampling.frequency_penalty * counts
        logits[token_ids] -= penalties.astype(np.float32)
    for token_id, bias in sampling.logit_bias.items():
        logits[token_id] += bias
    if context.mask is not None:
        logits[~context.mask] = -np.inf
    return logits


# --- the fold: a plain streamed request passes what stands above --------------------------------------------

NEGLIGIBLE = 1e-17  # a probability relative to the likeliest token's: 10^5 such tokens add up to 10^-12


def sample(logits: Array, context: Context) -> int:
    """Draw a token from the distribution that the request asks for."""
    sampling = context.sampling
    token_ids = candidates(logits, sampling)
    probs = apply_top_p(apply_temperature(logits[token_ids], sampling.temperature), sampling.top_p)
    u = philox_uniform(sampling.seed, sampling.choice, context.n_output)
    return int(token_ids[draw(probs, u)])


# --- logits to probabilities --------------------------------------------------------------------------------


def margin(sampling: Sampling) -> np.float32:
    """How far a logit may be below the largest: min_p keeps what is nearer, and nothing else is negligible.

    min_p: https://arxiv.org/abs/2407.01082.
    """
    return np.float32(-math.log(max(sampling.min_p, NEGLIGIBLE)) * sampling.temperature)


def candidates(logits: Array, sampling: Sampling) -> NDArray[np.int64]:
    """Return the ids of the tokens that may be chosen: top_k and min_p keep them, none is negligible.

    Both keep the likeliest tokens, so both are thresholds. top_k: https://arxiv.org/abs/1805.04833, section
    5.4.
    """
    least = logits.max() - margin(sampling)
    if 0 < sampling.top_k < len(logits):
        least = max(least, np.sort(logits)[-sampling.top_k])
    return np.flatnonzero(logits >= least)


def apply_temperature(logits: Array, temperature: float) -> Array:
    """Return exp(logit / temperature), scaled so that the likeliest token has 1."""
    scaled: Array = logits - logits.max()
    with np.errstate(over="ignore"):  # near 0 only the likeliest token keeps a probability above 0
        scaled /= max(temperature, 1e-30)  # which float32 holds
    return exp(scaled)


def exp(x: Array) -> Array:
    """e^x for x <= 88: 2^n times the Taylor series of e^r, |r| <= ln(2) / 2; 0 below -87.

    np.exp has other bits on other processors. This has the same on all, also where Numba compiles it for the
    numbers of an array one by one.
    """
    x = np.maximum(x, UNDERFLOW)
    n = np.floor(x * LOG2_E + HALF)
    r = x - n * LN_2_UPPER - n * LN_2_LOWER
    series: Any = TAYLOR[0]
    for c in TAYLOR[1:]:
        series = series * r + c
    return series * np.int32(np.int32(n + BIAS) << np.int32(23)).view(np.float32)  # type: ignore[no-any-return]


HALF = np.float32(0.5)
BIAS = np.float32(127)  # of a float32's exponent
UNDERFLOW = np.float32(-88)  # at or below this x, e^x becomes 0; e^88 is still finite
LOG2_E = np.float32(1 / math.log(2))
LN_2_UPPER = np.float32(355 / 512)  # has so few bits that n times it is exact
LN_2_LOWER = np.float32(math.log(2) - 355 / 512)
TAYLOR = tuple(np.float32(1 / math.factorial(k)) for k in range(7, -1, -1))


def apply_top_p(probs: Array, top_p: float) -> Array:
    """Return the probabilities, 0 for each token that top_p drops.

    Nucleus sampling, https://arxiv.org/abs/1904.09751, section 3.1, keeps the fewest likely tokens that hold
    top_p of the whole: a threshold too. As in vLLM, the whole is the tokens that min_p and top_k have kept.
    """
    if top_p == 1:
        return probs
    descending = np.sort(probs)[::-1]
    ends = np.cumsum(descending, dtype=np.float64)
    threshold = descending[np.searchsorted(ends, top_p * ends[-1])]
    return probs * (probs >= threshold)  # type: ignore[no-any-return]


# --- the draw -----------------------------------------------------------------------------------------------


def draw(probs: Array, u: float) -> int:
    """Draw a token: the inverse of the cumulative distribution, in the order of token ids, at u in [0, 1)."""
    ends = np.cumsum(probs, dtype=np.float64)
    position = min(u * ends[-1], np.nextafter(ends[-1], 0))  # rounding must not reach the end
    return int(np.searchsorted(ends, position, side="right"))


def philox_uniform(seed: int, choice: int, number: int) -> float:
    """Return a number in [0, 1) that depends on nothing but the arguments.

    Philox is a function of key and counter: "Parallel Random Numbers: As Easy as 1, 2, 3" (Salmon et al.,
    2011).
    """
    key = np.array([seed & 0xFFFF_FFFF_FFFF_FFFF, choice], np.uint64)  # a seed may be negative
    return float(np.random.Generator(np.random.Philox(key=key, counter=number)).random())


# --- logprobs -----------------------------------------------------------------------------------------------


def log_softmax(logits: Array) -> Array:
    """log(exp(x) / sum(exp(x))), summed in float64."""
    logprobs: Array = logits - logits.max()
    logprobs -= np.log(np.exp(logprobs).sum(dtype=np.float64))
    return logprobs


def top_logprobs(logits: Array, logprobs: Array, n: int) -> tuple[tuple[int, float], ...]:
    """Return the n likeliest tokens as (token_id, logprob), likeliest first; of equals the smallest ids."""
    token_ids = np.argsort(-logits, kind="stable")[:n]
    return tuple(zip(token_ids.tolist(), logprobs[token_ids].tolist(), strict=True))
