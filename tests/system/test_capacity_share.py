"""The benchmark of an edge's capacity calls devices equal that are served alike."""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
DEVICES, ROUNDS, PASSES = 8, 4, 40
PASS_S, APART_S = 0.02, 1e-5  # duration of a pass; time between two of its verdicts


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets tests import the benchmarks' modules."""
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])


def passes(missed: int | None = None) -> list[list[float]]:
    """Times of each device's verdicts; a pass's verdicts come in any order.

    missed: device that only every second pass serves.
    """
    random, verdicts = Random(0), [[] for _ in range(DEVICES)]
    for number in range(PASSES):
        order = random.sample(range(DEVICES), DEVICES)
        for place, device in enumerate(order):
            if device != missed or number % 2:
                verdicts[device].append(number * PASS_S + place * APART_S)
    return verdicts


def shares(verdicts: list[list[float]]) -> list[tuple[float, float]]:
    """For a span of `ROUNDS` that begins at any verdict: share by rounds, share by verdicts."""
    from _replay import whole_rounds

    every = sorted(at for each in verdicts for at in each)
    result = []
    for first in range(2 * DEVICES, len(every) - (ROUNDS + 2) * DEVICES):
        begun_s, ended_s = every[first], every[first + ROUNDS * DEVICES]
        whole = [whole_rounds(each, begun_s, ended_s) for each in verdicts]
        rates = [rounds / seconds for rounds, seconds in whole]
        counts = [sum(begun_s < at <= ended_s for at in each) for each in verdicts]
        result.append((min(rates) / max(rates), min(counts) / max(counts)))
    return result


def test_devices_that_are_served_alike() -> None:
    spans = shares(passes())
    assert min(share for share, _ in spans) > 0.99
    assert min(counted for _, counted in spans) == 0.6  # why verdicts are not counted


def test_a_device_that_every_second_pass_leaves_out() -> None:
    assert all(0.49 < share < 0.51 for share, _ in shares(passes(missed=3)))
