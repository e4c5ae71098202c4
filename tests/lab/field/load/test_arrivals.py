"""The times of a load's questions have the distributions that they are said to have."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from pilotfish.lab.field.load.arrivals import Arrivals

KS_99 = 1.63  # of √n · D, for n large


def arrivals(**changes):
    usual = {"seed": 3, "device": 0, "think_s": 2.0, "rate": None, "prompts": 5}
    return Arrivals(**{**usual, **changes})


def ks(values, mean):
    """√n times the largest distance from the exponential distribution."""
    ordered = np.sort(values)
    expected = 1.0 - np.exp(-ordered / mean)
    steps = np.arange(len(ordered) + 1) / len(ordered)
    distance = max((expected - steps[:-1]).max(), (steps[1:] - expected).max())
    return distance * np.sqrt(len(ordered))


def test_a_user_thinks_after_each_answer():
    times = arrivals()
    gaps = [times.next_s(7.0) - 7.0 for _ in range(4000)]
    assert ks(gaps, 2.0) < KS_99
    assert ks(gaps, 2.3) > KS_99  # the test can fail


def test_open_arrivals_do_not_wait_for_answers():
    busy, idle = arrivals(rate=0.5), arrivals(rate=0.5)
    at = [busy.next_s(1e6 * number) for number in range(4000)]
    assert at == [idle.next_s(0.0) for _ in range(4000)]
    assert ks(np.diff([0.0, *at]), 2.0) < KS_99


def test_the_questions_of_many_devices_are_a_poisson_process():
    """Counts in equal times: their variance is their mean, which is the sum of the rates."""
    devices, rate, span_s = 8, 0.5, 2000
    at = []
    for device in range(devices):
        times = arrivals(device=device, rate=rate)
        while (now := times.next_s(0.0)) < span_s:
            at.append(now)
    counts = np.histogram(at, bins=span_s, range=(0, span_s))[0]
    assert counts.mean() == pytest.approx(devices * rate, rel=0.05)
    assert counts.var() / counts.mean() == pytest.approx(1.0, abs=0.1)


def test_devices_and_seeds_have_times_of_their_own():
    firsts = {arrivals(seed=s, device=d).next_s(0.0) for s in range(4) for d in range(4)}
    assert len(firsts) == 16
    assert arrivals().next_s(0.0) == arrivals().next_s(0.0)


@pytest.mark.parametrize("prompts", [2, 3, 5])
def test_each_prompt_comes_equally_often_and_never_twice_in_succession(prompts):
    times = arrivals(prompts=prompts)
    order = [times.next_prompt() for _ in range(40 * prompts)]
    assert set(Counter(order).values()) == {40}
    assert all(a != b for a, b in pairwise(order))


def test_a_single_prompt_is_asked_again_and_again():
    times = arrivals(prompts=1)
    assert [times.next_prompt() for _ in range(3)] == [0, 0, 0]
