"""Rounding for split verification (dssd §3), in which the edge accepts and the device resamples.

The edge rounds p at random to P̃: whole numbers with the sum 2ᵇ and E[P̃] = 2ᵇ·p. It accepts with
P̃/2ᵇ in place of p and sends P̃; the device then samples from norm(max(0, P̃/2ᵇ − q)). For a given
P̃ the token has the law P̃/2ᵇ, and its expectation is p. So the output's law is p for every b; fewer
bits only lower acceptance. (Rounding to fp16 is not random, so the law would be the rounded p.) The
uniform variate of the rounding must be independent of the draft.
"""

import numpy as np
from numpy.typing import NDArray

from pilotfish.speculation.distributions import Floats


def systematic(p: Floats, bits: int, offset: float) -> NDArray[np.int64]:
    """Round p [V] to whole numbers n [V] with the sum 2ᵇ: nᵥ = ⌊2ᵇCᵥ + u⌋ − ⌊2ᵇCᵥ₋₁ + u⌋.

    C = cumsum(p), b = ``bits``, u = ``offset``. If u is uniform in [0, 1), E[n] = 2ᵇ·p, and each nᵥ
    differs from 2ᵇ·pᵥ by less than 1.
    """
    # f64 [V]
    running = np.cumsum(p, dtype=np.float64)
    running /= running[-1]  # exactly 1 at the last token with p > 0, and after it
    running *= 2.0**bits
    running += offset
    np.floor(running, out=running)
    np.minimum(running, 2.0**bits, out=running)  # 2ᵇ + u may have rounded up to 2ᵇ + 1
    counts = np.diff(running, prepend=0.0)
    return counts.astype(np.int64)
