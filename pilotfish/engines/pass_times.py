"""Measure a model's speed: the time of a pass by its number of tokens."""

import math
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from pilotfish.engines.language_model import LanguageModel
from pilotfish.engines.passes import Pass

_SWEEPS = 4  # sweep over all widths, so that other load affects all alike
_MOST_SWEEPS_S = 0.6  # a daemon's start waits for this: fewer sweeps over a slow model
# A pass this many times slower than its neighbours suggest was disturbed; number of retries.
_DISTURBED_FACTOR, _RETRIES = 1.25, 2
_MOST_TURNS, _FEWEST_TURNS = 12, 3  # the minimum applies if they are slow:
_MOST_TURNS_S = 20.0


def pass_times(decoder: LanguageModel, widths: Sequence[int]) -> dict[int, float]:
    """Time passes of these widths over an empty slot, with all their rows; seconds.

    See `least_times`. Slot 0 must be empty, and is empty again afterwards.
    """
    return least_times(lambda width: _time_pass(decoder, width), widths, decoder.context)


def least_times(
    pass_s: Callable[[int], float], widths: Sequence[int], context: int
) -> dict[int, float]:
    """Return the least of a few times for each width, never decreasing with the width; seconds.

    ``pass_s`` times one pass. Widths ascend; those beyond the context are skipped. The process uses
    the times for as long as it runs, so a pass that was interrupted (by suspend, a paused virtual
    machine, other work) must not count: such a pass is timed again.
    """
    least: dict[int, float] = {}

    def time_pass(width: int) -> None:
        # the first pass of a shape is slow, and counts only if there is no other
        least[width] = min(least.get(width, math.inf), pass_s(width))

    for sweep in range(1 + _SWEEPS):
        for width in widths:
            if width > context:
                break
            time_pass(width)
        for width in _disturbed_widths(least) * _RETRIES:
            time_pass(width)
        is_single = len(least) == 1  # nothing to compare with
        if (1 + sweep) * sum(least.values()) > _MOST_SWEEPS_S and sweep >= is_single:
            break
    slowest_s = 0.0
    for width, taken_s in least.items():
        least[width] = slowest_s = max(slowest_s, taken_s)
    return least


def _disturbed_widths(times: Mapping[int, float]) -> list[int]:
    """List widths whose pass took clearly longer than wider or narrower ones suggest."""
    known = list(times.items())
    disturbed = []
    for index, (width, taken_s) in enumerate(known):
        bounds = [wider_s for _, wider_s in known[index + 1 :]]
        if index == 1:
            bounds.append(known[0][1] * width / known[0][0])
        elif index > 1:  # extrapolate from the two before
            (first, first_s), (second, second_s) = known[index - 2 : index]
            slope_s = max(0.0, (second_s - first_s) / (second - first))
            bounds.append(second_s + slope_s * (width - second))
        if taken_s > _DISTURBED_FACTOR * min(bounds, default=math.inf):
            disturbed.append(width)
    return disturbed


def _time_pass(decoder: LanguageModel, width: int) -> float:
    tokens = np.zeros(width, dtype=np.int64)
    begun_s = time.perf_counter()
    decoder.forward([Pass(slot=0, tokens=tokens, rows=width)])
    taken_s = time.perf_counter() - begun_s
    decoder.rollback(0, 0)
    return taken_s


def time_interleaved(
    timers: Sequence[Callable[[], float]],
    progress: Callable[[str, int, int | None], None] = lambda label, done, total: None,
) -> list[float]:
    """Time several operations in turns, so that other load affects all alike; seconds of each.

    A timer runs its operation and returns its seconds. Each turn runs it three times; the first
    run only warms caches and threads, and does not count. Returns lower quartiles, which other work
    on the machine affects least.
    """
    label = "timing passes"
    taken: list[list[float]] = [[] for _ in timers]
    begun_s = time.monotonic()
    for turn in range(_MOST_TURNS):
        progress(label, turn, _MOST_TURNS)
        if turn >= _FEWEST_TURNS and time.monotonic() - begun_s > _MOST_TURNS_S:
            break
        for timer, times in zip(timers, taken, strict=True):
            _, *counted = (timer() for _ in range(3))
            times += counted
    progress(label, _MOST_TURNS, _MOST_TURNS)
    return [float(np.quantile(times, 0.25)) for times in taken]
