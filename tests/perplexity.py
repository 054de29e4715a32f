"""What each format of the weights loses: `python tests/perplexity.py FORMAT ...`, as bench.py cpu names them.

Each prints the perplexity of N_TOKENS of benches/prose.txt under the default model: of each token but the
first of a window, given those before it in the window.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))  # the server's modules

from benches.decoding import load
from benches.harness import prose
from checkpoint import hub
from checkpoint.config import read_config
from model import PAGE, Batch, NumpyOps, Span, forward
from tokenizer import Tokenizer

N_TOKENS = 2048
N_WINDOW = 512  # tokens that see each other, as in llama.cpp's perplexity


def perplexity(ops: NumpyOps, token_ids: list[int]) -> float:
    losses: list[float] = []
    for start in range(0, len(token_ids), N_WINDOW):
        window = token_ids[start : start + N_WINDOW]
        span = Span(0, range(N_WINDOW // PAGE), window[:-1], 0, len(window) - 1)
        logits = forward(ops, ops.weights, Batch([span])).astype(np.float64)
        losses += list(np.logaddexp.reduce(logits, axis=1) - logits[range(len(logits)), window[1:]])
    return float(np.exp(np.mean(losses)))


def main() -> None:
    parser = argparse.ArgumentParser(description="What each format of the weights loses.")
    parser.add_argument("formats", nargs="+", help="as bench.py cpu names them")
    formats = parser.parse_args().formats
    directory = hub.find(None)
    config = read_config(directory)
    token_ids = Tokenizer(directory / "tokenizer.json").encode(prose(8 * N_TOKENS))[:N_TOKENS]
    for contender in formats:
        print(f"{contender:10} {perplexity(load(contender, directory, config, N_WINDOW, 1), token_ids):.2f}")


if __name__ == "__main__":
    main()
