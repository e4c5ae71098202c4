"""Name the extra to install when a part of the command is missing."""

from collections.abc import Iterator
from contextlib import contextmanager

from pilotfish.base.extras import install_command
from pilotfish.engines.engine_errors import EngineError


@contextmanager
def export_tools() -> Iterator[None]:
    """Wrap an import from `export`: if its tools are missing, the error names the extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise EngineError(
            f"Exporting needs {error.name}, which is not installed: {install_command('export')}."
        ) from error
