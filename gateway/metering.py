"""Usage metering: usage objects to counts of tokens, and counts of tokens to costs.

    chunk --Meter.read()--> its usage object, counted and given its costs
    request --Ledger.settle()--> a line of the log, and totals

Authority: TelegramMessenger/cocoon, runners/helpers/CountTokens.cpp at b75d444, for the counters and the
formula; https://platform.openai.com/docs/api-reference for the names in a usage object.

Rules of this file:
1. Usage that was not seen is unknown, which is not 0.
2. A counter only grows: servers that send usage with every chunk are not counted twice.
3. What is not a count (a negative, a fraction, a word) is 0. Cached tokens are at most those of the prompt,
   reasoning tokens at most those of the completion.
4. Whatever becomes of a request, its usage is settled once: in the log, and in the totals of /health.
"""

import functools
import logging
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from channels import Usage

log = logging.getLogger("remote")

Document = dict[str, Any]  # a JSON object

MAX_COUNT = 2**53  # larger ones are not counts, and no float holds them


class TokenCounts(NamedTuple):
    prompt: int = 0
    cached: int = 0  # of the prompt's tokens
    completion: int = 0
    reasoning: int = 0  # of the completion's tokens


# fmt: off
#  place in a usage object of Chat Completions, of Responses, of single servers    count
PATHS = {
    "prompt_tokens":                              "prompt",
    "input_tokens":                               "prompt",
    "prompt_tokens_details.cached_tokens":        "cached",
    "input_tokens_details.cached_tokens":         "cached",
    "completion_tokens":                          "completion",
    "output_tokens":                              "completion",
    "completion_tokens_details.reasoning_tokens": "reasoning",
    "output_tokens_details.reasoning_tokens":     "reasoning",
    "reasoning_tokens":                           "reasoning",
}
# fmt: on


def usage_of(document: Document) -> Document | None:
    """Return the usage object of a chunk, or of a Responses event; None: it has none."""
    usage = member(document.get("response", document), "usage")
    return usage if isinstance(usage, dict) else None


def member(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None


def read_counts(usage: Document) -> TokenCounts:
    """Return the counts in a usage object; if a count is there twice, the larger one: rule 3."""
    counts = dict.fromkeys(TokenCounts._fields, 0)
    for path, name in PATHS.items():
        value: Any = functools.reduce(member, path.split("."), usage)
        if type(value) is int and 0 <= value <= MAX_COUNT:
            counts[name] = max(counts[name], value)
    prompt, cached, completion, reasoning = counts.values()
    return TokenCounts(prompt, min(cached, prompt), completion, min(reasoning, completion))


class Prices(NamedTuple):
    """What tokens cost; `--price` sets them."""

    per_token: int = 0
    multipliers: TokenCounts = TokenCounts(10_000, 10_000, 10_000, 10_000)  # in ten-thousandths
    coefficient: int = 1000  # of all tokens, in thousandths

    def adjusted(self, counts: TokenCounts) -> TokenCounts:
        """Weight the counts. Each token is in one of them: `prompt` is without the cached tokens,
        `completion` without those of the reasoning.

        n_tokens * (coefficient * 0.001) * multiplier * 0.0001, in doubles, cut toward zero: the order of the
        products is part of the formula.
        """
        prompt, cached, completion, reasoning = counts
        disjoint = (prompt - cached, cached, completion - reasoning, reasoning)
        weighted = [
            int(n_tokens * (self.coefficient * 0.001) * multiplier * 0.0001)
            for n_tokens, multiplier in zip(disjoint, self.multipliers, strict=True)
        ]
        return TokenCounts(*weighted)

    def costs(self, counts: TokenCounts) -> dict[str, int]:
        """Return the members that a usage object is given."""
        adjusted = self.adjusted(counts)
        prompt_cost = (adjusted.prompt + adjusted.cached) * self.per_token
        total_cost = sum(adjusted) * self.per_token
        return {
            "prompt_total_cost": prompt_cost,
            "completion_total_cost": total_cost - prompt_cost,
            "total_cost": total_cost,
        }


@dataclass
class Meter:
    """Counts the tokens of one request; without `prices` nothing is given a cost."""

    prices: Prices | None = None
    counts: TokenCounts | None = None  # None: no usage was seen

    def read(self, usage: Document) -> None:
        """Count a usage object, and give it its costs in place."""
        counts = read_counts(usage)
        largest = map(max, counts, self.counts or counts)  # rule 2
        self.counts = TokenCounts(*largest)
        if self.prices:
            usage |= self.prices.costs(self.counts)

    def usage(self) -> Usage | None:
        if self.counts is None:
            return None
        prompt, cached, completion, reasoning = self.counts
        return Usage(prompt, completion, reasoning, cached)

    def used(self) -> dict[str, int]:
        """Return the adjusted counts, their sum and its cost, for the log; nothing if they are unknown."""
        if self.counts is None:
            return {}
        adjusted = (self.prices or Prices()).adjusted(self.counts)
        used = adjusted._asdict() | {"total": sum(adjusted)}
        if self.prices:
            used["cost"] = used["total"] * self.prices.per_token
        return used


Outcome = Literal["done", "error", "disconnect"]


class Ledger:
    """The tokens that were used, request by request, and their totals since the start."""

    def __init__(self, prices: Prices | None = None) -> None:
        self.prices = prices
        # All of them from the start: the rate of a counter needs its zero.
        names = ("done", "error", "disconnect", "usage_unknown", "total")
        self.totals = Counter({f"relayed_{name}": 0 for name in names})

    def settle(self, model: str, upstream: str, outcome: Outcome, meter: Meter) -> None:
        """Enter a request, once, whatever became of it."""
        used = meter.used()
        summary = " ".join(f"{name}={value}" for name, value in used.items()) or "unknown (null)"
        log.info("%s of %s: %s, usage: %s", model, upstream or "no upstream", outcome, summary)
        entered = used | {outcome: 1, "usage_unknown": int(not used)}
        self.totals.update({f"relayed_{name}": value for name, value in entered.items()})
