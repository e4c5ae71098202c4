"""Whose fault an error is: the request's, which is told, or the edge's, which its log tells."""

import logging

from pilotfish.base.errors import InternalError, PilotfishError
from pilotfish.engines.engine_errors import EngineError

_log = logging.getLogger("pilotfish.edge")


def is_client_error(error: Exception) -> bool:
    """Whether a client may be told an error as it is: the engines' are of this machine."""
    return isinstance(error, PilotfishError) and not isinstance(error, EngineError)


def to_client_error(error: Exception, what: str) -> PilotfishError:
    """Return what a client is told of an error; logs the edge's own as ``what``."""
    if isinstance(error, PilotfishError) and is_client_error(error):
        return error
    _log.error(what, exc_info=error)
    return InternalError("The edge failed at this; see its log.")
