"""Map a drafter's logits to the vocabulary that it drafts in.

Each column of the logits is a token of that vocabulary, or none. Tokens without a column get −∞, so
the softmax renormalises the drafter's distribution over the tokens with one: those that its head
was cut to (FR-Spec, Zhao et al. 2025), those shared with a target of another vocabulary (Timor et
al. 2025), or both.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pilotfish.speculation.distributions import Floats


class Projection:
    """Maps logits. Reuses a buffer, so each lane needs its own.

    places: i64 [W], the token of each column, each at most once; ``size`` for no token. size: V.
    """

    def __init__(self, places: NDArray[np.int64], size: int) -> None:
        self._places, self._size = places, size
        # f32 [most rows so far, V + 1]; only the columns in `places` are written
        self._buffer = self._rows(1)

    def __call__(self, logits: Floats) -> Floats:
        """Map f32 [n, W] to f32 [n, V], −∞ without a column; valid until the next call."""
        if len(logits) > len(self._buffer):
            self._buffer = self._rows(len(logits))
        # row by row: indexing a 1-D array is twice as fast as one axis of a 2-D array
        for row, out in zip(logits, self._buffer, strict=False):
            out[self._places] = row
        return self._buffer[: len(logits), : self._size]

    def reaches(self, token: int) -> bool:
        """Whether this token has a column."""
        return bool((self._places == token).any())

    def _rows(self, count: int) -> NDArray[np.float32]:
        return np.full((count, self._size + 1), -np.inf, np.float32)
