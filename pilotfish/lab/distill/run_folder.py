"""The folder of a run, with its settings and intermediate results. One process at a time uses it.

run.json                  facts: settings, drafter, target and results so far
shared.i64                the drafter's ids of tokens that the target also has; empty: all ids
answers.jsonl             the target's answers, one a line
checkpoint-*.safetensors  weights, optimiser and step; a resumed run loads the newest
best.safetensors          the weights that agreed most with the target on held-out prompts
learning.jsonl            losses, and agreement on held-out prompts
before/                   the drafter's artifact before training
trained/                  the trained weights, as a Hugging Face folder
report.html, report.json, *.png
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from pilotfish.base.errors import RunFileError
from pilotfish.base.files import PRIVATE, write_whole
from pilotfish.base.reading import read_content, reading_file
from pilotfish.bridge.shared import SharedTokens
from pilotfish.lab.runs import FOLDER_LOCK, Change, LineFile, changes, locked_folder

_Facts = dict[str, Any]
_FLAGS = ("settings", "training")  # sections of run.json with command-line options as names
_OTHERWISE = {
    "training": "or delete checkpoint-* and trained in that folder to train from the start, "
}


class RunFolder:
    """A run's folder; `open` locks it. facts: the sections of run.json, by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.answers = path / "answers.jsonl"
        self._curve_file = LineFile(path / "learning.jsonl")
        self.best = path / "best.safetensors"
        self.before = path / "before"
        self.trained = path / "trained"
        self._facts_file, self._shared_file = path / "run.json", path / "shared.i64"
        self.facts: dict[str, _Facts] = self._read()

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator[RunFolder]:
        """Create the folder if it does not exist, and lock it.

        Raises `RunFileError` if another process has locked the folder, or if it holds no run.
        """
        with locked_folder(path):
            yield cls(path)

    def _read(self) -> dict[str, Any]:
        with reading_file(partial(_damage_error, self._facts_file)):
            try:
                return msgspec.json.decode(read_content(self._facts_file), type=dict[str, _Facts])
            except FileNotFoundError:
                others = [entry.name for entry in self.path.iterdir() if entry.name != FOLDER_LOCK]
                if others:
                    raise RunFileError(
                        f"The folder {self.path} contains {sorted(others)[0]}, but no "
                        "run.json: name another --run-folder."
                    ) from None
                return {}

    @property
    def has_begun(self) -> bool:
        """Whether the folder has results that took long to compute: an artifact or answers."""
        return self.before.exists() or self.answers.exists()

    def expect(self, current: Mapping[str, Any], section: str, *, binding: bool = True) -> None:
        """Store a section of the facts; if the folder has it already, check that it is unchanged.

        section: the section's name, for example "settings". binding: whether results depend on the
        section; if not, new values replace the old ones. Raises `RunFileError` for a changed
        binding section; the error names the difference.
        """
        values = msgspec.to_builtins(dict(current))
        recorded = self.facts.get(section)
        if recorded is None or not binding:
            self.facts = {**self.facts, section: values}
            content = msgspec.json.format(msgspec.json.encode(self.facts)) + b"\n"
            write_whole(self._facts_file, content, PRIVATE)
            return
        common = {name: values[name] for name in sorted(values.keys() & recorded.keys())}
        for change in changes(recorded, common):
            raise RunFileError(
                f"The run in {self.path} was begun with {_describe(change, section)}: give the "
                f"former value, {_OTHERWISE.get(section, '')}or name another --run-folder."
            )

    def write_shared_ids(self, shared: SharedTokens | None) -> None:
        """Store the drafter's ids of the tokens that the target also has; None: all ids."""
        ids = np.empty(0, np.int64) if shared is None else np.sort(shared.draft_ids)
        write_whole(self._shared_file, ids.astype("<i8").tobytes(), PRIVATE)

    def read_shared_ids(self) -> NDArray[np.int64] | None:
        """Read the drafter's ids of the tokens that the target also has, ascending; None: all."""
        # numpy raises ValueError if the file is truncated
        with reading_file(partial(_damage_error, self._shared_file)):
            ids = np.frombuffer(read_content(self._shared_file), "<i8").astype(np.int64)
        return ids if len(ids) else None

    def add_to_curve(self, line: Mapping[str, Any]) -> None:
        """Append a line to the learning curve."""
        self._curve_file.append(line)

    def curve(self, until: int) -> list[dict[str, Any]]:
        """Read the learning curve up to step ``until``; delete later and incomplete lines.

        A killed run may have trained beyond its last checkpoint. The resumed run repeats these
        steps and adds their lines again.
        """
        points = self._curve_file.read(
            _decode_point, lambda _, problem: _damage_error(self._curve_file.path, problem)
        )
        valid = [point for point in points if point["step"] <= until]
        if len(valid) < len(points):
            self._curve_file.replace(valid)
        return valid

    def checkpoints(self) -> list[tuple[int, Path]]:
        """List the steps and paths of the checkpoints, the newest first."""
        checkpoints = []
        for path in self.path.glob("checkpoint-*.safetensors"):
            number = path.stem.rpartition("-")[2]
            if number.isdecimal():
                checkpoints.append((int(number), path))
        return sorted(checkpoints, reverse=True)

    def checkpoint(self, step: int) -> Path:
        """Return the path of the checkpoint of this step."""
        return self.path / f"checkpoint-{step:07}.safetensors"


def _damage_error(path: Path, problem: str) -> RunFileError:
    return RunFileError(
        f"{path} does not belong to a run, or is damaged: {problem}. Name another --run-folder."
    )


def _decode_point(number: int, line: bytes) -> dict[str, Any]:
    """Decode a line of the learning curve; raise `ValueError` if it lacks a step."""
    point = msgspec.json.decode(line, type=dict[str, Any])
    msgspec.convert(point.get("step"), int)
    return point


def _describe(change: Change, section: str) -> str:
    if change.name == "prompts":
        return "other prompts (by --prompts, --count, --built-in, --held or --measure)"
    name = change.flag if section in _FLAGS else f"the {change.name.replace('_', ' ')}"
    return f"{name} {change}"
