"""bench.py runs, and its table has what it promises; how fast is none of this suite's business."""

import asyncio
import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import cast

import pytest

import bench
from benches import gpu, gpu_parts, kernels, server
from benches.harness import Figures, rounds, table
from benches.processes import started
from benches.runs import random_prompts
from benches.weights import config_json, expert_bytes, read_bytes
from checkpoint.config import parse_config
from checkpoint.weights import n_params, n_weight_bytes
from devices import cuda as cuda_module
from dialects.families import DIALECTS
from helpers import emulator
from helpers.emulator import Emulator
from helpers.serving import ROOT, TINY, serve

CPU_ROWS = {f"{what}, tokens/s" for what in ("prefill, 128 tokens", "decode, batch 1", "decode, batch 8")}
FEATURES = {"prefill of a second turn, tokens/s", "decode of a text that repeats, tokens/s"}


def test_cpu(tmp_path: Path) -> None:
    out = tmp_path / "cpu.md"
    flags = ["--model", str(TINY), "--repeat", "1", "--new", "3", "--threads", "1", "--perplexity", "140"]
    assert bench.main(["cpu", *flags, "--out", str(out)]) == 0
    rows = rows_of(out)
    assert rows.keys() >= CPU_ROWS | FEATURES | {"perplexity of 140 tokens"}
    assert any("GB/s that are read" in row for row in rows)


@pytest.mark.parametrize("shape", ["dry", "dry-gpt-oss", "dry-qwen3-moe"])
def test_cpu_shapes(shape: str, tmp_path: Path) -> None:
    out = tmp_path / "cpu.md"
    flags = ["--shape", shape, "--layers", "1", "--repeat", "1", "--new", "2", "--threads", "1"]
    assert bench.main(["cpu", *flags, "--out", str(out)]) == 0
    assert f"{shape}, 1 layers" in out.read_text(encoding="utf-8")
    assert rows_of(out).keys() >= CPU_ROWS


def test_no_round_finds_its_prompt_in_a_cache() -> None:
    """The second round of a prompt of 128 tokens took 64 from the first round's page."""
    assert random_prompts(1000, 1, 128) != random_prompts(1000, 1, 128)


def test_shapes_are_those_of_the_models() -> None:
    """The numbers of parameters that the models' makers publish, in billions."""
    published = {"gpt-oss-20b": 20.91, "qwen3-30b-a3b": 30.53, "qwen3-0.6b": 0.60, "qwen3-8b": 8.19}
    published["llama-3-8b"] = 8.03
    for name, n_billions in published.items():
        assert n_params(parse_config(config_json(name), {})) / 1e9 == pytest.approx(n_billions, abs=0.01)


def test_a_row_reads_the_experts_that_it_chooses() -> None:
    config = parse_config(config_json("gpt-oss-20b"), {})
    of_all = expert_bytes(config, 10**6)
    assert expert_bytes(config, 1) == pytest.approx(of_all * 4 / 32)
    assert expert_bytes(config, 2) == pytest.approx(of_all * (1 - (28 / 32) ** 2))
    embedding = 2 * config.vocab_size * config.dim
    assert read_bytes(config, 10**6) == n_weight_bytes(config) - embedding


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


# ---- A GPU, which the emulator stands for ------------------------------------------------------------------


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    if emulator.MISSING:
        pytest.skip(emulator.MISSING)
    monkeypatch.setitem(sys.modules, "cupy", cast("ModuleType", Emulator(memory=1 << 29)))
    monkeypatch.setattr(kernels, "N_TIMES", 1)
    monkeypatch.setattr(gpu, "READ_THREADS", 32)
    monkeypatch.setattr(gpu, "MAX_READ", 1 << 12)


@pytest.mark.usefixtures("cuda")
def test_gpu(tmp_path: Path) -> None:
    out = tmp_path / "gpu.md"
    flags = ["--shape", "dry", "--batches", "2", "--contexts", "9", "--prompts", "5", "--new", "2"]
    contenders = ["--contenders", "engine", "no-graphs", "--repeat", "1"]
    assert bench.main(["gpu", *flags, *contenders, "--out", str(out)]) == 0
    rows = rows_of(out)
    first, decode = "first token of 5, ms", "decode, {} tokens/s"
    assert rows.keys() == {first, *map(decode.format, ("2 x 9,", "sampled,"))}
    assert len(rows[decode.format("2 x 9,")]) == 3


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(
    ("shape", "kernels"),
    [("dry", {"gate_up", "down"}), ("dry-gpt-oss", {"expert_gate_up", "expert_down"})],
    ids=["dense", "mixture"],
)
def test_kernels(shape: str, kernels: set[str], tmp_path: Path) -> None:
    """Of every step there is a row for each kernel in it, and one for the whole."""
    out = tmp_path / "kernels.md"
    flags = ["--shape", shape, "--batches", "2", "--contexts", "9", "--repeat", "1"]
    assert bench.main(["kernels", *flags, "--out", str(out)]) == 0
    timed = {row.partition(", ")[0] for row in rows_of(out)}
    of_all = {"embed", "qkv", "out", "logits", "pick", "the whole step"} | kernels
    assert timed >= {f"2 x 9: {kernel}" for kernel in of_all | {"attend"}}
    assert timed >= {f"256 of a prompt after 9: {kernel}" for kernel in of_all | {"attend_prompt"}}


def test_a_step_reads_the_weights_and_what_its_windows_see() -> None:
    config = parse_config(config_json("qwen3-0.6b"), {})
    assert gpu.step_bytes(config, 1, 320) == 2 * (n_params(config) + 2 * 28 * 8 * 128 * 320)


def test_a_step_that_fails_is_said() -> None:
    """Too slow, or a test that was skipped: each is a failure."""
    assert "not done after 1 s" in gpu_parts.failure_of(["-c", "import time; time.sleep(60)"], 1)
    assert "exit status 3" in gpu_parts.failure_of(["-c", "import sys; sys.exit(3)"], 99)
    assert "was skipped" in gpu_parts.failure_of(["-c", "print('1 passed, 3 skipped')", "pytest"], 99)
    assert gpu_parts.failure_of(["-c", ""], 99) == ""


@pytest.mark.skipif(not cuda_module.missing(), reason="there is a GPU")
def test_a_part_without_a_device_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    """46 tests were skipped, and the command said that all was well."""
    with pytest.raises(SystemExit, match="1"):
        bench.main(["gpu-parts", "1"])
    assert "exit status 1" in capsys.readouterr().out
    asked = [sys.executable, "-m", "pytest", "-q", "tests/gpu"]
    by_name = subprocess.run(asked, capture_output=True, text=True, cwd=ROOT)
    assert by_name.returncode != 0
    assert "tests/gpu is for a GPU: " in by_name.stderr
