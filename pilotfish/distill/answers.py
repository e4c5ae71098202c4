"""The answers of a run: lines of a file, appended one by one, that no kill or full disk hurts.

A line that was cut short is dropped when the file is opened again; all before it are whole.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from threading import Lock

import msgspec

from pilotfish.base.errors import RunFileError
from pilotfish.base.files import PRIVATE
from pilotfish.base.reading import read_content, reading_file
from pilotfish.distill.prompt_selection import DistillPrompt
from pilotfish.distill.training_rows import TrainingRow


class TrainingExample(msgspec.Struct, frozen=True):
    """A prompt with its answer.

    key: the prompt's (`DistillPrompt.key`). held: it is not learnt from. told: the prompt in the
    target's ids. answer: the target's. row: the same as the drafter reads it.
    """

    key: str
    prompting: DistillPrompt
    held: bool
    told: list[int]
    answer: list[int]
    finish_reason: str
    row: TrainingRow

    @property
    def kind(self) -> str:
        """What the prompt is an example of."""
        return self.prompting.kind


class TrainingExampleFile:
    """The answers that are there, and more. `add` may be called from any thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.answers: dict[str, TrainingExample] = {}
        self._lock = Lock()
        if path.exists():
            self._read()

    def add(self, example: TrainingExample) -> None:
        """Append an answer; it is with the operating system when this returns.

        Raises `OSError` if it cannot be written; the file is then as it was before.
        """
        line = msgspec.json.encode(example) + b"\n"
        with self._lock:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, PRIVATE)
            try:
                before = os.fstat(descriptor).st_size
                _write(descriptor, line, before, self.path)
            finally:
                os.close(descriptor)
            self.answers[example.key] = example

    def _read(self) -> None:
        with reading_file(lambda problem: RunFileError(f"{self.path} cannot be read: {problem}.")):
            data = read_content(self.path)
        complete = data.rfind(b"\n") + 1
        decoder = msgspec.json.Decoder(TrainingExample)
        for number, line in enumerate(data[:complete].split(b"\n")[:-1], 1):
            with reading_file(partial(self._damaged, number)):
                example = decoder.decode(line)
            self.answers[example.key] = example
        if complete < len(data):
            os.truncate(self.path, complete)

    def _damaged(self, number: int, problem: str) -> RunFileError:
        return RunFileError(
            f"{self.path} is not a file of answers, or its line {number} is damaged: {problem}. "
            "Delete that line, and its prompt is asked again, or name another --run-folder."
        )


def _write(descriptor: int, line: bytes, before: int, path: Path) -> None:
    """Write all of the line, or nothing."""
    left = memoryview(line)
    try:
        while left:
            left = left[os.write(descriptor, left) :]
    except OSError as error:  # such as a full disk, after a part of the line
        os.ftruncate(descriptor, before)
        raise OSError(error.errno, os.strerror(error.errno or 0), str(path)) from error
