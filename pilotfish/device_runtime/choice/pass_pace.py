"""How long passes take, against the times that both ends measured at start.

A pass takes its time at start, times the factor by which the last rounds of any protocol took
longer, times a factor of the protocol's own: so other work of the machines while one protocol ran
does not count against it.

A pause (a suspended or overloaded machine) is in one round, and must bar no protocol: medians are
taken, and what a short answer has told is forgotten if no other one confirms it.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import median

import numpy as np

from pilotfish.device_runtime.record import Round

_RECENT = 24  # rounds
_PART = 16  # rounds whose mean is taken, since tokens come in bursts;
_LEAST_PART = 4  # in a short answer as few as these, of three parts
_OWN_MOST = 2.0  # a protocol's own factor, or its inverse; the rest is the machine's
_OWN_ANSWERS, _OWN_IDLE = 8, 16  # answers that it averages; answers without, to forget it
_OWN_ALONE = 32  # answers in a row under one protocol, likewise
# The machine's correction before the first answer. Two values, so that the median ignores a first
# answer that was slow because the process stood still.
_PRIOR = (1.0, 1.0)


class RecentValues(deque[float]):
    """The last values of one quantity."""

    def __init__(self, values: Iterable[float] = ()) -> None:
        super().__init__(values, maxlen=_RECENT)

    def median(self, otherwise: float) -> float:
        """Return their median; ``otherwise`` if there are none."""
        return median(self) if self else otherwise

    def mean(self, otherwise: float, weight: float = 0.0) -> float:
        """Return their mean, with ``weight`` further values of ``otherwise``."""
        count = weight + len(self)
        return (weight * otherwise + sum(self)) / count if count else otherwise

    def fade(self) -> None:
        """Note an answer without a new value: the oldest is forgotten."""
        if self:
            self.popleft()


class PassPace:
    """Slowdown of passes against the start: a machine's factor times a protocol's own.

    The machine's follows the last rounds, since it changes soon; a protocol's own only whole
    answers. Both fade without new values. What a protocol has shown beside others that ran before
    it is forgotten, too, once it has run alone for long: the others may have met a busy machine.
    """

    def __init__(self) -> None:
        self._machine = RecentValues()
        self._own: dict[str, deque[float]] = defaultdict(lambda: deque([1.0], maxlen=_OWN_ANSWERS))
        self._idle: Counter[str] = Counter()
        self._last, self._alone = "", 0  # the last one, and its answers in a row

    def add(self, name: str, factors: Sequence[float], *, with_edge_drafter: bool = False) -> None:
        """Add the factors of an answer's passes under this protocol.

        beside: the protocol has the machine do something else as well, so that what it takes longer
        is its own: by the machine's factor all others would be expected to be as slow, untried.
        """
        factors = [factor for factor in factors if factor > 0.0]  # nothing takes no time
        if not factors:
            self.fade()
            return
        if self._machine or with_edge_drafter:
            self._own[name].append(median(factors) / self._machines)
        own = self._of(name)
        if with_edge_drafter:
            self.fade()
        else:
            self._alone = self._alone + 1 if self._last == name else 0
            if self._alone % _OWN_ALONE == _OWN_ALONE - 1:  # the machine's is all that there is
                self._machine = RecentValues(own * factor for factor in self._machine)
                own = 1.0
                del self._own[name]
            self._machine.extend(factor / own for factor in factors)
        self._last = name
        self._idle = Counter({other: 1 + idle for other, idle in self._idle.items()})
        self._idle[name] = 0
        for other in [other for other, idle in self._idle.items() if idle > _OWN_IDLE]:
            self._own.pop(other, None)
            del self._idle[other]

    def fade(self) -> None:
        """Note an answer without such passes: the machine's factor gets older."""
        self._machine.fade()

    def factor(self, name: str) -> float:
        """Return the factor to expect now."""
        return self._machines * self._of(name)

    @property
    def _machines(self) -> float:
        return float(median([*_PRIOR, *self._machine]))

    def _of(self, name: str) -> float:
        return min(_OWN_MOST, max(1 / _OWN_MOST, median(self._own[name])))


def median_of_parts(rounds: Sequence[Round], mean: Callable[[Sequence[Round]], float]) -> float:
    """Return the median of a mean over parts of an answer, at least one round, in their order."""
    parts = max(1, len(rounds) // _PART, min(3, len(rounds) // _LEAST_PART))
    cuts = [len(rounds) * at // parts for at in range(parts + 1)]
    return median(mean(rounds[begin:end]) for begin, end in pairwise(cuts))


def pass_s(pace: Mapping[int, float], width: int) -> float:
    """Interpolate the seconds of a pass over so many tokens.

    pace: seconds by the number of tokens, ascending, at least one.
    """
    widths, seconds = list(pace), list(pace.values())
    if width <= widths[-1]:
        return float(np.interp(width, widths, seconds))
    return seconds[-1] * width / widths[-1]
