"""Measure a model's speed: the time of a pass by its number of tokens."""

import math
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from pilotfish.engines.language_model import LanguageModel
from pilotfish.engines.passes import Pass

_SWEEPS = 4  # sweep over all widths, so that other load affects all alike
_ENOUGH_S = 0.6  # a daemon's start waits for this: sweep less often over a slow model
# A pass that takes so many times what others tell was disturbed; how often it is timed again.
_DISTURBED, _AGAIN = 1.25, 2
_TURNS, _FEWEST_TURNS = 12, 3  # the fewest where they are slow:
_ENOUGH_TURNS_S = 20.0


def pass_times(decoder: LanguageModel, widths: Sequence[int]) -> dict[int, float]:
    """Time passes of these widths over an empty slot, with all their rows; seconds.

    See `least_times`. Slot 0 must be empty, and is empty again afterwards.
    """
    return least_times(lambda width: _pass_s(decoder, width), widths, decoder.context)


def least_times(
    pass_s: Callable[[int], float], widths: Sequence[int], context: int
) -> dict[int, float]:
    """Return the least of a few times for each width, never less for more tokens; seconds.

    ``predict_pass_s`` times one pass. Widths are ascending; those beyond the context are left out. The
    times are kept for as long as the process runs, so what stopped it during one pass (a suspended
    machine, a paused one, others' work) must not be in them: such a pass is timed again.
    """
    least: dict[int, float] = {}

    def time_pass(width: int) -> None:
        # the first pass of a shape is slow: counts only if alone
        least[width] = min(least.get(width, math.inf), pass_s(width))

    for sweep in range(1 + _SWEEPS):
        for width in widths:
            if width > context:
                break
            time_pass(width)
        for width in _disturbed(least) * _AGAIN:
            time_pass(width)
        alone = len(least) == 1  # and nothing tells whether it was disturbed
        if (1 + sweep) * sum(least.values()) > _ENOUGH_S and sweep >= alone:
            break
    slowest_s = 0.0
    for width, taken_s in least.items():
        least[width] = slowest_s = max(slowest_s, taken_s)
    return least


def _disturbed(times: Mapping[int, float]) -> list[int]:
    """List widths whose pass took clearly longer than a wider one's, or than narrower ones tell."""
    known = list(times.items())
    found = []
    for at, (width, taken_s) in enumerate(known):
        told = [wider_s for _, wider_s in known[at + 1 :]]
        if at == 1:
            told.append(known[0][1] * width / known[0][0])
        elif at > 1:  # the line through the two before
            (first, first_s), (second, second_s) = known[at - 2 : at]
            slope_s = max(0.0, (second_s - first_s) / (second - first))
            told.append(second_s + slope_s * (width - second))
        if taken_s > _DISTURBED * min(told, default=math.inf):
            found.append(width)
    return found


def _pass_s(decoder: LanguageModel, width: int) -> float:
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
    """Time several things in turns, so that other load affects all alike; seconds of each.

    A timer does its thing and returns the seconds that it took. Three times a turn: the first time
    brings weights and threads back, and does not count. The lower quartiles are returned, which
    other work on the machine affects least.
    """
    label = "timing passes"
    taken: list[list[float]] = [[] for _ in timers]
    begun_s = time.monotonic()
    for turn in range(_TURNS):
        progress(label, turn, _TURNS)
        if turn >= _FEWEST_TURNS and time.monotonic() - begun_s > _ENOUGH_TURNS_S:
            break
        for timer, kept in zip(timers, taken, strict=True):
            _, *counted = (timer() for _ in range(3))
            kept += counted
    progress(label, _TURNS, _TURNS)
    return [float(np.quantile(kept, 0.25)) for kept in taken]
