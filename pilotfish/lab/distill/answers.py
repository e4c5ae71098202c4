"""Store a run's answers in a file, one per line.

A kill or a full disk loses at most the last answer.

All lines but the last are always complete. Opening the file cuts off an incomplete last line.
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
from pilotfish.lab.distill.prompt_selection import DistillPrompt
from pilotfish.lab.distill.training_rows import TrainingRow


class TrainingExample(msgspec.Struct, frozen=True):
    """A prompt with the target's answer.

    key: `DistillPrompt.key`. held: whether the prompt is held out of training. prompt_ids, answer:
    prompt and answer, in the target's token ids. row: prompt and answer in the drafter's token ids.
    """

    key: str
    prompting: DistillPrompt
    held: bool
    prompt_ids: list[int] = msgspec.field(name="told")
    answer: list[int]
    finish_reason: str
    row: TrainingRow

    @property
    def kind(self) -> str:
        """The kind of the prompt."""
        return self.prompting.kind


class TrainingExampleFile:
    """The file with a run's answers. Any thread may call `add`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.answers: dict[str, TrainingExample] = {}
        self._lock = Lock()
        if path.exists():
            self._read()

    def add(self, example: TrainingExample) -> None:
        """Append an answer; the data reaches the operating system, not necessarily the disk.

        Raises `OSError` if the write fails; the file is then unchanged.
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
            with reading_file(partial(self._damage_error, number)):
                example = decoder.decode(line)
            self.answers[example.key] = example
        if complete < len(data):
            os.truncate(self.path, complete)

    def _damage_error(self, number: int, problem: str) -> RunFileError:
        return RunFileError(
            f"{self.path} is not a file of answers, or its line {number} is damaged: {problem}. "
            "Delete that line, so that its prompt is answered again, or name another --run-folder."
        )


def _write(descriptor: int, line: bytes, before: int, path: Path) -> None:
    """Write the whole line or nothing. before: size of the file before the write, bytes."""
    left = memoryview(line)
    try:
        while left:
            left = left[os.write(descriptor, left) :]
    except OSError as error:  # a full disk, for example, after part of the line is written
        os.ftruncate(descriptor, before)
        raise OSError(error.errno, os.strerror(error.errno or 0), str(path)) from error
