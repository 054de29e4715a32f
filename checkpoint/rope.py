"""Rotary positions (RoPE): how far each pair of a head turns per token, as a table of cos + i sin.

    Rope --rope_table()--> cos + i sin

Authority: https://arxiv.org/abs/2104.09864, section 3.4; for a context longer than the model was first
trained on, each function of ROPE_TYPES names its own. The types and their numbers are those of transformers,
https://github.com/huggingface/transformers/blob/main/src/transformers/modeling_rope_utils.py.

Rules of this file:
  * A type is a function: from the frequencies as trained, and the length n of the context, to those in use,
    and a factor on cos and sin.
  * Frequencies and angles are float64: an angle of some thousands is off by 2e-4 in float32.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

Number = Annotated[float, Meta(ge=1e-12, le=1e12)]
Theta = Annotated[float, Meta(ge=2, le=1e12)]
Size = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Freq = NDArray[np.float64]  # radians per position for each pair of a head. (head_dim/2,)


@dataclass(frozen=True)
class Rope:
    """The numbers of a model's RoPE, as `rope_parameters` of config.json names them.

    Numbers that its type does not use keep these defaults.
    """

    rope_theta: Theta
    rope_type: str = "default"  # a key of ROPE_TYPES
    partial_rotary_factor: Number = 1.0  # of a head's dimensions, from the first on, is rotated
    score_scale: Number = 1.0  # of attention, beside 1 / sqrt(head_dim)
    original_max_position_embeddings: Size = 0  # llama3, yarn, longrope: the context as first trained
    factor: Number = 1.0  # linear, llama3, yarn, longrope: how much longer it has become
    low_freq_factor: Number = 1.0  # llama3
    high_freq_factor: Number = 4.0  # llama3
    beta_fast: Number = 32.0  # yarn
    beta_slow: Number = 1.0  # yarn
    truncate: bool = True  # yarn: the ramp begins and ends at whole pairs
    # yarn, longrope: on cos and sin, so on q and k; None: by the factor
    attention_factor: Number | None = None
    short_factor: tuple[Number, ...] = ()  # longrope: for each pair that turns
    long_factor: tuple[Number, ...] = ()  # longrope: in a context longer than the original
    mscale: None = None  # not here: DeepSeek's two for yarn
    mscale_all_dim: None = None

    def n_turning(self, head_dim: int) -> int:
        """How many dimensions of a head turn, the first ones; the others have no positions."""
        return int(head_dim * self.partial_rotary_factor)


def rope_table(rope: Rope, head_dim: int, n: int) -> NDArray[np.complex64]:
    """cos + i sin of every pair's angle at positions 0 .. n-1. (n, head_dim/2)

    A pair that does not turn has 1. q and k are both multiplied by the root of `score_scale`.
    """
    turning = rope.n_turning(head_dim)
    trained: Freq = rope.rope_theta ** -(np.arange(0, turning, 2) / turning)
    freq, magnitude = ROPE_TYPES[rope.rope_type](rope, trained, n)
    angles = np.arange(n)[:, None] * freq  # (n, turning/2) float64
    table = np.ones((n, head_dim // 2), np.complex64)
    table.real[:, : len(freq)] = np.cos(angles) * magnitude
    table.imag[:, : len(freq)] = np.sin(angles) * magnitude
    table *= math.sqrt(rope.score_scale)
    return table


def llama3(rope: Rope, freq: Freq, n: int) -> tuple[Freq, float]:
    """Stretch each pair by how many turns it makes within the original context.

    https://github.com/meta-llama/llama-models/blob/main/models/llama3/model.py, apply_scaling
    """
    turns = rope.original_max_position_embeddings * freq / (2 * math.pi)
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return partly_stretched(freq, rope.factor, kept), 1.0


def yarn(rope: Rope, freq: Freq, n: int) -> tuple[Freq, float]:
    """Stretch by a ramp over the pairs, from the one that turns beta_fast times to that of beta_slow.

    https://arxiv.org/abs/2309.00071, with the ramp of its published code,
    https://github.com/jquesnelle/yarn/blob/master/scaled_rope/LlamaYaRNScaledRotaryEmbedding.py
    """
    n_pairs = len(freq)
    # theta^(-pair / n_pairs) * original = times * 2 * pi, solved for the pair
    low, high = (
        n_pairs
        * math.log(rope.original_max_position_embeddings / (times * 2 * math.pi))
        / math.log(rope.rope_theta)
        for times in (rope.beta_fast, rope.beta_slow)
    )
    if rope.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, 2 * n_pairs - 1)  # head_dim - 1, as in the published code: beyond the last pair
    kept = 1 - (np.arange(n_pairs, dtype=np.float64) - low) / (high - low or 0.001)
    magnitude = rope.attention_factor
    if magnitude is None:  # sqrt(1/t) of section 3.4, equation 22
        magnitude = 0.1 * math.log(max(rope.factor, 1)) + 1
    return partly_stretched(freq, rope.factor, kept), magnitude


def longrope(rope: Rope, freq: Freq, n: int) -> tuple[Freq, float]:
    """Divide the frequency of each pair by a number of its own: of the long list if n > original.

    https://arxiv.org/abs/2402.13753, section 3.3. In transformers the length of each sequence decides, and
    a sequence that outgrows the original context is computed anew. Here the length of the context decides, so
    that sequences can share keys; the effect on short texts in a long context: https://github.com/ggml-org/llama.cpp/issues/24823
    """
    original = rope.original_max_position_embeddings
    factors = rope.long_factor if n > original else rope.short_factor
    magnitude = rope.attention_factor
    if magnitude is None:
        magnitude = math.sqrt(1 + math.log(max(rope.factor, 1)) / math.log(max(original, 2)))
    return freq / np.array(factors), magnitude


def partly_stretched(freq: Freq, factor: float, kept: Freq) -> Freq:
    """Mix the frequencies: as trained if `kept` is 1, stretched by the whole factor if it is 0."""
    kept = np.clip(kept, 0, 1)
    return freq * kept + freq / factor * (1 - kept)


# rope_type
ROPE_TYPES: dict[str, Callable[[Rope, Freq, int], tuple[Freq, float]]] = {
    "default": lambda rope, freq, n: (freq, 1.0),
    "linear": lambda rope, freq, n: (freq / rope.factor, 1.0),  # https://arxiv.org/abs/2306.15595
    "llama3": llama3,
    "yarn": yarn,
    "longrope": longrope,
    "su": longrope,  # its older name
}
