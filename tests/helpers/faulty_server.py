"""server.py with an engine that fails on demand: `python -m tests.helpers.faulty_server`, with its flags.

The request chooses the fault by its seed, so the requests beside it and after it are served. An op raises,
computes nonsense or is slow, as it may with a driver, a damaged file or a large model.
"""

import sys
import time
from collections.abc import Sequence
from typing import Any

import model
import sampling
import server
from service import loading

AFTER_TOKENS = 5
RAISES, NO_NUMBER, SLOW, ENDS = 666, 667, 668, 669  # seeds
STEP_S = 0.01  # of the slow one: a client can do something between two tokens


class FaultyOps(model.NumpyOps):
    def pick(self, logits: model.Array, contexts: Sequence[sampling.Context]) -> list[sampling.Choice]:
        due = {c.sampling.seed for c in contexts if len(c.output) == AFTER_TOKENS}
        if ENDS in due:
            raise SystemExit  # the engine's thread does not expect that
        if RAISES in due:
            raise FloatingPointError("a fault made on purpose")
        if any(c.sampling.seed == SLOW for c in contexts):
            time.sleep(STEP_S)
        choices = super().pick(logits, contexts)
        if NO_NUMBER in due:
            no_number: Any = object()
            return [choice._replace(logprob=no_number) for choice in choices]
        return choices


if __name__ == "__main__":
    vars(loading)["ops_of"] = lambda _: FaultyOps
    sys.exit(server.main())
