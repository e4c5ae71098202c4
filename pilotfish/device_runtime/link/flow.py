"""Choose the number of bytes in flight of a transfer, and the size of its chunks.

The bytes in flight are few, so that later messages (a ping, hints, a cancellation) do not wait long
and acknowledgements come often. But they must fill the link: its rate × (its RTT + 0.3 s). The rate
of a chunk is the number of bytes delivered between its departure and its acknowledgement, over this
time (BBR's delivery rate). The RTT is the shortest time that any chunk took.

Some paths drop every large segment without an ICMP message, such as a tunnel with too small an MTU.
On these paths a connection stalls with its first large segment. So after a stall, chunks are sent
one at a time, in segments that any path carries, and grow step by step.
"""

import time
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Final, NamedTuple

from pilotfish.wire.messages import MAX_CHUNK

LEAST_BYTES: Final = 384  # bytes of a chunk: less than 576 with all headers and encryption
SEGMENT_BYTES: Final = 1024  # bytes of a chunk: less than Ethernet's 1500 with all headers
_TOO_LARGE: Final = 1400  # bytes of a segment: some paths lose segments of this size
_FIRST_WINDOW, _MOST_WINDOW = 4 << 10, 16 << 20
_QUEUE_S: Final = 0.3  # seconds of the link's rate that are in flight beyond one RTT
_MAX_WHOLE_S: Final = 0.25  # seconds: a message that takes longer is sent in chunks
_UNKNOWN_BYTES: Final = 16 << 10  # bytes: a longer message is sent in chunks if the rate is unknown
_RATES: Final = 8  # number of recent rates; the best of them counts
# a rate that grows by less than 1.25 × for 16 chunks is the link's rate
_GROWTH, _STEADY = 1.25, 16
_QUEUED_FACTOR = 1.5  # a chunk that takes 1.5 times the shortest time has waited in a queue
_GROW_AFTER: Final = 4  # delivered chunks of one size, before the double size is tried
_RETRY_AFTER: Final = 8  # the same, if the double size was lost before; grows × 8 after each loss


class _SentChunk(NamedTuple):
    end: int  # offset of the chunk's end in the message
    size: int
    sent_s: float
    delivered: int  # bytes of all chunks delivered before this chunk was sent


class ChunkFlow:
    """The chunks in flight in one direction of a link, and the link's measured rate.

    full_bps: rate (bit/s) of the link while chunks waited for it; None if no chunk has waited.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.large_lost = 0  # number of stalls with a large chunk, after smaller ones passed
        self._small_bytes: int | None = None  # size of chunks sent one at a time; None: no limit
        self._blocked_bytes: int | None = None  # smallest chunk size that was lost
        self._passed, self._retry_after = 0, _RETRY_AFTER
        self._connection, self._reconnected = 0, False
        self._begin()

    def follow(self, connection: int) -> None:
        """Reset the measurements if the connection is another one: its path may differ."""
        if connection != self._connection:
            self._reconnected = self._connection != 0
            self._connection = connection
            self._begin()

    def _begin(self) -> None:
        self.full_bps: float | None = None
        self._rates: deque[float] = deque(maxlen=_RATES)
        self._steady = 0  # number of chunks since the rate last grew
        self._window, self._least_s, self._delivered = _FIRST_WINDOW, float("inf"), 0
        self._least_bytes = 0  # size of the fastest chunk
        self.forget()

    def forget(self) -> None:
        """Drop all chunks in flight."""
        self._in_flight: deque[_SentChunk] = deque()
        self._in_flight_bytes = 0

    @property
    def rate_bps(self) -> float:
        """Lower bound of the link's recent rate, bit/s; 0 if unknown."""
        return 8 * max(self._rates, default=0.0)

    def whole_bytes(self, known_bps: float | None, unknown: int = _UNKNOWN_BYTES) -> int:
        """Return the maximum bytes of a message in one piece; known_bps: the link's rate (bit/s).

        After a loss at an unknown rate it is lower: large messages may be the cause of the loss.
        """
        if self._small_bytes is not None:
            return self._small_bytes
        if rate_bps := max(known_bps or 0.0, self.rate_bps):
            return max(SEGMENT_BYTES, int(rate_bps * _MAX_WHOLE_S / 8))
        return unknown // 4 if self._reconnected else unknown

    @property
    def first_offset(self) -> int:
        """Offset of the first byte in flight; 0 if there is none."""
        return self._in_flight[0].end - self._in_flight[0].size if self._in_flight else 0

    @property
    def tries_larger(self) -> bool:
        """Whether a chunk in flight is larger than any delivered since large chunks were lost."""
        largest = max([chunk.size for chunk in self._in_flight], default=0)
        return self._blocked_bytes is not None and not self._passed and largest > LEAST_BYTES

    def next_size(self, left: int) -> int:
        """Return the size of the next chunk, of ``left`` bytes to send; 0 means wait."""
        if self._small_bytes is not None:
            return 0 if self._in_flight else min(left, self._small_bytes)
        # several chunks, so that acknowledgements come steadily; each much larger than its header
        part = max(self._window // 8, min(self._window // 2, 2 * SEGMENT_BYTES), SEGMENT_BYTES)
        size = min(left, MAX_CHUNK, part)
        return size if not self._in_flight or self._in_flight_bytes + size <= self._window else 0

    def on_sent(self, end: int, size: int) -> None:
        """Add a sent chunk to the chunks in flight; end: offset of its end."""
        self._in_flight.append(_SentChunk(end, size, self._clock(), self._delivered))
        self._in_flight_bytes += size

    def on_acknowledged(self, offset: int) -> None:
        """Remove the chunks that end at or before this offset, and measure the rate."""
        now_s = self._clock()
        while self._in_flight and self._in_flight[0].end <= offset:
            chunk = self._in_flight.popleft()
            self._in_flight_bytes -= chunk.size
            self._delivered += chunk.size
            self._learn(chunk, max(1e-6, now_s - chunk.sent_s))

    def _learn(self, chunk: _SentChunk, took_s: float) -> None:
        rate = (self._delivered - chunk.delivered) / took_s
        grows = rate > _GROWTH * max(self._rates, default=0.0)
        self._steady = 0 if grows else self._steady + 1
        self._rates.append(rate)
        if took_s > _QUEUED_FACTOR * self._least_s and self._steady >= _STEADY:
            self.full_bps = 8 * median(self._rates)
        if took_s < self._least_s:
            self._least_s, self._least_bytes = took_s, chunk.size
        if self._steady >= _STEADY or took_s > _QUEUED_FACTOR * self._least_s + _QUEUE_S / 10:
            rate = max(self._rates)
            rtt_s = max(0.0, self._least_s - self._least_bytes / rate)
            most = rate * (rtt_s + _QUEUE_S)
        else:  # the link is not full yet: double the window with each round trip
            most = _MOST_WINDOW
        self._window = int(min(most, self._window + chunk.size, _MOST_WINDOW))
        if self._blocked_bytes is not None and chunk.size >= self._blocked_bytes:
            self._blocked_bytes = None
        if self._small_bytes is not None:
            self._grow(self._small_bytes)

    def _grow(self, small: int) -> None:
        """Double the size of single chunks after enough of them passed."""
        self._passed += 1
        blocked = self._blocked_bytes is not None and 2 * small >= self._blocked_bytes
        if self._passed < (self._retry_after if blocked else _GROW_AFTER):
            return
        self._passed = 0
        self._small_bytes = 2 * small if 2 * small < _FIRST_WINDOW else None

    def on_stall(self) -> None:
        """Reduce the size of chunks after a stalled connection."""
        size = max([chunk.size for chunk in self._in_flight], default=_TOO_LARGE)
        if size <= LEAST_BYTES:
            return  # a chunk of the smallest size is lost, so the size is not the cause
        if self._blocked_bytes is not None:
            self.large_lost += 1
            self._retry_after *= _RETRY_AFTER
        self._blocked_bytes = min(size, self._blocked_bytes or size)
        before = self._small_bytes if self._small_bytes is not None else 0
        self._small_bytes, self._passed = max(LEAST_BYTES, before // 2), 0
