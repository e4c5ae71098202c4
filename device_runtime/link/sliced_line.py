"""A line over which large replies come in slices, as far as the device asks for them.

What asks and what puts them together is `link.reassembly`; how many bytes are under way, either
way, is `link.flow`.
"""

from pilotfish.device_runtime.link.flow import SEGMENT_BYTES, Flow
from pilotfish.device_runtime.link.line import Arrival, Line
from pilotfish.device_runtime.link.loss import Interrupt
from pilotfish.device_runtime.link.reassembly import Reassembly
from pilotfish.wire.keys import DeviceKeys


class SlicedLine(Line):
    """A `Line` that hands out whole replies only. uplink, downlink: what is under way."""

    def __init__(self, endpoint: str, keys: DeviceKeys | None, interrupt: Interrupt) -> None:
        super().__init__(endpoint, keys, interrupt)
        self.uplink, self.downlink = Flow(), Flow()
        self._replies = Reassembly(self.downlink)

    def receive(self, timeout_s: float) -> Arrival | None:
        """As `Line.receive`; a reply that comes in slices only once it is whole."""
        if (ready := self._replies.next()) is None:
            arrived = super().receive(timeout_s)
            if arrived is None:
                return None
            self.downlink.follow(self.connection)
            self._replies.take(arrived)
            self._ask_on()
            ready = self._replies.next()
        return ready

    def resume(self) -> None:
        """Go on with a reply that came in part, over the present connection."""
        self.downlink.follow(self.connection)
        self._replies.resume()
        self._ask_on()

    def _ask_on(self) -> None:
        """Ask for more of a reply that comes in slices."""
        for more in self._replies.questions():
            self.try_send(more)

    def holds(self, connection: int) -> bool:
        """Whether this connection is the present one, and not over."""
        return self.channel.connected and self.connection == connection

    def _stood_still(self, outstanding: int) -> None:
        """Learn from a connection that was given up, on which so many bytes had not arrived.

        Where all had, the edge's replies have not.
        """
        if outstanding > SEGMENT_BYTES:
            self.uplink.stood_still()
        elif not outstanding:
            self.downlink.stood_still()
