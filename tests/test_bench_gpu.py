"""bench.py gpu, gpu-ops and gpu-parts without a GPU: reports, what is kept, dry runs on the emulator."""

import gc
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import cast

import numpy as np
import pytest

import bench
from benches import gpu, gpu_checkpoint, gpu_contenders, gpu_ops
from benches import gpu_parts as parts
from checkpoint.config import parse_config, read_config
from checkpoint.weights import n_params, n_weight_bytes
from devices.cuda import CudaOps
from helpers import emulator
from helpers.emulator import Emulator
from helpers.serving import ROOT
from parity import CASES, write


def row_of(contender: str, cell: gpu_contenders.Cell, seconds: float | None, why: str = "") -> gpu.Row:
    card, weights = "a card", "random weights of the shape of qwen3-0.6b"
    about = "24 of 24 graphs" if seconds else ""
    return gpu.Row(card, weights, contender, cell, seconds, why, about, 2000, 3e12, "2026-01-01", "cupy 14")


def test_report() -> None:
    """Floors, shares, the best of the peers, gaps and what they are due to."""
    config = parse_config(gpu_checkpoint.SHAPES["qwen3-0.6b"] | gpu_checkpoint.FOR_ALL, {})
    one = gpu_contenders.Cell(1, 256, 128)
    assert gpu.step_bytes(config, one) == 2 * (n_params(config) + 2 * 28 * 8 * 128 * 320)
    rows = [
        row_of("engine", one, 127 / 1000),
        row_of("engine", one._replace(sampled=True), 127 / 900),
        row_of("engine-no-graphs", one, 127 / 3000),  # itself, so not the best of its peers
        row_of("compiled-loop", one, 127 / 500),
        row_of("transformers-eager", one, 127 / 250),
        row_of("transformers-eager", gpu_contenders.Cell(64, 256, 128), None, "OutOfMemoryError: 80 GB"),
        row_of("transformers-eager", gpu_contenders.Cell(64, 4096, 128), None, "OutOfMemoryError: 80 GB"),
        row_of("engine", gpu_contenders.Cell(1, 512, 1), 0.0025),
    ]
    report = list(gpu.report(rows))
    assert report[0] == "## a card, random weights of the shape of qwen3-0.6b"
    assert "bfloat16; a kernel that only reads reaches 3000 GB/s; cupy 14." in report
    assert "| 1, 256 | 2000.0 | 1000.0 | 50.0 | 500.0 | 3000.0 | 250.0 | 2.00 |" in report
    assert "| 1, 256, sampled | 2000.0 | 900.0 | 45.0 | – | – | – | – |" in report
    assert "| prompt of 512 | 2.5 |" in report
    assert "- engine: 2026-01-01; 24 of 24 graphs" in report
    assert "- transformers-eager, at 64, 256; 64, 4096: OutOfMemoryError: 80 GB" in report


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulator in CuPy's place, and as little to measure as there can be."""
    if emulator.MISSING:
        pytest.skip(emulator.MISSING)
    monkeypatch.setitem(sys.modules, "cupy", cast("ModuleType", Emulator(memory=1 << 27)))
    monkeypatch.setattr(gpu, "ROUNDS", 1)
    monkeypatch.setattr(gpu, "CLEAR", -math.inf)  # what a busy machine makes of milliseconds is not the point


LITTLE = ["--contexts", "9", "--batches", "1", "2", "--prompts", "7", "--new", "8"]


@pytest.mark.usefixtures("cuda")
def test_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands add to one report; what is kept can be asked for again, and is not lost for lack of time."""
    write(tmp_path, CASES["smollm3-untied-biases"])
    out = tmp_path / "results" / "gpu.md"
    flags = ["gpu", "--model", str(tmp_path), *LITTLE, "--out", str(out), "--minutes", "999"]
    n_before = n_alive()
    assert bench.main([*flags, "--contenders", "engine"]) == 0
    assert n_alive() == n_before  # the card is for the next one
    assert capsys.readouterr().err.count(" tok/s") == 3

    less = ["engine-no-early", "engine-no-graphs", "engine-plain", "llama.cpp"]
    bench.main([*flags, "--batches", "1", "--contenders", *less])
    assert "llama.cpp, at 1, 9: FileNotFoundError: it needs `llama-bench`" in capsys.readouterr().out
    program = tmp_path / "llama-bench"
    program.write_text("#!/bin/sh\necho '[{\"avg_ns\": 8000000}]'")
    program.chmod(0o755)
    (tmp_path / gpu_contenders.GGUF).touch()
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    bench.main([*flags, "--contenders", "llama.cpp"])
    printed = capsys.readouterr().out
    assert printed == out.read_text(encoding="utf-8")
    number = r"-?[\d.]+"
    row = rf"^\| 1, 9 (\| {number} ){{6}}\| 1000.0 \| {number} \|$"
    assert re.search(row, printed, re.MULTILINE)
    assert re.search(rf"^\| 2, 9 (\| {number} ){{3}}(\| – ){{5}}\|$", printed, re.MULTILINE)
    assert re.search(rf"^\| 1, 9, sampled (\| {number} ){{3}}\| – ", printed, re.MULTILINE)
    assert re.search(rf"^\| prompt of 7 \| {number} \|$", printed, re.MULTILINE)
    assert "graphs, early launches" in printed
    assert "graphs, no early launches" in printed
    assert "0 of 0 graphs" in printed
    assert "Error" not in printed

    assert bench.main([*flags, "--contenders"]) == 0  # measures nothing
    assert capsys.readouterr().out == printed
    kept = gpu.read_rows(out)
    program.unlink()
    bench.main([*flags, "--contenders", "llama.cpp"])
    assert gpu.read_rows(out) == kept  # what fails now has worked before
    bench.main([*flags, "--contenders", "engine", "transformers-eager", "--minutes", "0"])
    assert "\n- transformers-eager, at 1, 9; 2, 9; 1, 7: out of time" in capsys.readouterr().out
    assert kept.items() <= gpu.read_rows(out).items()


def n_alive() -> int:
    return sum(type(thing) is CudaOps for thing in gc.get_objects())


def test_times() -> None:
    """A median of warm rounds; what cannot be told from the noise is no result; a slow cell has fewer."""
    given = iter([(9.0, 1.0), (1.0, 3.0), (1.0, 9.0), (1.0, 4.0)])
    assert gpu.seconds(lambda prompts: next(given), list) == 3
    for first, whole in ((1.0, 0.9), (1.0, 1.2)):
        with pytest.raises(ArithmeticError, match="no clear rest"):
            gpu.seconds(lambda prompts, times=(first, whole): times, list)  # type: ignore[misc]
    # the second begins late: of 2 + 2 tokens behind the first ones, 3 come in the 3 s from then on
    assert gpu_contenders.decode_seconds([[1, 2, 4], [2, 3, 5]]) == 3 * 4 / 3


@pytest.mark.usefixtures("cuda")
def test_a_prompt_whose_first_token_is_timed_is_a_new_one() -> None:
    """Or it would come out of a prefix cache; the prompts that decoding begins behind should."""
    for n_new, n_different in ((1, gpu.WARM_UPS + gpu.ROUNDS), (5, 1)):
        seen = list[list[list[int]]]()

        def round_(prompts: list[list[int]], seen: list[list[list[int]]] = seen) -> gpu_contenders.Times:
            seen.append(prompts)
            return 0, len(seen)

        started = gpu_contenders.Started(lambda cell, round_=round_: round_, lambda: "so")  # type: ignore[misc]
        rng, cell = np.random.default_rng(0), gpu_contenders.Cell(1, 16, n_new)
        assert gpu.measured(started, cell, 512, rng, math.inf) == gpu.Result(2, "", "so")
        assert len({str(prompts) for prompts in seen}) == n_different


def test_a_slow_cell_has_fewer_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "CELL_S", 0)
    times = iter([(0.0, 9.0), (0.0, 2.0)])
    assert gpu.seconds(lambda prompts: next(times), list) == 2


def test_nothing_of_the_server_is_needed() -> None:
    """A machine with a GPU may have CuPy, torch and pytest, and not all that the server needs."""
    absent = ("gguf", "httpx2", "llguidance", "starlette", "uvicorn")
    code = "import sys; sys.modules.update(dict.fromkeys(sys.argv[1:])); import benches.gpu, test_device"
    paths = [str(ROOT), *(str(ROOT / folder) for folder in ("tests", "tests/gpu"))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    subprocess.run([sys.executable, "-c", code, *absent], env=environment, check=True)


@pytest.mark.usefixtures("cuda")
@pytest.mark.filterwarnings("default")  # theirs
def test_peers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those that run on a CPU in seconds; the loop before it is compiled says what transformers says."""
    torch = pytest.importorskip("torch", reason="torch and transformers: .[parity]")
    transformers = pytest.importorskip("transformers", reason="torch and transformers: .[parity]")
    flags = ["gpu", "--shape", "dry", *LITTLE, "--minutes", "999"]
    bench.main(
        [*flags, "--contenders", *(name for name in gpu_contenders.CONTENDERS if "transformers" in name)]
    )
    printed = capsys.readouterr().out
    number = r"-?[\d.]+"
    assert re.search(rf"^\| 1, 9 \| {number} \| – \| – (\| {number} ){{4}}\| – \|$", printed, re.MULTILINE)
    assert "Error" not in printed

    gpu_checkpoint.checkpoint("dry", tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    token_ids = torch.tensor([[5, 3, 100, 7], [1, 2, 3, 4]])
    settings = {"do_sample": False, "min_new_tokens": 9, "max_new_tokens": 9, "pad_token_id": 0}
    expected = model.generate(token_ids, attention_mask=torch.ones_like(token_ids), **settings)
    with torch.no_grad():
        decoder = gpu_contenders.compiled_decoder(model, read_config(tmp_path), gpu_contenders.Cell(2, 4, 9))
        said = [decoder(token_ids, torch.arange(4))]
        for position in range(4, 12):
            said.append(decoder(said[-1], torch.tensor([position])))
    assert torch.cat(said, 1).tolist() == expected[:, 4:].tolist()


# ---- Three commands do everything --------------------------------------------------------------------------

EMULATOR_AS_CUPY = """
import sys
from helpers.emulator import Emulator
sys.modules[__name__] = Emulator(memory=1 << 29)
"""


def gpu_parts(folder: Path, part: int, only: list[str], *flags: str) -> subprocess.CompletedProcess[str]:
    """bench.py gpu-parts; a module `cupy` in the folder is the one that its steps import."""
    paths = [str(folder), str(ROOT / "tests"), str(ROOT)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    little = ["--small", "dry", "--large", "dry", "--gpu-flags", " ".join(LITTLE)]
    places = ["--keep", str(folder / "kept"), "--out-folder", str(folder / "results")]
    command = [sys.executable, "bench.py", "gpu-parts", str(part), *little, *places, "--only", *only, *flags]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300)


@pytest.mark.timeout(300)  # the emulator compiles every shape, in processes of their own
def test_the_parts_that_a_gpu_is_needed_for(tmp_path: Path) -> None:
    """A dry run of what measures, through the emulator; results and a report after each step."""
    if emulator.MISSING:
        pytest.skip(emulator.MISSING)
    (tmp_path / "cupy.py").write_text(EMULATOR_AS_CUPY)
    ops = ["--ops-flags", "--rows 1 17 --batches 1 2 --contexts 9"]
    ended = gpu_parts(tmp_path, 1, ["kernels", "engine"], *ops)
    assert ended.returncode == 0, ended.stderr
    results = tmp_path / "results"
    part = (results / "gpu-part1.md").read_text()
    assert re.findall(r"^\| (.+) \| \d+ \| done \|$", part, re.MULTILINE) == [
        "device",
        "kernels dry",
        "engine dry",
    ]
    kernels = (results / "gpu-ops-dry.md").read_text()
    for op in ("a launch", "attend", "decode step", "down", "gate_up", "logits", "out", "qkv"):
        assert re.search(rf"^\| {op} \| [12] \| .* \| [\d.]+ \| [\d.]+ \|", kernels, re.MULTILINE), op
    assert re.search(r"^\| out \| 17 \|  \| 1000000000 \| ", kernels, re.MULTILINE)  # every shape
    rows = gpu.read_rows(results / "gpu.md")
    assert {key[1:3] for key in rows} == {("random weights of the shape of dry", "engine")}
    assert "failed" not in (results / "gpu-part1.log").read_text()


@pytest.mark.usefixtures("cuda")
@pytest.mark.timeout(300)  # the emulator compiles every shape
def test_mixtures_of_experts_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The experts stand in place of gate_up and down; what they read depends on how many are chosen."""
    monkeypatch.setattr(gpu_ops, "ROUNDS", 1)
    monkeypatch.setattr(gpu_ops, "N_TIMES", 1)
    shape = ["--shape", "dry-mixture", "--keep", str(tmp_path)]
    sizes = ["--rows", "1", "5", "--batches", "2", "--contexts", "9"]
    assert bench.main(["gpu-ops", *shape, *sizes]) == 0
    printed = capsys.readouterr().out
    for op in ("attend", "decode step", "experts", "logits", "out", "qkv"):
        assert re.search(rf"^\| {op} \| [125] \| ", printed, re.MULTILINE), op
    assert not re.search("gate_up|down", printed)
    flags = ["gpu", *shape, *LITTLE, "--minutes", "999", "--contenders", "engine"]
    assert bench.main(flags) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^\| 2, 9 (\| -?[\d.]+ ){3}", printed, re.MULTILINE)
    assert "Error" not in printed


def test_a_row_reads_the_experts_that_it_chooses() -> None:
    config = parse_config(gpu_checkpoint.SHAPES["gpt-oss-20b"] | gpu_checkpoint.FOR_ALL, {})
    of_all = gpu_checkpoint.expert_bytes(config, 10**6)
    assert gpu_checkpoint.expert_bytes(config, 1) == pytest.approx(of_all * 4 / 32)
    assert gpu_checkpoint.expert_bytes(config, 2) == pytest.approx(of_all * (1 - (28 / 32) ** 2))
    embedding = 2 * config.vocab_size * config.dim
    assert gpu_checkpoint.read_bytes(config, 10**6) == n_weight_bytes(config) - embedding


def test_a_part_without_a_device_is_an_error(tmp_path: Path) -> None:
    """46 tests were skipped, and the command said that all was well."""
    (tmp_path / "cupy.py").write_text("raise ImportError")
    ended = gpu_parts(tmp_path, 1, ["smoke"])
    assert ended.returncode == 1
    assert "CuPy is not installed" in ended.stderr
    assert "| device | 0 | exit status 1 |" in (tmp_path / "results" / "gpu-part1.md").read_text()
    assert "smoke" not in ended.stderr
    asked = [sys.executable, "-m", "pytest", "-q", "tests/gpu"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    by_name = subprocess.run(asked, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert by_name.returncode != 0
    assert "tests/gpu is for a GPU: CuPy is not installed" in by_name.stderr


def test_a_step_that_fails_does_not_end_the_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too slow, no program for it, a test that was skipped: each is a failure, and the others run."""
    monkeypatch.setattr(parts, "LEAST_S", 0)
    log = tmp_path / "log"
    sleeping = ["sh", "-c", "sleep 60 & sleep 60"]
    assert parts.run_step(parts.Step("slow", 1, sleeping), 99, log).failure == "not done after 1 s"
    assert (
        parts.run_step(parts.Step("none", 1, ["true"], "no-such-tool"), 99, log).failure
        == "no no-such-tool on the PATH"
    )
    skipped = ["sh", "-c", "echo 1 passed, 3 skipped; exit 0", "pytest"]
    assert parts.run_step(parts.Step("skip", 9, skipped), 99, log).failure == "a test was skipped"
    assert parts.run_step(parts.Step("good", 9, ["true"]), 99, log).failure == ""
    assert "3 skipped" in log.read_text()


def test_engine_host(capsys: pytest.CaptureFixture[str]) -> None:
    """CudaOps as it is, with a device that takes no time."""
    for flags in ([], ["--sampled"]):
        assert bench.main(["engine-host", "--batches", "1", "3", "--new", "20", "--repeat", "1", *flags]) == 0
        printed = capsys.readouterr().out
        assert re.findall(r"^\| (\d) \| \d+ \| \d+ \|$", printed, re.MULTILINE) == ["1", "3"]
