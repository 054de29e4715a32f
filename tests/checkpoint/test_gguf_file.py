"""checkpoint/gguf_file.py and gguf_blocks.py on files that the tests' own writer makes of their models."""

import struct
import subprocess
import tempfile
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest

from checkpoint.config import UnsupportedModel, read_config
from checkpoint.gguf_file import PRE_TOKENIZERS, as_directory
from checkpoint.hub import find
from checkpoint.rope import rope_table
from checkpoint.weights import read_weights
from helpers.gguf_files import write_gguf
from helpers.serving import TINY
from helpers.tables import table
from parity import CASES, write
from request.template import ChatTemplate
from tokenizer import Tokenizer

MADE = ["llama-2", "smollm2", "qwen2", "qwen3", "llama-yarn", "llama-3.1-rope-scaling"]
MADE += ["granite", "granite-tied", "phi-3", "phi-4-mini"]

TABLES = table("checkpoints")
REFUSED = TABLES["gguf"]
ROUNDED = ("norm_eps", "embed_scale", "logit_scale")  # float32 in a GGUF file


@pytest.mark.bug("P14")
@pytest.mark.parametrize("name", MADE)
def test_a_file_of_floats_is_the_directory_that_it_was_made_of(name: str, tmp_path: Path) -> None:
    """Names, order of rows, biases, norms of heads, untied heads, divisors of frequencies: the same model."""
    write(tmp_path / "model", CASES[name])
    write_gguf(tmp_path / "model", tmp_path / "made.gguf", "F32")
    directory = find(str(tmp_path / "made.gguf"))
    expected, found = read_config(tmp_path / "model"), read_config(directory)
    for n in (32, 128):  # longrope: up to the original context, and beyond
        a, b = (rope_table(c.rope, c.head_dim, n) for c in (found, expected))
        assert np.allclose(a, b, rtol=0, atol=1e-5)
    assert [vars(found)[name] for name in ROUNDED] == pytest.approx(
        [vars(expected)[name] for name in ROUNDED]
    )
    kept = {field: vars(found)[field] for field in ("generation", "pairs_adjacent", "rope", *ROUNDED)}
    assert vars(found) == vars(expected) | kept
    theirs, ours = read_weights(tmp_path / "model", expected), read_weights(directory, found)
    for mine, other in zip([ours, *ours.layers], [theirs, *theirs.layers], strict=True):
        for field in vars(mine).keys() - {"layers"}:
            a, b = vars(mine)[field], vars(other)[field]
            assert a is b or np.allclose(a, b, rtol=1e-6, atol=0)


@pytest.mark.bug("P29")
def test_texts_of_a_file(tmp_path: Path) -> None:
    """Of the tiny model, which are Qwen's. The file's name has no suffix: Ollama names one by its SHA-256."""
    write_gguf(TINY, tmp_path / "sha256-1.5", "Q8_0")
    directory = find(str(tmp_path / "sha256-1.5"))
    assert directory.name == "sha256-1.5"
    ours, expected = Tokenizer(directory / "tokenizer.json"), Tokenizer(TINY / "tokenizer.json")
    assert {**ours.added_by_id} == {**expected.added_by_id}
    text = "<|im_start|>user\nGrüße, 日本語 🎉\n\n  <html>\t1,234.5 don't<|im_end|><think>"
    assert ours.encode(text) == expected.encode(text)
    conversation = [{"role": "user", "content": "hi"}], None, datetime(2026, 1, 1)
    found, original = (ChatTemplate.load(folder).render(*conversation) for folder in (directory, TINY))
    assert found == original
    assert read_config(directory).eos_token_ids == (2039, 2041)  # <|endoftext|> too, which its metadata lacks
    write_gguf(TINY, tmp_path / "two.gguf", "Q8_0", {"tokenizer.chat_template.tool_use": "{{ tools }}"})
    template = ChatTemplate.load(find(str(tmp_path / "two.gguf")))
    assert template.render(*conversation) == original
    assert template.render(conversation[0], [{"name": "f"}], datetime(2026, 1, 1)) == "[{'name': 'f'}]"


@pytest.mark.parametrize("pre", TABLES["pre_tokenizers"])
def test_pre_tokenizers(pre: str) -> None:
    """The words that merges work within, as each model's own tokenizer.json cuts them."""
    words = PRE_TOKENIZERS[pre].pre_tokenize_str("in 2024, DON'T\n\n x")
    assert "|".join(word for word, _ in words) == TABLES["pre_tokenizers"][pre]


@pytest.mark.bug("P17")
@pytest.mark.parametrize("key", REFUSED)
def test_what_is_not_supported_is_refused_by_name(key: str, tmp_path: Path) -> None:
    write_gguf(TINY, tmp_path / "made.gguf", "Q8_0", {key: REFUSED[key].get("value")})
    message = refusal(tmp_path / "made.gguf")
    assert all(word in message for word in REFUSED[key]["words"]), message


def refusal(file: Path) -> str:
    with pytest.raises(UnsupportedModel) as error:
        read(file)
    message = str(error.value)
    assert "\n" not in message
    return message


def read(file: Path) -> None:
    """Read all that a start reads, one after another."""
    directory = find(str(file))
    Tokenizer(directory / "tokenizer.json")
    read_weights(directory, read_config(directory))


def changed(data: bytes, place: int, new: bytes) -> bytes:
    return data[:place] + new + data[place + len(new) :]


HUGE = (2**64 - 1).to_bytes(8, "little")
# A tensor with a million sizes, whose product takes minutes
DIMENSIONS = b"GGUF" + struct.pack("<IQQQ1sI", 3, 1, 0, 1, b"t", 10**6) + HUGE * 10**6 + bytes(12)


def test_headers_that_lie(tmp_path: Path) -> None:
    """Counts and sizes that the file has no bytes for are refused before anything of that size is made."""
    write_gguf(TINY, tmp_path / "whole.gguf", "Q4_1")
    data = (tmp_path / "whole.gguf").read_bytes()
    end = data.index(b"token_embd.weight") + len(b"token_embd.weight")  # u32 n_dims, two u64, u32 format, u64
    norm = data.index(b"blk.0.attn_norm.weight") + len(b"blk.0.attn_norm.weight")  # one u64
    n_tokens = data.index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens") + 8
    #  what is changed                              words of the refusal
    cases = [
        (changed(data, 0, b"GGML"),                 "it begins with b'GGML', version 3; supported: b'GGUF'"),
        (b"",                                       "empty file"),
        (DIMENSIONS,                                "tensor 't' is F32 ["),
        (changed(data, 4, b"\1\0\0\0"),             "version 1; supported: b'GGUF', 2 or 3"),
        (changed(data, 8, HUGE),                    "tensor '' is F32 []"),
        (changed(data, 24, HUGE),                   f"{2**64 - 1} bytes at byte 32"),
        (changed(data, n_tokens, HUGE),             "bytes at byte"),
        (changed(data, n_tokens - 4, b"\x0d\0\0\0"), "13 is not a valid GGUFValueType"),
        (changed(data, end, b"\xff\xff\xff\xff"),   "34359738360 bytes at byte"),
        (changed(data, end + 4, b"\x21"),           "'token_embd.weight' is Q4_1 [33, 2048]; supported"),
        (changed(data, end + 12, HUGE),             "it is cut at byte 727296: tensor 'token_embd.weight'"),
        (changed(data, end + 12, b"\0\0"),          "'token_embd.weight' is Q4_1 [128, 0]"),
        (changed(data, norm + 12, b"\x1a"),         "attn_norm.weight' is I32 [128]; supported"),
        (changed(data, end + 20, b"\x63\0\0\0"),    "99 is not a valid GGMLQuantizationType"),
        (changed(data, end + 24, b"\x20"),          "'token_embd.weight' does not lie at bytes"),
        (data[:-9],                                 f"it is cut at byte {len(data) - 9}: tensor 'output"),
        (data.replace(b"blk.0.attn_q.w", b"blk.0.attn_v.w"), "or occurs twice"),
    ]  # fmt: skip
    for number, (changed_data, words) in enumerate(cases):
        file = tmp_path / f"case-{number}.gguf"
        file.write_bytes(changed_data)
        assert words in refusal(file), number


def test_a_file_that_is_cut_or_changed_is_refused_in_a_line_or_read(tmp_path: Path) -> None:
    write(tmp_path, CASES["qwen3"])
    file = tmp_path / "damaged.gguf"
    write_gguf(tmp_path, file, "Q4_1")
    data = file.read_bytes()
    header = data.rindex(b".weight")  # where it nearly ends
    for n in [*range(0, header, 41), *range(header, len(data), 10_007), len(data) - 32]:
        file.write_bytes(data[:n])
        as_directory.cache_clear()
        assert "is not a GGUF file that is supported: " in refusal(file)
    rng = np.random.default_rng(0)
    values = [0, 1, 9, 2**31, 2**32 - 1, 2**63, 2**64 - 1]
    for place in rng.integers(data.index(b"blk.0.attn_q.weight"), size=300).tolist():
        new = int(rng.choice(np.array(values, object))).to_bytes(8, "little")[: int(rng.choice([1, 4, 8]))]
        file.write_bytes(changed(data, place, new))
        as_directory.cache_clear()
        with suppress(ValueError):
            read(file)


def test_only_what_a_killed_server_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a folder gguf-my-model in /tmp ended the start with an error, and gguf-2024-backup was removed."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed = subprocess.Popen(["true"])
    killed.wait()
    left_over = tmp_path / f"llmref-gguf-{killed.pid}-a"
    others = [f"gguf-{killed.pid}-a", "gguf-my-model", "llmref-gguf-my-model", "llmref-gguf-9999999999-a"]
    for name in (left_over.name, *others):
        (tmp_path / name).mkdir()
    write_gguf(TINY, tmp_path / "tiny.gguf")
    assert find(str(tmp_path / "tiny.gguf")).is_relative_to(tmp_path)
    assert not left_over.exists()
    assert all((tmp_path / name).exists() for name in others)
