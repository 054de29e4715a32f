"""Usage objects to counts of tokens, and counts to what they cost.

    chunk, completion or Responses event --Meter.read()--> its usage, counted and with its costs

Authority: TelegramMessenger/cocoon, runners/helpers/CountTokens.cpp at b75d444, for the counters and the
formula; https://platform.openai.com/docs/api-reference for the names in a usage object.

Rules of this file:
1. Usage that was not seen is unknown, which is not 0.
2. A counter only grows: servers that send usage with every chunk are not counted twice.
3. What is no count (a negative, a fraction, a word) is 0; of what is cached no more counts than the prompt
   has, of reasoning no more than the completion.

Not here: which documents go by (relay.py), what becomes of the sums (remote.py).
"""

from typing import Any, NamedTuple

Document = dict[str, Any]

MAX_COUNT = 2**53  # larger ones are no counts, and no float holds them


class Counts(NamedTuple):
    prompt: int = 0
    cached: int = 0  # of the prompt
    completion: int = 0
    reasoning: int = 0  # of the completion

    def capped(self) -> "Counts":
        """A part is no more than its whole, whatever a server says: else the rest would cost less than 0."""
        cached, reasoning = min(self.cached, self.prompt), min(self.reasoning, self.completion)
        return self._replace(cached=cached, reasoning=reasoning)


# Where each of them stands in a usage object: chat's names, then those of Responses.
PATHS = (
    ("prompt_tokens", "input_tokens"),
    ("prompt_tokens_details.cached_tokens", "input_tokens_details.cached_tokens"),
    ("completion_tokens", "output_tokens"),
    (
        "completion_tokens_details.reasoning_tokens",
        "reasoning_tokens",
        "output_tokens_details.reasoning_tokens",
    ),
)


def usage_of(found: Document) -> Document | None:
    """The usage object of a chunk, a completion, a Responses event or a response."""
    for holder in (found, found.get("response")):
        if isinstance(holder, dict) and isinstance(holder.get("usage"), dict):
            usage: Document = holder["usage"]
            return usage
    return None


def _count(usage: Document, path: str) -> int:
    """What stands at a path; 0 for whatever is no count."""
    value: Any = usage
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value if type(value) is int and 0 <= value <= MAX_COUNT else 0


class Prices(NamedTuple):
    """What tokens cost."""

    per_token: int = 0
    multipliers: Counts = Counts(10_000, 10_000, 10_000, 10_000)  # in ten-thousandths
    coefficient: int = 1000  # of the worker, in thousandths

    def adjusted(self, counts: Counts) -> Counts:
        """Each kind of token apart, weighed: no token is in two of them."""
        apart = Counts(
            counts.prompt - counts.cached,
            counts.cached,
            counts.completion - counts.reasoning,
            counts.reasoning,
        )
        # The order of the products is part of the formula: they are doubles, and cut toward zero.
        weighed = (
            int(n * (self.coefficient * 0.001) * multiplier * 0.0001)
            for n, multiplier in zip(apart, self.multipliers, strict=True)
        )
        return Counts(*weighed)

    def costs(self, counts: Counts) -> dict[str, int]:
        """The members that a usage object is given."""
        prompt, cached, completion, reasoning = self.adjusted(counts)
        return {
            "prompt_total_cost": (prompt + cached) * self.per_token,
            "completion_total_cost": (completion + reasoning) * self.per_token,
            "total_cost": (prompt + cached + completion + reasoning) * self.per_token,
        }


class Meter:
    """The tokens of one request; `prices` None: nothing is given a cost."""

    def __init__(self, prices: Prices | None = None) -> None:
        self.counts: Counts | None = None  # None: no usage was seen
        self.prices = prices

    def read(self, found: Document) -> Document | None:
        """Count a document's usage and give it its costs; the usage, if it has one."""
        usage = usage_of(found)
        if usage is not None:
            seen = Counts(*(max(_count(usage, path) for path in paths) for paths in PATHS))
            self.counts = Counts(*map(max, seen, self.counts or seen)).capped()
            usage |= self.prices.costs(self.counts) if self.prices else {}
        return usage

    def used(self) -> dict[str, int | None]:
        """For the log: the adjusted counts and their sum, None where they are unknown."""
        if self.counts is None:
            return dict.fromkeys((*Counts._fields, "total"))
        adjusted = (self.prices or Prices()).adjusted(self.counts)
        return adjusted._asdict() | {"total": sum(adjusted)}
