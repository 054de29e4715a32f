"""This repository's model against transformers: the golden files that parity.py writes, without torch.

Authority: Hugging Face transformers in float32; `python tests/parity.py` makes the golden files anew.
"""

import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from checkpoint import default_model, hub
from checkpoint.weights import decoded_mxfp4
from parity import CASES, GOLDEN, N_GREEDY, TINY, TOLERANCE, Ours, digest, every_mxfp4, read_golden, write


def check(name: str, directory: Path, n_greedy: int = N_GREEDY) -> None:
    """The logits at the golden positions, and greedy tokens."""
    golden, ours = read_golden(name), Ours(directory)
    assert len(golden.greedy) == N_GREEDY
    assert golden.max_difference(golden.of(ours)) < TOLERANCE
    assert ours.greedy(golden.prompt, n_greedy) == golden.greedy[:n_greedy]


@pytest.mark.parametrize("name", CASES)
def test_logits_and_greedy_text(name: str, tmp_path: Path) -> None:
    """With another config.json they differ: else this would hold with the case's feature left out."""
    write(tmp_path, CASES[name])
    check(name, tmp_path)
    golden = read_golden(name)
    logits = golden.of(Ours(tmp_path, CASES[name].otherwise))
    assert golden.max_difference(logits) > 100 * TOLERANCE


def test_mxfp4_means_what_transformers_says() -> None:
    """Every byte with every scale, bit for bit."""
    assert digest(decoded_mxfp4(every_mxfp4())) == json.loads((GOLDEN / "mxfp4.json").read_text())


def test_every_golden_file_is_compared() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == {*CASES, "tiny", "default", "mxfp4"}


def test_tiny_model() -> None:
    check("tiny", TINY)


def test_default_model() -> None:
    """In a process of its own: as float32 it takes half a gigabyte."""
    try:
        directory = hub.find(None)
    except default_model.HubError as error:
        pytest.skip(f"the default model {default_model.NAME} cannot be had: {error}")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as child:
        child.submit(check, "default", directory, 16).result()
