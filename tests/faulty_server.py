"""server.py with an engine that fails on demand: `python -m tests.faulty_server`, flags as server.py's.

The request chooses the fault by its seed, so that those beside it and after it are served. Nothing of ours is
replaced: an op raises or computes nonsense, as a driver, the memory or a damaged file may make it do.
"""

import math
import sys
from collections.abc import Sequence

import model
import server

AFTER_TOKENS = 5
RAISES, NAN = 666, 667  # seeds


class FaultyOps(model.NumpyOps):
    def pick(self, logits: model.Array, contexts: Sequence[model.Context]) -> list[model.Choice]:
        due = {c.sampling.seed for c in contexts if len(c.output) == AFTER_TOKENS}
        if RAISES in due:
            raise FloatingPointError("a fault made on purpose")
        choices = super().pick(logits, contexts)
        return [choice._replace(logprob=math.nan) for choice in choices] if NAN in due else choices


if __name__ == "__main__":
    vars(server)["NumpyOps"] = FaultyOps
    sys.exit(server.main())
