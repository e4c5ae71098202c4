"""Rate limits of each client: messages, time of the serving thread, and bytes of cheap replies.

Each client has three token buckets, in bounded memory. A client that is alone may use all the time.
While cheap clients send messages too, all costly clients together get half of the time, in equal
parts; with no cheap ones they share all of it. A message is charged in full after it was served,
and its client is refused until the debt is paid off. Replies that a pass computed are not charged
in bytes; repeated replies, and replies about the target itself, are.
"""

from collections import OrderedDict
from dataclasses import dataclass
from math import exp, inf

from pilotfish.base.errors import RateLimitedError

_CLIENTS = 1024  # most clients; a new one then replaces the one that was silent longest
_SHARE = 0.5  # share of the thread's time for all costly clients while there are cheap ones
_BURST_S = 0.1  # thread time that a client may use in a burst
_COSTLY_SHARE = 0.1  # a client that uses more of the thread's time is costly
_REPLY_BURST = 16 << 20  # bytes of cheap replies in a burst
_REPLY_BYTES_PER_S = 4 << 20  # bytes of cheap replies, sustained
_RESERVED_SHARE = 0.5  # share of the message bucket that hints must leave to requests
_PRESENT_S = 1.0  # a client counts as present this long after its last message
_COUNT_EVERY_S = 0.1  # interval of counting present and costly clients


@dataclass(slots=True)
class _Buckets:
    messages: float
    seconds: float
    bytes: float
    updated_s: float  # last refill
    present_s: float  # last message, by a clock that stops while messages are served
    others: int = 0  # other clients present at the last message
    used_s: float = 0.0  # recent time of the serving thread, decaying


class Admission:
    """Rate limiter over all clients. ``rate``, messages/s of a client, may be changed."""

    def __init__(self, messages_per_s: float) -> None:
        self.rate = messages_per_s
        self._buckets: OrderedDict[bytes, _Buckets] = OrderedDict()  # most recently active last
        self._present: set[bytes] = set()  # clients that sent messages lately
        self._costly: set[bytes] = set()  # present clients with costly messages
        self._next_count_s = -inf  # when to count them again
        self._spent_s = 0.0  # time spent serving all clients

    def admit(self, owner: bytes, now_s: float, *, optional: bool = False) -> None:
        """Count one message of ``owner``; `RateLimitedError` if it came too soon.

        optional: the owner can do without this message, so it may not use the reserved share.
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
            raise RateLimitedError("Too many messages in this second; slow down.")
        if buckets.seconds < 0.0 and others:
            raise RateLimitedError(
                "These messages cost more time than one key may take while others wait; slow down."
            )
        buckets.messages -= 1.0

    def charge(self, owner: bytes, spent_s: float) -> None:
        """Charge processor time spent on a client's message, or on verifying its windows.

        A client that is alone never owes for more than one message, since it delays nobody.
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
        """Whether a client owes time while others are present, so that its work can wait."""
        buckets = self._buckets.get(owner)
        if buckets is None or buckets.seconds >= 0.0:
            return False
        self._count_clients(now_s, now_s - self._spent_s)
        if buckets.seconds + self._repaid_s(now_s - buckets.updated_s) >= 0.0:
            return False
        return not self._present <= {owner}

    def _repaid_s(self, gone_s: float) -> float:
        """Return the debt that a client pays off in ``gone_s`` seconds."""
        share = _SHARE if len(self._present) > len(self._costly) else 1.0
        return gone_s * share / max(1, len(self._costly))

    def may_send(self, owner: bytes) -> bool:
        """Whether an admitted client has bytes left for a cheap reply."""
        buckets = self._buckets.get(owner)
        return buckets is None or buckets.bytes >= 0.0

    def charge_bytes(self, owner: bytes, size: int) -> None:
        """Charge the bytes of a cheap reply."""
        buckets = self._buckets.get(owner)
        if buckets is not None:
            buckets.bytes -= size

    def _count_clients(self, now_s: float, present_s: float) -> None:
        """Update the sets of present and of costly clients, every `_COUNT_EVERY_S`."""
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
        """Forget the client that was silent longest, preferably one without debt."""
        clients = (
            client
            for client, buckets in self._buckets.items()
            if buckets.seconds + (now_s - buckets.updated_s) * _SHARE / _CLIENTS >= 0.0
        )
        client = next(clients, next(iter(self._buckets)))
        del self._buckets[client]
