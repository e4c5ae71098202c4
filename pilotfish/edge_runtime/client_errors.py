"""Distinguish request errors, which clients may see, from the edge's errors, which it only logs."""

import logging

from pilotfish.base.errors import BusyError, InternalError, PilotfishError
from pilotfish.base.shortage import shortage
from pilotfish.engines.engine_errors import EngineError

_log = logging.getLogger("pilotfish.edge")


def is_client_error(error: Exception) -> bool:
    """Return whether a client may see an error; engine errors describe the edge's machine."""
    return isinstance(error, PilotfishError) and not isinstance(error, EngineError)


def to_client_error(error: Exception, what: str) -> PilotfishError:
    """Return the error to send to the client; log an error of the edge, introduced by ``what``."""
    if isinstance(error, PilotfishError) and is_client_error(error):
        return error
    _log.error(what, exc_info=error)
    return InternalError("The edge failed at this request; see the edge's log.")


def log_failure(error: Exception, what: str) -> Exception:
    """Log an error of the edge; return the error for the request."""
    if (short := shortage(error)) is None:
        _log.error(what, exc_info=error)
        return error
    _log.error("%s because the machine lacks %s: %s", what, short, error)
    return BusyError(
        f"The edge's machine has no {short} left for this request now: try again later."
    )
