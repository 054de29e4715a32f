"""bench.py runs, and its table has what it promises; how fast is none of this suite's business."""

import re
from pathlib import Path

import pytest

import bench
from engine import Engine
from serving import TINY
from tokenizer import Tokenizer
from weights import read_config, read_weights


def test_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "transformers_model", lambda *_: None)  # gigabytes, where it is installed
    out = tmp_path / "results" / "cpu.md"
    flags = ["--model", str(TINY), "--repeat", "2", "--new", "3", "--threads", "1", "--out", str(out)]
    assert bench.main(["cpu", *flags]) == 0
    printed = capsys.readouterr()
    assert printed.out == out.read_text(encoding="utf-8")
    assert "tiny in float32" in printed.out
    assert "| tokens/s, median of 2 | engine | forward |" in printed.out
    for name in bench.MEASUREMENTS:
        assert re.search(rf"^\| {name} \| [1-9][\d.]+ \| [1-9][\d.]+ \|$", printed.out, re.MULTILINE)
    n_runs = 3 * len(bench.MEASUREMENTS) * 2
    assert printed.err.count("\n") == n_runs  # a line of progress each


def test_both_of_ours_say_the_same() -> None:
    config = read_config(TINY)
    weights = read_weights(TINY, config)
    prompts = bench.prompts(Tokenizer(TINY / "tokenizer.json"), 3, 20)
    assert [len(prompt) for prompt in prompts] == [20] * 3
    engine = Engine(config, weights, 64)
    said = bench.engine_run(engine)(prompts, 9).said
    engine.close()
    assert said == bench.forward_run(config, weights, 64)(prompts, 9).said
    assert len(said) == 9


def test_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "store.md"
    assert bench.main(["store", "--model", str(TINY), "--responses", "20", "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert printed.out == out.read_text(encoding="utf-8")
    for name in ("appended and written", "replayed"):
        assert re.search(rf"^\| {name} \| [1-9]\d+ events/s \|$", printed.out, re.MULTILINE)


def test_relay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "relay.md"
    assert bench.main(["relay", "--repeat", "1", "--events", "320", "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert printed.out == out.read_text(encoding="utf-8")
    *measured, first = printed.out.strip().splitlines()[6:]
    assert first == "| first one is here before the second is written | yes | yes | yes | | |"
    for name, row in zip(bench.RELAYED, measured, strict=False):
        assert re.fullmatch(rf"\| {re.escape(name)} (\| [\d.]+ ){{5}}\|", row)
