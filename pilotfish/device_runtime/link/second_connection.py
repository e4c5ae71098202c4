"""A second connection to the same edge, tried while the present one is quiet.

A quiet connection may recover (after a cellular outage), or be dead (if the device has another
address now). So the device keeps it, tries a second one, and uses the connection that makes
progress first.
"""

import logging
import time
from collections.abc import Callable

from pilotfish.device_runtime.link.retry import backoff
from pilotfish.wire.channel import EdgeChannel

_log = logging.getLogger("pilotfish.device")

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

    def replacement(self, present: EdgeChannel, *, at_once: bool = False) -> EdgeChannel | None:
        """Return a better channel than the present one, if there is one.

        at_once: do not wait for the present channel to recover.
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

    def _is_better(self, second: EdgeChannel, present: EdgeChannel, *, at_once: bool) -> bool:
        if not second.connected:
            self._connected_s = None
            return second.attempts.refuses_key  # the edge revoked the key: report it
        if at_once or not present.connected:
            return True
        if second.local_host != present.local_host:
            return True  # this machine is on another network now
        self._connected_s = self._connected_s or time.monotonic()
        return time.monotonic() - self._connected_s >= _GRACE_S

    def on_progress(self) -> None:
        """Reset the pauses: the present connection works, so a later attempt need not wait."""
        self._pauses, self._next_try_s = backoff(), 0.0

    def drop(self) -> None:
        """Close the second connection, if there is one."""
        if self._channel is not None:
            self._channel.close(0)
            self._channel = None
