"""checkpoint/rope.py as config.json asks for it, against formulas written here a second time."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from checkpoint.config import UnsupportedModel, parse_config
from checkpoint.rope import rope_table

HEAD_DIM, THETA = 128, 500_000.0
ORIGINAL = {"original_max_position_embeddings": 8192}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL}
YARN = {"type": "yarn", "factor": 4.0, **ORIGINAL}
SMALL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 4 * 8192,
}


def plain(pair: int) -> float:
    return float(THETA ** (-2 * pair / HEAD_DIM))


def linear(pair: int) -> float:
    return plain(pair) / 4


def llama3(pair: int) -> float:
    """https://github.com/meta-llama/llama-models/blob/main/models/llama3/model.py, apply_scaling"""
    wavelength = 2 * math.pi / plain(pair)
    if wavelength < 8192 / 4.0:
        return plain(pair)
    if wavelength > 8192 / 1.0:
        return plain(pair) / 8.0
    smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
    return (1 - smooth) * plain(pair) / 8.0 + smooth * plain(pair)


def yarn(pair: int, fast: float = 32, slow: float = 1, whole: bool = True) -> float:
    """https://arxiv.org/abs/2309.00071, section 3.2, with the ramp over dimensions of its published code"""
    low = HEAD_DIM * math.log(8192 / (fast * 2 * math.pi)) / (2 * math.log(THETA))
    high = HEAD_DIM * math.log(8192 / (slow * 2 * math.pi)) / (2 * math.log(THETA))
    if whole:
        low, high = math.floor(low), math.ceil(high)
    stretched = min(max((pair - low) / (high - low), 0), 1)
    return plain(pair) * (1 - stretched) + plain(pair) / 4 * stretched


def yarn_fractional(pair: int) -> float:
    return yarn(pair, 20, 2, whole=False)


def scaled(**scaling: Any) -> dict[str, Any]:
    return {"rope_theta": THETA, "rope_scaling": scaling}


def mscale(factor: float) -> float:
    return 0.1 * math.log(factor) + 1


# fmt: off
#    rope_theta or rope_parameters, rope_scaling            frequency        on cos and sin
ROPES: list[tuple[dict[str, Any], Callable[[int], float], float]] = [
    ({"rope_theta": THETA},                                 plain,           1.0),
    (scaled(type="linear", factor=4),                       linear,          1.0),
    (scaled(**LLAMA3),                                      llama3,          1.0),
    ({"rope_parameters": {"rope_theta": THETA, **LLAMA3}},  llama3,          1.0),
    (scaled(**YARN),                                        yarn,            mscale(4)),
    (scaled(**YARN, attention_factor=1.3),                  yarn,            1.3),
    (scaled(**YARN, beta_fast=20, beta_slow=2, truncate=False),
                                                            yarn_fractional, mscale(4)),
]
# fmt: on


@pytest.mark.parametrize(("changes", "frequency", "magnitude"), ROPES)
def test_rope_table(changes: dict[str, Any], frequency: Callable[[int], float], magnitude: float) -> None:
    config = parse_config(SMALL | changes, {})
    table = rope_table(config.rope, config.head_dim, 8193)
    assert table.shape == (8193, HEAD_DIM // 2)
    assert table.dtype == np.complex64
    for position in (0, 1, 100, 8192):
        for pair in range(HEAD_DIM // 2):
            angle = position * frequency(pair)
            expected = complex(magnitude * math.cos(angle), magnitude * math.sin(angle))
            assert table[position, pair] == pytest.approx(expected, abs=2e-7)


# What a division or a logarithm below would trip over, and what is no number at all.
# fmt: off
#   rope_scaling                                        words of the one line that refuses it
REFUSED: list[tuple[dict[str, Any], str]] = [
    (YARN | {"rope_theta": 1},                          "rope_theta is 1; supported: a number from 2"),
    (YARN | {"factor": 10**400},                        "factor is 1000"),
    (YARN | {"factor": None},                           "factor is null; supported: a number"),
    (YARN | {"truncate": "false"},                      'truncate is "false"; supported: true or false'),
    (YARN | {"mscale": 1},                              "mscale is 1; supported: null"),
    (LLAMA3 | {"high_freq_factor": 1.0},                "high_freq_factor is 1.0; supported: a number a"),
    (LLAMA3 | {"rope_type": []},                        'rope_type is []; supported: "default" or'),
]
# fmt: on


@pytest.mark.parametrize(("scaling", "words"), REFUSED)
def test_numbers_refused(scaling: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModel) as refusal:
        parse_config(SMALL | scaled(**scaling), {})
    assert str(refusal.value).startswith(f"config.json: {words}")
