"""The schedule of a watch: round n is due at n × every_s by the run's clock.

A round that could not begin in the first half of its interval is skipped and not made up for. So a
watch that was killed, slept or had no edge goes on as if it had not been interrupted.
"""

from msgspec import Struct

_LATE = 0.5  # share of the interval in which a round may begin


class Schedule(Struct, frozen=True):
    """The rounds of a watch. for_s: its length by the run's clock; None: it has no end."""

    every_s: float
    for_s: float | None = None

    def number_at(self, clock_s: float) -> int:
        """Return the number of the round to whose interval this time belongs."""
        return int(clock_s // self.every_s)

    def due(self, clock_s: float, last: int) -> int | None:
        """Return the round that is due at this time; None if there is none. last: the last one."""
        number = self.number_at(clock_s)
        late_s = clock_s - number * self.every_s
        return number if number > last and late_s <= _LATE * self.every_s else None

    def left_s(self, clock_s: float) -> float:
        """Return the seconds until the next round is due, or until the watch ends."""
        next_s = (self.number_at(clock_s) + 1) * self.every_s
        return min(next_s, next_s if self.for_s is None else self.for_s) - clock_s

    def is_over(self, clock_s: float) -> bool:
        """Return whether the watch has ended by this time."""
        return self.for_s is not None and clock_s >= self.for_s
