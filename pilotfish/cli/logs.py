"""Set up the log: on stderr for people, or in systemd's journal with priorities.

The journal adds the time itself, and takes a line's priority from a prefix ``<N>`` (sd-daemon(3)).
The journal gets the program's entries from INFO on, since its readers can filter by priority
(``journalctl -p warning``). Entries about single answers go there only from WARNING on, unless
``--verbose`` is set.
"""

import logging
import os
import sys
import threading
from types import TracebackType
from typing import Final

_OURS: Final = "pilotfish"
_ANSWERS: Final = f"{_OURS}.answers"
_SPANS: Final = "opentelemetry.sdk"
_FOR_PEOPLE: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_SYSLOG: Final = {  # level → priority of syslog(3)
    logging.DEBUG: 7,
    logging.INFO: 6,
    logging.WARNING: 4,
    logging.ERROR: 3,
    logging.CRITICAL: 2,
}


def set_up(*, verbose: bool) -> None:
    """Send the log to stderr: entries from WARNING on.

    If ``verbose`` or in the journal, from INFO on.
    """
    journal = is_journal()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JournalFormatter() if journal else logging.Formatter(_FOR_PEOPLE))
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, handlers=[handler])
    # it says every 20 s that spans are dropped; `base.trace_export` says once why
    logging.getLogger(_SPANS).setLevel(logging.ERROR)
    if journal:
        logging.getLogger(_OURS).setLevel(logging.INFO)
        sys.excepthook = _log_crash
        threading.excepthook = lambda crash: _log_crash(
            crash.exc_type, crash.exc_value, crash.exc_traceback
        )
        if not verbose:
            logging.getLogger(_ANSWERS).setLevel(logging.WARNING)


def is_journal() -> bool:
    """Return whether stderr is systemd's journal (``JOURNAL_STREAM``, systemd.exec(5))."""
    try:
        status = os.fstat(sys.stderr.fileno())
    except (OSError, ValueError, AttributeError):  # stderr is closed, or has no descriptor
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


def prefixed(text: str, level: int) -> str:
    """Return the text with the prefix of a priority before each line.

    A NUL byte ends a line, too, as it does in the journal.
    """
    lines = text.replace("\0", "\n").splitlines() or [""]
    return "\n".join(f"<{_SYSLOG.get(level, 6)}>{line}" for line in lines)


class _JournalFormatter(logging.Formatter):
    """A format without the time; each line, also a traceback's, gets the priority."""

    def __init__(self) -> None:
        super().__init__("%(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        return prefixed(super().format(record), record.levelno)


def _log_crash(
    kind: type[BaseException], error: BaseException | None, trace: TracebackType | None
) -> None:
    crash = None if error is None else (kind, error, trace)
    logging.getLogger(_OURS).critical("ended by an error (%s)", kind.__name__, exc_info=crash)
