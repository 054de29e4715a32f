"""From what the user calls a model to a directory in Hugging Face's layout.

    find(None) --> the default model     find("a/directory") --> itself     find("a/file.gguf") --> its texts
    find("Org/Name", "a revision") --> the Hub's, as it was at a branch, a tag or a commit

Authority: the layout is Hugging Face's (config.json, model.safetensors, tokenizer.json, ...); the Hub is
reached by its own client, https://huggingface.co/docs/huggingface_hub.
"""

import os
import re
from pathlib import Path

from checkpoint.default_model import PRESETS, HubError, default_model
from checkpoint.gguf_file import as_directory

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# Neither consolidated.safetensors, Mistral's second copy of the weights, nor folders (onnx/ ...) but one
HUB_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer*.json",
    "model*.json",
    "model*.safetensors",
    "*chat_template*.jinja",
]


def find(model: str | None, revision: str | None = None) -> Path:
    """Return the directory of a model: a directory, a GGUF file, a Hub id, or None for the default model.

    `revision` is a Hub id's: a branch, a tag or a commit; None is its main branch. Raises HubError, and
    UnsupportedModel for a GGUF file.
    """
    path = Path(os.path.expanduser(model or ""))  # Path's own raises for a user that there is not
    if revision and (model is None or path.exists()):
        raise HubError(f"--revision {revision}: expected --model to be a Hub id, such as Qwen/Qwen3-0.6B")
    if model is None:
        return as_directory(default_model(), PRESETS)
    if path.is_dir():
        return path
    if path.exists():
        return as_directory(path)
    if HUB_ID.fullmatch(model):
        return from_hub(model, revision)
    raise HubError(f"no directory {path.absolute()}, and {model} is not a Hub id like Qwen/Qwen3-0.6B")


def from_hub(model: str, revision: str | None) -> Path:
    """Return the directory of the Hub's files, downloaded if its client does not have them cached."""
    from huggingface_hub import constants, snapshot_download  # here, for it takes 0.2 s

    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=HUB_FILES))
    except Exception as error:  # the client's own, its HTTP client's or OSError, by version and by cause
        reason = str(error).strip().split("\n")[0]
        raise HubError(
            f"no model {model} at {revision or 'main'} in {constants.HF_HUB_CACHE}, or to be had from"
            f" {constants.ENDPOINT} ({type(error).__name__}: {reason}); give a directory that holds the model"
        ) from error
