"""What to install for a part of the command that is not there."""

from collections.abc import Iterator
from contextlib import contextmanager

from pilotfish.base.extras import install_command
from pilotfish.engines.engine_errors import EngineError


@contextmanager
def export_tools() -> Iterator[None]:
    """Around an import from `export`: an error that names the extra, if its tools are missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise EngineError(
            f"Exporting needs {error.name}, which is not installed: {install_command('export')}."
        ) from error
