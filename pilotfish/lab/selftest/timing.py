"""Time passes over S tokens of one slot, after 200 tokens of context.

The result has the median and the minimum. The minimum is more reliable if other programs run on the
machine.
"""

from __future__ import annotations

import time
from statistics import median
from typing import NamedTuple

from pilotfish.engines.engine import Engine, Work
from pilotfish.lab.selftest.checks import TEXT

SIZES = (1, 4, 8, 16)
CONTEXT_TOKENS = 200  # number of tokens in the slot before each timed pass
TIMED_PASSES, WARM_PASSES = 15, 3


class PassTimes(NamedTuple):
    """The times (ms) of TIMED_PASSES passes for each size S, by S."""

    median_ms: dict[str, float]
    least_ms: dict[str, float]


def pass_times(engine: Engine) -> PassTimes:
    """Time passes of each size; every pass computes the logits of all its tokens."""
    engine.run([Work(0, TEXT[:CONTEXT_TOKENS], rows=0)])
    times_ms = {str(size): _time_passes(engine, size) for size in SIZES}
    rounded = {size: [round(ms, 3) for ms in each] for size, each in times_ms.items()}
    return PassTimes(
        {size: median(each) for size, each in rounded.items()},
        {size: min(each) for size, each in rounded.items()},
    )


def _time_passes(engine: Engine, size: int) -> list[float]:
    works = [Work(0, TEXT[: CONTEXT_TOKENS + size], size)]
    times_ms = []
    for _ in range(WARM_PASSES + TIMED_PASSES):
        begin = time.perf_counter()
        engine.run(works)
        times_ms.append((time.perf_counter() - begin) * 1e3)
    return times_ms[WARM_PASSES:]
