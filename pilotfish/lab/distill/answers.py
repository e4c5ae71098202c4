"""Store a run's answers in a file, one per line.

A kill or a full disk loses at most the last answer.

All lines but the last are always complete. Opening the file cuts off an incomplete last line.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from pilotfish.base.errors import RunFileError
from pilotfish.lab.distill.prompt_selection import DistillPrompt
from pilotfish.lab.distill.training_rows import TrainingRow
from pilotfish.lab.runs import LineFile


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
        self._lines = LineFile(path)
        decoder = msgspec.json.Decoder(TrainingExample)
        examples = self._lines.read(lambda _, line: decoder.decode(line), self._damage_error)
        self.answers = {example.key: example for example in examples}

    def add(self, example: TrainingExample) -> None:
        """Append an answer; the data reaches the operating system, not necessarily the disk.

        Raises `OSError` if the write fails; the file is then unchanged.
        """
        self._lines.append(example)
        self.answers[example.key] = example

    def _damage_error(self, number: int, problem: str) -> RunFileError:
        if not number:
            return RunFileError(f"{self.path} cannot be read: {problem}.")
        return RunFileError(
            f"{self.path} is not a file of answers, or its line {number} is damaged: {problem}. "
            "Delete that line, so that its prompt is answered again, or name another --run-folder."
        )
