"""Loading a model: what its memory holds, and directories that are damaged, or made to harm."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from checkpoint.config import Config, Experts, read_config
from devices.cuda import CudaOps
from helpers.serving import TINY
from helpers.tables import table
from model import PAGE, NumpyOps
from service import loading, options


@pytest.fixture(scope="module")
def config() -> Config:
    return read_config(TINY)


@pytest.mark.parametrize(("head_dim", "padded"), [(40, 64), (64, 64), (80, 96)])
def test_pages_of_a_gpu_are_counted_with_their_padding(config: Config, head_dim: int, padded: int) -> None:
    config = replace(config, head_dim=head_dim, n_kv_heads=4, n_layers=32)
    token_bytes = 2 * 2 * 32 * 4 * padded  # a key and a value in 2 bytes
    assert CudaOps.page_bytes(config) == token_bytes * PAGE


def test_weights_that_the_ops_cannot_round_are_refused(config: Config) -> None:
    """test_cpu.py has what Numba's ops round to."""
    experts = Experts(4, 2, 32, (True,), True, has_biases=False, limit=None, alpha=1, mxfp4=False)
    rounding = SimpleNamespace(pack_as=lambda weights: [])
    mixture = replace(config, experts=experts)
    for ops, of in ((CudaOps, config), (NumpyOps, config), (rounding, mixture)):
        with pytest.raises(ValueError, match="--weights int8: expected a model without experts"):
            loading.packs(ops, of, "int8")
    assert loading.packs(rounding, config, "int8") == []


def test_the_context_of_longrope(config: Config) -> None:
    """Where its short list holds, unless a longer one is asked for; of one list it is the model's."""
    rope = replace(config.rope, original_max_position_embeddings=64, short_factor=(1.0,), long_factor=(2.0,))
    two, one = (replace(config, rope=replace(rope, long_factor=numbers)) for numbers in ((2.0,), (1.0,)))
    assert [loading.context_length(c, None) for c in (two, one, config)] == [64, 2048, 2048]
    assert loading.context_length(two, 2048) == 2048


def test_memory_by_default() -> None:
    """What there is room for, but no more than all that run at once can use."""
    assert loading.pool(1, 1000, 3, None, 10**6) == 3 * 16
    assert loading.pool(2**20, 2**40, 16, None, 5 * 2**20) == 5
    with pytest.raises(ValueError, match=f"expected {10**15} or more"):
        loading.pool(10**15, 1000, 3, None, 10**6)
    assert 2**20 < loading.free_memory() < 2**50


# --- directories that are damaged, or made to harm ----------------------------------------------------------


def check_refused(complaint: str, directory: Path, *flags: str) -> None:
    """What is raised is told in a line at the start, as of any wrong option."""
    args = options.arguments().parse_args(["--model", str(directory), "--device", "cpu", *flags])
    with pytest.raises((ValueError, OSError), match=re.escape(complaint)) as caught:
        loading.load(directory, args)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "content", "complaint"), table("checkpoints")["damages"])
def test_a_damaged_model_is_refused(tmp_path: Path, name: str, content: Any, complaint: str) -> None:
    """Bug: the start hung, took 5 GB, or ended with a traceback."""
    file = Path(shutil.copytree(TINY, tmp_path / "model")) / name
    match content:
        case "gone":
            file.unlink()
        case dict():
            file.write_text(json.dumps(json.loads(file.read_text()) | content))
        case [text, n_times]:
            file.write_text(text * n_times)
        case str():
            file.write_text(content, "latin-1")
        case _:
            file.write_bytes(file.read_bytes()[:content])
    check_refused(complaint, file.parent)


@pytest.mark.bug("K07", "P30")
async def test_options_and_the_end_of_the_tokenizer_reach_the_worker(tmp_path: Path) -> None:
    directory = Path(shutil.copytree(TINY, tmp_path / "model"))
    odd = json.loads((TINY / "config.json").read_text()) | {"time_step_limit": [0.0, float("inf")]}
    (directory / "config.json").write_text(json.dumps(odd))
    (directory / "generation_config.json").write_text('{"eos_token_id": 2039}')
    args = options.arguments().parse_args(["--device", "cpu", "--max-output-tokens", "3"])
    worker = loading.load(directory, args)
    assert (worker.max_output_tokens, {*worker.engine.config.eos_token_ids}) == (3, {2039, 2041})
    await worker.close()


def test_weights_of_somebody_else_are_not_read(tmp_path: Path) -> None:
    """The file is a good one: only where it lies is wrong."""
    directory = Path(shutil.copytree(TINY, tmp_path / "model"))
    shutil.move(directory / "model.safetensors", tmp_path / "model.safetensors")
    index = {"weight_map": {"model.norm.weight": "../model.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    check_refused("`$.weight_map", directory)


SIZES = [
    ("--max-model-len=1", "2 to 2048"),
    ("--max-model-len=4096", "--max-model-len 4096: expected 2 to 2048, the limit of the model"),
    ("--kv-memory=50K", "or more"),
]


@pytest.mark.parametrize(("flag", "complaint"), SIZES)
def test_sizes_that_this_model_cannot_have_are_refused(flag: str, complaint: str) -> None:
    check_refused(complaint, TINY, flag)
