"""How long a pass takes: S tokens of one slot on a context of 200."""

from __future__ import annotations

import time
from statistics import median

from pilotfish.engines.decoder import Decoder, Pass
from pilotfish.selftest.checks import TEXT

SIZES = (1, 4, 8, 16)
BEHIND = 200  # tokens that the slot holds
PASSES, WARM = 15, 3


def pass_ms(decoder: Decoder) -> dict[str, float]:
    """Return the median of PASSES passes of each size, ms by S; all logits are asked for."""
    decoder.rollback(0, 0)
    decoder.prefill(0, TEXT[:BEHIND], rows=0)
    return {str(size): _median_ms(decoder, size) for size in SIZES}


def _median_ms(decoder: Decoder, size: int) -> float:
    taken = []
    for _ in range(WARM + PASSES):
        begin = time.perf_counter()
        decoder.forward([Pass(0, TEXT[BEHIND : BEHIND + size])])
        taken.append(time.perf_counter() - begin)
        decoder.rollback(0, BEHIND)
    return round(median(taken[WARM:]) * 1e3, 3)
