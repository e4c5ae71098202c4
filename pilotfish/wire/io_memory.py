"""The memory that ZeroMQ takes for what peers send without encryption, charged to these peers.

A frame costs ZeroMQ 64 bytes at least, and up to 8 KiB if it comes alone: without encryption, where
it has two bytes on the wire, 32 to 230 times what the kernel counts. (CURVE adds 35 bytes to each
frame: there memory is 4 times the bytes at most, so that their number alone bounds it.) ZeroMQ
tells nobody how many frames it holds of a message. But one thread of its context reads all that
arrives, and the kernel counts the pages that each thread has touched for the first time. What those
of this thread are beyond the bytes that it read is charged to the connections that they came from,
in proportion. What passes, grammars or a device's models take, other threads touch.
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
_MINFLT_FIELD = 7  # among the fields of a thread's `stat`, behind its name: minflt
_CONTEXT_NUMBERS = count(1)  # of contexts, which name their threads; a name has 15 characters
_EXPLAINED_PER_BYTE = 4  # bytes of memory that a byte read explains
_MAX_MEMORY_PER_BYTE = 32  # bytes of memory that a byte of tiny frames takes
# What may be touched after the bytes for it were counted.
_MAX_CREDIT_BYTES = 8 << 20
# Of what was touched while a connection ended, whose last bytes nobody knows, one part in so many
# is charged to the others.
_ENDED_DIVISOR = 8
MAX_OVERHEAD_BYTES: Final = 8 << 20  # for one message; a connection that is charged more is cut


class IoThread:
    """The thread in which a context, of one such thread, reads its connections.

    Make it before the context's first socket.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        if not context.get(zmq.THREAD_NAME_PREFIX):
            context.set(zmq.THREAD_NAME_PREFIX, next(_CONTEXT_NUMBERS) % 1_000_000)
        self._name = f"{context.get(zmq.THREAD_NAME_PREFIX)}/ZMQbg/IO"
        self._stat = ""

    def touched_bytes(self) -> int | None:
        """Count the bytes of the pages that it has touched for the first time.

        None where the system does not say.
        """
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
                with suppress(OSError):  # a thread that has ended
                    if (task / "comm").read_text("utf-8", "replace").startswith(self._name):
                        return str(task / "stat")
        return ""


class OverheadMeter:
    """Charges the growth of one context's memory to the connections that its thread reads."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self._thread = IoThread(context)
        self._touched_bytes: int | None = None
        self._unexplained_bytes = (
            0  # touched and not explained; below 0: explained and not touched yet
        )

    def measure(self) -> None:
        """Note what was touched since the last call; before the connections' bytes are counted."""
        touched, then = self._thread.touched_bytes(), self._touched_bytes
        self._unexplained_bytes = min(
            self._unexplained_bytes, 0
        )  # what nobody was there to be charged
        if touched is not None and then is not None:
            self._unexplained_bytes += touched - then
        self._touched_bytes = touched

    def charge(
        self, counters: Collection[ReceiveCounter], *, connection_ended: bool = False
    ) -> None:
        """Charge it to what was read by now; left: a connection ended since the last call."""
        read = sum(each.new_bytes for each in counters)
        self._unexplained_bytes -= _EXPLAINED_PER_BYTE * read
        if self._unexplained_bytes > 0:
            parts = read * (_ENDED_DIVISOR if connection_ended else 1)
            for each in counters:
                if each.new_bytes and each.incomplete:
                    each.overhead_bytes += self._unexplained_bytes * each.new_bytes // parts
                each.shared_overhead_bytes += self._unexplained_bytes
            self._unexplained_bytes = 0
        self._unexplained_bytes = max(self._unexplained_bytes, -_MAX_CREDIT_BYTES)


def clear_overhead(cut: Collection[ReceiveCounter], others: Collection[ReceiveCounter]) -> None:
    """Take back what others were charged as far as those that were cut suffice to explain it."""
    most = _MAX_MEMORY_PER_BYTE * sum(each.incomplete_bytes for each in cut)
    rest = max(0.0, 1.0 - most / max(1, *(each.shared_overhead_bytes for each in cut)))
    for each in others:
        each.overhead_bytes = int(rest * each.overhead_bytes)
