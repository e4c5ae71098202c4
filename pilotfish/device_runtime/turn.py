"""Turns at a `Device`: one conversation gives one answer at a time.

In:  calls from any thread. Out: a `DeviceTurn` per call, in the order of request, or an error.

A thread that has an answer open would wait for itself, so its next call gets an error at once.
After `close`, and in a process forked from the device's process, every call gets an error: the
sockets and the model's threads stay with the process that opened them.
"""

from __future__ import annotations

import gc
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from inspect import GEN_RUNNING, getgeneratorstate
from typing import TYPE_CHECKING, Literal

from pilotfish.base.errors import (
    DeviceClosedError,
    DeviceInUseError,
    InterruptedGenerationError,
)
from pilotfish.device_runtime.record import Generation, Piece

if TYPE_CHECKING:
    from typing_extensions import Self

_INTERRUPT_AGAIN_S = 0.1  # pause before the next interrupt, in case the answer had not begun
_CHECK_DROPPED_S = 1.0  # interval at which a waiting caller checks for a deleted stream

_collecting: set[int] = set()  # ids of threads that run the garbage collector now


def _note_collection(phase: Literal["start", "stop"], _: dict[str, int]) -> None:
    (_collecting.add if phase == "start" else _collecting.discard)(threading.get_ident())


gc.callbacks.append(_note_collection)


class DeviceTurn:
    """The right to use a device, from an answer's beginning to its end.

    pieces: generator of the answer. opener: thread that began the answer; reader: thread that took
    the last piece; running: thread that works on the answer now, None between two pieces. over: the
    answer has ended. dropped: the stream was deleted before its end.
    """

    def __init__(self) -> None:
        self.opener = self.reader = threading.current_thread()
        self.running: threading.Thread | None = None
        self.pieces: Generator[Piece, None, None] | None = None
        self.over = self.dropped = False


class DeviceTurns:
    """Grants turns in the order of request. Thread-safe."""

    def __init__(self) -> None:
        # Re-entrant: a caller that waits with this lock may end a dropped answer, which locks
        # again.
        self._changed = threading.Condition(threading.RLock())
        self._waiting: deque[DeviceTurn] = deque()
        self._present: DeviceTurn | None = None
        self._process = os.getpid()
        self._closed = self._ended = False

    @property
    def usable(self) -> bool:
        """Whether the device is open, and was opened by this process."""
        return not self._closed and not self._forked

    @property
    def _forked(self) -> bool:
        # check before locking: another thread may have held the lock at the fork
        return os.getpid() != self._process

    def check(self) -> None:
        """Raise `DeviceClosedError` unless the device is `usable`."""
        if self._forked:
            raise DeviceClosedError(
                "This process was forked from the process that opened the device, and cannot use "
                "that device: open a device in this process."
            )
        if self._closed:
            raise DeviceClosedError("The device is closed: open another one.")

    def take(self, turn: DeviceTurn) -> None:
        """Wait for a turn; the caller must pass the turn to `end`, even after an error.

        Raises `DeviceInUseError` if this thread has the present turn, and the errors of `check`.
        """
        self.check()
        with self._changed:
            try:
                self._waiting.append(turn)
                while self._present is not None or self._waiting[0] is not turn:
                    self.check()
                    if self._present is not None and self._present.dropped:
                        self.end(self._present)
                    else:
                        self._refuse_holder(turn.opener)
                        self._changed.wait(_CHECK_DROPPED_S)
                self.check()
                self._present = turn
            finally:
                self._forget(turn)

    def _forget(self, turn: DeviceTurn) -> None:
        """Remove a turn from the queue."""
        if turn in self._waiting:
            self._waiting.remove(turn)
        self._changed.notify_all()

    def _refuse_holder(self, thread: threading.Thread) -> None:
        present = self._present
        if present is not None and thread in (present.opener, present.reader):
            raise DeviceInUseError(
                "This thread has an open answer of the device, which must end first: read its "
                "stream to the end, or close() it. To generate several answers at once, create "
                "further devices with device.beside()."
            )

    @contextmanager
    def running(self, turn: DeviceTurn) -> Iterator[None]:
        """Mark the answer as running in the calling thread during the block."""
        self.check()
        thread = threading.current_thread()
        with self._changed:
            self.check()
            if turn.running is not None:
                raise DeviceInUseError(
                    "Another thread is reading the next piece of this stream: read a stream in "
                    "one thread at a time."
                )
            turn.running = turn.reader = thread
        try:
            yield
        except InterruptedGenerationError:
            if self._closed:
                raise DeviceClosedError("The device was closed before the answer's end.") from None
            raise
        finally:
            with self._changed:
                turn.running = None
                if self._closed:  # only `close` waits for this; callers in the queue wait for `end`
                    self._changed.notify_all()

    def end(self, turn: DeviceTurn) -> None:
        """End the answer if it has not ended, and free the device; for any thread.

        Raises `DeviceInUseError` while another thread works on the answer.
        """
        if self._forked:
            return
        with self._changed:
            self._forget(turn)
            if self._present is not turn:
                return
            thread = threading.current_thread()
            pieces = turn.pieces
            within = pieces is not None and getgeneratorstate(pieces) == GEN_RUNNING
            if turn.running not in (None, thread) or within:
                raise DeviceInUseError(
                    "Another thread, or the caller of this callback, is generating the stream's "
                    "next piece: interrupt() the device first."
                )
            turn.running = thread
        try:
            if turn.pieces is not None:
                turn.pieces.close()
        finally:
            with self._changed:
                turn.running, turn.over, self._present = None, True, None
                self._changed.notify_all()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Use the device for the block."""
        turn = DeviceTurn()
        try:
            self.take(turn)
            with self.running(turn):
                yield
        finally:
            self.end(turn)

    def close(self, interrupt: Callable[[], None]) -> bool:
        """Refuse all waiting and later calls, and end the present answer.

        Returns False if another call has already done so. interrupt: ends an answer that runs in
        another thread.
        """
        if self._forked:
            return False
        with self._changed:
            present = self._present
            if present is not None and present.running is threading.current_thread():
                raise DeviceInUseError(
                    "The thread that generates an answer cannot close the "
                    "device: interrupt() the device instead."
                )
            self._closed = True
            self._changed.notify_all()
            while present is not None and present.running is not None:
                interrupt()
                self._changed.wait(_INTERRUPT_AGAIN_S)
            if self._ended:
                return False
            self._ended = True
        if present is not None:
            self.end(present)
        return True


class AnswerStream(Iterator[Piece]):
    """Yields the pieces of an answer as they arrive; any thread may read, one at a time.

    The device is free again after the last piece, after `close`, at the end of a ``with``, or when
    the stream is deleted. generation: the whole answer once it has ended; None before.
    """

    def __init__(
        self, turns: DeviceTurns, turn: DeviceTurn, whole: Callable[[], Generation]
    ) -> None:
        self._turns, self._turn, self._last_answer = turns, turn, whole
        self.generation: Generation | None = None

    def __next__(self) -> Piece:
        if self.generation is not None:
            raise StopIteration
        with self._turns.running(self._turn):
            piece = None if self._turn.over else self._next()
        if piece is None:
            raise StopIteration
        return piece

    def _next(self) -> Piece | None:
        """Return the next piece; at the end, free the device and return None."""
        assert self._turn.pieces is not None
        try:
            piece = next(self._turn.pieces, None)
            if piece is None:
                self.generation = self._last_answer()
        except BaseException:
            self._turns.end(self._turn)
            raise
        if piece is None:
            self._turns.end(self._turn)
        return piece

    def close(self) -> None:
        """End the answer if it has not ended, and free the device; for any thread.

        Raises `DeviceInUseError` while another thread waits for a piece, and in a callback.
        """
        self._turns.end(self._turn)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not hasattr(self, "_turn"):
            return  # a Ctrl-C interrupted the constructor
        # The garbage collector may run in a thread that holds a lock which `end` needs. Then the
        # next caller of the device ends the answer.
        self._turn.dropped = True
        if threading.get_ident() not in _collecting:
            self._turns.end(self._turn)
