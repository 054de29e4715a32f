"""Usage metering: usage objects to counts of tokens, and counts of tokens to costs.

    usage object of a chunk --Meter.read()--> counted, and given its costs
    request --Meter.settle()--> a line of the log, and totals

Authority: TelegramMessenger/cocoon, runners/helpers/CountTokens.cpp at b75d444, for the counters and the
costs; https://platform.openai.com/docs/api-reference for the names in a usage object.

Rules of this file:
1. Usage that was not seen is unknown, which is not 0.
2. A count only grows: servers that send usage with every chunk are not counted twice.
3. A value that is no count (a negative, a fraction, a word) is 0. Cached tokens are at most those of the
   prompt, reasoning tokens at most those of the completion.
4. The usage of each request is settled once, also if it fails: in the log, and in the totals of /health.
"""

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from channels import Usage
from completions import Chunk

log = logging.getLogger("remote")

MAX_COUNT = 2**53  # larger ones are not counts, and no float holds them

# fmt: off
#  in a usage object or its details   field of Usage
COUNTS = {
    "prompt_tokens":                  "input_tokens",
    "input_tokens":                   "input_tokens",  # the Responses API's name; so is output_tokens
    "completion_tokens":              "output_tokens",
    "output_tokens":                  "output_tokens",
    "cached_tokens":                  "cached_tokens",
    "reasoning_tokens":               "reasoning_tokens",
}
# fmt: on


# All counters from the start: the rate of a counter needs its zero.
NO_TOTALS = dict.fromkeys(
    ("relayed_done", "relayed_error", "relayed_disconnect", "relayed_usage_unknown", "relayed_total"), 0
)
Outcome = Literal["done", "error", "disconnect"]


@dataclass
class Meter:
    """Counts the tokens of one request."""

    price: int | None = None  # of one token; None: usage gets no costs
    model: str = ""
    totals: Counter[str] = field(default_factory=Counter)  # of all requests
    usage: Usage | None = None  # None: none was seen
    upstream: str = "no upstream"  # the URL of the upstream that answers

    def read(self, document: Chunk) -> None:
        """Count a usage object, and give it its costs in place."""
        usage = self.usage or Usage(0, 0)
        for members in (document, *document.values()):
            for name, count in COUNTS.items():
                value = members.get(name) if isinstance(members, dict) else None
                if type(value) is int and getattr(usage, count) < value <= MAX_COUNT:
                    setattr(usage, count, value)
        usage.cached_tokens = min(usage.cached_tokens, usage.input_tokens)
        usage.reasoning_tokens = min(usage.reasoning_tokens, usage.output_tokens)
        self.usage = usage
        if self.price is not None:
            prompt_cost, completion_cost = usage.input_tokens * self.price, usage.output_tokens * self.price
            document["prompt_total_cost"] = prompt_cost
            document["completion_total_cost"] = completion_cost
            document["total_cost"] = prompt_cost + completion_cost

    def used(self) -> dict[str, int]:
        """Return the tokens, each in one of the counts, their sum and its cost; nothing if unknown.

        The order is that of the line in the log: prompt, cached, completion, reasoning, total, cost.
        """
        usage = self.usage
        if usage is None:
            return {}
        used = {
            "prompt": usage.input_tokens - usage.cached_tokens,
            "cached": usage.cached_tokens,
            "completion": usage.output_tokens - usage.reasoning_tokens,
            "reasoning": usage.reasoning_tokens,
            "total": usage.input_tokens + usage.output_tokens,
        }
        if self.price is not None:
            used["cost"] = used["total"] * self.price
        return used

    def settle(self, outcome: Outcome) -> None:
        """Log the request, which has ended, and add it to the totals. Called once, also if it failed."""
        used = self.used()
        summary = " ".join(f"{name}={value}" for name, value in used.items()) or "unknown (null)"
        log.info("%s of %s: %s, usage: %s", self.model, self.upstream, outcome, summary)
        entered = used | {outcome: 1, "usage_unknown": int(not used)}
        self.totals.update({f"relayed_{name}": value for name, value in entered.items()})
