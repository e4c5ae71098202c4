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

_RECENT_ROUNDS = 24  # rounds
_PART_ROUNDS = 16  # rounds whose mean is taken, since tokens come in bursts;
_MIN_PART_ROUNDS = 4  # in a short answer as few as these, of three parts
_MAX_PROTOCOL_FACTOR = 2.0  # a protocol's own factor, or its inverse; the rest is the machine's
_AVERAGED_ANSWERS, _MAX_IDLE_ANSWERS = (
    8,
    16,
)  # answers that it averages; answers without, to forget it
_MAX_CONSECUTIVE_ANSWERS = 32  # answers in a row under one protocol, likewise
# The machine's correction before the first answer. Two values, so that the median ignores a first
# answer that was slow because the process stood still.
_PRIOR_FACTORS = (1.0, 1.0)


class RecentValues(deque[float]):
    """The last values of one quantity."""

    def __init__(self, values: Iterable[float] = ()) -> None:
        super().__init__(values, maxlen=_RECENT_ROUNDS)

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
        self._machine_factors = RecentValues()
        self._protocol_factors: dict[str, deque[float]] = defaultdict(
            lambda: deque([1.0], maxlen=_AVERAGED_ANSWERS)
        )
        self._idle_answers: Counter[str] = Counter()
        self._last_protocol, self._consecutive_answers = (
            "",
            0,
        )  # the last one, and its answers in a row

    def add(self, name: str, factors: Sequence[float], *, with_edge_drafter: bool = False) -> None:
        """Add the factors of an answer's passes under this protocol.

        beside: the protocol has the machine do something else as well, so that what it takes longer
        is its own: by the machine's factor all others would be expected to be as slow, untried.
        """
        factors = [factor for factor in factors if factor > 0.0]  # nothing takes no time
        if not factors:
            self.fade()
            return
        if self._machine_factors or with_edge_drafter:
            self._protocol_factors[name].append(median(factors) / self._machine_factor)
        own = self._protocol_factor(name)
        if with_edge_drafter:
            self.fade()
        else:
            self._consecutive_answers = (
                self._consecutive_answers + 1 if self._last_protocol == name else 0
            )
            if (
                self._consecutive_answers % _MAX_CONSECUTIVE_ANSWERS == _MAX_CONSECUTIVE_ANSWERS - 1
            ):  # the machine's is all that there is
                self._machine_factors = RecentValues(
                    own * factor for factor in self._machine_factors
                )
                own = 1.0
                del self._protocol_factors[name]
            self._machine_factors.extend(factor / own for factor in factors)
        self._last_protocol = name
        self._idle_answers = Counter(
            {other: 1 + idle for other, idle in self._idle_answers.items()}
        )
        self._idle_answers[name] = 0
        for other in [
            other for other, idle in self._idle_answers.items() if idle > _MAX_IDLE_ANSWERS
        ]:
            self._protocol_factors.pop(other, None)
            del self._idle_answers[other]

    def fade(self) -> None:
        """Note an answer without such passes: the machine's factor gets older."""
        self._machine_factors.fade()

    def factor(self, name: str) -> float:
        """Return the factor to expect now."""
        return self._machine_factor * self._protocol_factor(name)

    @property
    def _machine_factor(self) -> float:
        return float(median([*_PRIOR_FACTORS, *self._machine_factors]))

    def _protocol_factor(self, name: str) -> float:
        return min(
            _MAX_PROTOCOL_FACTOR,
            max(1 / _MAX_PROTOCOL_FACTOR, median(self._protocol_factors[name])),
        )


def median_of_parts(rounds: Sequence[Round], mean: Callable[[Sequence[Round]], float]) -> float:
    """Return the median of a mean over parts of an answer, at least one round, in their order."""
    parts = max(1, len(rounds) // _PART_ROUNDS, min(3, len(rounds) // _MIN_PART_ROUNDS))
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
