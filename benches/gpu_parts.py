"""All that a machine with a GPU is needed for: three commands, each of less than ten minutes.

    python bench.py gpu-parts 1     is it right? how fast is each kernel? how fast is the engine?
    python bench.py gpu-parts 2     what does each feature bring? how fast is an 8B?
    python bench.py gpu-parts 3     what does a tool see that watches every access?

A step is a process of its own, for an error of CUDA spoils the process that it comes in. If one fails, which
each does without a device, the next one runs, and the command fails. It ends when its time is over.
"""

import argparse
import subprocess
import sys
import time

from benches.harness import ROOT

COMMAND_S = 560  # of the ten minutes that a command may take
LAWS = ["-m", "pytest", "-q", "-rs", "tests/gpu", "-k"]
KERNELS = ["bench.py", "kernels", "--contexts", "1000", "--out"]
ENGINE = ["bench.py", "gpu", "--out"]
FEATURES = ["--contexts", "256", "--contenders", "engine", "no-early", "no-graphs"]
# fmt: off
PARTS = {
    1: [[*LAWS, "not sanitizer"], [*KERNELS, "results/gpu-kernels.md"], [*ENGINE, "results/gpu.md"]],
    2: [[*ENGINE, "results/gpu-features.md", *FEATURES],
        [*ENGINE, "results/gpu-8b.md", "--shape", "qwen3-8b"],
        [*KERNELS, "results/gpu-kernels-8b.md", "--shape", "qwen3-8b"]],
    3: [[*LAWS, "memcheck"], [*LAWS, "racecheck"]],
}
# fmt: on


def run(args: argparse.Namespace) -> None:
    """Run the steps of a part; exits with 0 if all went well."""
    deadline = time.monotonic() + COMMAND_S
    statuses: list[int] = []
    for step in PARTS[args.part]:
        seconds_left = deadline - time.monotonic()
        print("==", *step, f"at most {seconds_left:.0f} s", flush=True)
        ended = subprocess.run([sys.executable, *step], cwd=ROOT, timeout=seconds_left)
        print(f"exit status {ended.returncode}")
        statuses.append(ended.returncode)
    sys.exit(max(statuses))


def options(add: argparse.ArgumentParser) -> None:
    add.description = __doc__
    add.formatter_class = argparse.RawDescriptionHelpFormatter
    add.add_argument("part", type=int, choices=PARTS, help="see above")
