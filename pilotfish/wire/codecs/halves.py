"""Probabilities as IEEE halves ("fp16"), rounded as NumPy does but twenty times as fast.

The least half is 2⁻²⁴ = 6·10⁻⁸; a probability up to half of it becomes 0. Rounding changes a
probability by at most `HALF_ERROR` of itself, or 2⁻²⁵ if that is more.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

HALF_ERROR: Final = 2.0**-11
LARGEST_HALF: Final = 0x7BFF  # bits; infinity, NaN and negative numbers have larger bits

_LEAST_NORMAL: Final = np.float32(2.0**-14)  # smaller halves are multiples of 2⁻²⁴
_SCALE: Final = np.float32(2.0**24)
_EXPONENTS: Final = np.uint32((127 - 15) << 10)  # float32's exponents minus those of halves


def _every_half() -> NDArray[np.float32]:
    with np.errstate(invalid="ignore"):  # for signalling NaNs
        return np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)


_VALUES: Final = _every_half()


def halves(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return the bits of the halves nearest to ``values``, 0 to 1; of two, the even one."""
    bits = values.view(np.uint32)
    # The carry of this sum rounds up if the 13 bits that are cut off are more than one half.
    normal = ((bits + (np.uint32(0xFFF) + ((bits >> 13) & 1))) >> 13) - _EXPONENTS
    small = np.rint(values * _SCALE).astype(np.uint32)
    nearest: NDArray[np.uint32] = np.where(values < _LEAST_NORMAL, small, normal)
    return nearest.astype(np.uint16)


def from_halves(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Return the halves with these bits, exactly."""
    return _VALUES[bits]
