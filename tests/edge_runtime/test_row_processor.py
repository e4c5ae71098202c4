"""Rows that an ensemble's models process: what the edge states before a pass, and says after it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from pilotfish.base.errors import BadGrammarError, BusyError
from pilotfish.edge_runtime.logits_processors import RowProcessor
from pilotfish.engines.engine_errors import GrammarBusyError, GrammarError
from pilotfish.speculation.logits_options import LogitsOptions, LogitsProcessor

TEXT, PATHS = np.array([1, 2, 3], np.uint32), [[], [4], [4, 5]]


class Constraint:
    """Allows token 7 alone; row 1 is a dead end, or an error is raised."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def forbid(
        self, logits: np.ndarray, answer: np.ndarray, paths: Sequence[Sequence[int]]
    ) -> list[int]:
        if self.error is not None:
            raise self.error
        logits[[0, 2], :7] = logits[[0, 2], 8:] = -np.inf
        return [1]

    def forced(self, answer: np.ndarray, path: Sequence[int]) -> list[int]:
        return []


def processor(error: Exception | None = None) -> RowProcessor:
    options = LogitsOptions(presence_penalty=1.0)
    return RowProcessor(LogitsProcessor(options, 2, Constraint(error)), TEXT, PATHS)


def test_stated_rows_are_not_processed_twice() -> None:
    rows = processor()
    stated = rows.state(10)
    assert stated is not None
    assert (stated.options, stated.prompt_length) == (LogitsOptions(presence_penalty=1.0), 2)
    assert stated.masks is not None
    assert stated.masks.counts().tolist() == [1, 10, 1]  # a dead end stays unconstrained
    logits = np.zeros((3, 10), np.float32)
    assert rows.process(logits) == [1]
    assert not logits.any()


def test_a_model_of_this_process_is_processed_here() -> None:
    logits = np.zeros((3, 10), np.float32)
    assert processor().process(logits) == [1]
    assert np.isfinite(logits).sum(axis=1).tolist() == [1, 10, 1]
    assert logits[1, 4] == -1.0  # the penalty of its path


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (GrammarError("it cannot follow"), BadGrammarError),
        (GrammarBusyError("no room"), BusyError),
        (MemoryError(), MemoryError),
    ],
)
def test_an_error_before_the_pass_fails_this_job_after_it(
    error: Exception, expected: type[Exception]
) -> None:
    """The pass goes on for the other jobs, so the rows are computed without options."""
    rows = processor(error)
    assert rows.state(10) is None
    with pytest.raises(expected):
        rows.process(np.zeros((3, 10), np.float32))
