"""One step of the engine as data: from what is scheduled to what has become of the sequences.

    schedule() -> Scheduled -> Batch -> forward() -> logits -> pick_token() -> Choice -> postprocess()

    python tests/one_step.py             prints it
    python tests/one_step.py --write     puts it into README.md; test_walkthrough.py checks it there

The modules are the server's own, in this process, with the tiny model and NumpyOps: B comes when A has begun
to answer. Numbers have two decimals: the rounding of another machine does not show.
"""

import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))  # the server's modules

from checkpoint.config import read_config
from checkpoint.weights import read_weights
from model import Array, Batch, NumpyOps, forward
from request.template import ChatTemplate
from sampling import Choice, Context, Sampling, apply_temperature, apply_top_p, philox_uniform, pick_token
from scheduler import Scheduled, Scheduler, Sequence
from tokenizer import Tokenizer
from walkthrough import TINY, command, name, stages

N_STEPS_OF_A = 6  # before B comes: then two tokens are almost as likely
N_PAGES = 8
N_SHOWN = 4  # numbers of a row
PROMPTS = {"A": "Tell me a story about a cat.", "B": "hi"}
SAMPLINGS = {"A": Sampling(temperature=0.8, seed=10), "B": Sampling(temperature=0)}
OPS = ("embed", "qkv", "attend", "out", "gate_up", "down", "logits")


def traced(ops: NumpyOps) -> list[str]:
    """Let the ops write down the shape and the first numbers of what they make of layer 0, and the logits."""
    rows = [f"{'op':8} {'shape':12} row 0 begins with"]

    def run(op: str, compute: Callable[..., Any], x: Any, *more: Any) -> Any:
        made = compute(x, *more)
        result = x if made is None else made  # out and down add to x
        if op == "logits":
            rows.append("…        the same with the other layers")
        if op == "logits" or len(rows) < len(OPS):
            numbers = " ".join(f"{number:+.2f}" for number in result[0][:N_SHOWN])
            rows.append(f"{op:8} {result.shape!s:12} {numbers} …")
        return made

    for op in OPS:
        setattr(ops, op, partial(run, op, getattr(ops, op)))
    return rows


def one_step() -> str:
    config = read_config(TINY)
    tokenizer, template = Tokenizer(TINY / "tokenizer.json"), ChatTemplate.load(TINY)
    weights = read_weights(TINY, config, NumpyOps.pack)
    ops = NumpyOps(config, weights, config.max_seq_len, N_PAGES, len(PROMPTS))
    scheduler = Scheduler(N_PAGES, len(PROMPTS), NumpyOps.chunk, speculate=0, max_wanted=len(PROMPTS))
    sequences: dict[str, Sequence] = {}
    for letter, text in PROMPTS.items():
        prompt = template.render([{"role": "user", "content": text}], None, datetime.min)
        stop = frozenset(config.eos_token_ids)
        sequences[letter] = Sequence(tokenizer.encode(prompt), 100, stop, SAMPLINGS[letter])
    scheduler.add(sequences["A"])
    for _ in range(N_STEPS_OF_A):
        (scheduled,) = scheduler.schedule()
        scheduler.postprocess(scheduled, ops.launch([scheduled.span], scheduled.contexts))
    scheduler.add(sequences["B"])
    before = [*state_rows(sequences)]
    op_rows = traced(ops)

    step = scheduler.schedule()
    batch = Batch([scheduled.span for scheduled in step])
    logits = forward(ops, weights, batch)
    contexts = [context for scheduled in step for context in scheduled.contexts]
    choices = ops.pick(logits, contexts)
    letters = {sequence: letter for letter, sequence in sequences.items()}
    schedule_rows = [f"{letters[scheduled.sequence]}  {scheduled_row(scheduled)}" for scheduled in step]
    members = ("token_ids", "positions", "pages", "offsets", "wanted_rows")
    batch_rows = [f"{member:12} {getattr(batch, member).tolist()}" for member in members]
    choice_rows: list[str] = []
    for letter, row, context, choice in zip(PROMPTS, logits, contexts, choices, strict=True):
        text = repr(tokenizer.token_bytes(choice.token_id).decode())
        first, *others = chosen(row, context, choice.token_id, f"{choice.token_id}, {text}")
        choice_rows += [f"{letter}  {first}", *(f"   {line}" for line in others)]
    for scheduled, choice in zip(step, choices, strict=True):
        scheduler.postprocess(scheduled, [choice])

    schedule = f"{name(Scheduler.schedule)}() -> list[{name(Scheduled)}]"
    return stages(
        ("Before: A has begun to answer, B has just come", before),
        (f"{schedule}: A's newest token, all of B's prompt", schedule_rows),
        (f"{name(Batch)}(): the rows of the step, A's and then B's", batch_rows),
        (f"{name(forward)}() -> logits of the wanted rows", op_rows),
        (f"{name(pick_token)}() -> {name(Choice)}", choice_rows),
        (f"{name(Scheduler.postprocess)}(): the next step computes the tokens that were chosen",
         state_rows(sequences)),
    )  # fmt: skip


def state_rows(sequences: dict[str, Sequence]) -> Iterator[str]:
    for letter, one in sequences.items():
        tokens = f"prompt of {len(one.prompt)}, output {one.output}"
        pages = f"page_table {one.page_table}"
        yield f"{letter}  {tokens:57} n_computed {one.n_computed:2}  {pages}, slot {one.slot}"


def scheduled_row(scheduled: Scheduled) -> str:
    span = scheduled.span
    phase = "prefill" if scheduled.is_prefill else "decode"
    rows = f"start {span.start}, end {span.end}, n_wanted {span.n_wanted}"
    return f"{phase:8} {rows:30} token_ids {span.token_ids}"


def chosen(logits: Array, context: Context, token_id: int, token: str) -> Iterator[str]:
    """Yield the likeliest tokens of a sequence, and how one of them was chosen."""
    sampling = context.sampling
    largest = np.argsort(-logits)[:3]

    def listed(numbers: Array) -> str:
        return ", ".join(f"{token_id}: {numbers[token_id]:.2f}" for token_id in largest)

    yield f"the largest logits    {listed(logits)}"
    if sampling.temperature == 0:
        yield f"temperature 0         {token}, which has the largest"
        return
    probs = apply_top_p(apply_temperature(logits, sampling.temperature), sampling.top_p)
    probs /= probs.sum()
    end = np.cumsum(probs)[token_id]
    u = philox_uniform(sampling.seed, sampling.choice, context.n_output)
    yield f"temperature {sampling.temperature}       {listed(probs)}, as probabilities"
    covered = f"{end - probs[token_id]:.2f} to {end:.2f}"
    yield f"drawn: {u:.2f}           {token}, which by token id covers {covered}"


if __name__ == "__main__":
    command("one_step", "What one step of the engine computes, stage by stage.", one_step)
