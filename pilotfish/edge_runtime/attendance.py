"""Log which devices come and go, by name, however often and however many they do."""

import logging
import time
from collections.abc import Collection, Mapping
from typing import Final

_log = logging.getLogger("pilotfish.edge")

_PAUSE_S: Final = 1.0  # between two entries of one kind; what came and went meanwhile is none
_MOST_NAMES: Final = 10  # in one entry


class Attendance:
    """Which devices of the allow-list were connected when it was last noted."""

    def __init__(self) -> None:
        self._present: set[str] = set()
        self._noted_s = -_PAUSE_S

    def log_changes(self, owners: Collection[bytes], allowed: Mapping[bytes, str]) -> None:
        """Log the changes since the last time, at most once a second.

        owners: keys of the connections; one that is on the list no longer is its removal's matter.
        """
        if time.monotonic() - self._noted_s < _PAUSE_S:
            return
        self._noted_s = time.monotonic()
        present = {allowed[owner] for owner in owners if owner in allowed}
        for what, names in (
            ("connected", present - self._present),
            ("no longer connected", self._present - present),
        ):
            if names:
                first = ", ".join(sorted(names)[:_MOST_NAMES])
                more = len(names) - _MOST_NAMES
                _log.info("%s: %s%s", what, first, f" and {more} more" if more > 0 else "")
        self._present = present
