"""Log the keys that an edge refuses, their former names, and the command that admits them.

A refused device retries for ever, and so may strangers. So each key is logged once, and again after
ten minutes with the number of its attempts since then.
"""

import logging
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping
from shlex import quote

_log = logging.getLogger("pilotfish.wire")

_REPEAT_S = 600.0  # minimum time (s) between two lines about one key
_MIN_PAUSE_S = 1.0  # minimum time (s) between any two lines
_MAX_PAUSE_S = 60.0  # maximum pause (s) between strangers' lines; the pause doubles
# maximum number of strangers' keys; beyond it, the key silent for longest is dropped
_MAX_STRANGERS = 1024


class _KeyLog:
    """For each key, the time of its last log line and the number of its attempts since then.

    max_pause_s: the longest pause between two log lines, in seconds.
    """

    def __init__(self, max_pause_s: float) -> None:
        self._max_pause_s = max_pause_s
        self._entries: OrderedDict[bytes, tuple[float, int]] = OrderedDict()
        self._logged_s, self._pause_s = -math.inf, _MIN_PAUSE_S

    def __len__(self) -> int:
        return len(self._entries)

    def note(self, key: bytes, name: str, peer: str, most: int) -> None:
        """Count an attempt and log it if a line is due; remember at most ``most`` keys."""
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
    """Counts and a log of refused handshakes.

    by_name: counts of keys that were once on the list, by name. These keys have a separate log, so
    that strangers with ever new keys do not hide them.
    """

    def __init__(self) -> None:
        self.total = 0
        self.by_name: Counter[str] = Counter()
        self._names: dict[bytes, str] = {}  # names of all keys ever on the list
        self._known, self._strangers = _KeyLog(_MIN_PAUSE_S), _KeyLog(_MAX_PAUSE_S)

    def add_names(self, allowed: Collection[bytes]) -> None:
        """Remember the keys' names in an allow-list, if it has names."""
        if isinstance(allowed, Mapping):
            self._names.update(allowed)

    def note(self, key: bytes, peer: str, *, listed: bool = False) -> None:
        """Count a refused handshake with this key (Z85; b"": none) from this address.

        listed: the key is on the list but banned, which `Gate.ban` has logged.
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
        f"refused key {key.decode()}{listed_as} from {peer}{times}: to admit it, run `pilotfish "
        f"keys allow device.pub --name {quote(name or 'NAME')}` with that device's device.pub and "
        "the edge's --keys, and reload the edge"
    )
