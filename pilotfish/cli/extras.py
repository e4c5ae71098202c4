"""Name the extra to install if the command needs a module that is missing."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from pilotfish.base.errors import UnsupportedError
from pilotfish.base.extras import install_command
from pilotfish.engines.engine_errors import EngineError

_SERVICE = ("prometheus_client", "starlette", "uvicorn")


def require_service() -> None:
    """Raise `UnsupportedError`, which names the extra, if a module of the service is missing."""
    for name in _SERVICE:
        if find_spec(name) is None:
            raise UnsupportedError(
                f"The service needs {name}, which is not installed: {install_command('serve')}."
            )


@contextmanager
def export_tools() -> Iterator[None]:
    """Wrap an import from `export`; if that package's tools are missing, name the extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise EngineError(
            f"Exporting needs {error.name}, which is not installed: {install_command('export')}."
        ) from error
