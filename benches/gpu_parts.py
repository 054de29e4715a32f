"""All that a machine with a GPU is needed for: three commands, each of less than ten minutes.

    PARTS --run(): a process for each step, with a limit--> results/*.md, results/*.json, a log

    python bench.py gpu-parts 1     is it right? how fast is each kernel? how fast is the engine?
    python bench.py gpu-parts 2     who is beside it? how fast is an 8B?
    python bench.py gpu-parts 3     what does a tool see that watches every access? the peers of the 8B

What matters most comes first. The minutes are estimates: nobody has run them yet.

Rules of this file:
1. A step is a process of its own, for an error of CUDA spoils the process that it comes in; and it is
   bounded, by its own seconds and by what is left of the command.
2. Results are saved after each step. A step that fails does not end the command, but the command fails.
3. A machine without a device is an error. So is a test that is skipped.

Not here: the measurements (gpu.py, gpu_ops.py), the tests (tests/gpu).
"""

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
COMMAND_S = 560  # of one part: all of it, of the ten minutes that a command may take
LEAST_S = 20  # a step that has less is not begun
TIMED_OUT = 124  # exit status of coreutils' timeout

PYTHON = [sys.executable, "-u"]
HAS_DEVICE = "import sys; from devices import cuda; sys.exit(cuda.missing())"  # a reason is written to stderr
SMOKE = "graphs_and_early or SmolLM2 or pages_are"


class Step(NamedTuple):
    name: str
    seconds: int  # at most
    command: list[str]
    needs: str | None = None  # a program on the PATH


def laws(name: str, seconds: int, expression: str, needs: str | None, *flags: str) -> Step:
    """Tests of tests/gpu that the expression chooses."""
    pytest = [*PYTHON, "-m", "pytest", "-q", "-rs", f"--timeout={seconds}"]
    return Step(name, seconds, [*pytest, "tests/gpu", "-k", expression, *flags], needs)


def parts(args: argparse.Namespace) -> dict[int, list[Step]]:
    """The steps of each part, what matters most first."""
    out = args.out_folder
    side_by_side = []
    if importlib.util.find_spec("xdist"):
        side_by_side = ["-n", "6"]

    def bench(name: str, seconds: int, *flags: str) -> Step:
        return Step(name, seconds, [*PYTHON, "bench.py", *flags, "--keep", str(args.keep)])

    def engine(shape: str, seconds: int, *contenders: str, flags: tuple[str, ...] = ()) -> Step:
        where = ["--out", str(out / "gpu.md"), "--shape", shape, "--minutes", str(seconds / 60)]
        name = " ".join([*contenders, shape])
        return bench(name, seconds, "gpu", *where, *args.gpu_flags, *flags, "--contenders", *contenders)

    def kernels(shape: str, seconds: int, *flags: str) -> Step:
        where = ["--out", str(out / f"gpu-ops-{shape}.md"), "--shape", shape]
        return bench(f"kernels {shape}", seconds, "gpu-ops", *where, *args.ops_flags, *flags)

    short = ("--contexts", "256")
    two_batches = (*short, "--batches", "1", "16")
    return {
        1: [
            laws("smoke", 120, SMOKE, None, "-x"),
            laws("laws", 240, "not sanitizer", None, *side_by_side),
            kernels(args.small, 150),
            engine(args.small, 180, "engine"),
        ],
        2: [
            engine(args.small, 200, "compiled-loop", flags=short),
            engine(args.large, 200, "engine"),
            kernels(args.large, 120, "--rows", "1", "4", "16", "64", "256", "--contexts", "1000"),
            engine(args.small, 60, "engine-no-staging", "engine-no-early", "engine-no-graphs", flags=short),
            engine(args.small, 130, "transformers-compiled", flags=short),
            engine(args.small, 130, "transformers-eager", flags=short),
        ],
        3: [
            *(
                laws(tool, 280, f"sanitizer and {tool}", "compute-sanitizer")
                for tool in ("memcheck", "racecheck")
            ),
            engine(args.large, 150, "compiled-loop", flags=two_batches),
            engine(args.large, 150, "transformers-eager", flags=two_batches),
        ],
    }


class Ended(NamedTuple):
    """What became of a step."""

    name: str
    seconds: float
    failure: str  # "": none


def run(args: argparse.Namespace) -> None:
    """Run the steps of a part; exits with 1 where one has failed, at once where there is no device."""
    began = time.monotonic()
    args.out_folder.mkdir(parents=True, exist_ok=True)
    log = args.out_folder / f"gpu-part{args.part}.log"
    device = run_step(Step("device", 30, [*PYTHON, "-c", HAS_DEVICE]), COMMAND_S, log)
    steps = [
        step for step in parts(args)[args.part] if not args.only or set(args.only) & set(step.name.split())
    ]
    ended = [device]
    if device.failure:
        steps = []
    for step in steps:
        ended.append(run_step(step, COMMAND_S - (time.monotonic() - began), log))
        write_report(ended, args)
    write_report(ended, args)
    if any(step.failure for step in ended):
        sys.exit(1)


def run_step(step: Step, seconds_left: float, log: Path) -> Ended:
    """Run a step within what is left of the command, its output added to the log."""
    if step.needs and not shutil.which(step.needs):
        return said(Ended(step.name, 0, f"no {step.needs} on the PATH"))
    if seconds_left < LEAST_S:
        return said(Ended(step.name, 0, "no time left"))
    limit = min(step.seconds, seconds_left)
    print(f"== {step.name}, at most {limit:.0f} s", file=sys.stderr, flush=True)
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    began = time.monotonic()
    begin_of_output = log.stat().st_size if log.exists() else 0
    with log.open("ab") as output:
        output.write(f"\n== {step.name}\n".encode())
        output.flush()
        # With its children: `timeout` ends the whole group of processes.
        bounded = ["timeout", "-k", "5", f"{limit:.0f}", *step.command]
        status = subprocess.run(bounded, stdout=output, stderr=output, cwd=ROOT, env=environment).returncode
    failure = ""
    if status == TIMED_OUT:
        failure = f"not done after {limit:.0f} s"
    elif status:
        failure = f"exit status {status}"
    text = log.read_bytes()[begin_of_output:].decode(errors="replace")
    if not failure and "pytest" in step.command and " skipped" in text:
        failure = "a test was skipped"
    if failure:
        print("\n".join(text.splitlines()[-15:]), file=sys.stderr)
    return said(Ended(step.name, time.monotonic() - began, failure))


def said(ended: Ended) -> Ended:
    print(
        f"== {ended.name}: {ended.failure or 'done'} after {ended.seconds:.0f} s", file=sys.stderr, flush=True
    )
    return ended


def write_report(ended: list[Ended], args: argparse.Namespace) -> None:
    lines = [f"# Part {args.part}", "", "| step | seconds | |", "|---|---|---|"]
    lines += [f"| {step.name} | {step.seconds:.0f} | {step.failure or 'done'} |" for step in ended]
    report = args.out_folder / f"gpu-part{args.part}.md"
    report.write_text("\n".join([*lines, ""]), encoding="utf-8")


def options(add: argparse.ArgumentParser) -> None:
    add.description = __doc__
    add.formatter_class = argparse.RawDescriptionHelpFormatter
    add.add_argument("part", type=int, choices=(1, 2, 3), help="see above")
    add.add_argument(
        "--only", nargs="+", metavar="WORD", help="the steps that have one of these in their name"
    )
    for name, default, about in (("small", "qwen3-0.6b", "first"), ("large", "qwen3-8b", "then")):
        text = f"the shape that is measured {about} (default: {default})"
        add.add_argument(f"--{name}", default=default, metavar="SHAPE", help=text)
    home = Path.home() / ".cache" / "llmref-gpu"
    add.add_argument("--keep", type=Path, default=home, metavar="DIR", help=f"checkpoints (default: {home})")
    add.add_argument(
        "--out-folder", type=Path, default=ROOT / "results", metavar="DIR", help="default: results"
    )
    for bench in ("gpu", "ops"):
        text = "flags for each of these, in one word: '--batches 1 4'"
        add.add_argument(f"--{bench}-flags", type=str.split, default=[], metavar="FLAGS", help=text)
