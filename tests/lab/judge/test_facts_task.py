"""The made-up questions of task facts: the same everywhere, and checkable."""

from __future__ import annotations

from pathlib import Path

from pilotfish.cli import main
from pilotfish.lab.judge.facts_task import KINDS, SETS, make_questions
from pilotfish.lab.judge.tasks import Facts, read_task_questions


def test_a_set_and_a_number_give_the_same_question_on_every_machine() -> None:
    first = next(make_questions("dev", 1))
    assert first.message == (
        "Write a short message to Alice in two sentences. The facts: the meeting with Paul is on "
        "Saturday at 6 o'clock in room 53."
    )
    assert first.answer == "Paul, Saturday, 6, 53"
    assert list(make_questions("test", 9))[:4] == list(make_questions("test", 4))


def test_the_sets_share_hardly_a_question() -> None:
    texts = {name: {each.message for each in make_questions(name, 600)} for name in SETS}
    for name in ("dev", "test"):
        assert len(texts[name] & texts["train"]) <= 6  # sums of small numbers may repeat


def test_an_outcome_lists_the_facts_that_the_text_has_as_whole_words() -> None:
    task = Facts()
    for question in make_questions("train", 5):  # the sixth kind asks for a sum
        assert task.right(question, task.outcome(question, question.message))
        assert not task.right(question, task.outcome(question, "Nothing of this."))
    question = next(make_questions("dev", 1))
    text = "PAUL meets you at 6:00 on Saturdays, in room 535."
    assert task.outcome(question, text) == "Paul, -, 6, -"


def test_the_command_writes_what_the_task_reads(tmp_path: Path) -> None:
    path = tmp_path / "dev.jsonl"
    count = len(KINDS)
    words = ["judge", "questions", "--set", "dev", "--count", str(count), "--out", str(path)]
    assert main(words) == 0
    read = read_task_questions(path, Facts())
    assert read == list(make_questions("dev", count))
