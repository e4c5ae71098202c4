"""Sorted ids as gaps, and the Rice parameter of every gap.

A gap g is coded with parameter b as the quotient ⌊g/2^b⌋ in unary and the remainder in b bits. Low
ids are frequent tokens, so the gaps of a row grow with the id. Hence the place of an id in its row
decides b: each row of K is cut into eight groups, j holding the places from ⌊K·j/8⌋ to
⌊K·(j+1)/8⌋, and b = max(0, ⌊log₂(V/K)⌋ + `TILTS`[tilt][j]). The tilt is chosen for each frame.
"""

from functools import lru_cache
from math import frexp
from typing import Final

import numpy as np

from pilotfish.wire.codecs.bits import BitSlots, Ints

GROUPS: Final = 8
# What suits ids that are spread evenly, and low ids that are more and more frequent. The third
# suits a row of the 64 likeliest tokens of a vocabulary that byte-pair encoding has made.
TILTS: Final[Ints] = np.array(
    [
        [0, 0, 0, 0, 0, 0, 0, 0],
        [-2, -2, -1, -1, -1, 0, 0, 1],
        [-4, -4, -3, -2, -2, -1, 0, 2],
        [-6, -6, -5, -4, -3, -2, 0, 3],
    ]
)
_EVEN, _STEEP, _STEEPEST = 0.38, 0.2, 0.1  # ids' mean over V, measured where tilts are equally good
_CACHED_IDS = 8192  # ids; larger layouts are made anew, the others take about 1 MB each

# For geometric numbers of mean μ the best parameter is ⌊log₂(ln φ / ln(1 + 1/μ))⌋ + 1, φ the golden
# ratio (Kiely, 2004): ⌊log₂(_GOLDEN · (μ + ½))⌋ to within a hair.
_GOLDEN = 2.0 * 0.48121182505960347


def rice_parameter(mean: float) -> int:
    """A good parameter for geometric numbers of this mean."""
    return max(0, frexp(_GOLDEN * (mean + 0.5))[1] - 1)


def choose_tilt(ids: Ints, vocab_size: int) -> int:
    """The tilt that suits ``ids`` [N], those of all rows, by their mean.

    Whatever the ids are, their quotients then come to less than 18 N in all: early gaps, whose
    parameters a tilt makes small, are long only where ids are high.
    """
    mean = int(np.add.reduce(ids)) / (len(ids) * vocab_size)
    return (mean < _EVEN) + (mean < _STEEP) + (mean < _STEEPEST)


class Layout:
    """Where rows of ids below V stand, one behind the other, and how their gaps are coded."""

    def __init__(self, ends: tuple[int, ...], vocab_size: int, tilt: int) -> None:
        """Where each row ends; all have from 1 to ``vocab_size`` < 2²⁴ ids."""
        # all of these i64 [n]
        self.ends = np.array(ends)
        self.sizes: Ints = np.diff(self.ends, prepend=0)
        self.starts: Ints = self.ends - self.sizes
        self.lasts: Ints = self.ends - 1
        self.ends.flags.writeable = False  # every decoded window of this layout shares it
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
        """Slots for the gaps' remainders with ``more`` bits behind each."""
        cached = self._slots
        if cached is None or cached[0] != more:
            # one assignment: two threads may be here
            cached = self._slots = (more, BitSlots(self.parameters + more))
        return cached[1]

    def raised_gaps(self, ids: Ints) -> Ints:
        """The gaps of ``ids`` [N], 2^b added to each.

        Shifted by b they are the quotients' lengths in unary, their lower b bits the remainders.
        """
        raised = np.empty_like(ids)
        np.subtract(ids[1:], ids[:-1], out=raised[1:])
        raised[self.starts] = ids[self.starts] + 1
        raised += self._excess
        return raised

    def ids(self, lengths: Ints, remainders: Ints) -> Ints:
        """The ids [N] whose gaps have these quotients, each one less than its length in unary."""
        # one more than the gaps
        steps = lengths << self.parameters
        steps += remainders
        steps -= self._excess
        ids = steps.cumsum()
        # [n], one more than what all rows above have added
        above = ids[self.starts] - steps[self.starts]
        above += 1
        ids -= above.repeat(self.sizes)
        return ids


_cached_layout = lru_cache(maxsize=16)(Layout)


def layout(ends: tuple[int, ...], vocab_size: int, tilt: int) -> Layout:
    """The layout of such rows; drafts with the same K have the same one round after round."""
    return (_cached_layout if ends[-1] <= _CACHED_IDS else Layout)(ends, vocab_size, tilt)
