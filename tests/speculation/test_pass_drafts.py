"""How many drafts a pass makes, against brute force over schedules that are played step by step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
import pytest

from pilotfish.speculation.pass_drafts import (
    single_passes,
    stream_drafts,
    stream_token_s,
    window_passes,
    window_tokens_per_s,
)

FLAT, STEEP = {1: 1.0, 15: 1.0}, {1: 1.0, 15: 15.0}
CPU = {1: 12.0, 2: 13.1, 4: 17.9, 8: 24.2, 15: 37.7}
GPU = {1: 12.0, 8: 13.2, 15: 13.2}
# P-EAGLE's acceptances by place, as each draft's own, and as that of all drafts so far
OWN = [0.64, 0.40, 0.25, 0.15, 0.09, 0.05, 0.03, 0.02]
JOINT = [0.64, 0.63, 0.62, 0.60, 0.58, 0.56, 0.55, 0.53]
EVEN = [0.78] * 8  # three right drafts a pass


def played_token_s(
    means: Sequence[float],
    pass_times: dict[int, float],
    drafts: int,
    target_s: float,
    rtt_s: float,
    tokens: int = 4000,
) -> float:
    """Play both ends, event by event: draws decide which drafts are right. Seconds of a token."""
    rng = np.random.default_rng(0)
    widths, seconds = list(pass_times), list(pass_times.values())
    now_s, committed = 0.0, 0
    start, right, arrivals = 0, list[bool](), list[float]()
    free_s = 0.0

    def draft_until(limit_s: float) -> None:
        nonlocal free_s
        while free_s < limit_s:
            unread = drafts if right else 1
            free_s += float(np.interp(unread + drafts - 1, widths, seconds))
            for place in range(drafts):
                before = right[-1] if right else True
                right.append(before and bool(rng.random() < means[place]))
                arrivals.append(free_s + rtt_s / 2)

    while committed < tokens:
        draft_until(now_s)
        at, taken, agreed = committed - start, 0, 0
        while taken < 15 and at < len(right) and arrivals[at] <= now_s:
            agreed += right[at]
            at, taken = at + 1, taken + 1
        now_s += target_s
        committed += agreed + 1
        learnt_s = now_s + rtt_s / 2
        draft_until(learnt_s)
        last = committed - 1 - start
        if last >= len(right) or not right[last]:
            start, right, arrivals = committed, [], []
            free_s = max(free_s, learnt_s)
    return now_s / committed


CASES = [
    (means, times, target_s, rtt_s)
    for means, times in ((OWN, CPU), (OWN, GPU), (JOINT, CPU), (JOINT, GPU), (EVEN, GPU))
    for target_s, rtt_s in ((40.0, 0.0), (40.0, 50.0), (10.0, 20.0))
]


@pytest.mark.parametrize(("means", "times", "target_s", "rtt_s"), CASES)
def test_a_streams_cost_is_that_of_the_schedule(
    means: list[float], times: dict[int, float], target_s: float, rtt_s: float
) -> None:
    """The chosen count costs no more than one draft per pass, and about as little as the best."""
    played = {
        drafts: played_token_s(means, times, drafts, target_s, rtt_s) for drafts in (1, 2, 4, 8)
    }
    for drafts, token_s in played.items():
        model_s = stream_token_s(means, times, drafts, target_s=target_s, rtt_s=rtt_s)
        assert model_s == pytest.approx(token_s, rel=0.12)
    chosen = stream_drafts(means, times, target_s=target_s, rtt_s=rtt_s)
    if chosen not in played:
        played[chosen] = played_token_s(means, times, chosen, target_s, rtt_s)
    assert played[chosen] <= 1.01 * played[1]
    assert played[chosen] <= 1.07 * min(played.values())


def test_a_slow_target_leaves_time_for_passes_of_one_draft() -> None:
    assert stream_drafts(OWN, GPU, target_s=10.0, rtt_s=0.0) > 1  # no pass of one is in time
    assert stream_drafts(OWN, GPU, target_s=40.0, rtt_s=0.0) == 1
    assert stream_drafts(OWN, GPU, target_s=40.0, rtt_s=100.0) == 1
    # as good at every place: as many as a pass makes, or no more than are taken
    assert stream_drafts(EVEN, FLAT, target_s=0.5, rtt_s=0.0) == 8
    assert stream_drafts(EVEN, STEEP, target_s=10.0, rtt_s=0.0) == 1
    assert stream_drafts([0.9, 0.9, 0.0, 0.9], FLAT, target_s=1.5, rtt_s=0.0) == 2
    assert stream_drafts([0.9], FLAT, target_s=1.0, rtt_s=1.0) == 1
    assert stream_drafts(EVEN, FLAT, target_s=0.0, rtt_s=0.0) == 1  # unknown


def compositions(drafts: int, most: int) -> Iterator[tuple[int, ...]]:
    """All ways to split a window's drafts into passes."""
    if not drafts:
        yield ()
    for first in range(1, 1 + min(drafts, most)):
        for rest in compositions(drafts - first, most):
            yield (first, *rest)


@pytest.mark.parametrize(
    ("means", "times"), list(product((OWN, JOINT, EVEN, [0.9, 0.3, 0.2, 0.1]), (CPU, GPU, STEEP)))
)
def test_a_windows_passes_are_nearly_the_best_of_all(
    means: list[float], times: dict[int, float]
) -> None:
    for waiting_s in (0.0, 10.0, 40.0, 140.0):
        for drafts in (1, 2, 4, 7):
            single = single_passes(means, times, waiting_s=waiting_s, drafts=drafts)
            speeds = {
                passes: window_tokens_per_s(means, times, passes, waiting_s=waiting_s)
                for passes in compositions(drafts, len(means))
            }
            chosen = speeds[tuple(window_passes(single, drafts, len(means)))]
            assert chosen >= 0.97 * max(speeds.values())
            assert chosen >= (1 - 1e-9) * speeds[(1,) * drafts]
            assert chosen >= (1 - 1e-9) * speeds[tuple(window_passes(0, drafts, len(means)))]


def test_a_windows_speed_is_its_tokens_by_its_seconds() -> None:
    """Passes of 1 and 2 drafts read 1 and 1 + 1 tokens; the places are 0, 0 and 1."""
    speed = window_tokens_per_s([0.5, 0.2], {1: 1.0, 2: 3.0}, [1, 2], waiting_s=6.0)
    assert speed == pytest.approx((1 + 0.5 + 0.5 * 0.5 + 0.5 * 0.5 * 0.2) / (1.0 + 3.0 + 6.0))


def test_the_longer_a_round_waits_the_more_passes_it_makes() -> None:
    counts = [
        single_passes(OWN, GPU, waiting_s=waiting_s, drafts=6)
        for waiting_s in (0.0, 20.0, 100.0, 1000.0)
    ]
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert counts[-1] >= 4
    assert single_passes([0.9], FLAT, waiting_s=1.0, drafts=3) == 3


def test_the_passes_of_a_window() -> None:
    assert window_passes(2, 6, 8) == [1, 1, 4]
    assert window_passes(0, 12, 8) == [8, 4]
    assert window_passes(5, 3, 8) == [1, 1, 1]
    assert window_passes(0, 0, 8) == []
