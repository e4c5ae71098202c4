"""A model cut into stages that all run in this process, so that a decoder's checks can run it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from pilotfish.engines.artifact import open_stages
from pilotfish.engines.onnx_decoder import Output, Pass
from pilotfish.engines.stage import Head, Stage
from pilotfish.lab.selftest.check_result import ComparedRows
from pilotfish.lab.selftest.checks import (
    CONTEXT,
    SLOTS,
    PassRunner,
    PlainReference,
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
        self._stages = [
            Stage(each, slots=SLOTS, context=CONTEXT, threads=1, provider=provider)
            for each in open_stages(folder)
        ]
        self._head = Head(self._stages[0].artifact, threads=1, provider=provider)

    def forward(self, passes: Sequence[Pass]) -> list[Output]:
        """Append each pass to its slot in every stage, and return its output."""
        states = None
        for stage in self._stages:
            states = stage.forward(passes, states)
        assert states is not None  # a model has at least one stage
        ends = np.cumsum([item.row_count for item in passes])[:-1]
        parts = (np.split(rows, ends) for rows in (self._head.logits(states), states))
        return [Output(*both) for both in zip(*parts, strict=True)]

    def rollback(self, slot: int, length: int) -> None:
        """Drop all tokens of a slot after the first `length`, in every stage."""
        for stage in self._stages:
            stage.rollback(slot, length)

    def keep_path(self, slot: int, path: Sequence[int]) -> None:
        """Drop all nodes of the slot's last tree that are not on `path`."""
        for stage in self._stages:
            stage.keep_path(slot, path)


def stage_checks(runner: PassRunner, plain: PlainReference) -> Iterator[ComparedRows]:
    """Run a decoder's checks on stages, without the checks that read long texts."""
    for check in (logits, tree, rollback, keep, slots):
        empty_slots(runner)
        for compared in check(runner, plain):
            yield compared._replace(where=f"{check.__name__}, {compared.where}")
