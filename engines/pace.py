"""How fast a model is: the median time of a pass, by the number of tokens that it takes in."""

import time
from collections.abc import Sequence
from statistics import median

import numpy as np

from engines.decoder import Decoder, Pass


def pass_times(decoder: Decoder, widths: Sequence[int], repeats: int = 3) -> dict[int, float]:
    """Seconds of a pass over so many tokens of one empty slot, with all their rows, by width.

    Slot 0 must be empty, and is so again afterwards. Widths beyond the context are left out.
    """
    times = {}
    for width in widths:
        if width > decoder.context:
            break
        tokens = np.zeros(width, dtype=np.int64)
        taken = []
        for _ in range(1 + repeats):  # the first pass of a shape is a slow one
            begun_s = time.perf_counter()
            decoder.forward([Pass(slot=0, tokens=tokens, rows=width)])
            taken.append(time.perf_counter() - begun_s)
            decoder.rollback(0, 0)
        times[width] = median(taken[1:])
    return times
