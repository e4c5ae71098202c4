"""What can go wrong when a model is exported."""

from __future__ import annotations

from pilotfish.engines.errors import EngineError


class ExportError(EngineError):
    """A source cannot be read, or holds a model that is not supported; the text names which."""

    exit_code = 65  # EX_DATAERR


class DownloadError(ExportError):
    """A source could not be fetched; the text says what can be given instead."""

    exit_code = 69  # EX_UNAVAILABLE
