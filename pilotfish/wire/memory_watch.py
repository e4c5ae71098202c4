"""Watch the memory that peers make this process hold, in a thread for all its sockets.

ZeroMQ reads whatever a peer sends: it bounds the length of a frame, not the number of a message's
frames, nor that of waiting messages (`wire.transport` says why). A thread that computes or sleeps
cannot check that. So every `Receiver` is checked four times a second, and within 20 ms while the
process grows, by comparing the kernel's count of received bytes with the bytes of the messages that
were handed out. Freed memory is returned to the system.
"""

import ctypes
import logging
import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol
from weakref import WeakSet

from pilotfish.wire.link.tcp import Volume

_log = logging.getLogger("pilotfish.wire")

# Seconds between checks: while the process is stable, while it grows; and of peers in any case.
_POLL_S, _GROWING_POLL_S, _CHECK_S = 0.02, 0.005, 0.25
_GROWTH_BYTES: Final = 4 << 20  # of the process, above which peers are checked at once
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_MIN_TRIM_BYTES: Final = 16 << 20  # less free memory than this is not returned
_TRIM_S = (0.1, 60.0)  # between two attempts: doubling while they free nothing

SLACK_BYTES: Final = 1 << 16  # overhead of a message: encryption, framing, the handshake
_HEARTBEATS_BPS = {False: 80.0, True: 400.0}  # bytes a second of an idle peer's; encrypted
_FRAME_BYTES = {False: 9, True: 42}  # a frame's overhead on the wire; encrypted
_PLAIN_SLACK_BYTES: Final = 1 << 12  # what is left of an idle peer's bytes; not encrypted


class MemorySample(NamedTuple):
    """When it is looked, and whether the process grows: then it is looked again soon.

    grown: bytes by which it grew since the last look.
    """

    now_s: float
    urgent: bool
    grown_bytes: int = 0


class Receiver(Protocol):
    """A socket that receives from peers."""

    def check_memory(self, sample: MemorySample) -> bool:
        """Cut peers that make the process hold too much; True if it must be called again soon."""


@dataclass(slots=True)
class ReceiveCounter:
    """Counts what one connection sent.

    The receiver writes ``messages`` and ``handed``, the watch the rest. handed: bytes of these
    messages on the wire, about; held: bytes received and not handed out, if more than the usual
    overhead; fresh: bytes that ZeroMQ read since the last look; under_way: a message has begun;
    since: bytes read from then on; charged: memory that ZeroMQ took for it beyond what its bytes
    explain; beside: such memory of all connections in the same time (`wire.io_memory`).
    """

    encrypted: bool
    messages: int = 0
    delivered_bytes: int = 0
    held_bytes: int = 0
    new_bytes: int = 0
    incomplete: bool = False
    incomplete_bytes: int = 0
    overhead_bytes: int = 0
    shared_overhead_bytes: int = 0
    _read: int = 0
    _drained_messages: int = 0  # when all messages were last seen handed out
    _drained_delivered: int = 0
    _drained_received: int = 0
    _received: int = 0
    _unfinished: int = 0  # bytes that were no complete messages when all were handed out
    _drained_s: float = field(default_factory=time.monotonic)

    def add(self, size: int, frames: int) -> None:
        """Note that a message of this size was handed out."""
        self.messages += 1
        self.delivered_bytes += size + frames * _FRAME_BYTES[self.encrypted]

    def update(self, volume: Volume, sample: MemorySample, *, drained: bool) -> int:
        """Compute the held bytes; drained: all messages were handed out since the last check."""
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
        self.incomplete_bytes += self.new_bytes
        return self.held_bytes

    @property
    def left_bytes(self) -> int:
        """Bytes of messages that were received by the last look and not handed out.

        An ended connection leaves these: of an unfinished message nothing remains. Below 0: of what
        came later some was handed out.
        """
        unfinished = self._unfinished if self.messages == self._drained_messages else 0
        delivered = self.delivered_bytes - self._drained_delivered
        return self._received - self._drained_received - delivered - unfinished

    def _start_message(self) -> None:
        self.overhead_bytes = self.shared_overhead_bytes = self.incomplete_bytes = 0


class MemoryWatch:
    """The thread, which runs while there is something to watch.

    It holds weak references only: a socket that is dropped without `leave` is closed all the same.
    """

    def __init__(self) -> None:
        self._trimmer = MemoryTrimmer()
        self.reset()

    def reset(self) -> None:
        """Watch nothing: a forked child has neither the thread nor a use for its parent's sockets.

        The lock is new, too, for at the fork the thread may have held the old one.
        """
        self._watched: WeakSet[Receiver] = WeakSet()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, watched: Receiver) -> None:
        """Start to check a receiver."""
        with self._lock:
            self._watched.add(watched)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="memory-watch", daemon=True)
                self._thread.start()

    def remove(self, watched: Receiver) -> None:
        """Stop to check a receiver; when this returns, no check of it is running."""
        with self._lock:
            self._watched.discard(watched)

    def _run(self) -> None:
        baseline, next_s, urgent = _resident_bytes(), 0.0, False
        while True:
            time.sleep(_GROWING_POLL_S if urgent else _POLL_S)
            now_s, resident = time.monotonic(), _resident_bytes()
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
    """Check one receiver; an error at one leaves the others checked."""
    try:
        return watched.check_memory(sample)
    except Exception:
        _log.exception("the peers of a socket could not be checked")
        return False


class MemoryTrimmer:
    """Returns freed memory to the system, which the C library would keep."""

    def __init__(self) -> None:
        self._least = self._after = 0
        self._pause_s, self._due_s = _TRIM_S[0], 0.0
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone

    def trim_if_grown(self, resident: int, now_s: float) -> None:
        """Trim if the process has grown and may have memory to return."""
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
            self._after = _resident_bytes()
            useful = resident - self._after > _GROWTH_BYTES
            self._pause_s = _TRIM_S[0] if useful else min(2.0 * self._pause_s, _TRIM_S[1])
            self._due_s = now_s + self._pause_s


def _resident_bytes() -> int:
    """Return the process's resident bytes; 0 where the system does not say."""
    with suppress(OSError, IndexError, ValueError):
        descriptor = os.open(
            "/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC
        )  # a quarter of Path's time
        try:
            return int(os.read(descriptor, 64).split()[1]) * _PAGE_BYTES
        finally:
            os.close(descriptor)
    return 0


MEMORY_WATCH: Final = MemoryWatch()
os.register_at_fork(after_in_child=MEMORY_WATCH.reset)
