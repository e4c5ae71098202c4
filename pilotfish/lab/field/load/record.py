"""What one real device showed: the target's answers, and the drafts after each of their beginnings.

In:  a drafter and the target's answers. Out: a `Record`, which many devices replay; its file.

The drafter reads an answer at once instead of drafting it token by token, as in `field compare`
(`lab.agreement`). For each token it keeps the likeliest `BEST` predictions with their log
probabilities, so that a device that replays them is as sure of each draft as the real one was.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from pilotfish.base.errors import PromptTooLongError, RunFileError, UnsupportedError
from pilotfish.base.files import PRIVATE, write_whole
from pilotfish.base.reading import naming_file, reading_file
from pilotfish.lab.agreement import predictions
from pilotfish.lab.field.opened_drafters import Contender, measure_draft_s
from pilotfish.lab.field.target_answers import AnswerHeader, TargetAnswer
from pilotfish.speculation.distributions import Floats

if TYPE_CHECKING:
    from typing_extensions import Self

Ids = NDArray[np.uint32]

BEST = 8  # predictions that are kept for each token
_FIELDS = ("prompt", "answer", "ids", "log_probabilities")


@dataclass(frozen=True, eq=False)
class RecordedAnswer:
    """An answer of the target.

    prompt, answer: target ids u32 [n] and u32 [m]. ids, log_probabilities: u32 and f32 [m, BEST];
    row i predicts token i of the answer, the likeliest first; [0, BEST] without a drafter.
    """

    prompt: Ids
    answer: Ids
    ids: Ids
    log_probabilities: Floats


@dataclass(frozen=True, eq=False)
class Record:
    """The record of one device.

    drafter: name of the drafter; "" without one. draft_s: seconds per draft token. read_s: seconds
    in which the drafter reads a token of a prompt.
    """

    answers: Sequence[RecordedAnswer]
    drafter: str = ""
    draft_s: float = 0.0
    read_s: float = 0.0

    def save(self, path: Path) -> None:
        """Write the record into a private file, as a whole."""
        arrays: dict[str, Any] = {
            f"{field}-{number}": getattr(answer, field)
            for number, answer in enumerate(self.answers)
            for field in _FIELDS
        }
        arrays["drafter"] = np.array(self.drafter)
        arrays["seconds"] = np.array([self.draft_s, self.read_s])
        content = BytesIO()
        np.savez_compressed(content, **arrays)
        with naming_file(path):
            write_whole(path, content.getvalue(), PRIVATE)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a record; raises `RunFileError` for a file that is none."""
        with reading_file(lambda problem: RunFileError(f"{path} is not a record: {problem}.")):
            try:
                with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                    return cls._from(arrays)
            except (KeyError, TypeError, AttributeError, EOFError, BadZipFile, zlib.error) as error:
                raise ValueError("it has other content") from error
            except ValueError as error:  # numpy's advice would be to trust the file
                raise ValueError("it has no arrays") from error

    @classmethod
    def _from(cls, arrays: Any) -> Self:
        """Return the record in a file's arrays."""
        count = len(arrays.files) // len(_FIELDS)
        draft_s, read_s = map(float, arrays["seconds"])
        answers = [
            RecordedAnswer(*(arrays[f"{field}-{number}"] for field in _FIELDS))
            for number in range(count)
        ]
        return cls(answers, str(arrays["drafter"]), draft_s, read_s)


def record_without_drafter(prompts: Sequence[Ids], answers: Sequence[TargetAnswer]) -> Record:
    """Return a record without drafts: its devices can only stream. prompts: of each answer."""
    none = np.empty((0, BEST), np.uint32), np.empty((0, BEST), np.float32)
    return Record(
        [
            RecordedAnswer(prompt, np.asarray(answer.tokens, np.uint32), *none)
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
    )


def record(
    contender: Contender,
    header: AnswerHeader,
    answers: Sequence[TargetAnswer],
    progress: Callable[[int], None] = lambda done: None,
) -> Record:
    """Read the answers with a drafter, and time it.

    Leaves out answers that exceed the drafter's context. Raises `UnsupportedError` if none fits,
    and for a drafter of several drafts a pass. progress: gets the number of answers so far.
    """
    drafter = contender.drafter
    if drafter.drafts_per_pass > 1:
        raise UnsupportedError(
            f"{drafter.name} makes several drafts in a pass; a load records drafts one by one, so "
            "name another drafter."
        )
    done: list[RecordedAnswer] = []
    reading_s: list[float] = []
    for number, answer in enumerate(answers):
        progress(number)
        prompt = contender.prompt(header, answer.prompt)
        begun_s = time.perf_counter()
        try:
            drafter.start(prompt)
            drafter.prefill(prompt.ids)
            reading_s.append((time.perf_counter() - begun_s) / len(prompt.ids))
            entry = _read(contender, prompt.ids, np.asarray(answer.tokens, np.uint32))
        except PromptTooLongError:
            continue
        contender.agreed[answer.prompt] = entry.ids[:, 0] == entry.answer
        done.append(entry)
    if not done:
        raise UnsupportedError(
            "The drafter's context can hold no prompt together with its answer: lower --max-tokens."
        )
    (draft_s,) = measure_draft_s([contender], header, answers)
    return Record(done, drafter.name, draft_s, median(reading_s))


def _read(contender: Contender, prompt: Ids, answer: Ids) -> RecordedAnswer:
    """Keep the best predictions of each token of an answer."""
    text = np.concatenate([prompt, answer])
    ids = np.zeros((len(answer), BEST), np.uint32)
    log_probabilities = np.full((len(answer), BEST), -np.inf, np.float32)
    log_probabilities[:, 0] = 0.0  # where the drafter predicts nothing
    for positions, logits in predictions(contender.drafter, text, len(prompt)):
        best = np.argsort(logits, axis=1)[:, : -BEST - 1 : -1]
        highest = logits.max(axis=1, keepdims=True)
        total = highest + np.log(np.exp(logits - highest).sum(axis=1, keepdims=True))
        ids[positions, : best.shape[1]] = best
        log_probabilities[positions, : best.shape[1]] = np.take_along_axis(
            logits - total, best, axis=1
        )
    return RecordedAnswer(prompt, answer, ids, log_probabilities)
