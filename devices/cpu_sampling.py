"""Logits to tokens on a CPU: sampling.pick_token() for all rows of a step, by kernels.

    Context --settings()--> a row of SETTINGS; logits, SETTINGS --choose_rows()--> tokens and logprobs

sampling.py passes over the vocabulary some ten times, and sorts it. Here the first pass finds the largest
logit of each run of RUN tokens. A later pass leaves out the runs whose largest is below its threshold, often
nearly all. Nothing is sorted: top_k and top_p are thresholds, which threshold() finds bit by bit.

Authority: sampling.pick_token.

Rules of this file:
1. The same tokens as the spec, for the same logits: exp() is the spec's own code, compiled without liberties.
   Sums are float64, in an order that follows from the vocabulary alone.
2. A row is computed by itself. So it has the same token alone and in any batch, with any number of threads.

Not here: penalties, bias and masks (sampling.apply_penalties).
"""

import math

import numpy as np
from numba import njit, prange

from devices.cpu_kernels import LEAST_RANK, ONE, OPTIONS, exp, kernel, largest, number_of, row_kernel
from devices.kernels import MAX_TOP
from sampling import NO_TOKEN, Context, margin, philox_uniform

SETTINGS = np.dtype([
    ("temperature", "f8"), ("top_p", "f8"), ("top_k", "f8"), ("margin", "f4"), ("u", "f8"), ("n_top", "i8"),
])  # fmt: skip


def settings(context: Context) -> tuple[float, ...]:
    """What the kernel has to know of a row."""
    s = context.sampling
    n_top = -1 if s.n_top_logprobs is None else s.n_top_logprobs
    u = s.temperature and philox_uniform(s.seed, s.choice, context.n_output)
    return s.temperature, s.top_p, s.top_k, float(margin(s)), u, n_top


# --- the kernels --------------------------------------------------------------------------------------------

# No step is fused with another, because NumPy fuses none. Unsaid, Numba takes the liberties of the caller.
exact_kernel = njit(fastmath=False, **OPTIONS)

RUN = 128  # tokens
ZERO = np.float32(0)
LEAST_PROB = np.float32(1e-30)  # below any that is not negligible
MINUS_INFINITY = np.float32(-np.inf)


@kernel
def run_of(numbers, r):
    return numbers[r * RUN : (r + 1) * RUN]


@kernel
def run_maxima(logits):
    maxima = np.empty(-(-len(logits) // RUN), np.float32)
    for r in range(len(maxima)):
        maxima[r] = largest(run_of(logits, r))
    return maxima


@row_kernel
def weight_from(bound, numbers, weights):
    """The sum of the weights of the numbers from a bound on."""
    total = 0.0
    for i in range(len(numbers)):
        total += weights[i] if numbers[i] >= bound else 0
    return total


@kernel
def threshold(numbers, weights, needed):
    """The largest bound from which on the numbers weigh `needed` > 0; -inf if all weigh less."""
    low, high = LEAST_RANK, ~LEAST_RANK  # the ranks of -inf and of what is below inf
    while low < high:
        middle = (low + high + 1) >> 1
        if weight_from(number_of(middle), numbers, weights) >= needed:
            low = middle
        else:
            high = middle - 1
    return number_of(low)


@kernel
def likely(numbers, of_runs, bound):
    """Return the places of the numbers from a bound on; a run has none if its number in of_runs is lower."""
    places = np.empty(len(numbers), np.int32)
    n = 0
    for r in range(len(of_runs)):
        if of_runs[r] >= bound:
            for i in range(r * RUN, min((r + 1) * RUN, len(numbers))):
                places[n] = i  # the next one takes its place, unless this one counts
                n += numbers[i] >= bound
    return places[:n]


@kernel
def kth_largest(logits, maxima, k):
    """As many logits are no smaller than the k-th largest of the maxima of runs, or more."""
    bound = threshold(maxima, np.ones_like(maxima), k)
    some = logits[likely(logits, maxima, bound)]
    return threshold(some, np.ones_like(some), k)


@kernel
def top_tokens(logits, maxima, n):
    """Return the n likeliest tokens, likeliest first; of equals the smallest ids."""
    tokens = likely(logits, maxima, kth_largest(logits, maxima, n))
    for place in range(len(tokens)):  # by insertion, for Numba compiles its own sort for three seconds
        token = tokens[place]
        while place > 0 and logits[tokens[place - 1]] < logits[token]:
            tokens[place] = tokens[place - 1]
            place -= 1
        tokens[place] = token
    return tokens[:n]


@exact_kernel
def weighed(logits, maxima, temperature, least):
    """Return the probabilities, of which the largest is 1, and their sum in each run; if it is 0, the run's
    are not written.
    """
    probs, sums = np.empty_like(logits), np.zeros(len(maxima))
    top = largest(maxima)
    for r in range(len(maxima)):
        if maxima[r] >= least:
            some, of_run = run_of(logits, r), run_of(probs, r)
            for i in range(len(some)):
                prob = exp((some[i] - top) / temperature)
                of_run[i] = prob if some[i] >= least else ZERO
            sums[r] = weight_from(LEAST_PROB, of_run, of_run)
    return probs, sums


@kernel
def reached(weights, least, end, position):
    """Return the place of the weight that holds a position, and where it begins; the first begins at `end`.

    Weights below the least do not count. If rounding leaves the position behind all, it is the last.
    """
    found, begin = 0, end
    for i in range(len(weights)):
        if weights[i] >= least:
            found, begin = i, end
            end += weights[i]
            if end > position:
                break
    return found, begin


@kernel
def draw(logits, maxima, s):
    """sampling.sample()"""
    least = largest(maxima) - s.margin
    if 0 < s.top_k < len(logits):
        least = max(least, kth_largest(logits, maxima, s.top_k))
    probs, sums = weighed(logits, maxima, np.float32(max(s.temperature, 1e-30)), least)
    bound = LEAST_PROB
    if s.top_p < 1:
        total = sums.sum()
        # The tokens below this one add up to less than 1 - top_p.
        bound = max(bound, np.float32((1 - s.top_p) * total / len(probs)))
        some = probs[likely(probs, sums, bound)]
        bound = max(bound, threshold(some, some, max(s.top_p * total, LEAST_PROB)))
        for r in range(len(sums)):
            if sums[r] >= bound:
                sums[r] = weight_from(bound, run_of(probs, r), run_of(probs, r))
    position = s.u * weight_from(bound, sums, sums)
    r, begin = reached(sums, bound, 0.0, position)
    i, _ = reached(run_of(probs, r), bound, begin, position)
    return r * RUN + i


@kernel
def choose(raw, penalised, place, s, choice):
    """sampling.pick_token(); see choose_rows()."""
    maxima = raw_maxima = run_maxima(raw)
    logits = raw
    if place >= 0:
        logits = penalised[place]
        maxima = run_maxima(logits)
    choice[0] = NO_TOKEN
    if not (np.isfinite(largest(raw_maxima)) and np.isfinite(largest(maxima))):
        return
    if s.temperature:
        choice[0] = draw(logits, maxima, s)
    else:
        choice[0] = likely(logits, maxima, largest(maxima))[0]
    if s.n_top >= 0:
        _, sums = weighed(raw, raw_maxima, ONE, MINUS_INFINITY)
        normaliser = largest(raw_maxima) + math.log(sums.sum())
        tokens = top_tokens(raw, raw_maxima, s.n_top)
        logprobs = choice.view(np.float32)
        logprobs[1] = raw[choice[0]] - normaliser
        for i in range(len(tokens)):
            choice[2 + i] = tokens[i]
            logprobs[2 + MAX_TOP + i] = raw[tokens[i]] - normaliser


@kernel
def choose_rows(logits, penalised, places, settings, choices):
    """sampling.pick_token() of each row of logits (n_rows, vocab_size).

    penalised (n, vocab_size): rows after penalties, bias and masks; places (n_rows,): which of these is the
    row's, -1: it has none; settings (n_rows,) SETTINGS; choices (n_rows, CHOICE_WIDTH) int32, as
    step_memory.read_choices() takes them.
    """
    for r in prange(len(logits)):
        choose(logits[r], penalised, places[r], settings[r], choices[r])
