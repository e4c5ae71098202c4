"""Map a drafter's logits to the vocabulary of its drafts.

Each column of the logits stands for a token of this vocabulary, or for none. Tokens without a
column get −∞, so the softmax renormalises the drafter's distribution over the tokens that have a
column. Columns are missing if the drafter's head was cut to frequent tokens (FR-Spec, Zhao et al.
2025), or if its target has another vocabulary (Timor et al. 2025).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pilotfish.speculation.distributions import Floats


class Projection:
    """Maps logits; reuses its output buffer, so each lane needs its own `Projection`.

    places: the token of each column, i64 [W]; ``size`` where a column has no token; no token occurs
    twice. None: each column stands for the token with its number. size: V, the size of the
    vocabulary.
    """

    def __init__(self, places: NDArray[np.int64] | None, size: int) -> None:
        self._places, self._size = places, size
        # f32 [rows of the largest call, V + 1]; only the columns of ``places`` are ever written
        self._buffer = self._rows(0 if places is None else 1)

    def __call__(self, logits: Floats) -> Floats:
        """Map logits f32 [n, W] to f32 [n, V]; the result is valid until the next call.

        It shares no memory with ``logits``.
        """
        if self._places is None:
            copy: Floats = logits.copy()
            return copy
        if len(logits) > len(self._buffer):
            self._buffer = self._rows(len(logits))
        # row by row: indexing a 1-D array is twice as fast as indexing an axis of a 2-D array
        for row, out in zip(logits, self._buffer, strict=False):
            out[self._places] = row
        return self._buffer[: len(logits), : self._size]

    def reaches(self, token: int) -> bool:
        """Return whether this token has a column, so that it can be drafted."""
        return self._places is None or bool((self._places == token).any())

    def _rows(self, count: int) -> NDArray[np.float32]:
        return np.full((count, self._size + 1), -np.inf, np.float32)
