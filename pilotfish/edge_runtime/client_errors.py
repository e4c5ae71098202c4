"""Tell request errors, which clients may see, from the edge's own, which only its log shows."""

import logging

from pilotfish.base.errors import InternalError, PilotfishError
from pilotfish.engines.engine_errors import EngineError

_log = logging.getLogger("pilotfish.edge")


def is_client_error(error: Exception) -> bool:
    """Whether a client may see an error. Engine errors describe this machine, so are hidden."""
    return isinstance(error, PilotfishError) and not isinstance(error, EngineError)


def to_client_error(error: Exception, what: str) -> PilotfishError:
    """Return the error to send to the client; logs an error of the edge as ``what``."""
    if isinstance(error, PilotfishError) and is_client_error(error):
        return error
    _log.error(what, exc_info=error)
    return InternalError("The edge failed at this; see its log.")
