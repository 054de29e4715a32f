"""Loading a model: what the server says of it at its start."""

from dataclasses import replace

import pytest

from checkpoint.config import Config, read_config
from devices.cuda import CudaOps
from helpers.serving import TINY
from model import PAGE, NumpyOps
from service import loading


@pytest.fixture(scope="module")
def config() -> Config:
    return read_config(TINY)


@pytest.mark.parametrize(("head_dim", "padded"), [(40, 64), (64, 64), (80, 96)])
def test_pages_of_a_gpu_are_counted_with_their_padding(config: Config, head_dim: int, padded: int) -> None:
    """Bug: the start-up line counted heads without their padding, so less than the pages take."""
    config = replace(config, head_dim=head_dim, n_kv_heads=4, n_layers=32)
    facts = loading.memory_facts("cuda", config, 1000)
    token_bytes = 2 * 2 * 32 * 4 * padded  # a key and a value in 2 bytes
    assert CudaOps.page_bytes(config) == token_bytes * PAGE
    assert facts["memory"].startswith(f"{token_bytes / 1e3:.0f} kB a token of context")
    assert facts["memory"].endswith("in bfloat16")
    assert facts["pages"] == f"1000 of {PAGE} tokens, at most {1000 * PAGE * token_bytes / 1e6:.0f} MB"


def test_pages_of_a_cpu_have_no_padding(config: Config) -> None:
    config = replace(config, head_dim=40, n_kv_heads=4, n_layers=32)
    token_bytes = 2 * 4 * 32 * 4 * 40
    assert NumpyOps.page_bytes(config) == token_bytes * PAGE
    facts = loading.memory_facts("cpu", config, 10)
    assert facts["memory"] == f"{token_bytes / 1e3:.0f} kB a token of context, keys and values in float32"
