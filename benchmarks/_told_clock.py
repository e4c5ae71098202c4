"""A simulated clock: it runs in real time, except while a watch waits; then it jumps ahead.

A file holds how far the clock is ahead, so the clock goes on after a kill of its process, and the
driver of an experiment can read the clock and set its wall clock. Two doubles: the seconds by which
all clocks are ahead of the machine's, and those by which the wall clock was set on top of it.
"""

import mmap
import struct
import time
from pathlib import Path

from pilotfish.lab.field.run_clock import boot_s
from pilotfish.lab.field.watch.clock import Clock

_DOUBLE = struct.Struct("<d")


class ToldClock(Clock):
    """The clock in this file. speed: seconds of the clock in a second of real waiting."""

    def __init__(self, path: Path, speed: float = 1.0) -> None:
        if not path.exists():
            path.write_bytes(bytes(2 * _DOUBLE.size))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 2 * _DOUBLE.size)
        self._speed = speed

    def _get(self, number: int) -> float:
        value: float = _DOUBLE.unpack_from(self._memory, number * _DOUBLE.size)[0]
        return value

    def _add(self, number: int, seconds: float) -> None:
        _DOUBLE.pack_into(self._memory, number * _DOUBLE.size, self._get(number) + seconds)

    def unix_s(self) -> float:
        """The wall clock."""
        return time.time() + self._get(0) + self._get(1)

    def boot_s(self) -> float:
        """Seconds since the boot."""
        return boot_s() + self._get(0)

    def wait(self, seconds: float) -> None:
        """Wait a short time, in which the clock advances by so many seconds."""
        begun_s = boot_s()
        time.sleep(seconds / self._speed)
        self.skip(max(0.0, seconds - (boot_s() - begun_s)))

    def skip(self, seconds: float) -> None:
        """Let all clocks jump ahead."""
        self._add(0, seconds)

    def set_wall(self, by_s: float) -> None:
        """Set the wall clock alone."""
        self._add(1, by_s)
