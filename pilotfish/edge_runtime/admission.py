"""Limit each client's messages a second, its share of the serving thread's time, and the bytes that
it is sent without a pass.

Each client has three buckets, in bounded memory. A client that is alone may use all the time. While
others send messages, too, those that cost much can have half of it, in equal parts, and all of it
if there are no others: what a message costs is owed whole, however much it is, and its client is
refused until it is paid. Bytes likewise: what a pass has made is paid by that; but what only
repeats it, or tells of the target, is not.
"""

from collections import OrderedDict
from dataclasses import dataclass
from math import exp, inf

from pilotfish.base.errors import RateLimitedError

_CLIENTS = 1024  # most clients; beyond these the one silent longest is forgotten
_SHARE = 0.5  # of the serving thread's time, for all costly clients together beside others
_BURST_S = 0.1  # of its time that a client may use in a burst
_COSTLY_SHARE = 0.1  # of its time, with which a client is one of the costly
_REPLY_BURST = 16 << 20  # bytes of replies without a pass, in a burst
_REPLY_BYTES_PER_S = 4 << 20  # and a second
_RESERVED_SHARE = 0.5  # of a second's messages, which hints leave to requests
_PRESENT_S = 1.0  # after its last message, during which another client counts as present
_COUNT_EVERY_S = 0.1  # how often those are counted


@dataclass(slots=True)
class _Buckets:
    messages: float
    seconds: float
    bytes: float
    updated_s: float  # when they were looked at
    present_s: float  # likewise, by a clock that stops while messages and rules are worked on
    others: int = 0  # other clients that sent messages then
    used_s: float = 0.0  # of the serving thread's time lately: what is older counts for less


class Admission:
    """Counts each client's messages and their time; the rate may be changed at any time."""

    def __init__(self, messages_per_s: float) -> None:
        self.rate = messages_per_s
        self._buckets: OrderedDict[bytes, _Buckets] = OrderedDict()  # the last to speak is last
        self._present: set[bytes] = set()  # the clients that have sent messages lately
        self._costly: set[bytes] = set()  # those of them whose messages cost much
        self._next_count_s = -inf  # when they are counted again
        self._spent_s = 0.0  # on all clients: meanwhile nobody was heard

    def admit(self, owner: bytes, now_s: float, *, optional: bool = False) -> None:
        """Count one message of ``owner``; `RateLimitedError` if it came too soon.

        spared: it can be done without, and so must not use up what others of the owner's need.
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
        """Count the processor's time spent on a client's message, or on a rule of its rounds.

        A client that is alone then owes for one message at most: nobody waited for the others.
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
        """Whether a client owes time, while others send messages: what it waits for can wait."""
        buckets = self._buckets.get(owner)
        if buckets is None or buckets.seconds >= 0.0:
            return False
        self._count_clients(now_s, now_s - self._spent_s)
        if buckets.seconds + self._repaid_s(now_s - buckets.updated_s) >= 0.0:
            return False
        return not self._present <= {owner}

    def _repaid_s(self, gone_s: float) -> float:
        """Return what a client's debt is less by, after so many seconds."""
        share = _SHARE if len(self._present) > len(self._costly) else 1.0
        return gone_s * share / max(1, len(self._costly))

    def may_send(self, owner: bytes) -> bool:
        """Whether an admitted client may be sent a reply that no pass has made."""
        buckets = self._buckets.get(owner)
        return buckets is None or buckets.bytes >= 0.0

    def charge_bytes(self, owner: bytes, size: int) -> None:
        """Count the bytes of such a reply."""
        buckets = self._buckets.get(owner)
        if buckets is not None:
            buckets.bytes -= size

    def _count_clients(self, now_s: float, present_s: float) -> None:
        """Look now and then who has sent messages lately, and whose cost much."""
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
        """Forget the client that is silent longest, of those that owe nothing if there are some."""
        clients = (
            client
            for client, buckets in self._buckets.items()
            if buckets.seconds + (now_s - buckets.updated_s) * _SHARE / _CLIENTS >= 0.0
        )
        client = next(clients, next(iter(self._buckets)))
        del self._buckets[client]
