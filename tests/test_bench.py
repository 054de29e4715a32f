"""bench.py runs, and its tables have the rows that they promise. No speed is tested."""

import itertools
import sys
from pathlib import Path
from types import ModuleType
from typing import cast

import pytest

import bench
from benches import gpu, http, server
from benches.decoding import SHAPES, random_prompts, read_bytes
from benches.harness import Figures, rounds, table
from checkpoint.config import parse_config
from checkpoint.weights import n_params, n_weight_bytes
from devices import cuda as cuda_module
from helpers import emulator
from helpers.device_ops import sweep
from helpers.emulator import Emulator
from helpers.serving import TINY, serve


def rows_of(out: Path, *words: str) -> dict[str, list[str]]:
    """Run a benchmark for one round; return the cells of each row of its table, by the row's name."""
    bench.main([*words, "--repeat", "1", "--out", str(out / "table.md")])
    text = (out / "table.md").read_text(encoding="utf-8")
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {name: cells for name, *cells in lines[1:]}


DRY = "cpu --new 3 --prompts 64 --contexts 32 --batches 1 8 --layers 1 --shape"
CPU = {"prompt of 64, tokens/s", "decode, 1 x 32, tokens/s", "decode, 8 x 32, tokens/s"}
ASKED = {"a long prompt, first text, ms", "a short prompt, first text, ms", "1 streams, tokens/s"}
ASKED |= {"8 streams after long prompts, tokens/s"}
SPEEDS = {f"3 streams of 5, {kind}" for kind in ("events/s", "CPU µs an event", "CPU ms a stream")}
LATE = {"3 streams, median late, ms", "3 streams, p99 late, ms", "3 streams, kB a stream"}
STORED = {name.replace("of 5", "of 1") for name in SPEEDS} | {"idle, % of a core"}
SMALL = {
    "STREAMS": [(3, 5)],
    "LATE_STREAMS": [3],
    "MAX_STREAMS": 3,
    "TICK_MS": 50,
    "N_STORED": [9],
    "IDLE_S": 0.1,
}
SMALL["N_STORING"] = 3
# fmt: off
#   command                                                  names of its rows
RUNS = [
    (f"cpu --new 3 --prompts 64 --model {TINY} --perplexity 140", CPU | {"perplexity of 140 tokens"}),
    (f"{DRY} dry",                                           CPU),
    (f"{DRY} dry-gpt-oss",                                   CPU),
    (f"{DRY} dry-qwen3-moe",                                 CPU),
    ("relay --new 20",                                       ASKED | {"32 streams, tokens/s"}),
    (f"server --model {TINY}",                               SPEEDS | LATE | STORED),
]
# fmt: on


IDS = [words.partition(" --m")[0] for words, _ in RUNS]


@pytest.mark.parametrize(("words", "names"), sweep(RUNS, [RUNS[0], *RUNS[4:]]), ids=IDS)
def test_rows(words: str, names: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SMALL.items():
        monkeypatch.setattr(server, name, value)
    assert rows_of(tmp_path, *words.split()).keys() == names


def test_http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both APIs of a server; no prompt of a round is in its cache.

    Each prompt begins with a number, not at random: the tiny model has no text in answer to some.
    """
    numbers = itertools.count()
    monkeypatch.setattr("secrets.token_hex", lambda _: f"{next(numbers):08}")
    monkeypatch.setattr(http, "chat_mix", lambda: [http.Client(["hi"], 4, {}, 0.1)] * 2)
    monkeypatch.setattr(http, "AGENT", ["hi"])
    monkeypatch.setattr(http, "SETTLE_S", 0)
    with serve("--model", str(TINY)) as running:
        urls = f"{running.url}/v1", f"{running.url}/v1/responses"
        rows = rows_of(tmp_path, "http", *urls, "--new", "6", "--streams", "1", "2")
        assert running.health()["cached_tokens"] == 0
    day = {"a chat mix, good answers/s", "an agent, good answers/s"}
    assert rows.keys() == ASKED | day | {"2 streams, tokens/s"}
    assert all(len(cells) == 2 for cells in rows.values())


def test_no_round_finds_its_prompt_in_a_cache() -> None:
    """The second round of a prompt of 128 tokens took 64 from the first round's page."""
    assert random_prompts(1, 128) != random_prompts(1, 128)


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


# ---- Shapes ------------------------------------------------------------------------------------------------


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


def test_a_step_reads_the_weights_and_what_its_windows_see() -> None:
    config = parse_config(SHAPES["qwen3-0.6b"], {})
    assert gpu.step_bytes(config, 1, 320) == 2 * (n_params(config) + 2 * 28 * 8 * 128 * 320)


# ---- A GPU, which the emulator stands for ------------------------------------------------------------------


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    if emulator.MISSING:
        pytest.skip(emulator.MISSING)
    monkeypatch.setitem(sys.modules, "cupy", cast("ModuleType", Emulator(memory=1 << 29)))
    monkeypatch.setattr(gpu, "READ_THREADS", 32)
    monkeypatch.setattr(gpu, "MAX_READ", 1 << 12)


STEP = "--batches", "2", "--contexts", "9"


@pytest.mark.usefixtures("cuda")
def test_gpu(tmp_path: Path) -> None:
    flags = "--prompts", "5", "--new", "2", "--contenders", "engine", "no-graphs"
    rows = rows_of(tmp_path, "gpu", "--shape", "dry", *STEP, *flags)
    assert rows.keys() == {"decode, 2 x 9, tokens/s", "prompt of 5, tokens/s"}
    assert len(rows["decode, 2 x 9, tokens/s"]) == 3  # the floor is one


@pytest.mark.usefixtures("cuda")
def test_gpu_report(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "gpu-report", "--shape", "dry", *STEP, "--prompts", "5", "--new", "2")
    text = (tmp_path / "table.md").read_text()
    assert "checked on the emulator: logprobs within" in text
    for op in ("embed", "qkv", "attend", "out", "gate_up", "down", "logits", "pick"):
        assert f"| {op} | " in text
    assert "decode, 2 x 9, tokens/s" in rows


@pytest.mark.skipif(not cuda_module.missing(), reason="there is a GPU")
def test_a_part_without_a_device_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """46 tests were skipped, and the command said that all was well."""
    monkeypatch.setitem(gpu.PARTS, 3, [[*gpu.LAWS, "memcheck"]])
    with pytest.raises(SystemExit, match=r"[1-9]"):
        bench.main(["gpu-parts", "3"])
    assert "tests/gpu is for a GPU: " in capfd.readouterr().err
