"""Log which keys an edge refuses, whose they were, and what lets them in.

A device whose key is not on the list tries again for ever, and strangers may try without end: each
key is logged when it comes, and later on with the number of its attempts in between.
"""

import logging
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping
from shlex import quote

_log = logging.getLogger("pilotfish.wire")

_REPEAT_S = 600.0  # between two lines about one key
_MIN_PAUSE_S = 1.0  # between any two
_MAX_PAUSE_S = 60.0  # between any two of strangers, in the end: doubling while there is another one
_MAX_STRANGERS = (
    1024  # strangers' keys that are remembered; beyond, the one silent longest is forgotten
)


class _KeyLog:
    """Which keys of a kind were logged when, and how often they have come since.

    most_s: how rare its lines become.
    """

    def __init__(self, max_pause_s: float) -> None:
        self._max_pause_s = max_pause_s
        self._entries: OrderedDict[bytes, tuple[float, int]] = OrderedDict()
        self._logged_s, self._pause_s = -math.inf, _MIN_PAUSE_S

    def __len__(self) -> int:
        return len(self._entries)

    def note(self, key: bytes, name: str, peer: str, most: int) -> None:
        """Log a key if it is time for that; of ``most`` keys the rest is forgotten."""
        now_s = time.monotonic()
        logged_s, unlogged = self._entries.pop(key, (-math.inf, 0))
        since_s = now_s - self._logged_s
        if now_s - logged_s >= _REPEAT_S and since_s >= self._pause_s:
            calm = since_s >= _REPEAT_S
            self._pause_s = _MIN_PAUSE_S if calm else min(2 * self._pause_s, self._max_pause_s)
            self._logged_s = logged_s = now_s
            _log.warning("%s", _sentence(key, name, peer, unlogged))
            unlogged = -1
        self._entries[key] = logged_s, unlogged + 1
        if len(self._entries) > most:
            self._entries.popitem(last=False)


class RefusedKeys:
    """Counts refused handshakes. by_name: of keys that have been on the list, by their names.

    Strangers, who may come with endless keys, hide none of these in the log.
    """

    def __init__(self) -> None:
        self.total = 0
        self.by_name: Counter[str] = Counter()
        self._names: dict[bytes, str] = {}  # of all keys that have been on the list
        self._known, self._strangers = _KeyLog(_MIN_PAUSE_S), _KeyLog(_MAX_PAUSE_S)

    def add_names(self, allowed: Collection[bytes]) -> None:
        """Remember the names of a list of keys, if it has names."""
        if isinstance(allowed, Mapping):
            self._names.update(allowed)

    def note(self, key: bytes, peer: str, *, listed: bool = False) -> None:
        """Count a handshake with this key (in Z85; b"": it had none) from this address.

        listed: it is on the list, and shut out for a while; that is logged by whoever does it.
        """
        self.total += 1
        name = self._names.get(key, "")
        if name:
            self.by_name[name] += 1
        if listed:
            return
        if name:
            self._known.note(key, name, peer, len(self._names))
        else:
            self._strangers.note(key, name, peer, _MAX_STRANGERS)


def _sentence(key: bytes, name: str, peer: str, before: int) -> str:
    listed_as = f", which was {name!r} on the list," if name else ""
    times = f", and {before} times before," if before else ""
    return (
        f"refused key {key.decode()}{listed_as} from {peer}{times}: to let it in, run `pilotfish keys "
        f"allow device.pub --name {quote(name or 'NAME')}` with that device's device.pub and the "
        "edge's --keys, and reload the edge"
    )
