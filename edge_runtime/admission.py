"""Limit each client's messages a second and its share of the loop's time.

Each client has two buckets, in bounded memory. A client that is alone may use all the time; time
beyond its share counts against it as soon as another client sends messages.
"""

from collections import OrderedDict
from dataclasses import dataclass

from pilotfish.wire.errors import RateLimitedError

_CLIENTS = 1024  # most clients; beyond these the one silent longest is forgotten
_SHARE = 0.5  # of the loop's time, for one client, while others send messages
_AT_ONCE_S = 0.1  # of the loop's time that a client may use in a burst, and owe afterwards
_SPARE = 0.5  # of a second's messages, which hints leave to requests
_WANTED_S = 1.0  # after its last message, during which another client counts as present


@dataclass(slots=True)
class _Buckets:
    messages: float
    seconds: float
    at_s: float  # when they were looked at


class Admission:
    """Counts each client's messages and their time; the rate may be changed at any time."""

    def __init__(self, messages_per_s: float) -> None:
        self.rate = messages_per_s
        self._buckets: OrderedDict[bytes, _Buckets] = OrderedDict()
        self._speaking = b""  # the client of the last message, and the time of another's last one
        self._another_s = self._spoke_s = -_WANTED_S

    def admit(self, owner: bytes, now_s: float, *, spared: bool = False) -> None:
        """Count one message of ``owner``; `RateLimitedError` if it came too soon.

        spared: it can be done without, and so must not use up what others of the owner's need.
        """
        if owner != self._speaking:
            self._speaking, self._another_s = owner, self._spoke_s
        self._spoke_s = now_s
        most = max(1.0, self.rate)
        buckets = self._buckets.pop(owner, None) or _Buckets(most, _AT_ONCE_S, now_s)
        self._buckets[owner] = buckets
        if len(self._buckets) > _CLIENTS:
            self._buckets.popitem(last=False)
        gone_s = now_s - buckets.at_s
        buckets.at_s = now_s
        buckets.messages = min(most, buckets.messages + gone_s * self.rate)
        buckets.seconds = min(_AT_ONCE_S, buckets.seconds + gone_s * _SHARE)
        if buckets.messages < 1.0 + (_SPARE * most if spared else 0.0):
            raise RateLimitedError("Too many messages in this second; slow down.")
        if buckets.seconds < 0.0 and now_s - self._another_s < _WANTED_S:
            raise RateLimitedError(
                "These messages cost more time than one key may take while others wait; slow down."
            )
        buckets.messages -= 1.0

    def charge(self, owner: bytes, spent_s: float) -> None:
        """Count the time spent on an admitted message."""
        buckets = self._buckets.get(owner)
        if buckets is not None:
            buckets.seconds = max(-_AT_ONCE_S, buckets.seconds - spent_s)
