"""The socket to the edge, which may be exchanged for one to another address at any time.

One thread sends and receives. Others may ask whether the line is up, have it lead elsewhere, or
strike the interrupt; none of them waits for more than a moment, and none is waited for.
"""

import threading
from collections.abc import Sequence

import zmq

from pilotfish.device_runtime.link.gauge import Connection
from pilotfish.device_runtime.link.loss import Interrupt
from pilotfish.wire.channel import Channel
from pilotfish.wire.keys import DeviceKeys
from pilotfish.wire.link.tcp import Segments
from pilotfish.wire.messages import Buffer, Reply, Request

_SLICE_S = 0.1  # after so long a wait looks up: was it interrupted, does the line lead elsewhere?
_REPLY_BYTES = 16 * 1024 * 1024  # of one reply; the longest, of `dssd`, have one at most


class Line:
    """A `Channel` and its successors. Raises UnsupportedError for an address that is none."""

    def __init__(self, endpoint: str, keys: DeviceKeys | None, interrupt: Interrupt) -> None:
        self._keys = keys
        self._interrupt = interrupt
        self._sockets = 1
        self._turn = threading.Lock()  # to use the channel; a ZeroMQ socket is one thread's a time
        self._mail = threading.Lock()  # to leave or take the next one
        self._next: tuple[Channel, DeviceKeys | None] | None = None
        self._closed = False
        self.channel = Channel(endpoint, keys, _REPLY_BYTES)

    @property
    def connected(self) -> bool:
        """Was there a connection when somebody last looked?"""
        return self.channel.connected

    @property
    def connection(self) -> Connection:
        """The present connection, or the last one."""
        return Connection(self._sockets, self.channel.connections)

    @property
    def encrypted(self) -> bool:
        """Are there keys?"""
        return self._keys is not None

    def send(self, message: Request, frames: Sequence[Buffer] = ()) -> int | None:
        """Hand a message to ZeroMQ; returns its bytes, or None if there is no connection.

        That there is none may be known here before the news of it has come, which `connected` is.
        """
        with self._turn:
            if self._closed:
                return None
            try:
                return self.channel.send(message, frames)
            except zmq.Again:
                return None

    def receive(self, timeout_s: float) -> tuple[Reply, list[Buffer], int] | None:
        """The next message, its frames and bytes; None after a while or a change of the link.

        The while may be shorter than ``timeout_s``. Raises `InterruptedGenerationError`.
        """
        self._interrupt.check()
        with self._turn:
            if self._follow():
                return None
            return self.channel.receive(min(timeout_s, _SLICE_S))

    def await_news(self, seconds: float) -> None:
        """Give the news of the connection a moment to come. Raises as `receive` does."""
        self._interrupt.sleep(seconds)
        self.catch_up()

    def catch_up(self) -> None:
        """Take note of what has become of the connection, without waiting."""
        with self._turn:
            self._follow()
            self.channel.catch_up()

    def up(self) -> bool:
        """Is there a connection? For any thread."""
        # whoever waits on the channel just now takes note by itself
        if self._turn.acquire(blocking=False):
            try:
                if self._closed:
                    return False
                self._follow()
                self.channel.catch_up()
            finally:
                self._turn.release()
        return self.channel.connected

    def segments(self) -> Segments | None:
        """What the kernel knows of the connection; None where it knows nothing."""
        return self.channel.segments()

    def lead_to(self, endpoint: str, keys: DeviceKeys | None) -> None:
        """From now on the edge is there. For any thread; keys None: those that there are."""
        keys = keys or self._keys
        channel = Channel(endpoint, keys, _REPLY_BYTES)
        with self._mail:
            if self._closed:
                unread: Channel | None = channel
            else:
                unread = self._next[0] if self._next else None
                self._next = channel, keys
        if unread is not None:
            unread.close(0)

    def begin_again(self) -> None:
        """A new socket to the same address: ZeroMQ gives one up that was refused."""
        with self._mail:
            if self._next is None:
                channel = Channel(self.channel.endpoint, self._keys, _REPLY_BYTES)
                self._next = channel, self._keys

    def _follow(self) -> bool:
        """Take the next channel, if one was left; only in one's turn."""
        if self._next is None:
            return False
        with self._mail:
            (channel, self._keys), self._next = self._next, None
        before, self.channel = self.channel, channel
        self._sockets += 1
        before.close(0)
        return True

    def close(self) -> None:
        """Hang up."""
        with self._turn, self._mail:
            self._closed = True
            self.channel.close()
            if self._next is not None:
                self._next[0].close(0)
                self._next = None
