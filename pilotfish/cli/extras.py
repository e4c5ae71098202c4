"""Name the extra to install if the command needs a module that is missing."""

from collections.abc import Iterator
from contextlib import contextmanager

from pilotfish.base.extras import install_command
from pilotfish.engines.engine_errors import EngineError


@contextmanager
def export_tools() -> Iterator[None]:
    """Wrap an import from `export`; if that package's tools are missing, name the extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise EngineError(
            f"Exporting needs {error.name}, which is not installed: {install_command('export')}."
        ) from error
