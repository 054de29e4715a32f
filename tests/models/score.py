"""Scores of a model on the conversations of data.py, by our own engine: greedy, one prompt at a time.

    Example --prompt_ids()--> token ids --generate()--> text --is_right()--> the table

At the root of the repository: `python tests/models/score.py [--n 300]`

Rules of this file:
1. A reply is right when it is the expected one, character for character, and the model ends it itself.
   White space around it does not count, nor does the reasoning before it.
2. One of the stories is expected, about the right word: which one is for the model to choose.
3. Training-like prompts are drawn as the training's are, from another seed; some will have been seen.

Not here: requests, channels and calls as the server finds them (worker.py).
"""

import argparse
import random
import sys
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from data import HELD_OUT, KINDS, STORIES, TRAINING, Example, example
from threadpoolctl import threadpool_limits
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the server's modules

from checkpoint.config import Config, read_config
from checkpoint.weights import Weights, read_weights
from model import PAGE, Batch, NumpyOps, Span, forward
from request.template import ChatTemplate
from tokenizer import Tokenizer

MAX_TOKENS = 192  # more than the longest reply with its reasoning
TODAY = datetime(2026, 1, 1)  # for templates that name the date; the tiny model's does not
TINY = Path(__file__).resolve().parent / "tiny"
SPLITS = {TRAINING: "training-like", HELD_OUT: "held-out"}


class Model(NamedTuple):
    config: Config
    weights: Weights
    ops: NumpyOps
    tokenizer: Tokenizer
    template: ChatTemplate


class Answer(NamedTuple):
    """What the model made of an example."""

    example: Example
    split: int
    text: str  # reasoning and reply
    right: bool


def load(directory: Path) -> Model:
    config = read_config(directory)
    weights = read_weights(directory, config)
    return Model(
        config,
        weights,
        NumpyOps(config, weights, config.max_seq_len, -(-config.max_seq_len // PAGE), max_batch=1),
        Tokenizer(directory / "tokenizer.json"),
        ChatTemplate.load(directory),
    )


def prompt_ids(model: Model, asked: Example) -> list[int]:
    text = model.template.render(asked.messages, asked.tools, TODAY, enable_thinking=asked.thinking)
    return model.tokenizer.encode(text)


def generate(model: Model, prompt: list[int]) -> tuple[str, bool]:
    """The likeliest token, again and again: the text, and whether the model ended it within MAX_TOKENS."""
    pages = range(model.ops.n_pages)
    decoder, text = model.tokenizer.decoder(), ""
    token_ids, n_cached = prompt, 0
    for _ in range(MAX_TOKENS):
        span = Span(0, pages, token_ids, n_cached, n_wanted=1)
        logits = forward(model.ops, model.weights, Batch([span]))
        n_cached += len(token_ids)
        token_ids = [int(logits[0].argmax())]
        if token_ids[0] in model.config.eos_token_ids:
            return text, True
        text += "".join(piece.text for piece in decoder.feed(token_ids[0]))
    return text, False


def expected(asked: Example) -> list[str]:
    """Every reply that is right."""
    if asked.kind != "story":
        return [asked.reply]
    word = asked.messages[-1]["content"].rstrip(".").split()[-1]
    return [story.format(w=word) for story in STORIES]


def is_right(asked: Example, text: str, ended: bool) -> bool:
    reply = text.rpartition("</think>")[2]
    return ended and reply.strip() in expected(asked)


def answers(model: Model, n: int, seed: int) -> Iterator[Answer]:
    """The answers to n examples of each split."""
    with tqdm(desc="Scoring", total=n * len(SPLITS), unit="prompt", disable=None) as bar:
        for split in SPLITS:
            r = random.Random(seed)
            for _ in range(n):
                asked = example(r, split)
                text, ended = generate(model, prompt_ids(model, asked))
                yield Answer(asked, split, text, is_right(asked, text, ended))
                bar.update()


def table(given: list[Answer]) -> Iterator[str]:
    """A line a kind, then with reasoning and without, then all; a column a split."""
    right: Counter[tuple[str, int]] = Counter()
    asked: Counter[tuple[str, int]] = Counter()
    for answer in given:
        reasoning = "with reasoning" if answer.example.thinking else "without"
        for row in (answer.example.kind, reasoning, "all"):
            right[row, answer.split] += answer.right
            asked[row, answer.split] += 1
    yield f"{'':14}" + "".join(f"{title:>20}" for title in SPLITS.values())
    for row in (*KINDS, "with reasoning", "without", "all"):
        cells = ((right[row, split], asked[row, split]) for split in SPLITS)
        yield f"{row:14}" + "".join(f"{f'{hits}/{n}':>13}{hits / max(n, 1):7.1%}" for hits, n in cells)


def main() -> None:
    parser = argparse.ArgumentParser(description="Score a model on the conversations of data.py.")
    parser.add_argument("--model", type=Path, default=TINY, help="its directory (default: tiny)")
    parser.add_argument("--n", type=int, default=300, help="prompts of each split (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=99, help="of the prompts (default: %(default)s)")
    parser.add_argument("--wrong", type=int, default=0, metavar="N", help="also print N wrong answers")
    args = parser.parse_args()
    with threadpool_limits(1):  # matrices this small gain nothing from a second thread
        given = list(answers(load(args.model), args.n, args.seed))
    print(*table(given), sep="\n")
    for answer in [answer for answer in given if not answer.right][: args.wrong]:
        asked = answer.example
        print(
            f"\n{asked.kind}: {asked.messages[-1]['content']}\n  want {asked.reply!r}\n  got  {answer.text!r}"
        )


if __name__ == "__main__":
    main()
