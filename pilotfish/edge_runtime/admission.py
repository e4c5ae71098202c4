"""Rate limits of each client: messages, time of the serving thread, and bytes of cheap replies.

Each client has three token buckets, in bounded memory. A client that is alone may use all the
thread's time. While cheap clients send messages too, the costly clients together get half of the
time, in equal parts; without cheap clients they share all of it. A message is charged in full after
it was served, and its client is refused until its debt is paid off. Bytes are charged only for
cheap replies: replies that need no target pass, including replies that are sent again.
"""

from collections import OrderedDict
from dataclasses import dataclass
from math import exp, inf

from pilotfish.base.errors import RateLimitedError

_CLIENTS = 1024  # upper limit of clients; the client that was silent longest is forgotten
_SHARE = 0.5  # share of the thread's time that all costly clients get if there are cheap clients
_BURST_S = 0.1  # thread time (s) that a client may use in a burst
_COSTLY_SHARE = 0.1  # share of the thread's time above which a client is costly
_REPLY_BURST = 16 << 20  # upper limit of a client's cheap replies in a burst (bytes)
_REPLY_BYTES_PER_S = 4 << 20  # upper limit of a client's cheap replies in the long run (bytes/s)
_RESERVED_SHARE = 0.5  # share of the message bucket that hints may not use
_PRESENT_S = 1.0  # time (s) after its last message during which a client counts as present
_COUNT_EVERY_S = 0.1  # interval (s) between counts of present and costly clients


@dataclass(slots=True)
class _Buckets:
    messages: float
    seconds: float
    bytes: float
    updated_s: float  # time of the last refill
    present_s: float  # time of the last message, on a clock that stops while messages are served
    others: int = 0  # number of other clients present at the last message
    used_s: float = 0.0  # recently used time of the serving thread; decays


class Admission:
    """Rate limiter of all clients; ``rate`` (messages/s of a client) may be changed."""

    def __init__(self, messages_per_s: float) -> None:
        self.rate = messages_per_s
        self._buckets: OrderedDict[bytes, _Buckets] = OrderedDict()  # latest active client last
        self._present: set[bytes] = set()  # clients with a message in the last `_PRESENT_S`
        self._costly: set[bytes] = set()  # present clients that are costly or owe time
        self._next_count_s = -inf  # time of the next count of both sets
        self._spent_s = 0.0  # thread time spent on all clients

    def admit(self, owner: bytes, now_s: float, *, optional: bool = False) -> None:
        """Count one message of ``owner``; raise `RateLimitedError` if it came too soon.

        optional: whether the message is a hint, which the owner can do without. Hints may not use
        the reserved share of the bucket.
        """
        present_s = now_s - self._spent_s
        self._count_clients(now_s, present_s)
        self._present.add(owner)
        others = len(self._present) - 1
        most = max(1.0, self.rate)
        buckets = self._buckets.pop(owner, None) or _Buckets(
            most, _BURST_S, _REPLY_BURST, now_s, present_s
        )
        self._buckets[owner] = buckets
        if len(self._buckets) > _CLIENTS:
            self._forget(now_s)
        gone_s = now_s - buckets.updated_s
        buckets.updated_s, buckets.present_s, buckets.others = now_s, present_s, others
        buckets.messages = min(most, buckets.messages + gone_s * self.rate)
        buckets.bytes = min(_REPLY_BURST, buckets.bytes + gone_s * _REPLY_BYTES_PER_S)
        buckets.seconds = min(_BURST_S, buckets.seconds + self._repaid_s(gone_s))
        if buckets.messages < 1.0 + (_RESERVED_SHARE * most if optional else 0.0):
            raise RateLimitedError("This client sends too many messages per second; slow down.")
        if buckets.seconds < 0.0 and others:
            raise RateLimitedError(
                "This key's messages take more time than its share while other clients wait; slow "
                "down."
            )
        buckets.messages -= 1.0

    def charge(self, owner: bytes, spent_s: float) -> None:
        """Charge processor time spent on a client's message, or on the verification of its windows.

        A client that is alone never owes more than the time of one message, since it delays no
        other client.
        """
        self._spent_s += spent_s
        buckets = self._buckets.get(owner)
        if buckets is not None:
            buckets.used_s += spent_s
            left_s = buckets.seconds - spent_s
            if not buckets.others:
                left_s = max(left_s, min(buckets.seconds, -spent_s))
            buckets.seconds = left_s

    def over_budget(self, owner: bytes, now_s: float) -> bool:
        """Return whether a client owes time while others are present; its jobs then wait."""
        buckets = self._buckets.get(owner)
        if buckets is None or buckets.seconds >= 0.0:
            return False
        self._count_clients(now_s, now_s - self._spent_s)
        if buckets.seconds + self._repaid_s(now_s - buckets.updated_s) >= 0.0:
            return False
        return not self._present <= {owner}

    def _repaid_s(self, gone_s: float) -> float:
        """Return the debt (s of thread time) that a client pays off in ``gone_s`` seconds."""
        share = _SHARE if len(self._present) > len(self._costly) else 1.0
        return gone_s * share / max(1, len(self._costly))

    def may_send(self, owner: bytes) -> bool:
        """Return whether an admitted client has bytes left for a cheap reply."""
        buckets = self._buckets.get(owner)
        return buckets is None or buckets.bytes >= 0.0

    def charge_bytes(self, owner: bytes, size: int) -> None:
        """Charge ``size`` bytes of a cheap reply to a client."""
        buckets = self._buckets.get(owner)
        if buckets is not None:
            buckets.bytes -= size

    def _count_clients(self, now_s: float, present_s: float) -> None:
        """Update the sets of present and of costly clients, once every `_COUNT_EVERY_S`."""
        if now_s >= self._next_count_s:
            decay = exp((self._next_count_s - _COUNT_EVERY_S - now_s) / _PRESENT_S)
            self._next_count_s = now_s + _COUNT_EVERY_S
            self._present.clear()
            self._costly.clear()
            for client, buckets in self._buckets.items():
                if present_s - buckets.present_s < _PRESENT_S:
                    self._present.add(client)
                    if buckets.used_s > _COSTLY_SHARE * _PRESENT_S or buckets.seconds < 0.0:
                        self._costly.add(client)
                buckets.used_s *= decay

    def _forget(self, now_s: float) -> None:
        """Forget the client that was silent longest; prefer clients without debt."""
        clients = (
            client
            for client, buckets in self._buckets.items()
            if buckets.seconds + (now_s - buckets.updated_s) * _SHARE / _CLIENTS >= 0.0
        )
        client = next(clients, next(iter(self._buckets)))
        del self._buckets[client]
