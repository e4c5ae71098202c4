"""How long an attempt to connect may take."""

import math
import time

# An attempt gives way to the next one, since on a path that was dead when it began the kernel
# tries ever more rarely. But then the next has twice the time: the round trip may be that long.
_FIRST_MS, _MOST_MS = 3000, 12_000
_OF_ALL = 0.9  # an attempt that took this part of its time was given up for want of an answer


class ConnectTimeout:
    """Milliseconds for an attempt to connect; learns from attempts without an answer.

    too_short: the last attempt was given up, and a longer one may succeed.
    """

    def __init__(self) -> None:
        self.ms = _FIRST_MS
        self.too_short = False
        self._began_s = math.inf

    def begin(self) -> None:
        """Note the beginning of an attempt."""
        self._began_s = time.monotonic()

    def end(self) -> None:
        """Note that it failed: at once if it was refused, late if there was no answer."""
        spent_ms = (time.monotonic() - self._began_s) * 1e3
        self.too_short = self.ms < _MOST_MS and spent_ms > _OF_ALL * self.ms

    def lengthen(self) -> int:
        """Return the milliseconds of the next attempt, which has twice the time."""
        self.ms, self.too_short = min(2 * self.ms, _MOST_MS), False
        return self.ms
