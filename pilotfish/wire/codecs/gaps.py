"""Sorted ids as gaps, and the Rice parameter of every gap.

A gap g is coded with parameter b as the quotient ⌊g/2^b⌋ in unary and the remainder in b bits. Low
ids are frequent tokens, so in a row the gaps grow with the id. Therefore the index of an id in its
row determines b. A row of K ids (of a vocabulary of V) is cut into eight groups: group j has the
indices from ⌊K·j/8⌋ up to ⌊K·(j+1)/8⌋, and b = max(0, ⌊log₂(V/K)⌋ + `TILTS`[tilt][j]). Each frame
has one tilt.
"""

from functools import lru_cache
from math import frexp
from typing import Final

import numpy as np

from pilotfish.wire.codecs.bits import BitSlots, Ints

GROUPS: Final = 8
# For each tilt, the number added to each group's parameter. The first tilt suits evenly spread ids;
# the others suit rows with more and more low ids. The third suits the 64 likeliest tokens of a
# vocabulary that byte-pair encoding made.
TILTS: Final[Ints] = np.array(
    [
        [0, 0, 0, 0, 0, 0, 0, 0],
        [-2, -2, -1, -1, -1, 0, 0, 1],
        [-4, -4, -3, -2, -2, -1, 0, 2],
        [-6, -6, -5, -4, -3, -2, 0, 3],
    ]
)
# Mean id, divided by V, at which two neighbouring tilts are equally good (measured).
_EVEN, _STEEP, _STEEPEST = 0.38, 0.2, 0.1
_CACHED_IDS = 8192  # largest cached layout, in ids; it takes about 1 MB

# For geometric numbers of mean μ the best parameter is ⌊log₂(ln φ / ln(1 + 1/μ))⌋ + 1, with the
# golden ratio φ (Kiely, 2004). ⌊log₂(_GOLDEN · (μ + ½))⌋ is very nearly the same.
_GOLDEN = 2.0 * 0.48121182505960347


def rice_parameter(mean: float) -> int:
    """Return a good Rice parameter for geometric numbers of this mean."""
    return max(0, frexp(_GOLDEN * (mean + 0.5))[1] - 1)


def choose_tilt(ids: Ints, vocab_size: int) -> int:
    """Choose a frame's tilt by the mean of the ids [N] of all rows.

    The gaps' quotients then sum to less than 18 N for any ids: a steep tilt gives the first gaps of
    a row small parameters, but it is chosen only if ids are low, so that these gaps are short.
    """
    mean = int(np.add.reduce(ids)) / (len(ids) * vocab_size)
    return (mean < _EVEN) + (mean < _STEEP) + (mean < _STEEPEST)


class Layout:
    """The positions of consecutive rows of ids below V, and the Rice parameters of their gaps."""

    def __init__(self, ends: tuple[int, ...], vocab_size: int, tilt: int) -> None:
        """``ends``: the end of each row among all ids; a row has 1 to ``vocab_size`` < 2²⁴ ids."""
        # i64 [n] each
        self.ends = np.array(ends)
        self.sizes: Ints = np.diff(self.ends, prepend=0)
        self.starts: Ints = self.ends - self.sizes
        self.lasts: Ints = self.ends - 1
        self.ends.flags.writeable = False  # every decoded window with this layout shares the array
        # [n, GROUPS + 1]
        bounds = self.sizes[:, None] * np.arange(GROUPS + 1) >> 3
        density = np.frexp(vocab_size // self.sizes)[1] - 1
        # [n, GROUPS]
        each = np.maximum(density[:, None] + TILTS[tilt], 0)
        # i64 [N], from 0 to 27
        self.parameters: Ints = each.ravel().repeat(np.diff(bounds).ravel())
        self._excess: Ints = (1 << self.parameters) - 1
        self._slots: tuple[int, BitSlots] | None = None

    def slots(self, more: int) -> BitSlots:
        """Return slots for the gaps' remainders, each followed by ``more`` bits."""
        cached = self._slots
        if cached is None or cached[0] != more:
            # a single assignment, since two threads may run this method
            cached = self._slots = (more, BitSlots(self.parameters + more))
        return cached[1]

    def raised_gaps(self, ids: Ints) -> Ints:
        """Return the gaps of ``ids`` [N], with 2^b added to each.

        Such a sum, shifted right by b, is the length of the gap's quotient in unary; the lower b
        bits are the gap's remainder.
        """
        raised = np.empty_like(ids)
        np.subtract(ids[1:], ids[:-1], out=raised[1:])
        raised[self.starts] = ids[self.starts] + 1
        raised += self._excess
        return raised

    def ids(self, lengths: Ints, remainders: Ints) -> Ints:
        """Return the ids [N]. lengths: the unary lengths of the gaps' quotients."""
        # each is its gap plus 1
        steps = lengths << self.parameters
        steps += remainders
        steps -= self._excess
        ids = steps.cumsum()
        # [n]: sum of all steps in the rows above, plus 1
        above = ids[self.starts] - steps[self.starts]
        above += 1
        ids -= above.repeat(self.sizes)
        return ids


_cached_layout = lru_cache(maxsize=16)(Layout)


def layout(ends: tuple[int, ...], vocab_size: int, tilt: int) -> Layout:
    """Return a `Layout`, cached if small: drafts with the same K reuse it every round."""
    return (_cached_layout if ends[-1] <= _CACHED_IDS else Layout)(ends, vocab_size, tilt)
