"""Run an edge's daemon as the child of another process (`edge_runtime.process`)."""

import socket
from collections.abc import Callable

from pilotfish.base.child import ChildPipe
from pilotfish.base.errors import ListenError, PilotfishError
from pilotfish.engines.engine_errors import EngineError


def for_parent(daemon: Callable[..., int], descriptor: int) -> int:
    """Run a daemon and return its exit code; report its endpoint or its error to the parent.

    daemon: a function with three arguments. ``listening`` and ``announce`` are functions to call
        with the endpoint, once the daemon listens and once it serves; ``lifeline`` is a descriptor
        that reads end of file when the parent ends.
    """
    with socket.socket(fileno=descriptor) as end:
        tie = ChildPipe(end)
        try:
            return daemon(
                listening=lambda endpoint: tie.send({"endpoint": endpoint}),
                announce=lambda endpoint: tie.send({"serves": endpoint}),
                lifeline=descriptor,
            )
        except EngineError as error:
            tie.send_error(ListenError(str(error)))
            return error.exit_code
        except PilotfishError as error:
            tie.send_error(error)
            return error.exit_code
