"""Map a drafter's logits to the tokens of the vocabulary that it drafts in.

Each column of the logits is a token of that vocabulary, or none. Tokens that no column stands for
have −∞, so that the softmax is the drafter's distribution, renormalised over those that have one:
over the tokens that its head was cut to (FR-Spec, Zhao et al. 2025), or over those shared with a
target of another vocabulary (Timor et al. 2025), or both.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pilotfish.speculation.distributions import Floats


class Projection:
    """Maps logits; for one lane, since it reuses a buffer.

    places: i64 [W], the token of each column of the logits, each at most once; `size` where it is
    none. size: V, the vocabulary's.
    """

    def __init__(self, places: NDArray[np.int64], size: int) -> None:
        self._places, self._size = places, size
        # f32 [most rows so far, V + 1]; only columns of `places` are ever written
        self._buffer = self._rows(1)

    def __call__(self, logits: Floats) -> Floats:
        """Map f32 [n, W] to f32 [n, V], −∞ where no column is; the next call overwrites it."""
        if len(logits) > len(self._buffer):
            self._buffer = self._rows(len(logits))
        # row by row: NumPy's indexing of one axis is twice as fast as that of one of two
        for row, out in zip(logits, self._buffer, strict=False):
            out[self._places] = row
        return self._buffer[: len(logits), : self._size]

    def reaches(self, token: int) -> bool:
        """Whether a column stands for this token."""
        return bool((self._places == token).any())

    def _rows(self, count: int) -> NDArray[np.float32]:
        return np.full((count, self._size + 1), -np.inf, np.float32)
