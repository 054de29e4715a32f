"""bench.py runs, and its tables have the rows that they promise. No speed is tested."""

import argparse
import itertools
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import cast

import pytest

import bench
from benches import decoding, servers
from benches.decoding import SHAPES, load, op_bytes
from benches.harness import Case, rounds, table
from checkpoint.config import parse_config, read_config
from checkpoint.weights import n_params, n_weight_bytes
from devices import check
from devices import cuda as cuda_module
from helpers import emulator
from helpers.device_ops import sweep
from helpers.emulator import Emulator
from helpers.serving import TINY, serve
from perplexity import perplexity

Output = pytest.CaptureFixture[str]


def printed_rows(output: Output) -> dict[str, list[str]]:
    """Return the cells of each row of the table that was printed, by the row's name."""
    printed = output.readouterr().out.splitlines()
    lines = [line.strip("| ").split(" | ") for line in printed if line.startswith("| ")]
    return {name: cells for name, *cells in lines[1:]}


MODELS = [str(TINY), "dry", "dry-gpt-oss", "dry-qwen3-moe"]


@pytest.mark.parametrize("model", sweep(MODELS, MODELS[:2]), ids=str)
def test_cpu(model: str, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "N_READ", 1 << 20)
    flags = ["--new", "3", "--prompts", "64", "--batches", "2", "--contenders", "numpy", "--repeat", "1"]
    bench.main(["cpu", "--model", model, *flags])
    rows = printed_rows(capsys)
    decoded = {"decode, 2 x 32, tokens/s", "sampled, decode, 2 x 32, tokens/s"}
    assert rows.keys() == decoded | {"memory, GB/s", "prompt of 64, tokens/s"}
    assert len(rows["decode, 2 x 32, tokens/s"]) == 2  # the floor is one


HI: list[str | int] = ["hi"]


def small(row: servers.Row) -> servers.Row:
    """Return a row with few clients, which ask for little."""
    clients = [(min(wait_s, 0.1), HI[: len(turns)], min(new, 6)) for wait_s, turns, new in row.clients[:2]]
    more = {**row.more, "seed": row.more.get("seed", 0) // 20}
    used = row.servers[-1:] if "kB a stream" in row.figures else row.servers  # each round starts one
    return row._replace(times=min(row.times, 2), clients=clients, more=more, servers=used)


def measured(command: str, names: list[str]) -> set[str]:
    """Run the rows of a command at these servers, made small; return the names that its table has to have."""
    full = bench.TABLES[command]
    rows = [servers.Row(*row) for row in full["rows"]]
    commands = {name: [path, words.replace("0000", "")] for name, (path, words) in full["servers"].items()}
    settings = {"about": "", "rows": [*map(small, rows)], "servers": commands}
    servers.run(argparse.Namespace(table=settings, servers=names, model=str(TINY), only="", repeat=1))
    return {f"{row.name}, {kind}" for row in rows for kind in row.figures}


def test_server(capsys: Output) -> None:
    expected = measured("server", ["ours", "least", "relayed", "10000 stored"])  # others differ in a word
    rows = printed_rows(capsys)
    assert rows.keys() == expected
    assert len(rows["50 streams of 100, events/s"]) == 3


def test_http(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both APIs of a server that runs, and one that is started; no prompt of a round is in its cache.

    Each prompt begins with a number, not at random: the tiny model has no text in answer to some.
    """
    numbers = itertools.count()
    monkeypatch.setattr("secrets.token_hex", lambda _: f"{next(numbers):08}")
    with serve("--model", str(TINY)) as running:
        urls = [f"{running.url}/v1/chat/completions", f"{running.url}/v1/responses"]
        expected = measured("http", [*urls, "ours"])
        assert running.health()["cached_tokens"] == 0
    rows = printed_rows(capsys)
    assert rows.keys() == expected
    assert all(len(cells) == 3 for cells in rows.values())


def test_perplexity() -> None:
    """A model that has learnt nothing finds each token of its vocabulary as likely as any other."""
    ops = load("numpy", TINY, read_config(TINY), 512, 1)
    ops.weights.head[:] = 0
    assert perplexity(ops, [5, 6] * 300) == pytest.approx(ops.config.vocab_size)


def test_rounds() -> None:
    """Contenders take turns, the first round does not count, and ratios are to the first contender."""
    said: list[list[float]] = []

    def measure(values: list[float]) -> list[float]:
        said.append(values)
        return [values.pop(0)]

    contenders: dict[str, list[float]] = {"ours": [99, 4, 1, 2], "theirs": [99, 8, 5, 200]}
    medians = rounds([Case(["speed"], contenders, measure)], 3, math.inf)
    assert said == [*contenders.values()] * 4
    assert medians == {"speed": {"ours": 2, "theirs": 8}}
    assert list(table(medians))[2] == "| speed | 2.00 (1.00) | 8.00 (4.00) |"
    assert (
        list(table(rounds([Case(["speed"], contenders, measure)], 3, 0)))[2]
        == "| speed | not run | not run |"
    )


# ---- Shapes ------------------------------------------------------------------------------------------------


def test_shapes_are_those_of_the_models() -> None:
    """The numbers of parameters that the models' makers publish, in billions."""
    published = {"gpt-oss-20b": 20.91, "qwen3-30b-a3b": 30.53, "qwen3-0.6b": 0.60, "qwen3-8b": 8.19}
    for name, n_billions in published.items():
        assert n_params(parse_config(SHAPES[name], {})) / 1e9 == pytest.approx(n_billions, abs=0.01)


def test_a_row_reads_the_experts_that_it_chooses() -> None:
    config = parse_config(SHAPES["gpt-oss-20b"], {})
    n_all, n_one, n_two = (sum(op_bytes(config, batch, 0, packed=1).values()) for batch in (10**6, 1, 2))
    assert n_all == n_weight_bytes(config) - 2 * config.vocab_size * config.dim  # without the embedding
    n_one, n_two = n_all - n_one, n_all - n_two
    assert n_two / n_one == pytest.approx(28 / 32)


def test_a_step_reads_the_weights_and_what_its_windows_see() -> None:
    config = parse_config(SHAPES["qwen3-0.6b"], {})
    assert sum(op_bytes(config, 1, 320, packed=1).values()) == 2 * (n_params(config) + 2 * 28 * 8 * 128 * 320)


# ---- A GPU, which the emulator stands for ------------------------------------------------------------------


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    if emulator.MISSING:
        pytest.skip(emulator.MISSING)
    monkeypatch.setitem(sys.modules, "cupy", cast("ModuleType", Emulator(memory=1 << 29)))


@pytest.mark.usefixtures("cuda")
def test_gpu_report(capsys: Output, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says what a check found, and how long each op takes; the page is in a file as well."""
    monkeypatch.setattr(check, "STEPS", check.STEPS[:1])
    monkeypatch.setattr(check, "N_LAYERS", 1)
    monkeypatch.setattr(decoding, "N_READ", 1 << 20)
    monkeypatch.setattr(decoding, "N_LAUNCHES", 1)
    flags = f"--prompts 5 --new 2 --batches 2 --contexts 9 --repeat 1 --minutes 99 --file {tmp_path}/page.md"
    bench.main(["gpu-report", "--model", "dry", *flags.split()])
    text = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert "checked on the emulator: 9 ops, largest difference 0." in text
    rows = printed_rows(capsys)
    for op in ("a step", "embed", "qkv", "attend", "out", "gate_up", "down", "logits", "pick"):
        assert op == "a step" or f"{op}: 0." in text
        time_us, floor_us = (float(cell.partition(" ")[0]) for cell in rows[f"{op}, 2 x 9, µs"])
        assert floor_us >= 0 < time_us
    assert len(rows["decode, 2 x 9, tokens/s"]) == 2


@pytest.mark.skipif(not cuda_module.missing(), reason="there is a GPU")
def test_a_part_without_a_device_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """46 tests were skipped, and the command said that all was well."""
    monkeypatch.setitem(bench.TABLES["gpu-parts"], "parts", [["-m pytest -q -rs tests/gpu -k memcheck"]])
    with pytest.raises(SystemExit, match="True"):
        bench.main(["gpu-parts", "1"])
    assert "tests/gpu is for a GPU: " in capfd.readouterr().err
