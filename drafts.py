"""Tokens so far to what may come next: speculation by prompt lookup, without a second model.

    extend(tokens) ... drafts(n) --> the tokens that followed, the last time that the last two came

Authority: https://github.com/apoorvumang/prompt-lookup-decoding; of speculation itself arXiv 2211.17192.

Rules of this file:
1. A draft is a guess: engine.py keeps it as far as it is what the model chooses.
2. A lookup costs the same however long the text is.

Not here: which drafts are tried, and what became of them (engine.py).
"""

from collections.abc import Sequence

N_GRAM = 2  # tokens that must be the same for what followed them to be a draft


class Lookup:
    """The tokens of one sequence."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # an n-gram: the position after it
        self._found: int | None = None  # the position after where the last tokens came before
        self.extend(token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self._tokens.append(token_id)
            n_gram = tuple(self._tokens[-N_GRAM:])
            self._found = self._after.get(n_gram)
            self._after[n_gram] = len(self._tokens)

    def drafts(self, n: int) -> list[int]:
        """At most n tokens; what has come round once is expected to come round again."""
        if self._found is None:
            return []
        period = len(self._tokens) - self._found
        return [self._tokens[self._found + i % period] for i in range(n)]
