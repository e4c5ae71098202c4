"""Distinguish request errors, which clients may see, from the edge's errors, which it only logs."""

import logging

from pilotfish.base.errors import InternalError, PilotfishError
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
