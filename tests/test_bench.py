"""bench.py runs, and its tables have the rows that they promise. No speed is tested."""

import itertools
import re
import sys
from types import ModuleType
from typing import cast

import pytest

import bench
from benches import decoding, http, server
from benches.decoding import SHAPES, step_bytes
from benches.harness import Figures, rounds, table
from checkpoint.config import parse_config
from checkpoint.weights import n_params, n_weight_bytes
from devices import cuda as cuda_module
from helpers import emulator
from helpers.device_ops import sweep
from helpers.emulator import Emulator
from helpers.serving import TINY, serve
from perplexity import perplexity

Output = pytest.CaptureFixture[str]


def rows_of(output: Output, words: str) -> dict[str, list[str]]:
    """Run a benchmark for one round; return the cells of each row of its table, by the row's name."""
    bench.main([*words.split(), "--repeat", "1"])
    printed = output.readouterr().out.splitlines()
    lines = [line.strip("| ").split(" | ") for line in printed if line.startswith("| ")]
    return {name: cells for name, *cells in lines[1:]}


DRY = "cpu --new 3 --prompts 64 --batches 2"
CPU = {"prompt of 64, tokens/s", "decode, 2 x 32, tokens/s", "sampled, decode, 2 x 32, tokens/s"}
SPEEDS = {f"3 streams of 5, {kind}" for kind in ("events/s", "CPU µs an event", "CPU ms a stream")}
LATE = {"3 streams, median late, ms", "3 streams, p99 late, ms", "3 streams, kB a stream"}
STORED = {name.replace("of 5", "of 1") for name in SPEEDS} | {"idle, % of a core"}
SMALL = {
    "STREAMS": [(3, 5)],
    "LATE_STREAMS": [3],
    "MAX_STREAMS": 3,
    "TICK_MS": 50,
    "N_STORED": [9],
    "N_STORING": 3,
    "IDLE_S": 0.1,
}
# fmt: off
#   command                                             names of its rows
RUNS = [
    (f"{DRY} --model {TINY} --contenders numpy file",   CPU),
    (f"{DRY} --contenders numpy --shape dry-gpt-oss",   CPU),
    (f"{DRY} --contenders numpy --shape dry-qwen3-moe", CPU),
    (f"server --model {TINY}",                          SPEEDS | LATE | STORED),
]
# fmt: on
IDS = [words.partition(" --m")[0] for words, _ in RUNS]


@pytest.mark.parametrize(("words", "names"), sweep(RUNS, [RUNS[0], RUNS[3]]), ids=IDS)
def test_rows(words: str, names: set[str], capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "N_READ", 1 << 20)
    for name, value in SMALL.items():
        monkeypatch.setattr(server, name, value)
    assert rows_of(capsys, words).keys() == names


def test_http(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both APIs of a server that runs, and one that is started; no prompt of a round is in its cache.

    Each prompt begins with a number, not at random: the tiny model has no text in answer to some.
    """
    numbers = itertools.count()
    monkeypatch.setattr("secrets.token_hex", lambda _: f"{next(numbers):08}")
    monkeypatch.setattr(http, "chat_mix", lambda: [http.Client(["hi"], 4, {}, 0.1)] * 2)
    monkeypatch.setattr(http, "AGENT", ["hi"])
    monkeypatch.setattr(http, "LONG", "hello")
    monkeypatch.setattr(http, "SETTLE_S", 0)
    with serve("--model", str(TINY)) as running:
        urls = f"{running.url}/v1/chat/completions {running.url}/v1/responses"
        rows = rows_of(capsys, f"http {urls} ours --model {TINY} --new 6 --streams 1 2 --prompts 2")
        assert running.health()["cached_tokens"] == 0
    firsts = {
        f"{asked}, {kind}first text, ms"
        for asked in ("a short prompt", "2 long prompts")
        for kind in ("", "last ")
    }
    day = {"a chat mix, good answers/s", "an agent, good answers/s"}
    rates = {"1 streams, tokens/s", "2 streams, tokens/s", "8 streams after long prompts, tokens/s"}
    assert rows.keys() == firsts | rates | day
    assert all(len(cells) == 3 for cells in rows.values())


def test_perplexity() -> None:
    """A model that has learnt nothing finds each token of its vocabulary as likely as any other."""
    ops = decoding.load("numpy", TINY, 512, 1)
    ops.weights.head[:] = 0
    assert perplexity(ops, [5, 6] * 300) == pytest.approx(ops.config.vocab_size)


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
    n_all = step_bytes(config, 10**6, 0)
    assert n_all == n_weight_bytes(config) - 2 * config.vocab_size * config.dim  # without the embedding
    n_one, n_two = n_all - step_bytes(config, 1, 0), n_all - step_bytes(config, 2, 0)
    assert n_two / n_one == pytest.approx(28 / 32)


def test_a_step_reads_the_weights_and_what_its_windows_see() -> None:
    config = parse_config(SHAPES["qwen3-0.6b"], {})
    assert step_bytes(config, 1, 320) == 2 * (n_params(config) + 2 * 28 * 8 * 128 * 320)


# ---- A GPU, which the emulator stands for ------------------------------------------------------------------


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    if emulator.MISSING:
        pytest.skip(emulator.MISSING)
    monkeypatch.setitem(sys.modules, "cupy", cast("ModuleType", Emulator(memory=1 << 29)))


@pytest.mark.usefixtures("cuda")
def test_gpu_report(capsys: Output) -> None:
    """It says what a check found, and has a row for each op. The floor of a product is its bytes."""
    flags = "--prompts 5 --new 2 --batches 2 --contexts 9 --contenders engine no-graphs"
    bench.main(["gpu-report", "--shape", "dry", *flags.split(), "--repeat", "1"])
    text = capsys.readouterr().out
    assert "checked on the emulator: 8 ops, largest difference 0." in text
    for op in ("embed", "qkv", "attend", "out", "gate_up", "down", "logits", "pick"):
        assert f"{op}: 0." in text
        assert f"| {op}, µs | " in text
    assert len(re.findall(r"\| decode, 2 x 9, tokens/s( \| [\d.e+]+ \([\d.]+\)){3}", text)) == 1


@pytest.mark.skipif(not cuda_module.missing(), reason="there is a GPU")
def test_a_part_without_a_device_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """46 tests were skipped, and the command said that all was well."""
    monkeypatch.setitem(decoding.PARTS, 3, [f"{decoding.LAWS} memcheck"])
    with pytest.raises(SystemExit, match="True"):
        bench.main(["gpu-parts", "3"])
    assert "tests/gpu is for a GPU: " in capfd.readouterr().err
