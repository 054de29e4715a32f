"""Loading a model: what the server says of it at its start, and of a directory that is made to harm it."""

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from checkpoint.config import Config, Experts, read_config
from devices.cuda import CudaOps
from helpers.serving import TINY, run
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


def test_pages_of_a_cpu_are_those_of_its_ops(config: Config) -> None:
    """NumPy's have no padding; Numba's hold bfloat16, and whole tiles of values."""
    config = replace(config, head_dim=40, n_kv_heads=4, n_layers=32)
    assert NumpyOps.page_bytes(config) == 2 * 4 * 32 * 4 * 40 * PAGE
    ops = loading.cpu_ops()
    token_kb = ops.page_bytes(config) / PAGE / 1e3
    facts = loading.memory_facts("cpu", config, 10)
    assert facts["memory"] == f"{token_kb:.0f} kB a token of context, keys and values in {ops.kv_dtype}"


def test_weights_that_the_ops_cannot_round_are_refused(config: Config) -> None:
    """In one line that says what to do; test_cpu.py has what Numba's ops round to."""
    experts = Experts(4, 2, 32, (True,), True, has_biases=False, limit=None, alpha=1, mxfp4=False)
    rounding = SimpleNamespace(pack_as=lambda weights: [])
    for ops, of, advice in (
        (CudaOps, config, "give --device cpu"),
        (NumpyOps, config, "pip install -e '.[fast]' brings the kernels"),
        (rounding, replace(config, experts=experts), "leave it out"),
    ):
        with pytest.raises(ValueError, match=f"^--weights int8: .*{re.escape(advice)}$"):
            loading.packs(ops, of, "int8")
        assert loading.packs(NumpyOps, of, None) == [NumpyOps.pack]


# --- directories that are made to harm ----------------------------------------------------------------------

Harm = Callable[[Path], object]


def config_with(**fields: Any) -> Harm:
    def harm(directory: Path) -> None:
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return harm


def template(source: str) -> Harm:
    return lambda directory: (directory / "chat_template.jinja").write_text(source)


def pipe(name: str) -> Harm:
    def harm(directory: Path) -> None:
        (directory / name).unlink()
        os.mkfifo(directory / name)

    return harm


def tokenizer_config(text: str) -> Harm:
    def harm(directory: Path) -> None:
        (directory / "chat_template.jinja").unlink()
        (directory / "tokenizer_config.json").write_text(text)

    return harm


def shard_elsewhere(directory: Path) -> None:
    """The file is a good one: only where it lies is wrong."""
    shutil.move(directory / "model.safetensors", directory.parent / "model.safetensors")
    index = {"weight_map": {"model.norm.weight": "../model.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


ENDLESS = "{% for a in range(99999) %}" * 4 + "{% endfor %}" * 4
# fmt: off
HARMS: dict[str, tuple[str, Harm]] = {
    # what it does                the error says                             how
    "a template without end":     ("it takes more than",                     template(ENDLESS)),
    "a template of gigabytes":    ("MemoryError",                            template("{{ 'a' * 10**11 }}")),
    "a template too deep":        ("RecursionError",                         template("{{" + "(" * 9999)),
    "a template that is none":    ("cannot be rendered: TypeError",
                                   tokenizer_config('{"chat_template": 5}')),
    "JSON too deep":              ("RecursionError",                         tokenizer_config("[" * 99_999)),
    "a pipe as template":         ("chat_template.jinja is no file",         pipe("chat_template.jinja")),
    "a pipe as tokenizer":        ("tokenizer.json is no file",              pipe("tokenizer.json")),
    "a vocabulary of 2**31 - 1":  ("vocab_size is 2147483647; supported",
                                   config_with(vocab_size=2**31 - 1)),
    "a context of 20 million":    ("20000000 tokens: the table of rotary",
                                   config_with(max_position_embeddings=20_000_000)),
    "weights of somebody else":   ("weight_map is",                          shard_elsewhere),
}
# fmt: on


@pytest.mark.parametrize("name", HARMS)
def test_a_directory_made_to_harm_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    """Bug: the start hung, took 5 GB, read files elsewhere, or ended with a traceback."""
    message, harm = HARMS[name]
    directory = shutil.copytree(TINY, tmp_path / "model")
    harm(directory)
    ended = run("server.py", "--model", str(directory), "--port", "0", "--device", "cpu")
    assert (ended.returncode, ended.stdout) == (2, "")
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_a_long_context_may_be_cut(config: Config) -> None:
    config = replace(config, max_seq_len=20_000_000)
    assert loading.context_length(config, 8192) == 8192
