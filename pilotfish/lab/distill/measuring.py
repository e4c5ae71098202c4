"""Measure how often a drafter's artifact agrees with the target's answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pilotfish.engines.engine import Work, open_engine
from pilotfish.engines.engine_settings import EngineSettings
from pilotfish.lab.distill.answers import TrainingExample
from pilotfish.lab.distill.training_rows import NOWHERE, Agreement, TrainingRow, agreement

_AT_ONCE = 64  # rows of logits in one pass; with a vocabulary of 150,000 tokens, 64 rows take 40 MB
ALL = "all"


class Measurer:
    """Computes the choices of a drafter's artifact on answers.

    shared: the drafter's ids of the tokens that the target also has; the drafter chooses among
    these. None: the drafter chooses among all its ids.
    """

    def __init__(
        self,
        artifact: Path,
        context: int,
        settings: EngineSettings,
        shared: NDArray[np.int64] | None,
    ) -> None:
        self._engine = open_engine(
            artifact,
            context=context,
            threads=settings.threads,
            provider=settings.provider,
            drafts=True,
        )
        self._shared = shared

    def choices(self, row: TrainingRow) -> NDArray[np.int64]:
        """Compute the drafter's choice for each of the answer's n tokens, ids, i64 [n].

        The choice is NOWHERE if the row has no position for the token.
        """
        ids = np.array(row.ids)
        # positions before the prompt's last token predict no token of the answer
        first = max(0, row.prompt - 1)
        choices = np.full(len(ids), NOWHERE)
        for start in range(first, len(ids), _AT_ONCE):
            end = min(start + _AT_ONCE, len(ids))
            [output] = self._engine.run([Work(0, ids[:end], end - start)])
            choices[start:end] = self._choice(output.logits)
        return np.where(row.places >= 0, choices[row.places], NOWHERE)

    def _choice(self, logits: NDArray[np.float32]) -> NDArray[np.int64]:
        if self._shared is None:
            best: NDArray[np.int64] = logits.argmax(1)
            return best
        shared_best: NDArray[np.int64] = self._shared[logits[:, self._shared].argmax(1)]
        return shared_best


def agreement_by_kind(
    answers: Sequence[TrainingExample], agreed: Mapping[str, NDArray[np.bool_]]
) -> dict[str, Agreement]:
    """Compute the agreement over each kind of prompt, and over `ALL` prompts.

    agreed: whether each token of an answer agrees, bool [n], by the answer's key. If a kind has the
    same name as `ALL` (a file may have it), only the entry for all prompts is returned.
    """
    kinds: dict[str, list[NDArray[np.bool_]]] = {}
    for answer in answers:
        kinds.setdefault(answer.kind, []).append(agreed[answer.key])
    kinds[ALL] = [agreed[answer.key] for answer in answers]
    return {kind: agreement(arrays) for kind, arrays in kinds.items()}


def measure_agreement(
    measurer: Measurer, answers: Sequence[TrainingExample], progress: Callable[[int], None]
) -> dict[str, Agreement]:
    """Measure the agreement on these answers, by kind.

    progress: callback with the number of answers that have been read.
    """

    def read() -> Iterator[tuple[str, NDArray[np.bool_]]]:
        for number, answer in enumerate(answers, 1):
            yield answer.key, answer.row.compare_choices(measurer.choices(answer.row))
            progress(number)

    return agreement_by_kind(answers, dict(read()))
