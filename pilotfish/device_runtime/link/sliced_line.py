"""A line over which large replies arrive in slices, on the device's request.

`link.reassembly` requests and assembles slices. `link.flow` limits the bytes in flight in each
direction.
"""

import logging

from pilotfish.device_runtime.link.flow import ChunkFlow
from pilotfish.device_runtime.link.line import Line, ReceivedReply
from pilotfish.device_runtime.link.reassembly import Reassembly
from pilotfish.device_runtime.link.retry import CancelToken
from pilotfish.wire.keys import DeviceKeys
from pilotfish.wire.link.liveness import Liveness
from pilotfish.wire.messages import Slice

_log = logging.getLogger("pilotfish.device")


class SlicedLine(Line):
    """A `Line` that returns only whole replies. uplink, downlink: the chunks in flight."""

    def __init__(self, endpoint: str, keys: DeviceKeys | None, interrupt: CancelToken) -> None:
        super().__init__(endpoint, keys, interrupt)
        self.uplink, self.downlink = ChunkFlow(), ChunkFlow()
        self._replies = Reassembly(self.downlink)
        self._warned = False

    def receive(self, timeout_s: float) -> ReceivedReply | None:
        """Return the next whole reply; see `Line.receive`."""
        if (ready := self._replies.next()) is None:
            arrived = super().receive(timeout_s)
            if arrived is None:
                return None
            if isinstance(arrived.reply, Slice):
                self.downlink.follow(self.connection)
                self._replies.take(arrived)
                self._request_chunks()
            else:  # on a new connection, `resume` requests the next slices
                self._replies.take(arrived)
            ready = self._replies.next()
        return ready

    def resume(self) -> None:
        """Continue an incomplete reply over the present connection."""
        self.downlink.follow(self.connection)
        self._replies.resume()
        self._request_chunks()

    def _request_chunks(self) -> None:
        """Request the next slices of a reply."""
        for more in self._replies.chunk_requests():
            self.try_send(more)

    def holds(self, connection: int) -> bool:
        """Whether this connection is the present one, and still open."""
        return self.channel.connected and self.connection == connection

    @property
    def _is_risky(self) -> bool:
        return self.uplink.tries_larger or self.downlink.tries_larger

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
