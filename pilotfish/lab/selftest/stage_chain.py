"""A model cut into stages that all run in this process, so that an engine's checks can run it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from pilotfish.engines.artifact import open_stages
from pilotfish.engines.engine import StageEngine, Work
from pilotfish.engines.language_model import Output
from pilotfish.engines.stage import Head, Stage
from pilotfish.lab.selftest.check_result import ComparedRows
from pilotfish.lab.selftest.checks import (
    CONTEXT,
    SLOTS,
    PlainReference,
    SequenceRunner,
    empty_slots,
    keep,
    logits,
    rollback,
    slots,
    tree,
)


class StageChain:
    """A chain of stages, and a head for the logits. A stage reads the previous stage's states."""

    def __init__(self, folder: Path, provider: str) -> None:
        artifacts = open_stages(folder)
        self._stages = [
            StageEngine(Stage(each, slots=SLOTS, context=CONTEXT, threads=1, provider=provider))
            for each in artifacts
        ]
        self._head = Head(artifacts[0], threads=1, provider=provider)

    def run(self, works: Sequence[Work]) -> list[Output]:
        """Run the works in every stage, and return the output of each."""
        states = None
        for stage in self._stages:
            states = stage.run(works, states)
        assert states is not None  # a model has at least one stage
        ends = np.cumsum([work.rows for work in works])[:-1]
        parts = (np.split(rows, ends) for rows in (self._head.logits(states), states))
        return [Output(*both) for both in zip(*parts, strict=True)]

    def clear(self, slot: int) -> None:
        """Empty a slot of every stage."""
        for stage in self._stages:
            stage.clear(slot)


def stage_checks(runner: SequenceRunner, plain: PlainReference) -> Iterator[ComparedRows]:
    """Run an engine's checks on stages, without the checks that read long texts."""
    for check in (logits, tree, rollback, keep, slots):
        empty_slots(runner)
        for compared in check(runner, plain):
            yield compared._replace(where=f"{check.__name__}, {compared.where}")
