"""From token to wire: a course whose exercises are real bugs.

python -m course            lists the chapters and what you have done
python -m course 7.3        breaks a copy of the project in ./course-work/7.3; your work there is kept
python -m course check      judges your copy: the bug's own test, all tests of the module, and the original
python -m course hint       tells our rule, or who calls a function and which tests do
python -m course solution   shows the lines as they were
python -m course next       goes on to the next exercise
python -m course grade FOLDER ... --json FILE      judges all that was begun in the folders of students
"""

import sys
from importlib.util import find_spec

if sys.version_info < (3, 11) or None in map(find_spec, ("hypothesis", "pytest", "uvicorn")):
    packages = "pip install -e '.[dev]', or 'llmref[course]'"
    sys.exit("error: expected Python 3.11 or later, and its packages: " + packages)

import json
import re
import shutil
import signal
import time
from difflib import unified_diff
from pathlib import Path
from typing import Any

PROGRAM = sys.argv[0].replace(__file__, "python -m course")  # or "llmref course"
HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "tests")]

from index import told  # noqa: E402
from judge import exercises, judge  # noqa: E402
from mutants import LEFT_OUT, ROOT, Mutant, mutated  # noqa: E402

USAGE = __doc__.replace("python -m course", PROGRAM)
WORK = Path("course-work")
PROGRESS = WORK / "progress.json"  # {"current": a number, "begun": and "done": {a number: Unix time}}


def save(progress: dict[str, Any]) -> None:
    PROGRESS.write_text(json.dumps(progress, indent=1))


def start(number: str, exercise: Mutant, progress: dict[str, Any]) -> None:
    """Copy the project and break the copy, unless it is there already."""
    broken = WORK / number / exercise.file
    if WORK.exists() and not PROGRESS.exists():
        sys.exit(f"expected to make {WORK}, but something of that name is here: go to another folder")
    if not broken.exists():
        shutil.copytree(ROOT, WORK / number, ignore=LEFT_OUT)
        broken.write_text(mutated(exercise), encoding="utf-8")
        progress["begun"][number] = time.time()
    else:
        print(f"Your work on {number} is kept. Delete {WORK / number} to begin again.\n")
    save(progress | {"current": number})
    print(f"{number}: {told(exercise)[0]}\n\nLook into {broken}, then: {PROGRAM} check")


def check(number: str, exercise: Mutant, progress: dict[str, Any]) -> None:
    if why := judge(exercise, WORK / number):
        sys.exit(f"Not yet: {why}\nThe bug of this exercise: {told(exercise)[0]}")
    progress["done"].setdefault(number, time.time())
    save(progress)
    print(f"Solved. Go on: {PROGRAM} next")


def solution(exercise: Mutant) -> str:
    path = ROOT / exercise.file
    broken, whole = mutated(exercise).splitlines(), path.read_text(encoding="utf-8").splitlines()
    return "\n".join(unified_diff(broken, whole, "broken", path.name, lineterm=""))


def overview(known: dict[str, Mutant], progress: dict[str, Any]) -> str:
    lines = [USAGE]
    for page in sorted(HERE.glob("[01]*.md")):
        lines.append(page.name)
        titles = re.findall(r"^\* ([\d.]+) (.*) \(`python", page.read_text(encoding="utf-8"), re.MULTILINE)
        for number, title in titles:
            if begun := progress["begun"].get(number):
                done = progress["done"].get(number)
                state = f"done in {(done - begun) / 60:.0f} minutes" if done else "begun"
                lines.append(f"    {number:5} {title}: {state}")
    return "\n".join([*lines, f"{len(progress['done'])} of {len(known)} exercises are done."])


def grade(known: dict[str, Mutant], folders: list[str], report: str) -> None:
    """Judge each exercise that was begun in these folders."""
    found = {folder: dict[str, str]() for folder in folders}
    for folder, grades in found.items():
        for number, exercise in known.items():
            if (work := Path(folder) / number).is_dir():
                verdict = judge(exercise, work) or "solved"
                grades[number] = verdict
                print(folder, number, verdict.splitlines()[0], flush=True)
    Path(report).write_text(json.dumps(found, indent=1))


def main() -> None:
    known = exercises()
    numbers = ["", *known]
    progress: dict[str, Any] = {"current": "", "begun": {}, "done": {}}
    if PROGRESS.exists():
        progress = json.loads(PROGRESS.read_text(encoding="utf-8"))
    number = progress["current"]
    match sys.argv[1:]:
        case []:
            print(overview(known, progress))
        case ["-h" | "--help"]:
            print(USAGE)
        case ["next"]:
            following = numbers[numbers.index(number) % len(known) + 1]
            start(following, known[following], progress)
        case ["check" | "hint" | "solution"] if not number:
            sys.exit(f"Start an exercise first: {PROGRAM} 1.1")
        case ["check"]:
            check(number, known[number], progress)
        case ["hint"]:
            print(told(known[number])[1])
        case ["solution"]:
            print(solution(known[number]))
        case ["grade", *folders, "--json", report]:
            grade(known, folders, report)
        case [chosen] if chosen in known:
            start(chosen, known[chosen], progress)
        case _:
            sys.exit(f"{USAGE}\nexpected one of these words, or an exercise from 1.1 to {numbers[-1]}")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends this program without a word
    main()
