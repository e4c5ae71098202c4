"""Log warnings that requests cause: each sentence once, and only a few per minute.

Clients choose the names of tools and the content of schemas. Without these limits, a client that
varies them with each request would fill the journal.
"""

import logging
import threading
import time
from collections import OrderedDict, deque

_log = logging.getLogger("pilotfish.engines")

_MOST_REMEMBERED = 512  # maximum number of sentences that are remembered
_MOST_PER_PERIOD, _PERIOD_S = 30, 60.0


class Notices:
    """A log of warnings with a limited rate. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._logged: OrderedDict[str, None] = OrderedDict()
        self._times_s: deque[float] = deque(maxlen=_MOST_PER_PERIOD)

    def warn(self, sentence: str) -> None:
        """Log a sentence, unless it was logged recently or the rate limit is reached."""
        now_s = time.monotonic()
        with self._lock:
            if sentence in self._logged:
                return
            if len(self._times_s) == _MOST_PER_PERIOD and now_s - self._times_s[0] < _PERIOD_S:
                return
            self._times_s.append(now_s)
            self._logged[sentence] = None
            if len(self._logged) > _MOST_REMEMBERED:
                self._logged.popitem(last=False)
            full = len(self._times_s) == _MOST_PER_PERIOD and now_s - self._times_s[0] < _PERIOD_S
        _log.warning(
            "%s%s",
            sentence,
            " (further warnings of this kind are not logged for a while)" if full else "",
        )


NOTICES = Notices()
