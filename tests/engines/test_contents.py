"""What a slot is found to hold: compared once for the same arrays, and again after each change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pilotfish.engines import contents
from pilotfish.engines.contents import Held, SlotContents

TEXT = np.arange(8, dtype=np.uint32)
TREE = np.array([-1, 0, 0], np.int64)


def filled() -> SlotContents:
    """Return two slots: slot 0 has the first five tokens of `TEXT`."""
    slots = SlotContents(2, 16)
    slots.append(0, TEXT[:5])
    return slots


@pytest.mark.parametrize(
    ("change", "held"),
    [
        (lambda slots: slots.clear(0), 0),
        (lambda slots: slots.clear_all(), 0),
        (lambda slots: slots.keep(0, Held(3, [])), 3),
        (lambda slots: slots.append(0, TEXT[5:7]), 7),
        (lambda slots: slots.append(0, np.array([5, 6, 9], np.uint32), TREE), 7),
        (lambda slots: slots.append(1, TEXT[:2]), 5),
    ],
)
def test_a_finding_is_of_the_present_content(
    change: Callable[[SlotContents], None], held: int
) -> None:
    """A change of the slot is seen by the next call, also with the same arrays."""
    slots = filled()
    assert slots.find(0, TEXT).tokens == 5
    change(slots)
    assert slots.find(0, TEXT).tokens == held


def test_a_finding_is_of_its_arguments() -> None:
    """Other arrays, rows or parents are compared, even after a call for the same slot."""
    slots = filled()
    assert slots.find(0, TEXT).tokens == 5
    assert slots.find(0, TEXT[:3]).tokens == 2
    assert slots.find(0, TEXT, rows=6).tokens == 2
    assert slots.find(0, TEXT, 1, TREE).tokens == 5
    assert slots.find(0, TEXT[:6], 1, TREE).tokens == 3
    assert slots.find(0, TEXT + 1).tokens == 0
    assert slots.find(1, TEXT).tokens == 0


def test_the_same_arrays_are_compared_once(monkeypatch: Any) -> None:
    """A caller may ask what a slot lacks, and then run the sequence, for one comparison."""
    calls = []
    compare = contents.common_prefix

    def counted(a: np.ndarray, b: np.ndarray) -> int:
        calls.append(len(a))
        return compare(a, b)

    monkeypatch.setattr(contents, "common_prefix", counted)
    slots = filled()
    assert slots.find(0, TEXT) == slots.find(0, TEXT)
    assert len(calls) == 1
