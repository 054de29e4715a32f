"""Random checkpoints of every family and variation, and what transformers makes of them: the golden files.

    tables/parity.toml --write()--> a checkpoint --> transformers, float32 --> tests/golden/<case>.json

`pip install -e '.[parity]' && python tests/parity.py` writes the golden files anew, and exits with 1 if a
logit of ours differs by more than TOLERANCE, or one of the 64 greedy tokens after the prompt. Transformers
compute the whole sequence anew for every token, so that no cache of theirs is part of what is compared.

Rules of this file:
1. A checkpoint follows from its case and NumPy alone: the suite makes the same files without torch. The
   numbers of a tensor depend on its name and shape, not on its place in any table.
2. The numbers are such that every part of the model shows: no bias is 0, no norm weight 1. The suite
   asserts it: with another config.json, a feature off or another theta, the logits differ.
3. Original contexts and windows are far shorter than the prompt, so that scaling and sliding matter.
"""

import hashlib
import itertools
import json
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import TensorSpec, serialize_file

from checkpoint import hub
from checkpoint.config import parse_config, read_config
from checkpoint.weights import Mxfp4, all_parts, decoded_mxfp4, read_weights
from helpers.tables import table
from model import Array, Batch, NumpyOps, Span, forward
from request.template import ChatTemplate
from tokenizer import Tokenizer

GOLDEN = Path(__file__).parent / "golden"
TINY = Path(__file__).parent / "models" / "tiny"
TOLERANCE = 1e-3  # of a logit
N_PROMPT, N_GREEDY = 40, 64
CHECKED = [0, 13, N_PROMPT - 1, 70, N_PROMPT + N_GREEDY - 2]  # positions whose logits the golden files hold
PROMPT_SEED = 2  # one with which no greedy text is decided by a margin below TOLERANCE
N_PAGES = 128  # of every model here
N_TOP = 50  # logits kept of a position, where the vocabulary is a real one


class Case(NamedTuple):
    """A checkpoint of tables/parity.toml: config.json is SMALL with these changes."""

    model_type: str
    changes: dict[str, Any]
    otherwise: dict[str, Any]  # the same weights with these changes too must give other logits
    dtype: str = "F32"
    n_shards: int = 1


ROWS = table("parity")
SMALL: dict[str, Any] = json.loads(ROWS.pop("small"))
CASES = {
    name: Case(**row | {member: json.loads(row[member]) for member in ("changes", "otherwise")})
    for name, row in ROWS.items()
}


def config_json(case: Case) -> dict[str, Any]:
    raw = SMALL | case.changes | {"model_type": case.model_type}
    if "rope_parameters" in raw:  # holds it
        del raw["rope_theta"]
    return raw


def write(directory: Path, case: Case) -> None:
    """Write config.json and the weights, in one file or in shards with their index."""
    directory.mkdir(exist_ok=True)
    raw = config_json(case)
    (directory / "config.json").write_text(json.dumps(raw))
    parts = all_parts(parse_config(raw, {}))
    shards = ["model.safetensors"]
    if case.n_shards > 1:
        shards = [f"model-{n + 1:05}-of-{case.n_shards:05}.safetensors" for n in range(case.n_shards)]
        where = {part.name: shard for part, shard in zip(parts, itertools.cycle(shards), strict=False)}
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    for n, shard in enumerate(shards):
        tensors = {part.name: random_tensor(part.name, part.shape) for part in parts[n :: len(shards)]}
        write_tensors(directory / shard, tensors, case.dtype)


@contextmanager
def folder_of(name: str) -> Iterator[Path]:
    """A folder that holds the model of a case, while it is entered."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), CASES[name])
        yield Path(folder)


def write_tensors(path: Path, tensors: dict[str, NDArray[Any]], dtype: str) -> None:
    specs: dict[str, TensorSpec] = {}
    stored = {name: t if t.dtype == np.uint8 else STORED[dtype](t) for name, t in tensors.items()}
    for name, t in stored.items():
        kind = "bfloat16" if t.dtype == np.uint16 else str(t.dtype)
        specs[name] = TensorSpec(dtype=kind, shape=t.shape, data_ptr=t.ctypes.data, data_len=t.nbytes)
    serialize_file(specs, path, {"format": "pt"})


STORED: dict[str, Callable[[Array], NDArray[Any]]] = {
    "BF16": lambda tensor: (tensor.view(np.uint32) >> 16).astype("<u2"),
    "F16": lambda tensor: tensor.astype("<f2"),
    "F32": lambda tensor: tensor,
}
# the first of these that a tensor's name contains: mean and deviation, a matrix's times n_inputs ** -0.5
SPREAD = {
    "norm": (1.0, 0.3), "bias": (0.0, 0.25), "sinks": (1.0, 1.0), "embed_tokens": (0.0, 3.0),
    "lm_head": (0.0, 3.0), "": (0.0, 1.5),
}  # fmt: skip


def random_tensor(name: str, shape: tuple[int, ...]) -> NDArray[Any]:
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    if name.endswith("_blocks"):
        return rng.integers(0, 256, shape, np.uint8)
    if name.endswith("_scales"):
        return rng.integers(121, 125, shape, np.uint8)  # exponents of 2, plus 127
    mean, deviation = next(spread for word, spread in SPREAD.items() if word in name)
    if len(shape) > 1:
        deviation *= shape[1] ** -0.5
    return (mean + deviation * rng.standard_normal(shape)).astype(np.float32)


class Ours:
    """Logits from the engine's forward pass."""

    def __init__(self, directory: Path, changes: dict[str, Any] | None = None) -> None:
        """`changes` to config.json: the same weights, otherwise understood."""
        self.config = read_config(directory)
        if changes:
            raw = json.loads((directory / "config.json").read_text())
            self.config = parse_config(raw | changes, {})
        self.weights = read_weights(directory, self.config)
        length = min(self.config.max_seq_len, 1024)
        self.ops = NumpyOps(self.config, self.weights, length, N_PAGES, max_batch=1)

    def logits(self, token_ids: Sequence[int], positions: Sequence[int]) -> Array:
        """(len(positions), vocab_size): read in chunks that end at these positions, in ascending order."""
        ends = [position + 1 for position in positions]
        spans = [prefill(token_ids[start:end], start) for start, end in itertools.pairwise([0, *ends])]
        return np.concatenate([forward(self.ops, self.weights, Batch([span])) for span in spans])

    def greedy(self, prompt: Sequence[int], n: int) -> list[int]:
        """The prompt at once, then token by token."""
        token_ids = list(prompt)
        for start in [0, *range(len(prompt), len(prompt) + n - 1)]:
            logits = forward(self.ops, self.weights, Batch([prefill(token_ids[start:], start)]))
            token_ids.append(int(logits[0].argmax()))
        return token_ids[len(prompt) :]


def prefill(token_ids: Sequence[int], start: int, pages: Sequence[int] = range(N_PAGES)) -> Span:
    """Return tokens that are computed together; the choice after the last of them is wanted."""
    return Span(0, pages, token_ids, start, n_wanted=1)


class Golden(NamedTuple):
    prompt: list[int]
    greedy: list[int]  # the 64 tokens that follow
    rows: list[dict[str, Any]]  # position; ids and logits: all, or the largest; mean and max_abs of all

    def max_difference(self, logits: NDArray[Any]) -> float:
        """Compare the kept logits, and mean and largest absolute value of all, (len(rows), vocab_size)."""
        differences: list[float] = []
        for row, mine in zip(self.rows, logits, strict=True):
            found = golden_row(row["position"], mine)
            differences.append(float(np.abs(mine[row["ids"]] - row["logits"]).max()))
            differences += [abs(found[member] - row[member]) for member in ("mean", "max_abs")]
        return max(differences)

    def of(self, ours: "Ours") -> Array:
        """Return our logits at the same positions, the last of which says the last of the greedy tokens."""
        return ours.logits(self.prompt + self.greedy[:-1], [row["position"] for row in self.rows])


def read_golden(name: str) -> Golden:
    return Golden(**json.loads((GOLDEN / f"{name}.json").read_text()))


def golden_row(position: int, logits: Array) -> dict[str, Any]:
    """Keep these of the logits of a position, (vocab_size,)."""
    ids = np.arange(len(logits)) if len(logits) <= 128 else np.argsort(-logits, kind="stable")[:N_TOP]
    kept = {"position": position, "ids": ids.tolist(), "logits": [round(float(v), 5) for v in logits[ids]]}
    return kept | {"mean": float(logits.mean(dtype=np.float64)), "max_abs": float(np.abs(logits).max())}


def every_mxfp4() -> Mxfp4:
    """Every byte with every scale but that which means no number."""
    scales = np.arange(255, dtype=np.uint8).reshape(1, 255, 1).repeat(16, axis=2)
    blocks = np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16).repeat(255, axis=1)
    return Mxfp4(blocks, scales)


def digest(numbers: Array) -> str:
    """Of the bits of numbers; -0 counts as 0."""
    return hashlib.sha256((numbers + np.float32(0)).tobytes()).hexdigest()


def mxfp4_is_theirs() -> bool:
    """Write the digest of what transformers makes of every_mxfp4(), and compare ours bit for bit."""
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    packed = every_mxfp4()
    blocks, scales = torch.from_numpy(packed.blocks), torch.from_numpy(packed.scales)
    numbers = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
    golden = digest(numbers.contiguous().numpy())
    (GOLDEN / "mxfp4.json").write_text(json.dumps(golden) + "\n")
    return golden == digest(decoded_mxfp4(packed))


def theirs(directory: Path, prompt: list[int]) -> tuple[list[int], Array]:
    """Return N_GREEDY tokens after the prompt, and the logits of all positions but the last token's."""
    import torch
    from transformers import AutoModelForCausalLM

    where = {"gguf_file": "model.gguf"} if (directory / "model.gguf").is_file() else {}
    model, info = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True, **where
    )
    if any(info.values()):  # it fills in random numbers and goes on
        raise SystemExit(f"{directory.name}: transformers wants other tensors: {info}")
    token_ids = list(prompt)
    with torch.no_grad():
        for _ in range(N_GREEDY):
            logits = model(torch.tensor([token_ids]), use_cache=False).logits[0]
            token_ids.append(int(logits[-1].argmax()))
    return token_ids[len(prompt) :], logits.numpy()


def compare(name: str, directory: Path, prompt: list[int], positions: Sequence[int]) -> bool:
    """Write the golden file and compare all positions' logits, ours one by one, and a whole greedy answer."""
    greedy, logits = theirs(directory, prompt)
    golden = Golden(prompt, greedy, [golden_row(position, logits[position]) for position in positions])
    (GOLDEN / f"{name}.json").write_text(json.dumps(golden._asdict()) + "\n")
    ours = Ours(directory)
    difference = np.abs(ours.logits(prompt + greedy[:-1], range(len(logits))) - logits).max()
    best = np.partition(logits[-N_GREEDY:], -2)[:, -2:]  # the two likeliest tokens of each step
    margin = float((best[:, 1] - best[:, 0]).min())  # near 0 a greedy text is luck
    same = ours.greedy(prompt, N_GREEDY) == greedy
    print(f"{name:26} {difference=:.1e}, greedy text equal: {same}, {margin=:.3f}")
    return same and bool(difference < TOLERANCE < margin)


def chat_prompt(directory: Path, text: str) -> list[int]:
    messages = [{"role": "user", "content": text}]
    prompt = ChatTemplate.load(directory).render(messages, None, datetime(2026, 1, 1))
    return Tokenizer(directory / "tokenizer.json").encode(prompt)


def main() -> int:
    good = [mxfp4_is_theirs()]
    random_prompt = np.random.default_rng(PROMPT_SEED).integers(0, SMALL["vocab_size"], N_PROMPT).tolist()
    for name in CASES:
        with folder_of(name) as folder:
            good.append(compare(name, folder, random_prompt, CHECKED))
    real = {"tiny": (TINY, "What is 2+2? Answer with just the number."),
            "default": (hub.find(None), "What is the capital of France?")}  # fmt: skip
    for name, (directory, text) in real.items():
        prompt = chat_prompt(directory, text)
        good.append(compare(name, directory, prompt, [len(prompt) - 1, len(prompt) + N_GREEDY - 2]))
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
