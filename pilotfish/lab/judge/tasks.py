"""Tasks: write the prompt of a question, extract an answer's outcome, and check the outcome.

An *outcome* is an answer's result, as a short text that can be compared. Each task is a class in
`TASKS`.
"""

from __future__ import annotations

import json
import re
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from functools import partial
from pathlib import Path
from typing import ClassVar, NamedTuple

from pilotfish.base.errors import UnsupportedError
from pilotfish.base.reading import read_text, reading_file

_COMMAND_S = 30.0
_NUMBER = r"[-−]?\$?\s?[\d,]*\.?\d+"


class Question(NamedTuple):
    """A question. key: unique name. message: the prompt's text. answer: the reference answer."""

    key: str
    message: str
    answer: str


class Task(ABC):
    """A kind of question. instruction: text that the prompt adds after the question."""

    name: ClassVar[str]
    instruction: ClassVar[str] = ""

    def ask(self, question: str) -> str:
        """Compose the prompt: the question, then the instruction."""
        return f"{question}\n\n{self.instruction}" if self.instruction else question

    @abstractmethod
    def outcome(self, question: Question, text: str) -> str:
        """Extract an answer's outcome; "" if it has none."""

    def right(self, question: Question, outcome: str) -> bool:
        """Return whether the outcome equals the reference answer's outcome."""
        return outcome != "" and outcome == self.outcome(question, question.answer)


class Gsm8k(Task):
    """Grade-school mathematics (Cobbe et al. 2021); the outcome is the final number."""

    name = "gsm8k"
    instruction = (
        "Think step by step in short sentences, at most one a step. End with a line '#### ' and "
        "the number."
    )

    def outcome(self, question: Question, text: str) -> str:
        """Return the last number after "####" or in a box; without one, the last number."""
        marked = re.findall(rf"(?:####|boxed{{)\D{{0,3}}?({_NUMBER})", text)
        numbers = marked or re.findall(_NUMBER, text)
        return _number(numbers[-1]) if numbers else ""


class Exact(Task):
    """Any questions; the outcome is the answer's text, with normalised spaces."""

    name = "exact"

    def outcome(self, question: Question, text: str) -> str:
        """Join the words with single spaces."""
        return " ".join(text.split())


class Facts(Task):
    """A short text that contains given facts (`judge.facts_task`); the outcome is which it has.

    The reference answer lists the facts, with commas between them.
    """

    name = "facts"

    def outcome(self, question: Question, text: str) -> str:
        """List the facts that the text contains as whole words, and "-" for each other fact."""
        return ", ".join(
            fact if re.search(rf"\b{re.escape(fact)}\b", text, re.IGNORECASE) else "-"
            for fact in question.answer.split(", ")
        )


class Command(Task):
    """Any questions; a program of the user extracts and checks the outcome.

    The program reads one line of JSON (``question``, ``answer``, ``text``) and prints the outcome.
    It exits with 0 if the outcome is right, and with 1 if not.
    """

    name = "command"

    def __init__(self, command: Sequence[str]) -> None:
        if not command:
            raise UnsupportedError("Task command needs a program: --checker 'PROGRAM ARGUMENTS'.")
        self._command = list(command)
        self._right: dict[tuple[str, str], bool] = {}

    def outcome(self, question: Question, text: str) -> str:
        """Run the program; return its output, stripped."""
        request = {"question": question.message, "answer": question.answer, "text": text}
        try:
            process = subprocess.run(
                self._command,
                input=json.dumps(request, ensure_ascii=False) + "\n",
                capture_output=True,
                text=True,
                timeout=_COMMAND_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UnsupportedError(f"The checker {self._command[0]} failed: {error}.") from error
        if process.returncode not in (0, 1):
            raise UnsupportedError(
                f"The checker {self._command[0]} exited with {process.returncode}, but only 0 "
                f"(right) and 1 (wrong) are allowed: {process.stderr.strip()[:200]}"
            )
        outcome = process.stdout.strip()
        self._right[question.key, outcome] = process.returncode == 0
        return outcome

    def right(self, question: Question, outcome: str) -> bool:
        """Return the verdict of the program's run that printed this outcome."""
        return self._right[question.key, outcome]


TASKS: dict[str, type[Task]] = {task.name: task for task in (Gsm8k, Exact, Facts, Command)}


def make_task(name: str, checker: Sequence[str] = ()) -> Task:
    """Make the task of this name. checker: program and arguments, for `Command`."""
    if name not in TASKS:
        raise UnsupportedError(f"There is no task {name!r}; the tasks are {', '.join(TASKS)}.")
    return Command(checker) if name == Command.name else TASKS[name]()


def _line_error(fault: str, problem: str) -> UnsupportedError:
    return UnsupportedError(f"{fault}: {problem}.")


def read_task_questions(path: Path, task: Task) -> list[Question]:
    """Read a file of JSON lines, each with "question" and "answer"; skip empty lines."""
    parsed = []
    with reading_file(lambda problem: UnsupportedError(f"{path} cannot be read: {problem}.")):
        # not `splitlines`: a JSON string may contain Unicode's other line ends
        lines = read_text(path).split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        fault = f'{path}, line {number} is not a JSON object with "question" and "answer"'
        with reading_file(partial(_line_error, fault)):
            entry = json.loads(line)
            if not isinstance(entry, dict) or not entry.keys() >= {"question", "answer"}:
                raise UnsupportedError(f"{fault}.")
            question, answer = str(entry["question"]), str(entry["answer"])
            (question + answer).encode()  # raises if the text has half a surrogate pair
        parsed.append(Question(f"{path.stem}-{number}", task.ask(question), answer))
    if not parsed:
        raise UnsupportedError(f"{path} has no question.")
    return parsed


def _number(text: str) -> str:
    """Normalise a number's digits: 1,234.50 becomes 1234.5."""
    digits = re.sub(r"[\s$,]", "", text).replace("−", "-")
    try:
        return format(Decimal(digits).normalize(), "f")
    except InvalidOperation:
        return ""
