"""The socket to the edge; a redirect may at any time replace it by a socket to another address.

One thread sends and receives. Other threads may read the connection's state, redirect the line or
cancel. They do so at once, and never block the first thread.
"""

import os
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import zmq

from pilotfish.device_runtime.link.absence import LinkPhase
from pilotfish.device_runtime.link.connectivity import Connectivity, LinkStatus, unconnected_state
from pilotfish.device_runtime.link.retry import CancelToken
from pilotfish.device_runtime.link.second_connection import SecondConnection
from pilotfish.wire.channel import EdgeChannel
from pilotfish.wire.keys import DeviceKeys
from pilotfish.wire.link.attempts import ConnectFailure
from pilotfish.wire.link.diagnosis import AddressState, Diagnosis
from pilotfish.wire.link.liveness import Liveness
from pilotfish.wire.messages import Buffer, DeviceMessage, Reply

SLICE_S = 0.1  # longest wait between checks for a cancellation or a redirect
REPLY_BYTES = 16 * 1024 * 1024  # maximum bytes of a reply; the longest replies (`dssd`) have 1 MB
# Seconds after which a quiet connection is closed if nobody waits for it.
_MAX_QUIET_S = 30.0
# a wait that is longer than planned by this time shows that this process was suspended
_STALL_S = 0.15


class ReceivedReply(NamedTuple):
    """A reply, its frames and size. sliced: it came in slices, so its time measures nothing."""

    reply: Reply
    frames: list[Buffer]
    size: int
    sliced: bool = False


class Line:
    """The present `EdgeChannel`, then its successors; raises `UnsupportedError` for a bad address.

    While the present connection is quiet, the line tries a second one.
    """

    def __init__(self, endpoint: str, keys: DeviceKeys | None, interrupt: CancelToken) -> None:
        self.channel = self._dial(endpoint, keys)
        self._diagnosis = Diagnosis(endpoint)
        self._keys = keys
        self._cancel_token = interrupt
        self._channel_lock = threading.Lock()  # held while a thread uses the channel
        self._next_lock = threading.Lock()  # held to set or take the next channel
        self._next: tuple[EdgeChannel, DeviceKeys | None] | None = None
        self._closed = False
        self._process = os.getpid()  # process that owns the sockets; a fork cannot use them
        self._second = SecondConnection(lambda: self._dial(self.channel.endpoint, self._keys))

    @staticmethod
    def _dial(endpoint: str, keys: DeviceKeys | None) -> EdgeChannel:
        return EdgeChannel(endpoint, keys, REPLY_BYTES, _MAX_QUIET_S)

    @property
    def is_connected(self) -> bool:
        """Whether there is a live connection."""
        return self.channel.connected and not self.channel.quiet

    @property
    def connection(self) -> int:
        """Number of the present or last connection; never 0."""
        return self.channel.connection

    def try_send(self, message: DeviceMessage, frames: Sequence[Buffer] = ()) -> int | None:
        """Hand a message to ZeroMQ; returns its size, or None if there is no connection.

        ZeroMQ may notice a lost connection before `channel.connected` is False.
        """
        if os.getpid() != self._process:
            return None
        with self._channel_lock:
            if self._closed:
                return None
            try:
                return self.channel.send(message, frames)
            except zmq.Again:
                return None

    def receive(self, timeout_s: float) -> ReceivedReply | None:
        """Return the next message with its frames and size; None after a time-out or a change.

        The time-out is ``timeout_s`` or shorter. Raises `InterruptedGenerationError`.
        """
        self._cancel_token.check()
        with self._channel_lock:
            if self._take_next():
                return None
            arrived = self.channel.receive(min(timeout_s, SLICE_S))
            if arrived is None:
                self._try_second()
                return None
            return ReceivedReply(*arrived)

    def refresh(self) -> None:
        """Update the connection's state without waiting."""
        with self._channel_lock:
            self._take_next()
            self.channel.read_events()
            self._try_second()

    def is_up(self) -> bool:
        """Whether there is a live connection. For any thread."""
        # if the lock is taken, the thread that waits on the channel updates the state
        if self._channel_lock.acquire(blocking=False):
            try:
                if self._closed:
                    return False
                self._take_next()
                self.channel.read_events()
                self._try_second()
            finally:
                self._channel_lock.release()
        return self.is_connected

    def redirect(self, endpoint: str, keys: DeviceKeys | None) -> None:
        """Use another address from now on; keys None: keep the keys. For any thread."""
        keys = keys or self._keys
        channel = self._dial(endpoint, keys)
        with self._next_lock:
            if self._closed:
                unused: EdgeChannel | None = channel
            else:
                unused = self._next[0] if self._next else None
                self._next = channel, keys
        if unused is not None:
            unused.close(0)

    def unconnected_state(self) -> Connectivity:
        """Return why there is no connection, and start a diagnosis. For any thread."""
        attempts, diagnosis = self.channel.attempts, self._diagnosis
        if attempts.failure in (ConnectFailure.CONNECT, ConnectFailure.CLOSED):
            diagnosis.poll()
        finding = diagnosis.state
        keys = self._keys is not None
        attempts.wrong_key = keys and finding is AddressState.CURVE
        was_welcomed = self.channel.connections > 0
        return unconnected_state(attempts, finding, keys=keys, was_welcomed=was_welcomed)

    def status_of(self, state: Connectivity) -> LinkStatus:
        """Return the link's status for this state. For any thread."""
        return LinkStatus.from_state(state, self.channel.endpoint, keys=self._keys is not None)

    def retry(self) -> None:
        """Try to connect soon, since something has changed. For any thread."""
        self._diagnosis.probe_now()
        self.channel.attempts.retry_now()

    def _take_next(self) -> bool:
        """Switch to the next channel; False if there is none. The caller holds `_channel_lock`."""
        if self._next is None:
            return False
        with self._next_lock:
            (channel, self._keys), self._next = self._next, None
        before, self.channel = self.channel, channel
        self._diagnosis = Diagnosis(channel.endpoint)
        before.close(0)
        self._second.drop()
        return True

    def _try_second(self) -> None:
        """Try a second connection if the present one is quiet. The caller holds `_channel_lock`."""
        if self._closed:
            return
        better = self._second.replacement(self.channel, at_once=self._is_risky)
        if better is not None:
            before, self.channel = self.channel, better
            liveness = before.liveness()
            if liveness is not None:
                self._on_stall(liveness)
            before.close(0)

    @property
    def _is_risky(self) -> bool:
        """Whether a test of larger chunks may have stalled the connection forever."""
        return False

    def _on_stall(self, liveness: Liveness) -> None:
        """Handle a connection that was dropped because it stalled."""

    def _phase(self, *, in_doubt: bool) -> LinkPhase:
        """Return the link's phase; in_doubt: nothing has crossed since the edge was away."""
        channel, liveness = self.channel, self.channel.liveness()
        if not channel.connected:
            progresses = liveness is not None and liveness.progresses
        elif liveness is None:  # no TCP: a socket of this machine
            return LinkPhase.IDLE
        elif not (liveness.quiet or (in_doubt and liveness.overdue)):
            return LinkPhase.CARRYING if liveness.transfers else LinkPhase.IDLE
        elif liveness.blocked and not self._second.is_connected:
            return LinkPhase.BLOCKED
        else:
            progresses = self._second.is_handshaking
        return LinkPhase.CONNECTING if progresses else LinkPhase.AWAY

    def close(self) -> None:
        """Close the socket."""
        with self._channel_lock, self._next_lock:
            self._closed = True
            self._second.drop()
            self.channel.close()
            if self._next is not None:
                self._next[0].close(0)
                self._next = None


def stalled_s(since_s: float) -> float:
    """Return the seconds for which this process was suspended in a wait of `SLICE_S`."""
    excess_s = time.monotonic() - since_s - SLICE_S
    return excess_s if excess_s > _STALL_S else 0.0
