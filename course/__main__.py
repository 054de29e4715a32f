"""From token to wire: a course whose exercises are real bugs.

python -m course            lists the chapters
python -m course 7.3        copies the project to ./course-work and breaks it, as exercise 7.3 says
python -m course check      runs the test that notices
python -m course hint       tells our rule, or which test to read
python -m course solution   shows the lines as they were
python -m course next       goes on to the next exercise
"""

import sys
from importlib.util import find_spec

if sys.version_info < (3, 11) or None in map(find_spec, ("hypothesis", "pytest", "uvicorn")):
    sys.exit("error: expected Python 3.11 or later, and its packages: pip install -e '.[dev]'")

import shutil
import subprocess
import tomllib
from pathlib import Path

PROGRAM = sys.argv[0].replace(__file__, "python -m course")  # or "llmref course"
HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "tests")]

from index import told  # noqa: E402
from mutants import LEFT_OUT, ROOT, Mutant, mutants, mutated, taken_out  # noqa: E402

USAGE = __doc__.replace("python -m course", PROGRAM)
WORK = Path("course-work")
CHOSEN = WORK / "exercise"  # the file that holds its number
MAX_LINES, MAX_WIDTH = 10, 160  # of what a test says
CHAPTERS = tomllib.loads((HERE / "exercises.toml").read_text(encoding="utf-8"))


def exercises() -> dict[str, Mutant]:
    """Return each exercise by its number: first the bugs to be found, then the functions to be written."""
    rows = [*mutants()]
    numbered: dict[str, Mutant] = {}
    for chapter, fields in CHAPTERS.items():
        found = [row for words in fields["find"] for row in rows if words in str(row)]
        found += [taken_out(*words.split()) for words in fields["write"]]
        numbered |= {f"{chapter}.{i}": exercise for i, exercise in enumerate(found, 1)}
    return numbered


def start(number: str, exercise: Mutant) -> None:
    """Copy the project, and break the copy."""
    if WORK.exists() and not CHOSEN.exists():
        sys.exit(f"expected to make {WORK}, but something of that name is here: go to another folder")
    shutil.rmtree(WORK, ignore_errors=True)
    shutil.copytree(ROOT, WORK, ignore=LEFT_OUT)
    CHOSEN.write_text(number, encoding="utf-8")
    broken = WORK / f"{exercise.module}.py"
    broken.write_text(mutated(exercise), encoding="utf-8")
    print(f"{number}: {told(exercise)[0]}\n\nLook into {broken}, then: {PROGRAM} check")


def check(exercise: Mutant) -> None:
    """Run the test; raises SystemExit with ten lines of what it says, if it fails."""
    command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", exercise.test]
    ended = subprocess.run(command, cwd=WORK, capture_output=True, text=True)
    if ended.returncode:
        said = [line[:MAX_WIDTH] for line in ended.stdout.splitlines() if line.startswith((">", "E "))]
        sys.exit("\n".join([f"Not yet: {exercise.test}", told(exercise)[0], *said[:MAX_LINES]]))
    print(f"Solved. Go on: {PROGRAM} next")


def main() -> None:
    known = exercises()
    numbers = [*known]
    number = CHOSEN.read_text(encoding="utf-8") if CHOSEN.exists() else numbers[-1]
    match sys.argv[1:]:
        case []:
            print(USAGE, *(path.name for path in sorted(HERE.glob("[01]*.md"))), sep="\n")
        case ["check"]:
            check(known[number])
        case ["hint"]:
            print(told(known[number])[1])
        case ["solution"]:
            print(known[number].old)
        case ["next"]:
            following = numbers[numbers.index(number) + 1 - len(numbers)]
            start(following, known[following])
        case [chosen] if chosen in known:
            start(chosen, known[chosen])
        case _:
            sys.exit(f"{USAGE}\nexpected one of these words, or an exercise from 1.1 to {numbers[-1]}")


if __name__ == "__main__":
    main()
