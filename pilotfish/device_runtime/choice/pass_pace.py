"""Estimate the slowdown of passes, compared with the times that both ends measured at the start.

Pass time = (time at the start) × (the machine's recent factor, over all protocols) × (the
protocol's own factor). So a machine that was busy while one protocol ran does not count against
this protocol.

A pause (a suspended or overloaded machine) slows one round and must not exclude a protocol: factors
are medians, and a short answer's factor fades unless another answer confirms it.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import median

import numpy as np

from pilotfish.device_runtime.record import Round

_RECENT_ROUNDS = 24
_PART_ROUNDS = 16  # rounds per part of an answer; parts are averaged, since tokens come in bursts
_MIN_PART_ROUNDS = 4  # minimum rounds per part, in a short answer of three parts
_MAX_PROTOCOL_FACTOR = 2.0  # upper bound of a protocol's factor; the lower bound is 1/2
_AVERAGED_ANSWERS = 8  # number of last answers that give a protocol's factor
_MAX_IDLE_ANSWERS = 16  # answers without a protocol, after which its factor is reset
_MAX_CONSECUTIVE_ANSWERS = 32  # answers in a row with one protocol, after which its factor is reset
# The machine's factors before the first answer. They are two, so that the median ignores a first
# answer during which the process was suspended.
_PRIOR_FACTORS = (1.0, 1.0)


class RecentValues(deque[float]):
    """The last values of one quantity."""

    def __init__(self, values: Iterable[float] = ()) -> None:
        super().__init__(values, maxlen=_RECENT_ROUNDS)

    def median(self, default: float) -> float:
        """Return the median; ``default`` without values."""
        return median(self) if self else default

    def mean(self, default: float, weight: float = 0.0) -> float:
        """Return the mean, with ``weight`` further values of ``default``."""
        count = weight + len(self)
        return (weight * default + sum(self)) / count if count else default

    def fade(self) -> None:
        """Drop the oldest value, after an answer that added none."""
        if self:
            self.popleft()


class PassPace:
    """Slowdown of passes since the start: the machine's factor times the protocol's.

    The machine's factor follows the last rounds, since load changes fast. A protocol's factor
    follows whole answers. Both fade without new values. A protocol's factor is relative to other
    protocols, which may have run while the machine was busy; so it is reset after many answers in a
    row.
    """

    def __init__(self) -> None:
        self._machine_factors = RecentValues()
        self._protocol_factors: dict[str, deque[float]] = defaultdict(
            lambda: deque([1.0], maxlen=_AVERAGED_ANSWERS)
        )
        self._idle_answers: Counter[str] = Counter()
        self._last_protocol = ""
        self._consecutive_answers = 0  # answers in a row under the last protocol
        self._factors: dict[str, float] = {}  # cached factors

    def add(self, name: str, factors: Sequence[float], *, with_edge_drafter: bool = False) -> None:
        """Add the factors of an answer's passes under this protocol.

        with_edge_drafter: the edge drafts as well, so only the protocol's factor counts the
        slowdown. If it counted as the machine's, all other protocols would seem just as slow.
        """
        self._factors.clear()
        factors = [factor for factor in factors if factor > 0.0]  # a pass of 0 s was not measured
        if not factors:
            self.fade()
            return
        if self._machine_factors or with_edge_drafter:
            self._protocol_factors[name].append(median(factors) / self._machine_factor)
        protocol_factor = self._protocol_factor(name)
        if with_edge_drafter:
            self.fade()
        else:
            self._consecutive_answers = (
                self._consecutive_answers + 1 if self._last_protocol == name else 0
            )
            if (
                self._consecutive_answers % _MAX_CONSECUTIVE_ANSWERS == _MAX_CONSECUTIVE_ANSWERS - 1
            ):  # attribute all slowdown to the machine
                self._machine_factors = RecentValues(
                    protocol_factor * factor for factor in self._machine_factors
                )
                protocol_factor = 1.0
                del self._protocol_factors[name]
            self._machine_factors.extend(factor / protocol_factor for factor in factors)
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
        """Reduce the weight of the machine's factors, after an answer that measured none."""
        self._factors.clear()
        self._machine_factors.fade()

    def factor(self, name: str) -> float:
        """Return the slowdown that is expected now under a protocol."""
        if name not in self._factors:
            self._factors[name] = self._machine_factor * self._protocol_factor(name)
        return self._factors[name]

    @property
    def _machine_factor(self) -> float:
        return float(median([*_PRIOR_FACTORS, *self._machine_factors]))

    def _protocol_factor(self, name: str) -> float:
        return min(
            _MAX_PROTOCOL_FACTOR,
            max(1 / _MAX_PROTOCOL_FACTOR, median(self._protocol_factors[name])),
        )


def median_of_parts(rounds: Sequence[Round], mean: Callable[[Sequence[Round]], float]) -> float:
    """Split an answer's rounds (at least one) into parts; return the median of their means."""
    parts = max(1, len(rounds) // _PART_ROUNDS, min(3, len(rounds) // _MIN_PART_ROUNDS))
    cuts = [len(rounds) * at // parts for at in range(parts + 1)]
    return median(mean(rounds[begin:end]) for begin, end in pairwise(cuts))


class PassTimes:
    """Seconds of a pass by its number of tokens, interpolated.

    measured: seconds by number of tokens, ascending; may be empty, but then nothing can be read.
    """

    def __init__(self, measured: Mapping[int, float]) -> None:
        self._widths, self._seconds = list(measured), list(measured.values())
        self._interpolated: dict[int, float] = {}  # cached seconds, by the widths that were asked

    def __bool__(self) -> bool:
        return bool(self._widths)

    def __getitem__(self, width: int) -> float:
        if width not in self._interpolated:
            beyond = max(1.0, width / self._widths[-1])
            seconds = float(np.interp(width, self._widths, self._seconds))
            self._interpolated[width] = beyond * seconds
        return self._interpolated[width]
