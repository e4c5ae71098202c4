"""The errors of exports; each message gives the reason."""

from __future__ import annotations

from pilotfish.engines.engine_errors import EngineError


class ExportError(EngineError):
    """The source cannot be read, or its model is not supported."""

    exit_code = 65  # EX_DATAERR


class DownloadError(ExportError):
    """The source could not be downloaded; the message names alternatives."""

    exit_code = 69  # EX_UNAVAILABLE


class CacheFullError(EngineError):
    """The disk has no room for an artifact in the cache."""

    exit_code = 74  # EX_IOERR


class ModelInUseError(EngineError):
    """A process uses the artifact that should be removed."""

    exit_code = 75  # EX_TEMPFAIL
