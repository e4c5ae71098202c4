"""How long passes take, against the times that both ends measured at start.

A pass takes its time at start, times the factor by which the last rounds of any protocol took
longer, times a factor of the protocol's own: so other work of the machines while one protocol ran
does not count against it.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np

_RECENT = 24  # rounds
_OWN_MOST = 2.0  # a protocol's own factor, or its inverse; the rest is the machine's
_OWN_ANSWERS, _OWN_IDLE = 8, 16  # answers that it averages; answers without, to forget it


class Recent(deque[float]):
    """The last values of one quantity."""

    def __init__(self) -> None:
        super().__init__(maxlen=_RECENT)

    def median(self, otherwise: float) -> float:
        """Return their median; ``otherwise`` if there are none."""
        return median(self) if self else otherwise

    def mean(self, otherwise: float, weight: float = 0.0) -> float:
        """Return their mean, with ``weight`` further values of ``otherwise``."""
        count = weight + len(self)
        return (weight * otherwise + sum(self)) / count if count else otherwise


class PassPace:
    """Slowdown of passes against the start: a machine's factor times a protocol's own.

    The machine's follows the last rounds, since it changes soon; a protocol's own only whole
    answers. Both fade without new values.
    """

    def __init__(self) -> None:
        self._machine = Recent()
        self._own: dict[str, deque[float]] = defaultdict(lambda: deque([1.0], maxlen=_OWN_ANSWERS))
        self._idle: Counter[str] = Counter()

    def add(self, name: str, factors: Sequence[float], *, beside: bool = False) -> None:
        """Add the factors of an answer's passes under this protocol.

        beside: the protocol has the machine do something else as well, so that what it takes longer
        is its own: by the machine's factor all others would be expected to be as slow, untried.
        """
        factors = [factor for factor in factors if factor > 0.0]  # nothing takes no time
        if not factors:
            self.fade()
            return
        if self._machine or beside:
            self._own[name].append(median(factors) / self._machine.median(1.0))
        own = self._of(name)
        if beside:
            self.fade()
        else:
            self._machine.extend(factor / own for factor in factors)
        self._idle = Counter({other: 1 + idle for other, idle in self._idle.items()})
        self._idle[name] = 0
        for other in [other for other, idle in self._idle.items() if idle > _OWN_IDLE]:
            self._own.pop(other, None)
            del self._idle[other]

    def fade(self) -> None:
        """Note an answer without such passes: the machine's factor gets older."""
        if self._machine:
            self._machine.popleft()

    def factor(self, name: str) -> float:
        """Return the factor to expect now."""
        return self._machine.median(1.0) * self._of(name)

    def _of(self, name: str) -> float:
        return min(_OWN_MOST, max(1 / _OWN_MOST, median(self._own[name])))


def pass_s(pace: Mapping[int, float], width: int) -> float:
    """Interpolate the seconds of a pass over so many tokens.

    pace: seconds by the number of tokens, ascending, at least one.
    """
    widths, seconds = list(pace), list(pace.values())
    if width <= widths[-1]:
        return float(np.interp(width, widths, seconds))
    return seconds[-1] * width / widths[-1]
