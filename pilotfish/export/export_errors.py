"""Errors of exporting a model."""

from __future__ import annotations

from pilotfish.engines.engine_errors import EngineError


class ExportError(EngineError):
    """The source cannot be read, or its model is not supported; the text gives the reason."""

    exit_code = 65  # EX_DATAERR


class DownloadError(ExportError):
    """The source could not be downloaded; the text names alternatives."""

    exit_code = 69  # EX_UNAVAILABLE
