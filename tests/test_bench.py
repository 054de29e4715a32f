"""bench.py runs, and its tables have the rows that they promise; how fast is not this suite's business."""

import itertools
import sys
from pathlib import Path
from types import ModuleType
from typing import cast

import pytest

import bench
from benches import gpu, gpu_parts, kernels, server
from benches.harness import Figures, random_prompts, rounds, started, table
from benches.weights import SHAPES, read_bytes
from checkpoint.config import parse_config
from checkpoint.weights import n_params, n_weight_bytes
from devices import cuda as cuda_module
from dialects.families import DIALECTS
from helpers import emulator
from helpers.emulator import Emulator
from helpers.serving import TINY, serve

CPU_ROWS = {f"{what}, tokens/s" for what in ("prefill, 128 tokens", "decode, batch 1", "decode, batch 8")}


def rows_of(out: Path, *words: str) -> dict[str, list[str]]:
    """Run a benchmark for one round; return the cells of each row of its table, by the row's name."""
    bench.main([*words, "--repeat", "1", "--out", str(out / "table.md")])
    text = (out / "table.md").read_text(encoding="utf-8")
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {name: cells for name, *cells in lines[1:]}


# fmt: off
CPU = [
    (["--model", str(TINY), "--perplexity", "140"],    {"perplexity of 140 tokens"}),
    (["--shape", "dry", "--layers", "1"],              set[str]()),
    (["--shape", "dry-gpt-oss", "--layers", "1"],      set[str]()),
    (["--shape", "dry-qwen3-moe", "--layers", "1"],    set[str]()),
]
# fmt: on


@pytest.mark.parametrize(("flags", "more"), CPU)
def test_cpu(flags: list[str], more: set[str], tmp_path: Path) -> None:
    assert rows_of(tmp_path, "cpu", "--new", "3", "--threads", "1", *flags).keys() == CPU_ROWS | more


def test_no_round_finds_its_prompt_in_a_cache() -> None:
    """The second round of a prompt of 128 tokens took 64 from the first round's page."""
    assert random_prompts(1, 128) != random_prompts(1, 128)


def test_shapes_are_those_of_the_models() -> None:
    """The numbers of parameters that the models' makers publish, in billions."""
    published = {"gpt-oss-20b": 20.91, "qwen3-30b-a3b": 30.53, "qwen3-0.6b": 0.60, "qwen3-8b": 8.19}
    for name, n_billions in published.items():
        assert n_params(parse_config(SHAPES[name], {})) / 1e9 == pytest.approx(n_billions, abs=0.01)


def test_a_row_reads_the_experts_that_it_chooses() -> None:
    config = parse_config(SHAPES["gpt-oss-20b"], {})
    n_all = read_bytes(config, 10**6)
    assert n_all == n_weight_bytes(config) - 2 * config.vocab_size * config.dim  # without the embedding
    n_one, n_two = n_all - read_bytes(config, 1), n_all - read_bytes(config, 2)
    assert n_two / n_one == pytest.approx(28 / 32)


def test_pieces(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "pieces", "--pieces", "400")
    assert rows.keys() == {f"{name}, pieces/s" for name in DIALECTS} | {"events/s stored", "events/s read"}


def test_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "STREAMS", {1: 20, 3: 5})
    monkeypatch.setattr(server, "TICK_MS", 50)
    rows = rows_of(tmp_path, "server", "--model", str(TINY))
    kinds = ("events/s", "CPU µs an event", "median late, ms", "p99 late, ms")
    expected = {f"{n} streams, {kind}" for n in (1, 3) for kind in kinds}
    assert rows.keys() == expected | {"3 streams, kB a stream"}
    assert all(len(cells) == 2 for cells in rows.values())


def test_both_servers_say_as_many_tokens() -> None:
    for name in server.SERVED:
        with started(*server.command_of(name, TINY)) as running:
            [answer] = server.hear(running, 1, 5, 0)
        assert len(answer.text_times) == 5


ASKED = {"a long prompt, first text, ms", "a short prompt, first text, ms", "1 streams, tokens/s"}
ASKED |= {"8 streams after long prompts, tokens/s"}


def test_relay(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "relay", "--new", "20")
    assert rows.keys() == ASKED | {"32 streams, tokens/s"}
    assert all(len(cells) == 3 for cells in rows.values())


def test_http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both APIs of a server; no prompt of a round is in its cache.

    Each prompt begins with a number, not at random: the tiny model has no text in answer to some.
    """
    numbers = itertools.count()
    monkeypatch.setattr("secrets.token_hex", lambda _: f"{next(numbers):08}")
    with serve("--model", str(TINY)) as running:
        urls = f"{running.url}/v1", f"{running.url}/v1/responses"
        rows = rows_of(tmp_path, "http", *urls, "--new", "6", "--characters", "400", "--streams", "1", "2")
        assert running.health()["cached_tokens"] == 0
    assert rows.keys() == ASKED | {"2 streams, tokens/s"}
    assert all(len(cells) == 2 for cells in rows.values())


def test_rounds() -> None:
    """Contenders take turns, the first round does not count, and ratios are to the first contender."""
    said: list[list[float]] = []

    def measure(values: list[float]) -> Figures:
        said.append(values)
        return {"speed": values.pop(0)}

    contenders: dict[str, list[float]] = {"ours": [99, 4, 1, 2], "theirs": [99, 8, 5, 200]}
    medians = rounds([(contenders, measure)], 3)
    assert said == [*contenders.values()] * 4
    assert medians == {"speed": {"ours": 2, "theirs": 8}}
    assert list(table(medians))[2] == "| speed | 2.00 (1.00) | 8.00 (4.00) |"


# ---- A GPU, which the emulator stands for ------------------------------------------------------------------


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    if emulator.MISSING:
        pytest.skip(emulator.MISSING)
    monkeypatch.setitem(sys.modules, "cupy", cast("ModuleType", Emulator(memory=1 << 29)))
    monkeypatch.setattr(kernels, "N_TIMES", 1)
    monkeypatch.setattr(gpu, "READ_THREADS", 32)
    monkeypatch.setattr(gpu, "MAX_READ", 1 << 12)


STEP = ["--batches", "2", "--contexts", "9"]


@pytest.mark.usefixtures("cuda")
def test_gpu(tmp_path: Path) -> None:
    flags = ["--prompts", "5", "--new", "2", "--contenders", "engine", "no-graphs"]
    rows = rows_of(tmp_path, "gpu", "--shape", "dry", *STEP, *flags)
    assert rows.keys() == {"decode, 2 x 9, tokens/s", "prompt of 5, tokens/s"}
    assert len(rows["decode, 2 x 9, tokens/s"]) == 3  # the floor is one


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(
    ("shape", "kernels"),
    [("dry", {"gate_up", "down"}), ("dry-gpt-oss", {"expert_gate_up", "expert_down"})],
    ids=["dense", "mixture"],
)
def test_kernels(shape: str, kernels: set[str], tmp_path: Path) -> None:
    """Of every step there is a row for each kernel in it, and one for the whole."""
    timed = rows_of(tmp_path, "kernels", "--shape", shape, *STEP).keys()
    of_all = {"embed", "qkv", "out", "logits", "pick", "the whole step"} | kernels
    assert timed >= {f"2 x 9: {kernel}, µs" for kernel in of_all | {"attend"}}
    assert timed >= {f"256 of a prompt after 9: {kernel}, µs" for kernel in of_all | {"attend_prompt"}}


def test_a_step_reads_the_weights_and_what_its_windows_see() -> None:
    config = parse_config(SHAPES["qwen3-0.6b"], {})
    assert gpu.step_bytes(config, 1, 320) == 2 * (n_params(config) + 2 * 28 * 8 * 128 * 320)


@pytest.mark.skipif(not cuda_module.missing(), reason="there is a GPU")
def test_a_part_without_a_device_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """46 tests were skipped, and the command said that all was well."""
    monkeypatch.setitem(gpu_parts.PARTS, 3, [[*gpu_parts.LAWS, "memcheck"]])
    with pytest.raises(SystemExit, match=r"[1-9]"):
        bench.main(["gpu-parts", "3"])
    assert "tests/gpu is for a GPU: " in capfd.readouterr().err
