"""The scheduler: which tokens of which sequences the next step computes. Continuous batching, PagedAttention.

    Sequence --add()--> waiting, running --schedule()--> [Scheduled, ...]
    Scheduled, its Choices --postprocess()--> the new tokens

It is pure: state in, Scheduled out, no clocks, locks or pipes. The engine's thread alone calls it: it
launches the step that schedule() returns, and hands the choices to postprocess().

Why a pure core and not methods of the engine: tests/explore.py walks through every order of arrivals, steps
and departures in small schedulers, which threads and a device would not allow. The price is that steps in
flight are an argument, and that every decision is made again for each step.

Authority: continuous batching is Orca, https://www.usenix.org/conference/osdi22/presentation/yu; page tables
are PagedAttention, https://arxiv.org/abs/2309.06180; chunked prefill https://arxiv.org/abs/2308.16369;
speculative decoding https://arxiv.org/abs/2211.17192, by prompt lookup
https://github.com/apoorvumang/prompt-lookup-decoding.

Rules of this file:
1. A step computes the newest token of every sequence that decodes, unless the sequence waits for a mask or
   its last token is in flight. Chunks of prompts come on top, up to `max_rows` rows: a long prompt must not
   pause the streams.
2. The tokens of a sequence do not depend on company, cache, preemption or drafts. A row is computed by itself
   (model.py), so it has the same bits in any chunk, and any full page may be shared or computed again.
3. Slots of the batch and prompts go round robin over owners, however many sequences an owner has.
4. When pages run out, the youngest sequence of the owner with the most pages is preempted. No sequence is
   preempted for a draft.
5. A sequence ends once. Its pages are free before the next step.
"""

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count, takewhile
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from model import PAGE, Span
from pages import OutOfPages, PagePool, PrefixHash, prefix_hash, root_hash
from sampling import NO_TOKEN, Choice, Context, Sampling

MAX_CHUNKS = 2  # chunks whose rows a step may have for prompts: one prompt alone may take all
MIN_ROWS = 8  # of prompts that a step allows while others decode, however slow the machine is

# --- Theory of operation ------------------------------------------------------------------------------------
#
# The life of a request:
#
# 1. Arrival.       The engine hands a Sequence to add(), which puts it at the end of `waiting`.
# 2. Admission.     A waiting sequence moves to `running` when a slot of the batch is free, and enough pages
#                   are free for all its tokens and for the growth of those that run. The oldest sequence of
#                   the owner that runs the fewest goes first. An owner with nothing running may displace a
#                   sequence of an owner that has several running, if that frees enough slots and pages.
# 3. Prefix cache.  Automatic prefix caching: pages of its prompt that its owner has computed before go into
#                   its page table and are not computed again. If another sequence is computing the page that
#                   it needs next, it skips this step and finds the page later.
# 4. Prefill.       The rest of the prompt is computed in chunks (chunked prefill). All prompts together get
#                   the rows of MAX_CHUNKS chunks a step, and fewer while others decode. The last row of the
#                   last chunk gives the first token of the output. The prompt with the fewest tokens left
#                   goes first until it is complete: if prompts took a chunk each in turn, those that came
#                   together would all be complete only at the end. Half of the rows are kept for the first
#                   prompt in round-robin order, so short prompts cannot starve a long one.
# 5. Decode.        Each step computes one row, that of the newest token, and chooses the next token from it.
#                   The engine may launch a step before it has read the one before. Then only the device
#                   knows the newest token, and the span is chained to it (Span.token_ids is None).
# 6. Masks.         Structured output needs a mask before each choice, and the mask depends on the newest
#                   token. The engine sets `mask` when it has been made. Until then the sequence sits the
#                   steps out, so that the others do not wait. Meanwhile its prompt is computed, except for
#                   the last row.
# 7. Drafts.        With speculative decoding a step also computes drafts: tokens that followed when the last
#                   two tokens came before. Drafts are kept up to the first that differs from the choice. The
#                   next step overwrites the places of the others in the KV cache. A sequence that needs masks
#                   has no drafts.
# 8. Preemption.    When a running sequence needs a page and none is free, a sequence gives back its slot and
#                   its pages. It waits, before the others of its owner, to start again at 2. Its output is
#                   kept; prompt and output are computed again as one prompt.
# 9. Finish.        A stop token or max_tokens ends it in postprocess(). The engine ends it with remove() if
#                   it fails or its client leaves. Slot and pages are free at once; full pages stay in the
#                   prefix cache until they are taken.
#
# Invariants:
#
# - `waiting` and `running` hold the sequences of one owner in the order of arrival, and those that wait are
#   younger than those that run.
# - A sequence has a slot and pages while it runs, and at no other time. A result for a sequence without a
#   slot comes too late and is dropped.
# - n_computed counts the steps in flight too. Places of the KV cache after it may hold
#   rejected drafts, or tokens past the end of the output: each is written again before a row reads it.
# - Steps run in the order of their launch. So a page may be given to another sequence while a step in flight
#   still writes to it: the step of the other sequence comes later.
# - A sequence is preempted only while nothing is in flight: n_unread is 0.
#
# An example with MAX_CHUNKS * chunk = 128: A, with a prompt of 200 tokens, arrives while B decodes.
#
#   step   B          A                              A afterwards
#   1      one row    prompt[0:128]                  n_computed 128
#   2      one row    prompt[128:200], a choice      n_computed 200, 1 token of output
#   3      one row    that token, a choice           n_computed 201, 2 tokens of output

# --- Sequence -----------------------------------------------------------------------------------------------

Mask = NDArray[np.bool_]  # (vocab_size,) the tokens that are allowed next
FinishReason = Literal["stop", "length", "failed"]  # failed: its logits are not finite numbers
PreemptedFor = Literal["pages", "turn", ""]  # no page was free; an owner ran nothing; "": never preempted


@dataclass(eq=False)
class Sequence:
    """One choice of a request, while it waits and runs."""

    prompt: list[int]  # token ids
    max_tokens: int
    stop_token_ids: frozenset[int]
    sampling: Sampling
    constraint: "Constraint | None" = None
    owner: str = ""  # whose turn it takes, and in whose prefix cache its pages are
    request_id: str = ""  # for the engine's log lines, and for the observer of the steps

    output: list[int] = field(default_factory=list)  # tokens chosen, in the steps that have been read
    finish: FinishReason | None = None
    mask: Mask | None = None  # for the next token of a sequence with a constraint; None: not known yet

    slot: int | None = None  # place in the batch; None while it waits, and when it has ended
    page_table: list[int] = field(default_factory=list)  # the page of token i is page_table[i // PAGE]
    prefix_hashes: list[PrefixHash] = field(default_factory=list)  # one for each full page, made when needed
    n_computed: int = 0  # tokens with keys and values in its pages, once all steps in flight have run
    n_unread: int = 0  # tokens chosen in steps in flight
    n_cached: int = 0  # prompt tokens taken from the prefix cache (usage.cached_tokens)
    preempted_for: PreemptedFor = ""  # the last time
    max_drafts: int = 0  # drafts of a step: fewer while they are wrong

    @property
    def is_prefilling(self) -> bool:
        """True for a prompt, and for a preempted sequence that is computed again as one."""
        return not self.n_unread and (not self.output or self.n_tokens - self.n_computed > 1)

    def hash_at(self, position: int) -> PrefixHash | None:
        """Return the hash of the page at a position of the prefill; None for the page of the last token.

        The last token is always computed, because the next choice needs its row.
        """
        number = position // PAGE
        if (number + 1) * PAGE >= self.n_tokens:
            return None
        return self.page_hash(number)

    @property
    def n_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def n_ready(self) -> int:
        """Known tokens that a step can compute now: not the last one while its mask is missing."""
        return self.n_tokens - self.n_computed - self.awaits_mask

    @property
    def awaits_mask(self) -> bool:
        """True while its next token cannot be chosen."""
        return self.constraint is not None and self.mask is None

    def contexts(self, drafts: list[int]) -> list[Context]:
        """Return the context of the next choice, then that of the choice after each draft."""
        outputs = [self.output, *([*self.output, *drafts[:n]] for n in range(1, len(drafts) + 1))]
        return [
            Context(self.sampling, self.prompt_array, output, self.mask, self.n_unread) for output in outputs
        ]

    @cached_property
    def prompt_array(self) -> NDArray[np.int64]:
        """The prompt for penalties and drafts, made once for all steps."""
        return np.array(self.prompt, np.int64)

    def token_ids(self, start: int, end: int) -> list[int]:
        """Tokens `start` to `end` of prompt and output."""
        n_prompt = len(self.prompt)
        return self.prompt[start:end] + self.output[max(0, start - n_prompt) : max(0, end - n_prompt)]

    # --- the fold of this class: a request goes on with the next one ----------------------------------------

    def page_hash(self, number: int) -> PrefixHash:
        """Return the hash of page `number` of the page table, which its tokens fill."""
        hashes = self.prefix_hashes
        while len(hashes) <= number:
            before = hashes[-1] if hashes else root_hash(self.owner)
            start = len(hashes) * PAGE
            hashes.append(prefix_hash(before, self.token_ids(start, start + PAGE)))
        return hashes[number]


class Scheduled(NamedTuple):
    """One sequence's share of a step."""

    sequence: Sequence
    span: Span
    contexts: list[Context]  # one for each of its last rows, from which a token is chosen
    drafts: list[int]  # the last tokens of the span: guesses, to be verified
    is_prefill: bool = False


Step = list[Scheduled]  # of all sequences in it


# --- Scheduler ----------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Scheduler:
    """The sequences that wait and run, and the pages they have."""

    n_pages: int
    max_batch: int  # sequences that run at once
    chunk: int  # tokens of a prefill chunk
    speculate: int  # drafts of a sequence in a step, at most
    max_wanted: int  # rows of a step from which a token is chosen, at most; those left over are for drafts

    def __post_init__(self) -> None:
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []  # the youngest, admitted last, is at the end
        self.pool = PagePool(self.n_pages)
        self.counts = dict.fromkeys(["steps", "preemptions", "cached_tokens", "drafted", "accepted"], 0)
        self._free_slots = list(reversed(range(self.max_batch)))
        self.left: list[Sequence] = []  # those that gave up their slots; engine.py ends their constraints
        self._turns = count(1)
        self._last_turn = Counter[str]()  # owner: the number of its last turn

    def add(self, sequence: Sequence) -> None:
        sequence.max_drafts = self.speculate
        self.waiting.append(sequence)

    def schedule(self, in_flight: Collection[Step] = (), max_rows: float = math.inf) -> Step:
        """Choose what the next step computes. What is returned counts as launched: n_computed, n_unread.

        First we admit. If a sequence waits and _surplus() names one that should give way to it, that one is
        preempted, and we admit again. While the step does not find enough pages, the youngest sequence of the
        owner with the most is preempted. `in_flight`: the steps that earlier calls returned and postprocess()
        has not seen yet. While there is one we return [] and do not preempt: reading it may end a sequence.
        `max_rows`: about the most rows of the step while any sequence decodes; prompts always get MIN_ROWS.
        """
        self._admit()
        if self.waiting and (surplus := self._surplus()):
            if in_flight:
                return []
            self.preempt(surplus, "turn")
            self._admit()
        while True:
            try:
                step = self._next_step(in_flight, max_rows)
                break
            except OutOfPages:
                if in_flight:  # a step that is read may end a sequence, and free its pages
                    return []
                self.preempt(self._youngest_of_largest_owner(self.running))
        for scheduled in step:
            scheduled.sequence.n_computed = scheduled.span.end
            scheduled.sequence.n_unread += scheduled.span.n_wanted
        return step

    def _admit(self) -> None:
        """Move sequences to `running` while slots and pages are free. None overtakes the first in turn."""
        while self.waiting and self._free_slots:
            sequence = self._in_turn(self.waiting, self.running)[0]
            # One that runs alone always has enough pages: none is longer than the pool.
            if self.running and self._n_lacking_pages(sequence, self.running) > 0:
                return
            self._last_turn[sequence.owner] = next(self._turns)
            self.waiting.remove(sequence)
            self.running.append(sequence)
            sequence.slot = self._free_slots.pop()

    def _in_turn(self, sequences: list[Sequence], served: list[Sequence]) -> list[Sequence]:
        """Sort round robin over owners: first the owners with the fewest served, then the least recent."""
        n_before = Counter(sequence.owner for sequence in served)
        keys: dict[Sequence, tuple[int, int]] = {}
        for sequence in sequences:
            keys[sequence] = n_before[sequence.owner], self._last_turn[sequence.owner]
            n_before[sequence.owner] += 1
        return sorted(sequences, key=keys.__getitem__)

    def _next_step(self, in_flight: Collection[Step], max_rows: float) -> Step:
        """Return the next step. Raises OutOfPages; the next attempt uses the pages taken until then."""
        step: Step = []
        prefilling: list[Sequence] = []

        # decode
        n_drafts = self.max_wanted - len(self.running)
        for sequence in self.running:
            if sequence.is_prefilling:
                prefilling.append(sequence)
            elif scheduled := self._decode(sequence, n_drafts):
                step.append(scheduled)
                n_drafts -= len(scheduled.drafts)

        # prefill
        ready = self._ready(prefilling, in_flight) if prefilling else []
        if not ready:
            return step
        n_rows = MAX_CHUNKS * self.chunk
        n_decoding = len(self.running) - len(prefilling)
        if n_decoding:
            n_rows = int(min(n_rows, max(max_rows - n_decoding, MIN_ROWS)))
        shortest = min(ready, key=lambda sequence: sequence.n_ready)
        n_kept = 0 if shortest is ready[0] else n_rows // 2  # for the first in turn
        for sequence in sorted(ready, key=lambda sequence: sequence is not shortest):
            n = min(sequence.n_ready, n_rows - n_kept)
            n_kept = 0
            if n > 0:
                scheduled = self._prefill(sequence, n)
                step.append(scheduled)
                n_rows -= n
                if scheduled.contexts:  # the prompt ends
                    self._last_turn[sequence.owner] = next(self._turns)
        return step

    def _ready(self, prefilling: list[Sequence], in_flight: Collection[Step]) -> list[Sequence]:
        """Return the sequences that can compute rows of their prompts now, in turn.

        A sequence sits the step out if another one computes its next page, in this step or in one in flight.
        """
        computed_by = {
            scheduled.sequence.hash_at(scheduled.span.start): scheduled.sequence
            for step in in_flight
            for scheduled in step
            if scheduled.is_prefill
        }
        ready: list[Sequence] = []
        for sequence in self._in_turn(prefilling, []):
            while page_hash := sequence.hash_at(sequence.n_computed):
                page = self.pool.find(page_hash)  # it may have been filled since the last step
                if page is None:
                    break
                self._share(sequence, page)
            is_first = page_hash is None or computed_by.setdefault(page_hash, sequence) is sequence
            if is_first and sequence.n_ready > 0:
                ready.append(sequence)
        return ready

    def _prefill(self, sequence: Sequence, n: int) -> Scheduled:
        """Schedule the next n tokens of a prompt. The last token of the prompt chooses the next one."""
        end = sequence.n_computed + n
        contexts = sequence.contexts([]) if end == sequence.n_tokens else []
        span = self._span(sequence, sequence.token_ids(sequence.n_computed, end), len(contexts))
        return Scheduled(sequence, span, contexts, [], is_prefill=True)

    def _span(self, sequence: Sequence, token_ids: list[int] | None, n_wanted: int) -> Span:
        """Return the next rows of a sequence, with pages for them; raises OutOfPages."""
        assert sequence.slot is not None
        span = Span(sequence.slot, sequence.page_table, token_ids, sequence.n_computed, n_wanted)
        while len(sequence.page_table) * PAGE < span.end:
            sequence.page_table.append(self.pool.take())
        return span

    def postprocess(self, scheduled: Scheduled, choices: list[Choice]) -> list[Choice]:
        """Record the choices of a step for one sequence, one for each context; return the new tokens.

        Set `finish` if the sequence ends with them.
        """
        sequence, span, drafts = scheduled.sequence, scheduled.span, scheduled.drafts
        if sequence.slot is None:  # it ended while the step was in flight
            return []
        n_accepted = 0
        while n_accepted < len(drafts) and choices[n_accepted].token_id == drafts[n_accepted]:
            n_accepted += 1
        tokens = choices[: n_accepted + 1]  # the rows after them follow another text
        token_ids = [token.token_id for token in tokens]
        if NO_TOKEN in token_ids:
            sequence.finish = "failed"
            self.remove(sequence)
            return []
        n_rejected = len(choices) - len(tokens)
        sequence.output += token_ids
        sequence.n_unread -= len(choices)
        sequence.n_computed -= n_rejected
        if drafts:
            sequence.max_drafts = min(self.speculate, max(1, 2 * n_accepted))
            self.counts["drafted"] += len(drafts)
            self.counts["accepted"] += n_accepted
        for number in range(span.start // PAGE, (span.end - n_rejected) // PAGE):  # pages that are now full
            self.pool.register(sequence.page_table[number], sequence.page_hash(number))
        if tokens:
            sequence.mask = None
            if token_ids[-1] in sequence.stop_token_ids:
                sequence.finish = "stop"
            elif len(sequence.output) == sequence.max_tokens:
                sequence.finish = "length"
        if sequence.finish:
            self.remove(sequence)
        return tokens

    def _decode(self, sequence: Sequence, max_drafts: int) -> Scheduled | None:
        """Schedule the row of the newest token, and drafts after it; None if it sits the step out."""
        drafts: list[int] = []
        if self.speculate and sequence.output and sequence.constraint is None:
            drafts = self._drafts(sequence)
        token_ids: list[int] | None = None
        if sequence.n_unread:
            # Only the device knows the newest token. The span is chained to it, unless the output is complete
            # with it, drafts are in flight or may follow it, or a mask depends on it.
            is_complete = len(sequence.output) + sequence.n_unread >= sequence.max_tokens
            if is_complete or drafts or sequence.constraint is not None:
                return None
        elif sequence.awaits_mask:
            return None
        else:
            if drafts:
                drafts = drafts[: min(max_drafts, self._n_places(sequence))]
            token_ids = [sequence.output[-1], *drafts]
        span = self._span(sequence, token_ids, len(drafts) + 1)
        return Scheduled(sequence, span, sequence.contexts(drafts), drafts)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that waits or runs; do nothing if it has ended."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        elif sequence in self.running:
            self.running.remove(sequence)
            assert sequence.slot is not None
            self._free_slots.append(sequence.slot)
            sequence.slot = None
            self.pool.release(sequence.page_table)
            sequence.page_table = []  # a new list, because a span in flight may still use the old one
            self.left.append(sequence)

    # --- the fold of this class: a request goes on with the next one ----------------------------------------

    def preempt(self, sequence: Sequence, what_for: PreemptedFor = "pages") -> None:
        """Put a running sequence first in line: the waiting sequences of its owner are younger."""
        self.remove(sequence)
        self.waiting.insert(0, sequence)
        sequence.n_computed = 0
        sequence.preempted_for = what_for
        self.counts["preemptions"] += 1

    # --- admission ------------------------------------------------------------------------------------------

    def _n_lacking_pages(self, newcomer: Sequence, others: list[Sequence]) -> int:
        """Return how many pages are missing for it to run beside the others; 0 or less: none.

        All tokens of all sequences need pages, and each running sequence needs one more.
        """
        n_lacking = len(others) - self.pool.n_free
        for sequence in [newcomer, *others]:
            n_lacking += max(0, sequence.n_tokens // PAGE + 1 - len(sequence.page_table))
        hashes = map(newcomer.page_hash, range((newcomer.n_tokens - 1) // PAGE))
        return n_lacking - len(list(takewhile(self.pool.is_in_use, hashes)))

    # --- fairness between owners: with a single one it is first come, first served --------------------------

    def _surplus(self) -> Sequence | None:
        """Return the sequence to preempt so that an owner with nothing running can start, or None.

        It is one of an owner with several running, and frees enough pages.
        """
        n_running = Counter(sequence.owner for sequence in self.running)
        newcomer = self._in_turn(self.waiting, self.running)[0]
        several = [sequence for sequence in self.running if n_running[sequence.owner] > 1]
        if n_running[newcomer.owner] or not several:
            return None
        surplus = self._youngest_of_largest_owner(several)
        others = [sequence for sequence in self.running if sequence is not surplus]
        kept = {page for sequence in others for page in sequence.page_table}  # it may share pages with them
        if self._n_lacking_pages(newcomer, others) > len({*surplus.page_table} - kept):
            return None
        return surplus

    def _youngest_of_largest_owner(self, running: list[Sequence]) -> Sequence:
        """Return the youngest of these sequences whose owner has the most pages."""
        n_pages = Counter[str]()
        for sequence in running:
            n_pages[sequence.owner] += len(sequence.page_table)
        return max(reversed(running), key=lambda sequence: n_pages[sequence.owner])

    # --- the next step --------------------------------------------------------------------------------------

    def _share(self, sequence: Sequence, page: int) -> None:
        """Take the next page from the prefix cache, and move n_computed past it."""
        number = sequence.n_computed // PAGE
        self.pool.share(page)
        self.pool.release(sequence.page_table[number:])  # taken for a step that ran out of pages
        sequence.page_table[number:] = [page]
        n_found = (number + 1) * PAGE - sequence.n_computed  # less than a page if it had begun that page
        sequence.n_computed += n_found
        if not sequence.preempted_for:  # to find again what it had computed saves nothing
            sequence.n_cached += n_found
            self.counts["cached_tokens"] += n_found

    # --- drafts ---------------------------------------------------------------------------------------------

    def _drafts(self, sequence: Sequence) -> list[int]:
        """Predict the tokens after the newest one, up to a stop token, after which nothing can follow."""
        n = min(sequence.max_drafts, sequence.max_tokens - len(sequence.output) - 1)
        drafts = prompt_lookup(np.concatenate([sequence.prompt_array, sequence.output]), n)
        return list(takewhile(lambda token_id: token_id not in sequence.stop_token_ids, drafts))

    def _n_places(self, sequence: Sequence) -> int:
        """Return how many drafts have room in its pages and in pages that no other sequence may need."""
        n_pages = max(len(sequence.page_table), math.ceil(sequence.n_tokens / PAGE))
        n_spare_pages = max(0, self.pool.n_free - len(self.running))  # the others may need a page each
        return (n_pages + n_spare_pages) * PAGE - sequence.n_tokens


# --- the fold: a plain streamed request passes what stands above --------------------------------------------


class Constraint(Protocol):
    """Makes the masks of one answer (structured output, constrained decoding), in the engine's thread."""

    def mask(self, output: list[int]) -> Mask | None:
        """Return the tokens that are allowed after this output, the same for the same output.

        Return None while the mask is computed, without waiting. Raises if the constraint cannot be followed
        further.
        """

    def fileno(self) -> int:
        """Return a file descriptor that becomes readable when the mask has come."""

    def close(self) -> None:
        """Release its resources. The next call of mask() begins again."""


def prompt_lookup(text: NDArray[np.int64], n: int) -> list[int]:
    """Predict n tokens, those after the last earlier place of the text's last two tokens, or none.

    A prediction that reaches the end of the text begins again. The text has at least two tokens.
    """
    ends = np.flatnonzero((text[:-2] == text[-2]) & (text[1:-1] == text[-1])) + 2
    if not len(ends):
        return []
    return np.resize(text[ends[-1] :], n).tolist()
