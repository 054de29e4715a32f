"""The course: nano.py says what the real server says, and each exercise can be failed and solved."""

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from course.__main__ import CHAPTERS, exercises
from course_data import BLOCKS, page, written
from helpers.serving import ROOT, TINY, Server, environment, serve, without
from index import told
from mutants import mutants, mutated

MAX_NANO = 400  # lines
PROMPTS = [
    "What is 2+2?", "Hello!", "What is the capital of France?", "Who are you?", "Tell me a story.",
    "Count to five.", "What is the weather in Tokyo?", "Goodbye!",
]  # fmt: skip
OF_ONE_RUN = {"id", "item_id", "created_at", "completed_at"}


# --- nano.py ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nano() -> Iterator[openai.OpenAI]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "course/nano.py", str(TINY), "--port", str(port)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        url = f"http://127.0.0.1:{port}/v1"
        try:  # the client asks again while nothing listens
            with openai.OpenAI(base_url=url, api_key="none", max_retries=20) as client:
                yield client
        finally:
            process.kill()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve("--device", "cpu") as running:
        yield running


def said(client: openai.OpenAI, prompt: str) -> list[Any]:
    """Return the events of a streamed response, without what belongs to this run alone."""
    body: Any = {"model": "tiny", "input": prompt, "max_output_tokens": 90, "temperature": 0, "store": False}
    return [without(event.to_dict(), OF_ONE_RUN) for event in client.responses.create(**body, stream=True)]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_nano_says_what_the_real_server_says(nano: openai.OpenAI, server: Server, prompt: str) -> None:
    with server.sdk() as client:
        assert said(nano, prompt) == said(client, prompt)


def test_a_seed_repeats_an_answer(nano: openai.OpenAI) -> None:
    """The answer is not streamed, and its input is a list of messages."""
    body: Any = {"model": "tiny", "instructions": "Be brief.", "max_output_tokens": 20, "temperature": 2}
    body["input"] = [{"role": "user", "content": "What is 2+2?"}]
    drawn = [nano.responses.create(**body, extra_body={"seed": seed}) for seed in (1, 1, 2)]
    first, again, other = [without(response.to_dict(), OF_ONE_RUN) for response in drawn]
    assert first == again != other


def test_nano_is_read_in_half_an_hour() -> None:
    text = (ROOT / "course" / "nano.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_NANO
    ours = {path.stem for path in ROOT.glob("*.py")}
    assert not ours & {*re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE)}


# --- exercises ----------------------------------------------------------------------------------------------

EXERCISES = exercises()


def test_each_bug_to_be_found_is_one_row_of_mutants() -> None:
    rows = "\n".join(map(str, mutants()))
    words = [words for fields in CHAPTERS.values() for words in fields["find"]]
    assert [word for word in words if rows.count(word) != 1] == []


@pytest.mark.parametrize("chapter", BLOCKS)
def test_a_chapter_holds_its_data_and_lists_its_exercises(chapter: str) -> None:
    text = page(chapter).read_text(encoding="utf-8")
    assert text == written(chapter), "python tests/course_data.py --write"
    listed = re.findall(r"^\* ([\d.]+) .*\(`python -m course ([\d.]+)`\)$", text, re.MULTILINE)
    own = [number for number in EXERCISES if number.split(".")[0] == str(int(chapter[:2]))]
    assert listed == [(number, number) for number in own]
    assert 3 <= len(own) <= 7


def test_the_first_page_leads_to_all_chapters() -> None:
    text = (ROOT / "course" / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"\]\((\d.*)\.md\)", text) == [*BLOCKS]


def test_there_are_enough_and_all_can_be_made() -> None:
    symptoms = [told(exercise)[0] for exercise in EXERCISES.values() if mutated(exercise)]
    assert sum("https://" in symptom for symptom in symptoms) >= 40
    assert sum("has been taken out" in symptom for symptom in symptoms) >= 10


def course(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "course", *words]
    path = environment() | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=path)


SWEPT = [pytest.param(number, marks=pytest.mark.sweep) for number in EXERCISES if number != "8.1"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", ["8.1", *SWEPT])
def test_an_exercise_fails_and_is_solved(number: str, tmp_path: Path) -> None:
    assert course(tmp_path, number).returncode == 0
    failed = course(tmp_path, "check")
    assert failed.returncode == 1
    assert failed.stderr.startswith("Not yet:")
    assert len(failed.stderr.splitlines()) < 20
    module = f"{EXERCISES[number].module}.py"
    shutil.copy(ROOT / module, tmp_path / "course-work" / module)
    assert "Solved" in course(tmp_path, "check").stdout


def test_the_words_of_the_command(tmp_path: Path) -> None:
    assert "10" in course(tmp_path, "11.1").stderr
    assert course(tmp_path, "next").stdout.startswith("1.1: ")
    assert course(tmp_path, "hint").stdout
    assert EXERCISES["1.1"].old in course(tmp_path, "solution").stdout
    assert os.listdir(tmp_path) == ["course-work"]
    assert course(tmp_path).stdout.split()[-len(BLOCKS) :] == [f"{chapter}.md" for chapter in BLOCKS]


def test_a_folder_of_another_kind_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "course-work").mkdir()
    assert course(tmp_path, "1.1").returncode == 1
    assert list((tmp_path / "course-work").iterdir()) == []
