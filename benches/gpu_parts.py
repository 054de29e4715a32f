"""All that a machine with a GPU is needed for: three commands, each of less than ten minutes.

    python bench.py gpu-parts 1     is it right? how fast is each kernel? how fast is the engine?
    python bench.py gpu-parts 2     what does each feature bring? how fast is an 8B?
    python bench.py gpu-parts 3     what does a tool see that watches every access?

Rules of this file:
1. A step is a process of its own, for an error of CUDA spoils the process that it comes in; it is bounded by
   what is left of the command. A step that fails does not end the command, but the command fails.
2. A machine without a device is an error. So is a test that is skipped.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

from benches.harness import ROOT

COMMAND_S = 560  # of one part: all of it, of the ten minutes that a command may take
HAS_DEVICE = "import sys; from devices import cuda; sys.exit(cuda.missing())"  # a reason is written to stderr
LAWS = "-m pytest -q -rs tests/gpu -k "
PARTS = {
    1: [
        LAWS + "not~sanitizer",
        "bench.py kernels --out OUT/gpu-kernels.md --contexts 1000",
        "bench.py gpu --out OUT/gpu.md",
    ],
    2: [
        "bench.py gpu --out OUT/gpu-features.md --contexts 256 --contenders engine no-early no-graphs",
        "bench.py gpu --out OUT/gpu-8b.md --shape qwen3-8b",
        "bench.py kernels --out OUT/gpu-kernels-8b.md --contexts 1000 --shape qwen3-8b",
    ],
    3: [LAWS + "memcheck", LAWS + "racecheck"],
}


def run(args: argparse.Namespace) -> None:
    """Run the steps of a part; exits with 1 if one has failed, at once if there is no device."""
    deadline = time.monotonic() + COMMAND_S
    failures = [failure_of(["-c", HAS_DEVICE], COMMAND_S)]
    for step in PARTS[args.part] if failures == [""] else []:
        command = step.replace("OUT", str(args.out_folder)).split()
        failures.append(failure_of([word.replace("~", " ") for word in command], deadline - time.monotonic()))
    print("\n".join(filter(None, failures)) or f"part {args.part}: done")
    sys.exit(int(any(failures)))


def failure_of(command: list[str], seconds_left: float) -> str:
    """Run one step; "" if all went well."""
    step = " ".join(command)
    print(f"== {step}, at most {seconds_left:.0f} s", file=sys.stderr, flush=True)
    try:
        ended = subprocess.run(
            [sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=seconds_left
        )
    except subprocess.TimeoutExpired:
        return f"{step}: not done after {seconds_left:.0f} s"
    print(ended.stdout, file=sys.stderr)
    if ended.returncode:
        return f"{step}: exit status {ended.returncode}"
    if "pytest" in command and " skipped" in ended.stdout:
        return f"{step}: a test was skipped"
    return ""


def options(add: argparse.ArgumentParser) -> None:
    add.description = __doc__
    add.formatter_class = argparse.RawDescriptionHelpFormatter
    add.add_argument("part", type=int, choices=PARTS, help="see above")
    add.add_argument("--out-folder", type=Path, default=ROOT / "results", metavar="DIR", help="of the tables")
