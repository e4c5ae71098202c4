"""Store mined episodes: a folder with one file for each question and a record of the settings.

Each file is written atomically. So interrupted mining resumes with the first missing question.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from pilotfish.base.errors import UnsupportedError
from pilotfish.base.files import PRIVATE, write_whole
from pilotfish.base.reading import read_content, reading_file
from pilotfish.lab.judge.model_passes import Floats, Ids
from pilotfish.lab.judge.question_reader import Mismatch
from pilotfish.lab.runs import locked_folder

SETTINGS = "mined.json"
_SUFFIX = ".safetensors"
_META = "episode"


class LabelledMismatch(NamedTuple):
    """A mismatch and its labels.

    critical: forgiving it changes the answer's outcome. stalling: forgiving it saves no round.
    """

    mismatch: Mismatch
    critical: bool
    stalling: bool


@dataclass(frozen=True, eq=False)
class Episode:
    """One question's answer and its n mismatches, from left to right.

    at: position in the answer, i64 [n]. tokens: the drafter's and the target's token, i64 [n, 2].
    drafter, target: each model's states at the drafted token, f32 [n, d_D] and f32 [n, d_T].
    gap: the target's logit of its own token minus that of the drafter's, f32 [n]; empty if the
    episode was mined by an earlier version. critical: label y, bool [n]. stalling: the mismatch
    saves no round and is not known to be critical (`judge.mining`), bool [n]. answer: token ids of
    the target's answer. outcome: that answer's outcome. right: whether the outcome is correct.
    """

    key: str
    at: Ids
    tokens: Ids
    drafter: Floats
    target: Floats
    critical: NDArray[np.bool_]
    stalling: NDArray[np.bool_]
    answer: list[int]
    outcome: str
    right: bool
    gap: Floats = field(default_factory=lambda: np.empty(0, np.float32))

    def __len__(self) -> int:
        return len(self.at)

    @classmethod
    def from_mismatches(
        cls,
        key: str,
        labelled: Sequence[LabelledMismatch],
        *,
        answer: list[int],
        outcome: str,
        right: bool,
    ) -> Episode:
        """Make an episode from its mismatches, which are in the order of their positions."""
        mismatches = [entry.mismatch for entry in labelled]
        return cls(
            key=key,
            at=np.array([entry.at for entry in mismatches], dtype=np.int64),
            tokens=np.array([(m.drafted, m.wanted) for m in mismatches], np.int64).reshape(-1, 2),
            drafter=_stack([entry.drafter for entry in mismatches]),
            target=_stack([entry.target for entry in mismatches]),
            gap=np.array([entry.gap for entry in mismatches], dtype=np.float32),
            critical=np.array([entry.critical for entry in labelled], dtype=np.bool_),
            stalling=np.array([entry.stalling for entry in labelled], dtype=np.bool_),
            answer=answer,
            outcome=outcome,
            right=right,
        )

    def write(self, folder: Path) -> None:
        """Write the episode's file atomically."""
        from safetensors.numpy import save

        arrays = {
            name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)
        }
        metadata = {name: value for name, value in vars(self).items() if name not in arrays}
        data = save(arrays, {_META: json.dumps(metadata)})
        write_whole(folder / f"{self.key}{_SUFFIX}", data, PRIVATE)

    @classmethod
    def read(cls, path: Path) -> Episode:
        """Read an episode's file; raise `UnsupportedError` if it holds no episode."""
        from safetensors import SafetensorError, safe_open

        def unreadable(problem: object) -> UnsupportedError:
            return UnsupportedError(
                f"{path} does not hold an episode: {problem}. Remove this file."
            )

        with reading_file(unreadable):
            try:
                with safe_open(path, framework="numpy") as file:
                    metadata: dict[str, Any] = json.loads(file.metadata()[_META])
                    arrays = {name: file.get_tensor(name) for name in list(file.keys())}
                    return cls(**metadata, **arrays)
            except (SafetensorError, KeyError, TypeError) as error:
                raise unreadable(error) from error


@dataclass(frozen=True)
class MiningRecord:
    """The settings with which all episodes of a folder were mined.

    most: maximum number of tokens in an answer. slack, right_only: see `judge.mining.episode`.
    drafter, target: each model's name, origin (`Manifest.origin`), precision and state width.
    """

    task: str
    instruction: str
    most: int
    slack: int | None
    right_only: bool
    drafter: dict[str, Any]
    target: dict[str, Any]

    @contextmanager
    def writing(self, folder: Path) -> Iterator[None]:
        """Lock the folder inside the ``with`` block; write the record if the folder has none.

        Raises `UnsupportedError` if the folder has a different record, and `RunFileError` if
        another process has locked it.
        """
        path = folder / SETTINGS
        with locked_folder(folder):
            if not path.exists():
                write_whole(path, json.dumps(asdict(self), indent=2).encode(), PRIVATE)
            elif MiningRecord.read(folder) != self:
                raise UnsupportedError(
                    f"{folder} was mined with other settings ({path}): choose another --out, or "
                    f"give the same pair, task, --max-tokens, --slack and --right-only."
                )
            yield

    @classmethod
    def read(cls, folder: Path) -> MiningRecord:
        """Read a folder's record; raise `UnsupportedError` if it has none."""

        def unreadable(problem: str) -> UnsupportedError:
            return UnsupportedError(
                f"{folder} has no mined episodes ({problem}): make them with pilotfish judge mine."
            )

        with reading_file(unreadable):
            return msgspec.json.decode(read_content(folder / SETTINGS), type=cls)


def finished_questions(folder: Path) -> set[str]:
    """Return the keys of the questions that have an episode in the folder."""
    return {path.name.removesuffix(_SUFFIX) for path in folder.glob(f"*{_SUFFIX}")}


def episodes(folder: Path) -> Iterator[Episode]:
    """Yield a folder's episodes in the order of the questions' keys."""
    for path in sorted(folder.glob(f"*{_SUFFIX}")):
        yield Episode.read(path)


def _stack(states: Sequence[Floats]) -> Floats:
    return np.stack(states) if states else np.empty((0, 0), dtype=np.float32)
