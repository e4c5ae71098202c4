"""Watch the memory that peers make this process hold, in one thread for all its sockets.

ZeroMQ reads whatever a peer sends. ZeroMQ bounds the length of a frame, but neither the number of
frames of a message nor the number of queued messages (`wire.transport` says why). A thread that
computes or sleeps cannot check these numbers. So a separate thread checks every `Receiver` four
times a second, and within 20 ms while the process grows: it compares the bytes that the kernel
received with the bytes of the messages that ZeroMQ delivered. The thread also returns freed memory
to the system.
"""

import ctypes
import logging
import os
import threading
import time
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol
from weakref import WeakSet

from pilotfish.base.memory import resident_bytes
from pilotfish.wire.link.tcp import Volume

_log = logging.getLogger("pilotfish.wire")

# Seconds between two readings of the process's memory while it is stable and while it grows, and
# between two checks of the peers while it is stable.
_POLL_S, _GROWING_POLL_S, _CHECK_S = 0.02, 0.005, 0.25
_GROWTH_BYTES: Final = 4 << 20  # growth of the process after which peers are checked at once
_MIN_TRIM_BYTES: Final = 16 << 20  # minimum growth of the process that is worth a trim
# pause (s) between trims: minimum, maximum; it doubles while trims free little
_TRIM_S = (0.1, 60.0)

SLACK_BYTES: Final = 1 << 16  # overhead of a message: encryption, framing, the handshake
_HEARTBEATS_BPS = {False: 80.0, True: 400.0}  # bytes a second from an idle peer; True: encrypted
_FRAME_BYTES = {False: 9, True: 42}  # overhead of a frame on the wire (bytes); True: encrypted
_PLAIN_SLACK_BYTES: Final = 1 << 12  # undelivered bytes that an idle unencrypted peer may have


class MemorySample(NamedTuple):
    """A reading of the process's memory.

    urgent: the process grows, so the next check follows soon. grown_bytes: growth since the last
    check.
    """

    now_s: float
    urgent: bool
    grown_bytes: int = 0


class Receiver(Protocol):
    """A socket that receives messages from peers."""

    def check_memory(self, sample: MemorySample) -> bool:
        """Cut peers that make the process hold too much; True if it must be called again soon."""


@dataclass(slots=True)
class ReceiveCounter:
    """Counts of the bytes that one connection received.

    The receiver writes ``messages`` and ``delivered_bytes``, the memory watch the rest.

    delivered_bytes: approximate bytes on the wire of the messages delivered. held_bytes: bytes
    received but not delivered; 0 if they may be mere overhead. new_bytes: bytes that ZeroMQ read
    since the last check. new_segments: segments that brought them. incomplete: a message has begun.
    incomplete_bytes, incomplete_segments: bytes and segments read since it began. overhead_bytes:
    memory charged to this connection for that message (`wire.io_memory`). shared_overhead_bytes:
    memory charged to all connections in that time.
    """

    encrypted: bool
    messages: int = 0
    delivered_bytes: int = 0
    held_bytes: int = 0
    new_bytes: int = 0
    new_segments: int = 0
    incomplete: bool = False
    incomplete_bytes: int = 0
    incomplete_segments: int = 0
    overhead_bytes: int = 0
    shared_overhead_bytes: int = 0
    _read: int = 0
    _segments: int = 0  # arrived when bytes were last read
    _drained_messages: int = 0  # this and the next two: counts when the queue was last empty
    _drained_delivered: int = 0
    _drained_received: int = 0
    _received: int = 0
    _unfinished: int = 0  # bytes of an incomplete message when the queue was last empty
    _drained_s: float = field(default_factory=time.monotonic)

    def add(self, size: int, frames: int) -> None:
        """Count a delivered message of this size."""
        self.messages += 1
        self.delivered_bytes += size + frames * _FRAME_BYTES[self.encrypted]

    def update(self, volume: Volume, sample: MemorySample, *, drained: bool) -> int:
        """Compute and return the held bytes; drained: the queue was empty since the last check."""
        delivered = self.delivered_bytes
        if drained and self.messages != self._drained_messages:
            self._drained_messages, self._drained_delivered = self.messages, delivered
            self._drained_received, self._drained_s = volume.received, sample.now_s
            self._start_message()
        heartbeats = int(_HEARTBEATS_BPS[self.encrypted] * (sample.now_s - self._drained_s))
        held = (
            volume.received
            - self._drained_received
            - (delivered - self._drained_delivered)
            - heartbeats
        )
        self._received = volume.received
        if drained:
            self._unfinished = max(0, held)
        self.held_bytes = held if held > SLACK_BYTES else 0
        self.incomplete = held > _PLAIN_SLACK_BYTES
        if not self.incomplete:
            self._start_message()
        self.new_bytes, self._read = (
            max(0, volume.read - self._read),
            max(self._read, volume.read),
        )
        self.new_segments = 0
        if self.new_bytes:
            self.new_segments, self._segments = volume.segments - self._segments, volume.segments
        self.incomplete_bytes += self.new_bytes
        self.incomplete_segments += self.new_segments
        return self.held_bytes

    @property
    def left_bytes(self) -> int:
        """Bytes of complete messages received by the last check and not delivered.

        An ended connection leaves these in the queue; ZeroMQ drops an incomplete message. Below 0:
        messages that arrived after that check were delivered.
        """
        unfinished = self._unfinished if self.messages == self._drained_messages else 0
        delivered = self.delivered_bytes - self._drained_delivered
        return self._received - self._drained_received - delivered - unfinished

    def _start_message(self) -> None:
        self.overhead_bytes = self.shared_overhead_bytes = 0
        self.incomplete_bytes = self.incomplete_segments = 0


class MemoryWatch:
    """The watching thread, which runs while there are receivers.

    It holds only weak references, so a socket that is dropped without `remove` is closed all the
    same.
    """

    def __init__(self) -> None:
        self._trimmer = MemoryTrimmer()
        self.reset()

    def reset(self) -> None:
        """Forget all receivers, as a forked child must: the thread exists in the parent only.

        The lock is replaced because the parent's thread may have held it at the fork.
        """
        self._watched: WeakSet[Receiver] = WeakSet()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, watched: Receiver) -> None:
        """Start checking a receiver."""
        with self._lock:
            self._watched.add(watched)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="memory-watch", daemon=True)
                self._thread.start()

    def remove(self, watched: Receiver) -> None:
        """Stop checking a receiver; when this returns, no check of it is running."""
        with self._lock:
            self._watched.discard(watched)

    def _run(self) -> None:
        baseline, next_s, urgent = resident_bytes(), 0.0, False
        while True:
            time.sleep(_GROWING_POLL_S if urgent else _POLL_S)
            now_s, resident = time.monotonic(), resident_bytes()
            baseline = min(baseline, resident)
            urgent = resident - baseline > _GROWTH_BYTES
            with self._lock:
                if not self._watched:
                    self._thread = None
                    return
                if urgent or now_s >= next_s:
                    sample = MemorySample(now_s, urgent, resident - baseline)
                    again = [_check(watched, sample) for watched in list(self._watched)]
                    baseline, next_s = resident, now_s if any(again) else now_s + _CHECK_S
            self._trimmer.trim_if_grown(resident, now_s)


def _check(watched: Receiver, sample: MemorySample) -> bool:
    """Check one receiver; log its errors, so that the others are still checked."""
    try:
        return watched.check_memory(sample)
    except Exception:
        _log.exception("the peers of a socket could not be checked")
        return False


class MemoryTrimmer:
    """A trimmer that returns freed memory to the system; the C library would keep it."""

    def __init__(self) -> None:
        self._least = self._after = 0
        self._pause_s, self._due_s = _TRIM_S[0], 0.0
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only in glibc

    def trim_if_grown(self, resident: int, now_s: float) -> None:
        """Trim if the process has grown and a trim is due."""
        if self._trim is None:
            return
        self._least = min(self._least or resident, resident)
        if resident - self._least < _MIN_TRIM_BYTES:
            return
        if resident - self._after > _MIN_TRIM_BYTES:
            self._pause_s = _TRIM_S[0]
            self._due_s = min(self._due_s, now_s + self._pause_s)
        if now_s >= self._due_s:
            self._trim(0)
            self._after = resident_bytes()
            useful = resident - self._after > _GROWTH_BYTES
            self._pause_s = _TRIM_S[0] if useful else min(2.0 * self._pause_s, _TRIM_S[1])
            self._due_s = now_s + self._pause_s


MEMORY_WATCH: Final = MemoryWatch()
os.register_at_fork(after_in_child=MEMORY_WATCH.reset)
