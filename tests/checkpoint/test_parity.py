"""This repository's model against transformers: the golden files that parity.py writes, without torch.

Authority: Hugging Face transformers in float32; `python tests/parity.py` makes the golden files anew.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoint import default_model, hub
from checkpoint.config import FAMILIES, parse_config
from checkpoint.weights import decoded_mxfp4
from parity import (
    CASES,
    GOLDEN,
    N_GREEDY,
    TINY,
    TOLERANCE,
    YARN,
    Ours,
    config_json,
    digest,
    every_mxfp4,
    read_golden,
    read_mxfp4_golden,
    write,
)


def check(name: str, ours: Ours) -> None:
    """The logits at the golden positions, and 64 greedy tokens."""
    golden = read_golden(name)
    assert len(golden.greedy) == N_GREEDY
    assert golden.max_difference(ours.logits(golden.token_ids, golden.positions)) < TOLERANCE
    assert ours.greedy(golden.prompt, N_GREEDY) == golden.greedy


@pytest.mark.parametrize("name", CASES)
def test_logits_and_greedy_text(name: str, tmp_path: Path) -> None:
    write(tmp_path, CASES[name])
    check(name, Ours(tmp_path))


@pytest.mark.parametrize("name", CASES)
def test_another_config_gives_other_logits(name: str, tmp_path: Path) -> None:
    """Else the test above would hold with the case's feature left out."""
    write(tmp_path, CASES[name])
    golden = read_golden(name)
    otherwise = Ours(tmp_path, CASES[name].otherwise)
    assert golden.max_difference(otherwise.logits(golden.token_ids, golden.positions)) > 100 * TOLERANCE


# fmt: off
#  a mixture           what config.json says otherwise
VARIATIONS: dict[str, dict[str, dict[str, Any]]] = {
    "gpt-oss": {
        "window":       {"sliding_window": None},
        "full layers":  {"layer_types": ["sliding_attention"] * 4},
        "YaRN":         {"rope_scaling": None, "rope_parameters": {"rope_type": "default"}},
        "truncate":     {"rope_scaling": YARN},
        "clamp":        {"swiglu_limit": 100.0},
        "alpha":        {"swiglu_alpha": 1.0},
        "top-k 1 less": {"num_experts_per_tok": 2},
    },
    "qwen3-moe": {"top-k 1 less": {"num_experts_per_tok": 2}, "shares": {"norm_topk_prob": False}},
    "mixtral-window": {"top-k 1 less": {"num_experts_per_tok": 2}},
}
# fmt: on


@pytest.mark.parametrize(
    ("name", "variation"), [(name, variation) for name, row in VARIATIONS.items() for variation in row]
)
def test_each_variation_matters(name: str, variation: str, tmp_path: Path) -> None:
    write(tmp_path, CASES[name])
    golden = read_golden(name)
    otherwise = Ours(tmp_path, VARIATIONS[name][variation])
    assert golden.max_difference(otherwise.logits(golden.token_ids, golden.positions)) > 10 * TOLERANCE


@pytest.mark.parametrize("field", ["sinks", "b_router", "b_gate_up", "b_down", "bqkv", "bo"])
def test_each_tensor_that_only_gpt_oss_has_matters(field: str, tmp_path: Path) -> None:
    write(tmp_path, CASES["gpt-oss"])
    golden = read_golden("gpt-oss")
    without = Ours(tmp_path)
    for layer in without.weights.layers:
        setattr(layer, field, None)
    assert golden.max_difference(without.logits(golden.token_ids, golden.positions)) > 100 * TOLERANCE


def test_mxfp4_means_what_transformers_says() -> None:
    """Every byte with every scale, bit for bit."""
    assert digest(decoded_mxfp4(every_mxfp4())) == read_mxfp4_golden()


def test_cases_differ_in_what_they_are_for() -> None:
    """Each way that a family can differ is in some case, as config.json's reader understands it."""
    configs = [parse_config(config_json(case), {}) for case in CASES.values()]
    assert {config.model_type for config in configs} == FAMILIES.keys()
    assert {config.rope.rope_type for config in configs} == {"default", "linear", "llama3", "yarn"}
    for feature in ("tied", "qkv_bias", "o_bias", "mlp_bias", "qk_norm", "sinks"):
        assert {getattr(config, feature) for config in configs} == {True, False}
    assert {config.n_heads // config.n_kv_heads for config in configs} == {1, 2}
    assert {config.head_dim * config.n_heads == config.dim for config in configs} == {True, False}
    assert {len({*config.windows}) for config in configs if any(config.windows)} == {1, 2}
    assert {all(config.rotary) for config in configs} == {True, False}
    assert {case.dtype for case in CASES.values()} == {"F32", "F16", "BF16"}
    assert {case.n_shards for case in CASES.values()} > {1}


def test_every_golden_file_is_compared() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == {*CASES, "tiny", "default", "mxfp4"}


def test_tiny_model() -> None:
    check("tiny", Ours(TINY))


def test_default_model() -> None:
    try:
        directory = hub.find(None)
    except default_model.HubError as error:
        pytest.skip(f"the default model {default_model.NAME} cannot be had: {error}")
    check("default", Ours(directory))


def test_the_comparison_sees_a_wrong_logit() -> None:
    """One logit of one position, and one that the golden file of a real model does not hold itself."""
    golden = read_golden("tiny")
    logits = Ours(TINY).logits(golden.token_ids, golden.positions)
    for wrong in [int(logits[1].argmax()), int(np.abs(logits[1]).argmin())]:
        changed = logits.copy()
        changed[1, wrong] += 3
        assert golden.max_difference(changed) > TOLERANCE
