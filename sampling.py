"""Logits to a token: penalties, temperature, top-k, top-p, min-p, and the draw.

    logits --apply_penalties()--> logits --apply_temperature()--> probabilities --apply_top_k_top_p_min_p()-->
    probabilities --draw()--> token id          all together: logits, Context --pick_token()--> Choice

Authority: https://platform.openai.com/docs/api-reference/chat/create for penalties, logit_bias and logprobs;
each other method names its paper.

Rules of this file:
1. What is drawn depends on the logits, on the request (its parameters, its seed, which of its n choices this
   is), on the output so far and on the mask: never on the other sequences of the batch, nor on how the output
   was cut into steps.
2. Logprobs are the model's own, before temperature, penalties and bias.
3. Arithmetic on probabilities is float64, because it sums over the whole vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Probs = NDArray[np.float64]  # (vocab_size,), not normalised


@dataclass(frozen=True)
class Sampling:
    """How a request wants its tokens chosen; the defaults draw from the model's own distribution."""

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

    @cached_property
    def bias_arrays(self) -> tuple[NDArray[np.int64], Array]:
        """logit_bias as token ids and biases, made once for all steps."""
        token_ids = np.array(list(self.logit_bias), np.int64)
        biases = np.array(list(self.logit_bias.values()), np.float32)
        return token_ids, biases


class Context(NamedTuple):
    """What the choice of one token depends on besides its logits."""

    sampling: Sampling
    prompt: Sequence[int] | NDArray[np.int64]  # token ids
    output: Sequence[int]  # token ids of the answer, as far as the host has read them
    mask: NDArray[np.bool_] | None = None  # (vocab_size,) the tokens that structured output allows; None: all
    n_unread: int = 0  # output tokens that are chosen on the device, in steps that the host has not read

    @property
    def n_output(self) -> int:
        """The number of the token to choose, from 0."""
        return len(self.output) + self.n_unread


NO_TOKEN = -1  # chosen if the logits are not finite numbers: that sequence fails, and no other


class Choice(NamedTuple):
    """A chosen token, with the logprobs that were asked for."""

    token_id: int  # or NO_TOKEN
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()  # (token_id, logprob), likeliest first


def pick_token(logits: Array, context: Context) -> Choice:
    """Choose a token by the logits, (vocab_size,)."""
    if not np.isfinite(logits.max()):
        return Choice(NO_TOKEN)
    sampling = context.sampling
    penalised = apply_penalties(logits, context)
    if sampling.temperature == 0:
        token_id = int(penalised.argmax())
    else:
        probs = apply_temperature(penalised, sampling.temperature)
        probs = apply_top_k_top_p_min_p(probs, sampling)
        token_id = draw(probs, philox_uniform(sampling.seed, sampling.choice, context.n_output))
    if sampling.n_top_logprobs is None:
        return Choice(token_id)
    logprobs = log_softmax(logits)  # the model's own: rule 2
    return Choice(token_id, float(logprobs[token_id]), top_logprobs(logprobs, sampling.n_top_logprobs))


# --- logits to probabilities --------------------------------------------------------------------------------


def apply_penalties(logits: Array, context: Context) -> Array:
    """Return the logits, changed by penalties, bias and mask, in this order.

    repetition_penalty is for tokens of the prompt and the output: https://arxiv.org/abs/1909.05858, section
    4.1, as transformers has it. presence_penalty and frequency_penalty are for tokens of the output:
    https://platform.openai.com/docs/api-reference/chat/create, as is logit_bias.
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
    if sampling.logit_bias:
        token_ids, biases = sampling.bias_arrays
        logits[token_ids] += biases
    if context.mask is not None:
        logits[~context.mask] = -np.inf
    return logits


def apply_temperature(logits: Array, temperature: float) -> Probs:
    """Return exp(logit / temperature), scaled so that the likeliest token has 1."""
    with np.errstate(over="ignore"):  # near 0 only the likeliest token keeps a probability above 0
        probs: Probs = np.exp((logits - logits.max()).astype(np.float64) / temperature)
    return probs


def apply_top_k_top_p_min_p(probs: Probs, sampling: Sampling) -> Probs:
    """Return the probabilities, 0 for each token that top_k, top_p or min_p drops.

    All three keep the likeliest tokens, so each is a threshold; the likeliest token has probability 1 here.
    min_p: https://arxiv.org/abs/2407.01082. top_k: https://arxiv.org/abs/1805.04833, section 5.4. top_p,
    nucleus sampling: https://arxiv.org/abs/1904.09751, section 3.1; as in vLLM it is the last of them.
    """
    threshold = sampling.min_p
    if 0 < sampling.top_k < len(probs):
        k_th_largest = np.partition(probs, -sampling.top_k)[-sampling.top_k]
        threshold = max(threshold, k_th_largest)
    if sampling.top_p < 1:
        total = probs[probs >= threshold].sum()
        # All tokens below this threshold have less than 1 - top_p together: top_p drops them, unsorted.
        negligible = (1 - sampling.top_p) * total / len(probs)
        descending = np.sort(probs[probs >= max(threshold, negligible)])[::-1]
        n_nucleus = int(np.searchsorted(np.cumsum(descending), sampling.top_p * total)) + 1
        threshold = descending[:n_nucleus][-1]  # rounding may make n_nucleus one too many
    return np.where(probs < threshold, 0, probs)


# --- the draw -----------------------------------------------------------------------------------------------


def draw(probs: Probs, u: float) -> int:
    """Draw a token: the inverse of the cumulative distribution, in the order of token ids, at u in [0, 1)."""
    ends = np.cumsum(probs)
    position = min(u * ends[-1], np.nextafter(ends[-1], 0))  # rounding must not reach the end
    return int(np.searchsorted(ends, position, side="right"))


def philox_uniform(seed: int, choice: int, number: int) -> float:
    """Return a number in [0, 1) that depends on the arguments alone.

    Philox is a function of key and counter: "Parallel Random Numbers: As Easy as 1, 2, 3" (Salmon et al.,
    2011).
    """
    key = np.array([seed & 0xFFFF_FFFF_FFFF_FFFF, choice], np.uint64)  # a seed may be negative
    return float(np.random.Generator(np.random.Philox(key=key, counter=number)).random())


# --- logprobs -----------------------------------------------------------------------------------------------


def log_softmax(logits: Array) -> Array:
    """log(exp(x) / sum(exp(x))), summed in float64."""
    logprobs: Array = logits - logits.max()
    logprobs -= np.log(np.exp(logprobs, dtype=np.float64).sum())
    return logprobs


def top_logprobs(logprobs: Array, n: int) -> tuple[tuple[int, float], ...]:
    """Return the n likeliest tokens as (token_id, logprob), likeliest first."""
    if n == 0:
        return ()
    unordered = np.argpartition(logprobs, -n)[-n:]
    token_ids = unordered[np.argsort(-logprobs[unordered], kind="stable")]
    return tuple((int(token_id), float(logprobs[token_id])) for token_id in token_ids)
