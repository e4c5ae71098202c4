"""Charge unencrypted peers for the memory that ZeroMQ takes for their frames.

A frame costs ZeroMQ at least 64 bytes, and up to 8 KiB if it arrives alone. Without encryption an
empty frame has two bytes on the wire, so memory may be 32 to 230 times the bytes that the kernel
counts. (CURVE adds 35 bytes to each frame; there memory is at most 4 times the bytes, and a bound
on bytes suffices.) ZeroMQ does not report how many frames of a message it holds. But one thread of
a ZeroMQ context reads all its connections, and for each thread the kernel counts the pages that it
touches for the first time (minor faults). If that thread touches more memory than the bytes that it
read explain, the rest is charged to the connections that it read. A large frame takes only its own
size, whatever segments bring it. So the connections with the smallest TCP segments are charged
first, each with at most a buffer for each segment. What these buffers do not explain is charged to
all in proportion to the most memory that each may have caused: what its bytes take as tiny frames,
and the buffers.
Model passes, grammars and a device's models do not disturb the count: other threads run them.
"""

import os
from collections.abc import Collection
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Final

import zmq

from pilotfish.wire.memory_watch import ReceiveCounter

_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_TASKS: Final = Path("/proc/self/task")
_MINFLT_FIELD = 7  # index of minflt among the fields after the name in a thread's `stat`
_CONTEXT_NUMBERS = count(1)  # numbers for the names of the contexts' threads
_EXPLAINED_PER_BYTE = 4  # bytes of memory that one byte read explains
_MAX_MEMORY_PER_BYTE = 32  # bytes of memory that one byte of tiny frames takes
# ZeroMQ reads into a buffer of this size (bytes), which even one small frame keeps. A read takes a
# segment or more, so there are at most as many buffers as segments, besides full ones.
_BUFFER_BYTES = 8192
# A connection that was cut explains no charge of one whose bytes take more than this factor times
# as much memory as its own bytes. With full segments of any network the factor is under 1.5.
_MAX_MEMORY_RATIO = 2
# Maximum memory (bytes) that is explained by bytes read, but that the thread touches only later.
_MAX_CREDIT_BYTES = 8 << 20
# If a connection ended, its last bytes are unknown, and it may have caused the touched memory. So
# the open connections are charged only 1/8 of that memory.
_ENDED_DIVISOR = 8
MAX_OVERHEAD_BYTES: Final = 8 << 20  # maximum memory of one message; a connection with more is cut


class IoThread:
    """The I/O thread of a ZeroMQ context, which has one; it reads all the context's connections.

    Create this object before the context's first socket.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        if not context.get(zmq.THREAD_NAME_PREFIX):
            context.set(zmq.THREAD_NAME_PREFIX, next(_CONTEXT_NUMBERS) % 1_000_000)
        self._name = f"{context.get(zmq.THREAD_NAME_PREFIX)}/ZMQbg/IO"
        self._stat = ""

    def touched_bytes(self) -> int | None:
        """Return the bytes of pages that the thread has touched so far; None: unknown."""
        if not self._stat:
            self._stat = self._find_stat()
        with suppress(OSError, IndexError, ValueError):
            descriptor = os.open(self._stat, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fields = os.read(descriptor, 512).rpartition(b")")[2].split()
                return int(fields[_MINFLT_FIELD]) * _PAGE_BYTES
            finally:
                os.close(descriptor)
        return None

    def _find_stat(self) -> str:
        with suppress(OSError):
            for task in _TASKS.iterdir():
                with suppress(OSError):  # the thread has ended
                    if (task / "comm").read_text("utf-8", "replace").startswith(self._name):
                        return str(task / "stat")
        return ""


class OverheadMeter:
    """A meter of a context's unexplained memory; charges that memory to its connections."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self._thread = IoThread(context)
        self._touched_bytes: int | None = None
        self._unexplained_bytes = 0  # negative: bytes explained but not touched yet

    def measure(self) -> None:
        """Read how much memory was touched; call it before the connections' bytes are counted."""
        touched, before = self._thread.touched_bytes(), self._touched_bytes
        # drop the bytes that could be charged to no connection
        self._unexplained_bytes = min(self._unexplained_bytes, 0)
        if touched is not None and before is not None:
            self._unexplained_bytes += touched - before
        self._touched_bytes = touched

    def charge(
        self, counters: Collection[ReceiveCounter], *, connection_ended: bool = False
    ) -> None:
        """Charge the unexplained bytes to these connections.

        Those with the smallest segments are charged first, and the rest is charged in proportion to
        the most memory that each may have caused.
        connection_ended: a connection has ended since the last call.
        """
        read = sum(each.new_bytes for each in counters)
        self._unexplained_bytes -= _EXPLAINED_PER_BYTE * read
        if self._unexplained_bytes > 0:
            charge = self._unexplained_bytes // (_ENDED_DIVISOR if connection_ended else 1)
            _charge_by_most_memory(counters, _charge_buffers(counters, charge))
            for each in counters:
                each.shared_overhead_bytes += self._unexplained_bytes
            self._unexplained_bytes = 0
        self._unexplained_bytes = max(self._unexplained_bytes, -_MAX_CREDIT_BYTES)


def _charge_buffers(counters: Collection[ReceiveCounter], charge: int) -> int:
    """Charge connections for the buffers of their segments, and return what is left to charge.

    The connections with the smallest segments come first. None is charged more than a buffer for
    each segment, less the memory that its bytes explain.
    """
    reading = [each for each in counters if each.new_bytes and each.incomplete]
    for each in sorted(reading, key=lambda each: each.new_bytes / max(1, each.new_segments)):
        buffers = _BUFFER_BYTES * each.new_segments - _EXPLAINED_PER_BYTE * each.new_bytes
        part = min(charge, max(0, buffers))
        each.overhead_bytes += part
        charge -= part
    return charge


def _charge_by_most_memory(counters: Collection[ReceiveCounter], charge: int) -> None:
    """Charge connections in proportion to the most memory that each may have caused.

    A connection without an incomplete message has a part too, but is not charged.
    """
    shares = [_most_memory(each.new_bytes, each.new_segments) for each in counters]
    total = sum(shares)
    for each, share in zip(counters, shares, strict=True):
        if share and each.incomplete:
            each.overhead_bytes += charge * share // total


def clear_overhead(cut: Collection[ReceiveCounter], others: Collection[ReceiveCounter]) -> None:
    """Reduce the charges of ``others`` by the memory that the ``cut`` connections can explain.

    Connections with large segments do not explain what those with far smaller ones are charged.
    """
    shared = max(1, *(each.shared_overhead_bytes for each in cut))
    for other in others:
        ratio = _memory_ratio(other) / _MAX_MEMORY_RATIO
        able = [each for each in cut if _memory_ratio(each) >= ratio]
        most = sum(_most_memory(each.incomplete_bytes, each.incomplete_segments) for each in able)
        other.overhead_bytes = int(max(0.0, 1.0 - most / shared) * other.overhead_bytes)


def _memory_ratio(counter: ReceiveCounter) -> float:
    """Return the maximum memory that an incomplete message takes for each of its bytes."""
    read_bytes = max(1, counter.incomplete_bytes)
    return _most_memory(read_bytes, counter.incomplete_segments) / read_bytes


def _most_memory(read_bytes: int, segments: int) -> int:
    """Return the maximum memory (bytes) that frames of ``read_bytes`` in ``segments`` take."""
    return _MAX_MEMORY_PER_BYTE * read_bytes + _BUFFER_BYTES * segments
