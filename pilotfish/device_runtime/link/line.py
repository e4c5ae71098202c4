"""The socket to the edge; a redirect may at any time replace it by a socket to another address.

One thread sends and receives. Other threads may read the connection's state, redirect the line or
cancel. They do so at once, and never block the first thread.

A quiet connection may recover (after a cellular outage), or be dead (if the device has another
address now). So the device keeps it, tries a second one, and uses the connection that makes
progress first.

Large replies arrive in slices, on the device's request: `link.reassembly` requests and assembles
them, and `link.flow` limits the bytes in flight in each direction.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence

import zmq

from pilotfish.device_runtime.link.connectivity import Connectivity, LinkStatus, unconnected_state
from pilotfish.device_runtime.link.flow import ChunkFlow
from pilotfish.device_runtime.link.reassembly import REPLY_BYTES, Reassembly, ReceivedReply
from pilotfish.device_runtime.link.retry import CancelToken, LinkPhase, backoff
from pilotfish.wire.channel import EdgeChannel
from pilotfish.wire.keys import DeviceKeys
from pilotfish.wire.link.attempts import ConnectFailure
from pilotfish.wire.link.diagnosis import AddressState, Diagnosis
from pilotfish.wire.link.liveness import Liveness
from pilotfish.wire.messages import Buffer, DeviceMessage, Slice

_log = logging.getLogger("pilotfish.device")

SLICE_S = 0.1  # longest wait between checks for a cancellation or a redirect
# Seconds after which a quiet connection is closed if nobody waits for it.
_MAX_QUIET_S = 30.0
# a wait that is longer than planned by this time shows that this process was suspended
_STALL_S = 0.15
# Seconds that the quiet connection has to recover once the second one is connected: both kernels
# retransmit within a second.
_GRACE_S = 1.1


class SecondConnection:
    """At most one second connection. dial: begins to connect a new channel."""

    def __init__(self, dial: Callable[[], EdgeChannel]) -> None:
        self._dial = dial
        self._channel: EdgeChannel | None = None
        self._connected_s: float | None = None  # time at which it was connected
        self._pauses = backoff()  # seconds between attempts
        self._next_try_s = 0.0  # earliest time of the next attempt

    @property
    def is_connected(self) -> bool:
        """Whether the second connection is connected."""
        return self._channel is not None and self._channel.connected

    @property
    def is_handshaking(self) -> bool:
        """Whether the second connection's handshake makes progress."""
        if self._channel is None or self._channel.connected:
            return False
        liveness = self._channel.liveness()
        return liveness is not None and liveness.progresses

    def replacement(
        self, present: EdgeChannel, *, at_once: Callable[[], bool]
    ) -> EdgeChannel | None:
        """Return a better channel than the present one, if there is one.

        at_once: returns whether not to wait for the present channel to recover.
        """
        if self._channel is None:
            if present.quiet and time.monotonic() >= self._next_try_s:
                self._next_try_s = time.monotonic() + next(self._pauses)
                self._connected_s, self._channel = None, self._dial()
            return None
        if present.connected and not present.quiet:
            self.drop()
            return None
        self._channel.read_events()
        if not self._is_better(self._channel, present, at_once=at_once):
            return None
        _log.info("the connection to the edge has stalled: using another connection")
        better, self._channel = self._channel, None
        return better

    def _is_better(
        self, second: EdgeChannel, present: EdgeChannel, *, at_once: Callable[[], bool]
    ) -> bool:
        if not second.connected:
            self._connected_s = None
            return second.attempts.refuses_key  # the edge revoked the key: report it
        if not present.connected or at_once():
            return True
        if second.local_host != present.local_host:
            return True  # this machine is on another network now
        self._connected_s = self._connected_s or time.monotonic()
        return time.monotonic() - self._connected_s >= _GRACE_S

    def on_progress(self) -> None:
        """Reset the pauses: the present connection works, so a later attempt need not wait."""
        if self._next_try_s:
            self._pauses, self._next_try_s = backoff(), 0.0

    def drop(self) -> None:
        """Close the second connection, if there is one."""
        if self._channel is not None:
            self._channel.close(0)
            self._channel = None


class Line:
    """The present `EdgeChannel`, then its successors; raises `UnsupportedError` for a bad address.

    While the present connection is quiet, the line tries a second one. uplink, downlink: the chunks
    in flight.
    """

    def __init__(self, endpoint: str, keys: DeviceKeys | None, interrupt: CancelToken) -> None:
        self.channel = self._dial(endpoint, keys)
        self._diagnosis = Diagnosis(endpoint)
        self._keys = keys
        self._cancel_token = interrupt
        self._channel_lock = threading.Lock()  # held while a thread uses the channel
        self._next_lock = threading.Lock()  # held to set or take the next channel
        self._next: tuple[EdgeChannel, DeviceKeys | None] | None = None
        self._arrived_s = time.monotonic()  # when the last message came, or the line was made
        self._closed = False
        self._process = os.getpid()  # process that owns the sockets; a fork cannot use them
        self._second = SecondConnection(lambda: self._dial(self.channel.endpoint, self._keys))
        self.uplink, self.downlink = ChunkFlow(), ChunkFlow()
        self._replies = Reassembly(self.downlink)
        self._warned = False  # the log names the loss of large segments

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

    def holds(self, connection: int) -> bool:
        """Whether this connection is the present one, and still open."""
        return self.channel.connected and self.connection == connection

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
        """Return the next whole reply; None after a time-out, a slice or a change of the link.

        The time-out is ``timeout_s`` or shorter. Raises `InterruptedGenerationError`.
        """
        replies = self._replies
        if replies.has_begun and (ready := replies.next()) is not None:
            return ready
        if (arrived := self._receive_message(timeout_s)) is None:
            return None
        if isinstance(arrived.reply, Slice):
            self.downlink.follow(self.connection)
            replies.take(arrived)
            self._request_chunks()
        elif replies.has_begun:  # on a new connection, `resume` requests the next slices
            replies.take(arrived)
        else:
            return arrived
        return replies.next()

    def _receive_message(self, timeout_s: float) -> ReceivedReply | None:
        """Return the next message, which may be a slice; None: see `receive`."""
        self._cancel_token.check()
        with self._channel_lock:
            if self._take_next():
                return None
            arrived = self.channel.receive(min(timeout_s, SLICE_S))
            if arrived is None:
                self._try_second()
                return None
            self._arrived_s = time.monotonic()
            return ReceivedReply(*arrived)

    @property
    def silent_s(self) -> float:
        """Seconds since the last message came, of any connection."""
        return time.monotonic() - self._arrived_s

    def resume(self) -> None:
        """Continue an incomplete reply over the present connection."""
        self.downlink.follow(self.connection)
        self._replies.resume()
        self._request_chunks()

    def _request_chunks(self) -> None:
        """Request the next slices of a reply."""
        for more in self._replies.chunk_requests():
            self.try_send(more)

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
        # a test of larger chunks may have stalled the connection forever
        better = self._second.replacement(
            self.channel, at_once=lambda: self.uplink.tries_larger or self.downlink.tries_larger
        )
        if better is not None:
            before, self.channel = self.channel, better
            liveness = before.liveness()
            if liveness is not None:
                self._on_stall(liveness)
            before.close(0)

    def _on_stall(self, liveness: Liveness) -> None:
        """Infer from a stalled connection whether the path loses large segments.

        The path may lose large segments if one direction works and the other does not. A broken
        path loses all segments.
        """
        if liveness.only_receives:
            self.uplink.on_stall()
        elif liveness.only_sends:
            self.downlink.on_stall()
        if not self._warned and max(self.uplink.large_lost, self.downlink.large_lost):
            self._warned = True
            _log.warning(
                "large TCP segments are lost on the way to %s or back, so messages are sent in "
                "small segments, which is slow. Set "
                "`sysctl net.ipv4.tcp_mtu_probing=1` on both machines, or a smaller MTU",
                self.channel.endpoint,
            )

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
