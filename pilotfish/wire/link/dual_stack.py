"""Which IP family an attempt to connect to a name uses.

ZeroMQ looks a name up at each attempt, in one family: IPv4 only, or with ``ZMQ_IPV6`` its first
IPv6 address, and its IPv4 address where it has no other. So the families take turns.
"""

import math
import time
from urllib.parse import urlsplit

from pilotfish.wire.address import literal_address

_PAUSE_S = (0.1, 1.0)  # after both families have failed, doubling


class DualStack:
    """The family of one socket's attempts; IPv4 comes first. It stays where it led to a connection.

    ipv6: of the present attempt. An address that is no name has its own family, and never turns.
    """

    def __init__(self, endpoint: str) -> None:
        host = (urlsplit(endpoint).hostname or "") if endpoint.startswith("tcp:") else ""
        self._named = bool(host) and literal_address(host) is None
        self.ipv6 = "[" in endpoint
        self._due_s = math.inf
        self._pause_s = _PAUSE_S[0]
        self._other_failed = False  # the other family did, just before this one

    def connected(self) -> None:
        """Note that the present family leads somewhere."""
        self._due_s, self._pause_s, self._other_failed = math.inf, _PAUSE_S[0], False

    def failed(self) -> None:
        """Note that the attempt came to no connection, and ZeroMQ would go on in its family."""
        if not self._named or self._due_s < math.inf:
            return
        now_s = time.monotonic()
        if self._other_failed:
            self._due_s = now_s + self._pause_s
            self._pause_s = min(2 * self._pause_s, _PAUSE_S[1])
        else:
            self._due_s = now_s
        self._other_failed = not self._other_failed

    @property
    def due(self) -> bool:
        """Whether the other family ought to be tried now."""
        return time.monotonic() >= self._due_s

    @property
    def pauses(self) -> bool:
        """Whether both families have failed, and the next attempt is not due yet."""
        return time.monotonic() < self._due_s < math.inf

    def switch_family(self) -> bool:
        """Return whether the attempt that begins now uses IPv6: the other family if one failed."""
        if self._due_s < math.inf:
            self._due_s, self.ipv6 = math.inf, not self.ipv6
        return self.ipv6
