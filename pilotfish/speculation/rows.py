"""`Row`, the distribution from which a token was sampled, in the form in which it crosses the link.

A row has a weight for each token, or for a few tokens; all others have the weight 0. Probabilities
are weights divided by their float64 sum, so weights may have any scale and any real dtype.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Row:
    """Distribution with weights [K] of the tokens ``ids`` [K], ascending; ids None: K = V."""

    weights: NDArray[np.floating] | NDArray[np.integer]
    ids: NDArray[np.uint32] | None = None

    @cached_property
    def total(self) -> float:
        """Sum of the weights, in float64."""
        return float(self.weights.sum(dtype=np.float64))

    @property
    def support(self) -> "NDArray[np.uint32] | slice":
        """Index that selects the row's tokens in an array [V]."""
        return slice(None) if self.ids is None else self.ids

    def probability(self, token: int) -> float:
        """Return q(token); 0 for a token outside the row."""
        at = self.index(token)
        return 0.0 if at is None else float(self.weights[at]) / self.total

    def index(self, token: int) -> int | None:
        """Return the index of the token's weight; None for a token outside the row."""
        if self.ids is None:
            return token
        at = int(np.searchsorted(self.ids, token))
        return None if at == len(self.ids) or self.ids[at] != token else at

    def probabilities(self) -> NDArray[np.float64]:
        """Return the weights [K] divided by their sum."""
        shares: NDArray[np.float64] = self.weights / np.float64(self.total)
        return shares

    def token(self, at: int) -> int:
        """Return the token of the weight at index ``at``."""
        return at if self.ids is None else int(self.ids[at])
