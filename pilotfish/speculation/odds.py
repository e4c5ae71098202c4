"""placeholder"""

from bisect import bisect_right

_EDGES = (0.25, 0.5, 1.0, 2.0, 3.0, 4.5, 7.0)


class Odds:
    """Calibrated odds."""

    def __init__(self) -> None:
        self._right = [3.8] * (len(_EDGES) + 1)
        self._seen = [4.0] * (len(_EDGES) + 1)

    def of(self, margin: float) -> float:
        """Odds."""
        at = bisect_right(_EDGES, margin)
        return self._right[at] / self._seen[at]

    def learn(self, margin: float, agreed: bool) -> None:
        """Learn."""
        at = bisect_right(_EDGES, margin)
        self._right[at] = 0.99 * self._right[at] + agreed
        self._seen[at] = 0.99 * self._seen[at] + 1
