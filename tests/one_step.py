"""One step of the engine as data: its numbers, from the schedule to what the sequences are behind it.

    schedule() -> Scheduled -> Batch -> forward() -> logits -> pick_token() -> Choice -> postprocess()

    python tests/one_step.py             prints it
    python tests/one_step.py --write     puts it into README.md; test_walkthrough.py holds it to be there

The modules are the server's own, in this process, with the tiny model and NumpyOps: B comes when A has begun
to answer. Numbers have two decimals: the rounding of another machine does not show.
"""

import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))  # the server's modules

from checkpoint.config import read_config
from checkpoint.weights import Weights, read_weights
from model import CHUNK, Array, Batch, NumpyOps, forward
from request.template import ChatTemplate
from sampling import Choice, Context, Sampling, apply_temperature, philox_uniform, pick_token
from sampling import apply_top_k_top_p_min_p as apply_limits
from scheduler import Scheduled, Scheduler, Sequence
from tokenizer import Tokenizer
from walkthrough import TINY, command, name, stages

BEGIN = "<!-- made by `python tests/one_step.py --write` -->\n```text\n"
END = "```\n<!-- end of the step -->"
N_STEPS_OF_A = 6  # before B comes: then it is in two minds
N_PAGES = 8
N_SHOWN = 4  # numbers of a row
PROMPTS = {"A": "Tell me a story about a cat.", "B": "hi"}
SAMPLINGS = {"A": Sampling(temperature=0.8, seed=10), "B": Sampling(temperature=0)}


OPS = ("embed", "qkv", "attend", "out", "gate_up", "down", "logits")


def traced(ops: NumpyOps) -> list[str]:
    """Let ops write down the shape and the first numbers of what each makes of layer 0, and of the logits."""
    rows = [f"{'op':8} {'shape':12} row 0 begins with"]

    def trace(op: str, run: Callable[..., Any]) -> None:
        def traced_run(x: Any, *more: Any) -> Any:
            made = run(x, *more)
            result = x if made is None else made  # out and down add to x
            if op == "logits":
                rows.append("…        the same with the other layers")
            if op == "logits" or len(rows) <= len(OPS) - 1:
                numbers = " ".join(f"{number:+.2f}" for number in result[0][:N_SHOWN])
                rows.append(f"{op:8} {result.shape!s:12} {numbers} …")
            return made

        setattr(ops, op, traced_run)

    for op in OPS:
        trace(op, getattr(ops, op))
    return rows


def one_step() -> str:
    config = read_config(TINY)
    tokenizer, template = Tokenizer(TINY / "tokenizer.json"), ChatTemplate.load(TINY)
    weights = read_weights(TINY, config, NumpyOps.pack)
    ops = NumpyOps(config, weights, config.max_seq_len, N_PAGES, len(PROMPTS))
    scheduler = Scheduler(N_PAGES, len(PROMPTS), CHUNK, speculate=0, max_wanted=len(PROMPTS))
    sequences: dict[str, Sequence] = {}
    for letter, text in PROMPTS.items():
        prompt = template.render([{"role": "user", "content": text}], None, datetime.min)
        stop = frozenset(config.eos_token_ids)
        sequences[letter] = Sequence(tokenizer.encode(prompt), 100, stop, SAMPLINGS[letter])
    scheduler.add(sequences["A"])
    for _ in range(N_STEPS_OF_A):
        advance(scheduler, computed(scheduler, ops, weights))
    scheduler.add(sequences["B"])
    before = list(state_rows(sequences))
    op_rows = traced(ops)
    step = computed(scheduler, ops, weights)
    letters = {sequence: letter for letter, sequence in sequences.items()}
    chosen = list(choice_rows(list(letters.values()), step, tokenizer))
    advance(scheduler, step)
    batch_rows = [
        f"{member:12} {getattr(step.batch, member).tolist()}"
        for member in ("token_ids", "positions", "pages", "offsets", "wanted_rows")
    ]
    schedule = f"{name(Scheduler.schedule)}() -> list[{name(Scheduled)}]"
    return stages(
        ("Before: A has begun to answer, B has just come", before),
        (f"{schedule}: A's newest token, all of B's prompt", scheduled_rows(step.scheduled, letters)),
        (f"{name(Batch)}(): the rows of the step, A's and then B's", batch_rows),
        (f"{name(forward)}() -> logits of the wanted rows", op_rows),
        (f"{name(pick_token)}() -> {name(Choice)}", chosen),
        (f"{name(Scheduler.postprocess)}(): the next step computes the tokens that were chosen",
         state_rows(sequences)),
    )  # fmt: skip


class ComputedStep(NamedTuple):
    scheduled: list[Scheduled]
    batch: Batch
    logits: Array  # of the wanted rows
    contexts: list[Context]  # of these
    choices: list[Choice]  # of these


def computed(scheduler: Scheduler, ops: NumpyOps, weights: Weights) -> ComputedStep:
    """A step as the engine and NumpyOps.launch() compute it, with all that is made on the way."""
    scheduled = scheduler.schedule()
    batch = Batch([one.span for one in scheduled])
    logits = forward(ops, weights, batch)
    contexts = [context for one in scheduled for context in one.contexts]
    return ComputedStep(scheduled, batch, logits, contexts, ops.pick(logits, contexts))


def advance(scheduler: Scheduler, step: ComputedStep) -> None:
    choices = iter(step.choices)
    for one in step.scheduled:
        scheduler.postprocess(one, [next(choices) for _ in one.contexts])


def state_rows(sequences: dict[str, Sequence]) -> Iterator[str]:
    for letter, one in sequences.items():
        tokens = f"prompt of {len(one.prompt)}, output {one.output}"
        pages = f"page_table {one.page_table}"
        yield f"{letter}  {tokens:57} n_computed {one.n_computed:2}  {pages}, slot {one.slot}"


def scheduled_rows(scheduled: list[Scheduled], letters: dict[Sequence, str]) -> Iterator[str]:
    for one in scheduled:
        span = one.span
        phase = "prefill" if one.is_prefill else "decode"
        rows = f"start {span.start}, end {span.end}, n_wanted {span.n_wanted}"
        yield f"{letters[one.sequence]}  {phase:8} {rows:30} token_ids {span.token_ids}"


def choice_rows(letters: list[str], step: ComputedStep, tokenizer: Tokenizer) -> Iterator[str]:
    """Of each sequence the likeliest tokens, and how one of them is chosen."""
    rows = zip(letters, step.logits, step.contexts, step.choices, strict=True)
    for letter, row, context, choice in rows:
        sampling = context.sampling
        text = repr(tokenizer.token_bytes(choice.token_id).decode())
        largest = np.argsort(-row)[:3]
        shown = ", ".join(f"{token_id}: {row[token_id]:.2f}" for token_id in largest)
        yield f"{letter}  the largest logits    {shown}"
        if sampling.temperature == 0:
            yield f"   temperature 0         {choice.token_id}, {text}, which has the largest"
            continue
        probs = apply_limits(apply_temperature(row, sampling.temperature), sampling)
        probs /= probs.sum()
        shown = ", ".join(f"{token_id}: {probs[token_id]:.2f}" for token_id in largest)
        ends = np.cumsum(probs)
        end = ends[choice.token_id]
        part = f"{end - probs[choice.token_id]:.2f} to {end:.2f}"
        u = philox_uniform(sampling.seed, sampling.choice, context.n_output)
        yield f"   temperature {sampling.temperature}       {shown}, as probabilities"
        yield f"   drawn: {u:.2f}           {choice.token_id}, {text}, which by token id covers {part}"


if __name__ == "__main__":
    command("What one step of the engine computes, stage by stage.", one_step, BEGIN, END)
