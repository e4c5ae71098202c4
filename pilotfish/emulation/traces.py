"""Packet-delivery traces in the format of Mahimahi's `mm-link`.

In: a text file; each line is a time in whole milliseconds, in order, at which the link can carry
one packet of 1500 bytes. A line that stands twice means two packets. Out: the departure of each
segment, in order.

The trace repeats, with its last time as its period. An opportunity is lost if no bytes wait. Small
segments share an opportunity; a segment that does not fit continues in the next one. (Mahimahi,
link_queue.cc; Netravali et al., USENIX ATC 2015, §4)
"""

import math
import os
from array import array
from bisect import bisect_left
from pathlib import Path

from pilotfish.base.errors import TraceError
from pilotfish.base.reading import without_bom

OPPORTUNITY_BYTES = 1500


class Trace:
    """The delivery opportunities of one direction of a link; times_ms: ascending, never empty."""

    def __init__(self, times_ms: "array[int]") -> None:
        self.times_ms = times_ms

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Trace":
        """Read a trace file; raises TraceError, which names the line at fault."""
        try:
            lines = without_bom(Path(path).read_bytes()).splitlines()
        except OSError as error:
            raise TraceError(f"The trace {path} cannot be read: {error.strerror}.") from error
        times = array("Q")
        last = 0
        for number, line in enumerate(lines, 1):
            # int() alone would also accept " 1_000 ", and endless digits
            if not (line.isdigit() and len(line) <= 15):
                excerpt = line[:40].decode(errors="replace")
                raise TraceError(
                    f"{path}, line {number}: {excerpt!r} is not a time in whole milliseconds; "
                    "each line of a trace must be one such time."
                )
            time_ms = int(line)
            if time_ms < last:
                raise TraceError(
                    f"{path}, line {number}: {time_ms} ms comes after {last} ms; sort the trace."
                )
            times.append(time_ms)
            last = time_ms
        if not times:
            raise TraceError(f"The trace {path} is empty; it needs at least one line.")
        if last == 0:
            raise TraceError(f"The trace {path} lasts 0 ms; its last line is its period.")
        return cls(times)

    @property
    def period_s(self) -> float:
        """The period in seconds, after which the trace repeats."""
        return self.times_ms[-1] / 1e3

    @property
    def mean_bps(self) -> float:
        """The mean rate of the trace, in bit/s."""
        return len(self.times_ms) * OPPORTUNITY_BYTES * 8 / self.period_s

    def time_s(self, index: int) -> float:
        """Return the time of opportunity ``index``; the index counts through all repetitions."""
        cycle, place = divmod(index, len(self.times_ms))
        return (cycle * self.times_ms[-1] + self.times_ms[place]) / 1e3

    def first_from(self, time_s: float) -> int:
        """Return the index of the first opportunity at ``time_s`` or later."""
        # tolerance of 1 ns, since sums of clock readings are not exact
        cycle, rest_ms = divmod(math.ceil(time_s * 1e3 - 1e-6), self.times_ms[-1])
        if rest_ms == 0 and cycle > 0:  # the end of one cycle is the start of the next
            cycle, rest_ms = cycle - 1, self.times_ms[-1]
        return int(cycle) * len(self.times_ms) + bisect_left(self.times_ms, rest_ms)


class TraceClock:
    """The position in a trace that began at ``start_s``; assigns opportunities to segments."""

    def __init__(self, trace: Trace, start_s: float) -> None:
        self._trace = trace
        self._start_s = start_s
        self._index = -1  # number of the opportunity in use
        self._time_s = -math.inf
        self._room = 0  # bytes that still fit into the opportunity

    def leave(self, arrival_s: float, size: int) -> float:
        """Return the departure time of the last byte of a segment that arrived at ``arrival_s``."""
        if self._time_s < arrival_s:
            first = self._trace.first_from(arrival_s - self._start_s)
            self._use_opportunity(max(self._index + 1, first))
        while size > self._room:
            size -= self._room
            self._use_opportunity(self._index + 1)
        self._room -= size
        return self._time_s

    def _use_opportunity(self, index: int) -> None:
        self._index = index
        self._time_s = self._start_s + self._trace.time_s(index)
        self._room = OPPORTUNITY_BYTES
