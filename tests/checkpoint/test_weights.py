"""checkpoint/weights.py against small random checkpoints; test_parity.py has the tensors of each family."""

import contextlib
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoint import weights
from checkpoint.config import FAMILIES, Fields, UnsupportedModel, parse_config, read_config
from checkpoint.rope import ROPE_TYPES, Rope, rope_table
from checkpoint.weights import all_parts, read_weights
from helpers.tables import plain, table
from parity import CASES, SMALL, random_tensor, write_tensors

LLAMA: dict[str, Any] = SMALL | {"model_type": "llama"}


def checkpoint(directory: Path, dtype: str = "F32", **changes: Any) -> dict[str, Any]:
    """Write LLAMA with these changes to a directory, and return its tensors."""
    raw = LLAMA | changes
    (directory / "config.json").write_text(json.dumps(raw))
    parts = all_parts(parse_config(raw, {}))
    tensors = {part.name: random_tensor(part.name, part.shape) for part in parts}
    write_tensors(directory / "model.safetensors", tensors, dtype)
    return tensors


TABLES = table("checkpoints")
NOPE = {"no_rope_layers": [1, 0, 1, 0]}
LLAMA3 = CASES["llama-3.1-rope-scaling"].changes["rope_scaling"]


@pytest.mark.bug("P15")
@pytest.mark.parametrize("changes", TABLES["becomes"])
def test_config(changes: str) -> None:
    expected = TABLES["becomes"][changes]
    config = parse_config(LLAMA | json.loads(changes), {})
    assert {name: plain(getattr(config, name)) for name in expected} == expected


@pytest.mark.parametrize("model_type", TABLES["defaults"])
def test_absent_fields_take_the_familys_defaults(model_type: str) -> None:
    expected = TABLES["defaults"][model_type]
    n_heads = expected[1]
    raw = {name: SMALL[name] for name in ("vocab_size", "intermediate_size", "num_hidden_layers")} | NOPE
    raw |= {"model_type": model_type, "num_attention_heads": n_heads, "hidden_size": 6 * n_heads}
    c = parse_config(raw, {})
    found = [c.head_dim, c.n_kv_heads, c.max_seq_len, c.rope.rope_theta, [*c.eos_token_ids]]
    assert found == expected


@contextlib.contextmanager
def refused(words: list[str]) -> Iterator[None]:
    with pytest.raises(UnsupportedModel) as refusal:
        yield
    assert all(word in str(refusal.value) for word in words), refusal.value
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("changes", TABLES["config"])
def test_config_refused(changes: str) -> None:
    with refused(TABLES["config"][changes]):
        parse_config(LLAMA | json.loads(changes), {})


JUNK: list[Any] = [None, True, "false", "x", -1, 0, 1, 2, 2.5, 1e-300, 10**400, math.nan, math.inf]
JUNK += [[], [1], [[]], {}, {"a": 1}, {"a": {}}]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_whatever_a_field_holds_is_read_or_refused(model_type: str) -> None:
    """Each field, and each of `rope_parameters` under each type: finite angles, or UnsupportedModel."""
    changes: list[dict[str, Any]] = [{name: junk} for name in Fields.__struct_fields__ for junk in JUNK]
    for kind, field, junk in itertools.product(ROPE_TYPES, vars(Rope(1)), JUNK):
        changes.append({"rope_parameters": {**LLAMA3, "rope_type": kind, field: junk}})
    read = 0
    for change in changes:
        raw = LLAMA | NOPE | {"model_type": model_type, "use_sliding_window": True, "max_window_layers": 1}
        raw |= change
        with contextlib.suppress(UnsupportedModel):
            config = parse_config(raw, {})
            assert np.isfinite(rope_table(config.rope, config.head_dim, 4)).all(), change
            read += 1
    assert 0 < read < len(changes)


@pytest.mark.parametrize(("dtype", "packed"), [("BF16", np.uint16), ("F16", np.float32)])
def test_a_matrix_of_bfloat16_is_packed_as_it_is(tmp_path: Path, dtype: str, packed: Any) -> None:
    """Through float32 and back, 1.19 GB took 4 to 7 s, and twice the memory."""
    checkpoint(tmp_path, dtype)
    found = read_weights(tmp_path, read_config(tmp_path), lambda w: w)
    [*layers, last] = found.layers
    assert {array.dtype for array in (found.embed, last.wqkv, last.w_gate_up)} == {np.dtype(packed)}
    assert {array.dtype for array in (found.norm, last.attn_norm, layers[0].mlp_norm)} == {np.dtype("f4")}


def test_bfloat16_rounds_to_nearest_even() -> None:
    """The largest number becomes infinity, a subnormal one keeps its sign."""
    bits = "3F800000 3F807FFF 3F808000 3F808001 3F818000 BF808000 7F800000 FF800000 7F7FFFFF 80000001"
    values = np.array([int(number, 16) for number in bits.split()], np.uint32).view(np.float32)
    rounded = weights.bfloat16(values)
    found = " ".join(f"{number:04X}" for number in rounded)
    assert found == "3F80 3F80 3F80 3F81 3F82 BF80 7F80 FF80 7F80 8000"
    assert weights.bfloat16(rounded) is rounded, "what is bfloat16 already"
    assert np.array_equal(weights.bfloat16(values[::2]), rounded[::2]), "a view with gaps"


#   tensor, after "model.layers.1."  becomes                      words of the one line that refuses it
TENSORS_REFUSED: list[tuple[str, Any, list[str]]] = [
    ("mlp.up_proj.weight", None, ["mlp.up_proj.weight (80, 48) is missing"]),
    ("self_attn.q_proj.weight", np.zeros((24, 48), "f4"), ["q_proj.weight is (24, 48)", "(48, 48)"]),
    ("self_attn.q_proj.weight", np.zeros((48, 48), np.uint8), ["q_proj.weight is (48, 48) of uint8"]),
    ("self_attn.q_proj.bias", np.zeros(48, "f4"), ["q_proj.bias has no place in", "llama"]),
]


@pytest.mark.parametrize(("name", "tensor", "words"), TENSORS_REFUSED)
def test_tensors_refused(tmp_path: Path, name: str, tensor: Any, words: list[str]) -> None:
    tensors = checkpoint(tmp_path) | {f"model.layers.1.{name}": tensor}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    write_tensors(tmp_path / "model.safetensors", kept, "F32")
    with refused(words):
        read_weights(tmp_path, read_config(tmp_path))


@pytest.mark.bug("P17")
def test_a_head_beside_a_tied_one_is_the_head_unless_it_is_the_same(tmp_path: Path) -> None:
    """Another one is the head, as transformers 5 has it: vllm-project/llm-compressor#2647"""
    tensors = checkpoint(tmp_path, tie_word_embeddings=True)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)  # of old files
    write_tensors(tmp_path / "model.safetensors", tensors, "F32")
    loaded = read_weights(tmp_path, read_config(tmp_path))
    assert loaded.head is loaded.embed
    tensors["lm_head.weight"] = tensors["lm_head.weight"] + 1
    write_tensors(tmp_path / "model.safetensors", tensors, "F32")
    loaded = read_weights(tmp_path, read_config(tmp_path))
    assert np.array_equal(loaded.head, tensors["lm_head.weight"])
