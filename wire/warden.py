"""What peers make this process hold is looked at by a thread of its own, for all sockets alike.

ZeroMQ reads whatever a peer sends: it bounds the length of a frame, not the number of a message's
frames, and the number of messages that wait, not their bytes. A thread that computes, or sleeps,
cannot see to that. So every `Receiver` is looked at four times a second, and within 20 ms where the
process grows; what it compares is the kernel's count of the bytes received with those of
the messages that were handed out. Memory that is free again goes back to the system.
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

_log = logging.getLogger("pilotfish.wire")

# How often the process is looked at: while it is still, while it grows; and its peers in any case.
_LOOK_S, _SOON_S, _ANYWAY_S = 0.02, 0.005, 0.25
_GROWTH: Final = 4 << 20  # of the process, from which peers are looked at without delay
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_KEPT: Final = 16 << 20  # so much of free memory is not worth giving back
_TRIM_S = (0.1, 60.0)  # between two attempts to: doubling while they are of no use

SLACK_BYTES: Final = 1 << 16  # of a message: what encryption and framing add, and the handshake
_HEARTBEATS_BPS = 400.0  # bytes a second of an idle peer's heartbeats, which are no message
_FRAME_BYTES = {False: 9, True: 42}  # what a frame has on the wire besides; encrypted
# A message takes about as much memory as it has bytes, but one of tiny frames 40 times as much: so
# much may the process grow while one is under way, and so many times the bytes of it.
_GROWN, _TIMES = 8 << 20, 4


class Glance(NamedTuple):
    """One look. resident: bytes that the process holds; urgent: it grows."""

    resident: int
    now_s: float
    urgent: bool


class Receiver(Protocol):
    """A socket to which peers send."""

    def weigh(self, look: Glance) -> bool:
        """Cut peers that make the process hold too much; True if it must be done again soon."""


@dataclass(slots=True)
class Intake:
    """What one connection brought. The receiver writes ``messages`` and ``handed``, the warden the
    rest.

    handed: bytes of these messages on the wire, about; hoarded: bytes that were received and not
    handed out, where these are worth a thought.
    """

    messages: int = 0
    handed: int = 0
    hoarded: int = 0
    _messages_then: int = 0  # when a message was last seen to have been the last one there
    _handed_then: int = 0
    _received_then: int = 0
    _resident_then: int = 0
    _since_s: float = field(default_factory=time.monotonic)
    _swollen: int = 0  # looks in a row

    def took(self, size: int, frames: int, encrypted: bool) -> None:
        """A message of so many bytes and frames was handed out."""
        self.messages += 1
        self.handed += size + frames * _FRAME_BYTES[encrypted]

    def weigh(self, received: int, look: Glance, *, drained: bool) -> int:
        """Bytes that are hoarded; drained: since the last look all messages were handed out."""
        handed = self.handed
        if not self._resident_then:
            self._resident_then = look.resident
        if drained and self.messages != self._messages_then:
            self._messages_then, self._handed_then = self.messages, handed
            self._received_then, self._since_s = received, look.now_s
            self._resident_then = look.resident
        heartbeats = int(_HEARTBEATS_BPS * (look.now_s - self._since_s))
        hoarded = received - self._received_then - (handed - self._handed_then) - heartbeats
        self.hoarded = hoarded if hoarded > SLACK_BYTES else 0
        return self.hoarded

    def swollen(self, look: Glance, total: int) -> bool:
        """The process grows, and has under this message as for far more than ``total`` bytes.

        Asked at every look: what takes memory for itself, and once, grows at one of them alone.
        """
        grown = look.resident - self._resident_then
        beyond = look.urgent and self.hoarded > 0 and grown > _GROWN + _TIMES * total
        self._swollen = self._swollen + 1 if beyond else 0
        return self._swollen > 1


class Warden:
    """The thread, which runs while there is something to watch.

    It keeps nothing alive: a socket that is dropped without `leave` is closed, as any other is.
    """

    def __init__(self) -> None:
        self._watched: WeakSet[Receiver] = WeakSet()
        self._turn = threading.Lock()
        self._thread: threading.Thread | None = None
        self._free = Trimmer()

    def join(self, watched: Receiver) -> None:
        """Glance at it from now on."""
        with self._turn:
            self._watched.add(watched)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="warden", daemon=True)
                self._thread.start()

    def leave(self, watched: Receiver) -> None:
        """Glance at it no more; after this returns it is not being looked at."""
        with self._turn:
            self._watched.discard(watched)

    def _run(self) -> None:
        then, next_s, urgent = _resident(), 0.0, False
        while True:
            time.sleep(_SOON_S if urgent else _LOOK_S)
            now_s, resident = time.monotonic(), _resident()
            then = min(then, resident)
            urgent = resident - then > _GROWTH
            with self._turn:
                if not self._watched:
                    self._thread = None
                    return
                if urgent or now_s >= next_s:
                    look = Glance(resident, now_s, urgent)
                    soon = [_weighed(watched, look) for watched in list(self._watched)]
                    then, next_s = resident, now_s if any(soon) else now_s + _ANYWAY_S
            self._free.look(resident, now_s)


def _weighed(watched: Receiver, look: Glance) -> bool:
    """Have it weigh its peers; what fails at one socket leaves the others their bounds."""
    try:
        return watched.weigh(look)
    except Exception:
        _log.exception("the peers of a socket could not be weighed")
        return False


class Trimmer:
    """Gives memory back that is free, which the C library would keep for later."""

    def __init__(self) -> None:
        self._least = self._after = 0
        self._pause_s, self._due_s = _TRIM_S[0], 0.0
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone

    def look(self, resident: int, now_s: float) -> None:
        """Do so if the process has grown and may have something to give."""
        if self._trim is None:
            return
        self._least = min(self._least or resident, resident)
        if resident - self._least < _KEPT:
            return
        if resident - self._after > _KEPT:
            self._pause_s = _TRIM_S[0]
            self._due_s = min(self._due_s, now_s + self._pause_s)
        if now_s >= self._due_s:
            self._trim(0)
            self._after = _resident()
            useful = resident - self._after > _GROWTH
            self._pause_s = _TRIM_S[0] if useful else min(2.0 * self._pause_s, _TRIM_S[1])
            self._due_s = now_s + self._pause_s


def _resident() -> int:
    """Bytes of memory that the process holds; 0 where the system does not say."""
    with suppress(OSError, IndexError, ValueError):
        descriptor = os.open(
            "/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC
        )  # a quarter of Path's time
        try:
            return int(os.read(descriptor, 64).split()[1]) * _PAGE_BYTES
        finally:
            os.close(descriptor)
    return 0


WARDEN: Final = Warden()
