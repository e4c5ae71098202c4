"""The clocks of a watch. A test or an experiment gives the watch a clock of its own."""

import time
from typing import Final, NamedTuple

from pilotfish.lab.field.run_clock import RunClock, boot_s

# longest wait of a reader between two calls of its `on_wait`, so that a watch ends soon
WAIT_SLICE_S: Final = 0.2


class Stamp(NamedTuple):
    """A time by the wall clock and by the run's clock, in seconds."""

    unix_s: float
    clock_s: float


class Clock:
    """The machine's clocks. All times of a watch's rows and events come from this object.

    Durations within a row (a round, a ping, a timeout) are those of Python's monotonic clock.
    """

    def unix_s(self) -> float:
        """Return the wall clock's time in seconds; a person or NTP may set it at any time."""
        return time.time()

    def boot_s(self) -> float:
        """Return the seconds since the machine booted, with those in which it slept."""
        return boot_s()

    def wait(self, seconds: float) -> None:
        """Wait for so many seconds."""
        time.sleep(seconds)


class Stamps:
    """Gives the time by both clocks. run_clock: the run's clock since this start."""

    def __init__(self, clock: Clock, run_clock: RunClock) -> None:
        self._clock = clock
        self.clock_s = run_clock

    def __call__(self) -> Stamp:
        """Return the present time."""
        return Stamp(self._clock.unix_s(), self.clock_s())
