"""Measure a model's speed: the time of a pass as a function of its number of tokens."""

import math
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from pilotfish.engines.engine import Engine, Work

_SWEEPS = 4  # number of sweeps over all widths; in a sweep, other programs affect all widths alike
# time limit (s): a daemon waits for this when it starts, so slow models get fewer sweeps
_MOST_SWEEPS_S = 0.6
# A pass counts as disturbed if its time exceeds this multiple of the time that its neighbours
# suggest. It is then timed again, up to _RETRIES times.
_DISTURBED_FACTOR, _RETRIES = 1.25, 2
# after _MOST_TURNS_S (s), only the minimum number of turns is made
_MOST_TURNS, _FEWEST_TURNS = 12, 3
_MOST_TURNS_S = 20.0


def pass_times(
    engine: Engine, widths: Sequence[int], clock: Callable[[], float] = time.perf_counter
) -> dict[int, float]:
    """Time passes of these widths (tokens) in slot 0; return seconds by width.

    Each pass computes logits for all its tokens. Slot 0 is empty afterwards. See `least_times`.
    clock: returns the time in seconds. With `time.process_time` and an engine of one thread, other
    work on the machine hardly counts.
    """
    return least_times(lambda width: _time_pass(engine, width, clock), widths, engine.model.context)


def least_times(
    pass_s: Callable[[int], float], widths: Sequence[int], context: int
) -> dict[int, float]:
    """Time each width several times; return the minimum time (s) by width.

    The times are made non-decreasing.

    ``pass_s`` times one pass of a width. `widths` ascend; widths beyond the context are skipped.
    The process uses the times as long as it runs, so a pass that was interrupted (suspend, a paused
    virtual machine, other work) must not count: it is timed again.
    """
    least: dict[int, float] = {}

    def time_pass(width: int) -> None:
        # The first pass of a shape is slow; taking the minimum ignores the first pass if there is
        # another one.
        least[width] = min(least.get(width, math.inf), pass_s(width))

    for sweep in range(1 + _SWEEPS):
        for width in widths:
            if width > context:
                break
            time_pass(width)
        for width in _disturbed_widths(least) * _RETRIES:
            time_pass(width)
        is_single = len(least) == 1  # a single width has no neighbours to compare with
        if (1 + sweep) * sum(least.values()) > _MOST_SWEEPS_S and sweep >= is_single:
            break
    slowest_s = 0.0
    for width, taken_s in least.items():
        least[width] = slowest_s = max(slowest_s, taken_s)
    return least


def _disturbed_widths(times: Mapping[int, float]) -> list[int]:
    """List the widths that took much longer than the times of other widths suggest."""
    known = list(times.items())
    disturbed = []
    for index, (width, taken_s) in enumerate(known):
        bounds = [wider_s for _, wider_s in known[index + 1 :]]
        if index == 1:
            bounds.append(known[0][1] * width / known[0][0])
        elif index > 1:  # extrapolate from the two narrower widths
            (first, first_s), (second, second_s) = known[index - 2 : index]
            slope_s = max(0.0, (second_s - first_s) / (second - first))
            bounds.append(second_s + slope_s * (width - second))
        if taken_s > _DISTURBED_FACTOR * min(bounds, default=math.inf):
            disturbed.append(width)
    return disturbed


def _time_pass(engine: Engine, width: int, clock: Callable[[], float]) -> float:
    engine.clear(0)
    work = Work(slot=0, tokens=np.zeros(width, dtype=np.int64), rows=width)
    begun_s = clock()
    engine.run([work])
    taken_s = clock() - begun_s
    engine.clear(0)
    return taken_s


def time_interleaved(
    timers: Sequence[Callable[[], float]],
    progress: Callable[[str, int, int | None], None] = lambda label, done, total: None,
) -> list[float]:
    """Time several operations in turns, so that other programs affect all alike; return seconds.

    A timer runs its operation once and returns the seconds. Each turn calls each timer three times;
    the first call warms caches and threads and does not count. The result is the lower quartile for
    each timer, which other work on the machine affects little.
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
