"""bench.py runs, and its table has what it promises; how fast is none of this suite's business."""

import asyncio
import itertools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bench
from benches import common, cpu, server
from benches.harness import Figures, rounds, table
from benches.processes import started
from checkpoint.config import parse_config, read_config
from checkpoint.weights import n_params, n_weight_bytes, read_weights
from dialects.families import DIALECTS
from engine import Engine
from helpers.serving import ROOT, TINY, serve
from model import Batch, NumpyOps, Span, forward
from tokenizer import Tokenizer


def test_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "transformers_model", lambda *_: None)  # gigabytes, where it is installed
    monkeypatch.setattr(cpu, "N_TEXT", 600)
    out = tmp_path / "results" / "cpu.md"
    flags = [
        "--model",
        str(TINY),
        "--repeat",
        "2",
        "--new",
        "3",
        "--threads",
        "1",
        "--perplexity",
        "--out",
        str(out),
    ]
    assert bench.main(["cpu", *flags]) == 0
    printed = capsys.readouterr()
    assert printed.out == out.read_text(encoding="utf-8")
    assert re.search("^[\\d-]+, tiny, 3 tokens decoded a sequence,", printed.out)
    formats = re.findall("^Weights: (.*?)[.] (NumPy|Numba), .* of weights", printed.out, re.MULTILINE)
    has_numba = "numba" in sys.modules
    names = ["file", *["int8", "int4"] * has_numba]  # the file has bfloat16
    assert [name for name, _ in formats] == names
    n_contenders = 0
    for name in names:
        contenders = ["engine", "forward"] + ["forward, NumPy"] * (has_numba and name == "file")
        n_contenders += len(contenders)
        part = printed.out.partition(f"Weights: {name}.")[2].partition("\n\n")[2].partition("\n\n")[0]
        assert f"| tokens/s, median of 2 (engine / it) | {' | '.join(contenders)} |" in part
        for row in [*cpu.MEASUREMENTS, "batch 8 / batch 1"]:
            cells = r" \| [\d.]+( \([\d.]+\))?" * len(contenders)
            assert re.search(rf"^\| {row}{cells} \|", part, re.MULTILINE)
        assert (
            bool(re.search(r"^\| batch 1, of [\d.]+ GB/s that are read \| \d+% \|", part, re.M)) == has_numba
        )
        assert re.search(
            rf"^\| {name} \| [\d.]+( \([+-][\d.]+ ± [\d.]+ %\))? \|  \|$", printed.out, re.MULTILINE
        )
    own = re.findall(r"^\| (.*: .*) \| [\d.]+ \| [\d.]+ \| ([\d.]+) \|$", printed.out, re.MULTILINE)
    assert [name.partition(":")[0] for name, _ in own] == [
        "prefill of a second turn, 1033 tokens",
        "decode",
        "decode of a text that repeats",
        f"decode, batch {common.MAX_BATCH}",
    ]
    n_runs = 3 * (len(cpu.MEASUREMENTS) * n_contenders + len(own))
    assert printed.err.count("round ") == n_runs  # a line of progress each


def test_losses_do_not_depend_on_chunks() -> None:
    """Of 130 tokens in a window 129 are predicted, whether or not the first 128 are computed together."""
    config = read_config(TINY)
    weights = read_weights(TINY, config)
    [window] = common.prompts(Tokenizer(TINY / "tokenizer.json"), 1, 130)
    ops = common.with_pages(NumpyOps, config, weights, 192)
    losses = cpu.our_losses(ops, weights, [window, window[:5]])
    batch = Batch([Span(0, range(3), window, 0, len(window))])
    expected = cpu.window_losses(forward(ops, weights, batch), window)
    assert losses.shape == (129 + 4,)
    assert losses == pytest.approx([*expected, *expected[:4]], rel=1e-4)


def test_both_of_ours_say_the_same() -> None:
    config = read_config(TINY)
    weights = read_weights(TINY, config)
    prompts = common.prompts(Tokenizer(TINY / "tokenizer.json"), 3, 20)
    assert [len(prompt) for prompt in prompts] == [20] * 3
    engine = Engine(common.with_pages(NumpyOps, config, weights, 64))
    said = common.engine_run(engine)(prompts, 9).said
    engine.close()
    assert said == cpu.forward_run(common.with_pages(NumpyOps, config, weights, 64))(prompts, 9).said
    assert len(said) == 9


def test_no_round_finds_its_prompt_in_a_cache() -> None:
    """The second round of a prompt of 128 tokens took 64 from the first round's page."""
    [first], [second] = (common.prompts(Tokenizer(TINY / "tokenizer.json"), 1, 128, n) for n in (0, 1))
    assert first[0] != second[0]
    assert first[1:] == second[1:]


def test_pieces(tmp_path: Path) -> None:
    out = tmp_path / "pieces.md"
    assert (
        bench.main(["pieces", "--pieces", "400", "--responses", "3", "--repeat", "1", "--out", str(out)]) == 0
    )
    rows = rows_of(out)
    assert rows.keys() == {f"{name}, pieces/s" for name in DIALECTS} | {"events/s stored", "events/s read"}


def test_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "STREAMS", {1: 20, 3: 5})
    monkeypatch.setattr(server, "TICK_S", 0.05)
    out = tmp_path / "server.md"
    assert bench.main(["server", "--model", str(TINY), "--repeat", "1", "--out", str(out)]) == 0
    rows = rows_of(out)
    kinds = ("events/s", "CPU µs an event", "median late, ms", "p99 late, ms")
    assert rows.keys() == {f"{n} streams, {kind}" for n in (1, 3) for kind in kinds} | {
        "3 streams, kB a stream"
    }
    assert all(len(cells) == 2 for cells in rows.values())


def test_both_servers_say_as_many_tokens() -> None:
    for name in server.SERVED:
        with started(*server.command_of(name, TINY)) as running:
            [heard] = asyncio.run(server.hear(running.url, 1, 5, paced=False))
        assert len(heard.late_s) == 5


def test_relay(tmp_path: Path) -> None:
    out = tmp_path / "relay.md"
    assert bench.main(["relay", "--repeat", "1", "--events", "320", "--out", str(out)]) == 0
    rows = rows_of(out)
    assert rows.keys() == {"first event, ms", "an event, ms", "events/s, 1 streams", "events/s, 32 streams"}
    assert all(len(cells) == 3 for cells in rows.values())


def test_http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two servers, which happen to be one; no prompt of a round is in its cache.

    Each prompt begins with a number, not at random: the tiny model has no text in answer to some.
    """
    out = tmp_path / "http.md"
    numbers = itertools.count()
    monkeypatch.setattr("secrets.token_hex", lambda _: f"{next(numbers):08}")
    with serve("--model", str(TINY)) as running:
        url = f"{running.url}/v1"
        flags = ["--repeat", "1", "--new", "6", "--characters", "400", "--streams", "1", "2"]
        assert (
            bench.main(["http", url, url.replace("127.0.0.1", "localhost"), *flags, "--out", str(out)]) == 0
        )
        counts = running.health()
    rows = rows_of(out)
    assert rows.keys() == {
        "a long prompt, tokens",
        "a long prompt, its tokens/s",
        "a long prompt, first token, ms",
        "a short prompt, first token, ms",
        "1 streams, tokens/s",
        "2 streams, tokens/s",
    }
    assert all(len(cells) == 2 for cells in rows.values())
    assert counts["cached_tokens"] == 0


def test_rounds() -> None:
    """Contenders take turns, the first round does not count, and ratios are to the first contender."""
    said: list[str] = []

    def contender(name: str, values: list[float]) -> Callable[[], Figures]:
        def measure() -> Figures:
            said.append(name)
            return {"speed": values.pop(0)}

        return measure

    case = {"ours": contender("ours", [99, 4, 1, 2]), "theirs": contender("theirs", [99, 8, 5, 200])}
    medians = rounds([case], 3)
    assert said == ["ours", "theirs"] * 4
    assert medians == {"speed": {"ours": 2, "theirs": 8}}
    assert list(table(medians))[2] == "| speed | 2 | 8 (4.00) |"


def rows_of(out: Path) -> dict[str, list[str]]:
    """The cells of each row of the tables in a file, by the row's name."""
    lines = [line.strip("| ").split(" | ") for line in out.read_text(encoding="utf-8").splitlines()]
    return {name: cells for name, *cells in lines if cells and not name.startswith("median")}


# fmt: off
SMALL_SHAPES: dict[str, dict[str, Any]] = {
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "num_local_experts": 5, "num_experts_per_tok": 3, "quantization_config": {"quant_method": "mxfp4"},
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
    },
    "qwen2.5-0.5b": {
        "model_type": "qwen2", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
}
# fmt: on


@pytest.mark.parametrize("name", SMALL_SHAPES)
def test_cpu_shapes(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = pytest.importorskip("benches.shapes", reason="needs Numba")
    monkeypatch.setattr(shapes, "SHAPES", SMALL_SHAPES)
    monkeypatch.setattr(shapes, "GIGABYTE", np.ones(2**20, np.float32))
    flags = ["--weights", "int8"] if name == "qwen2.5-0.5b" else []
    assert bench.main(["cpu", "--shape", name, *flags, "--repeat", "2", "--new", "2", "--threads", "1"]) == 0
    printed = capsys.readouterr().out
    assert f"{name} with random weights, 2 of 2 layers" in printed
    for row in ("weights", "read a token", "decode, batch 1", "decode, batch 8", "share of it at batch 1"):
        assert re.search(rf"^\| {row} \| [\d.]+", printed, re.MULTILINE), row


def test_memory_is_read_by_as_many_threads_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """With --threads 1 all cores read it, and the share of its speed that one reaches was half."""
    numba = pytest.importorskip("numba", reason="pip install -e '.[fast]' brings Numba")
    from benches import shapes

    monkeypatch.setattr(shapes, "GIGABYTE", np.ones(2**20, np.float32))
    for n_threads in (numba.config.NUMBA_NUM_THREADS, 1):
        assert shapes.memory_speed(n_threads) > 0
        assert numba.get_num_threads() == n_threads


def test_shapes_are_those_of_the_models() -> None:
    """The numbers of parameters that the models' makers publish, in billions."""
    shapes = pytest.importorskip("benches.shapes", reason="needs Numba")
    published = {"gpt-oss-20b": 20.91, "qwen3-30b-a3b": 30.53, "qwen3-0.6b": 0.60, "qwen3-8b": 8.19}
    published |= {"qwen2.5-0.5b": 0.49, "smollm2-135m": 0.135, "llama-3-8b": 8.03}
    for name, n_billions in published.items():
        assert n_params(parse_config(shapes.SHAPES[name], {})) / 1e9 == pytest.approx(n_billions, abs=0.01)
    assert shapes.SHAPES.keys() - published == {"dry", "dry-mixture"}
    config = parse_config(shapes.SHAPES["gpt-oss-20b"], {})
    all_gb, token_gb = n_weight_bytes(config) / 1e9, shapes.read_bytes(config, 1) / 1e9
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"gpt-oss-20b has {all_gb:.1f} GB of weights, and a token reads {token_gb:.1f} GB" in readme
