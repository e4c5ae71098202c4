"""How long a pass takes: S tokens of one slot on a context of 200.

Beside the median stands the quickest, which says more where others use the machine.
"""

from __future__ import annotations

import time
from statistics import median
from typing import NamedTuple

from pilotfish.engines.onnx_decoder import Decoder, Pass
from pilotfish.selftest.checks import TEXT

SIZES = (1, 4, 8, 16)
BEHIND = 200  # tokens that the slot holds
PASSES, WARM = 15, 3


class PassTimes(NamedTuple):
    """Of PASSES passes of each size, ms by S."""

    median_ms: dict[str, float]
    least_ms: dict[str, float]


def pass_times(decoder: Decoder) -> PassTimes:
    """Time passes of each size; all logits are asked for."""
    decoder.rollback(0, 0)
    decoder.prefill(0, TEXT[:BEHIND], rows=0)
    taken = {str(size): _taken_ms(decoder, size) for size in SIZES}
    rounded = {size: [round(ms, 3) for ms in each] for size, each in taken.items()}
    return PassTimes(
        {size: median(each) for size, each in rounded.items()},
        {size: min(each) for size, each in rounded.items()},
    )


def _taken_ms(decoder: Decoder, size: int) -> list[float]:
    taken = []
    for _ in range(WARM + PASSES):
        begin = time.perf_counter()
        decoder.forward([Pass(0, TEXT[BEHIND : BEHIND + size])])
        taken.append((time.perf_counter() - begin) * 1e3)
        decoder.rollback(0, BEHIND)
    return taken[WARM:]
