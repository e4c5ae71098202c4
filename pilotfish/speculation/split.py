"""Rounding for split verification (dssd §3): the edge accepts, the device resamples.

The edge replaces p by P̃, whole numbers that sum to 2ᵇ with E[P̃] = 2ᵇ·p, accepts against P̃ and
sends P̃; the device resamples norm(max(0, P̃ − q)). Given P̃ the token follows P̃ exactly, and
E[P̃]/2ᵇ = p, so the output's law is p for every b: fewer bits only cost acceptance (rounding to
fp16 would make the law P̃). The uniform used for rounding must be independent of the draft.
"""

import numpy as np
from numpy.typing import NDArray

from pilotfish.speculation.distributions import Floats


def systematic(p: Floats, bits: int, offset: float) -> NDArray[np.int64]:
    """Round to whole numbers n [V] that sum to 2^bits: nᵥ = ⌊2ᵇCᵥ + u⌋ − ⌊2ᵇCᵥ₋₁ + u⌋.

    C = cumsum p. For u = ``offset`` uniform in [0, 1): E[n] = 2ᵇ·p, and each nᵥ is within 1 of it.
    """
    # f64 [V]
    running = np.cumsum(p, dtype=np.float64)
    running /= running[-1]  # exactly 1 from the last token with a probability on
    running *= 2.0**bits
    running += offset
    np.floor(running, out=running)
    np.minimum(running, 2.0**bits, out=running)  # 2ᵇ + u may have rounded up to 2ᵇ + 1
    counts = np.diff(running, prepend=0.0)
    return counts.astype(np.int64)
