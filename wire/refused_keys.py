"""Log which keys an edge refuses, whose they were, and what lets them in.

A device whose key is not on the list tries again for ever, and strangers may try without end: each
key is logged when it comes, and later on with the number of its attempts in between.
"""

import logging
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping

_log = logging.getLogger("pilotfish.wire")

_AGAIN_S = 600.0  # between two lines about one key
_BETWEEN_S = 1.0  # between any two
_MOST = 1024  # keys that are remembered; beyond these the one silent longest is forgotten


class RefusedKeys:
    """Counts refused handshakes. by_name: of keys that have been on the list, by their names."""

    def __init__(self) -> None:
        self.total = 0
        self.by_name: Counter[str] = Counter()
        self._names: dict[bytes, str] = {}  # of all keys that have been on the list
        self._met: OrderedDict[bytes, tuple[float, int]] = OrderedDict()  # logged when; since then
        self._logged_s = -math.inf

    def learn(self, allowed: Collection[bytes]) -> None:
        """Remember the names of a list of keys, if it has names."""
        if isinstance(allowed, Mapping):
            self._names.update(allowed)

    def note(self, key: bytes, peer: str) -> None:
        """Count a handshake with this key (in Z85; b"": it had none) from this address."""
        self.total += 1
        name = self._names.get(key, "")
        if name:
            self.by_name[name] += 1
        now_s = time.monotonic()
        logged_s, unlogged = self._met.pop(key, (-math.inf, 0))
        if now_s - logged_s >= _AGAIN_S and now_s - self._logged_s >= _BETWEEN_S:
            self._logged_s = logged_s = now_s
            _log.warning("%s", _sentence(key, name, peer, unlogged))
            unlogged = -1
        self._met[key] = logged_s, unlogged + 1
        if len(self._met) > _MOST:
            self._met.popitem(last=False)


def _sentence(key: bytes, name: str, peer: str, before: int) -> str:
    whose = f", which was {name!r} on the list," if name else ""
    times = f", and {before} times before," if before else ""
    return (
        f"refused key {key.decode()}{whose} from {peer}{times}: to let it in, run `pilotfish keys "
        f"allow device.pub --name {name or 'NAME'}` with that device's device.pub and the edge's "
        "--keys, and reload the edge"
    )
