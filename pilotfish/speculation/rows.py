"""One distribution as it was sampled from: the numbers that are shipped are these numbers.

A row gives a weight to each token, or to a few tokens and 0 to all others. Its law is the weights
divided by their float64 sum, so weights of any scale and any real dtype will do.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Row:
    """Weights [K] of the tokens ``ids`` [K], ascending; of all tokens [V] where ids is None."""

    weights: NDArray[np.floating] | NDArray[np.integer]
    ids: NDArray[np.uint32] | None = None

    @cached_property
    def total(self) -> float:
        """The float64 sum of the weights."""
        return float(self.weights.sum(dtype=np.float64))

    @property
    def support(self) -> "NDArray[np.uint32] | slice":
        """Indexes an array over the vocabulary at the tokens that have a weight here."""
        return slice(None) if self.ids is None else self.ids

    def probability(self, token: int) -> float:
        """Return q(token); 0 for a token that is not in the row."""
        at = self.index(token)
        return 0.0 if at is None else float(self.weights[at]) / self.total

    def index(self, token: int) -> int | None:
        """Return the index of the token's weight; None for one that is not in the row."""
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
