"""How many messages a client may send: a token bucket per client, in bounded memory."""

from collections import OrderedDict

_CLIENTS = 1024  # the longest silent is forgotten beyond these, which fills its bucket again


class Admission:
    """Counts the messages of each client against its rate, which may be changed at any time."""

    def __init__(self, messages_per_s: float) -> None:
        self.rate = messages_per_s
        self._buckets: OrderedDict[bytes, tuple[float, float]] = OrderedDict()  # (tokens, at)

    def admit(self, owner: bytes, now_s: float) -> bool:
        """Take one message of ``owner`` into account; False when it came too fast."""
        most = max(1.0, self.rate)
        tokens, at = self._buckets.pop(owner, (most, now_s))
        tokens = min(most, tokens + (now_s - at) * self.rate)
        admitted = tokens >= 1.0
        self._buckets[owner] = (tokens - 1.0 if admitted else tokens, now_s)
        if len(self._buckets) > _CLIENTS:
            self._buckets.popitem(last=False)
        return admitted
