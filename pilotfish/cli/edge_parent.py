"""An edge's daemon as the child of another process (`edge_runtime.process`)."""

import socket
from typing import Protocol

from pilotfish.engines.errors import EngineError
from pilotfish.wire.errors import ListenError, PilotfishError
from pilotfish.wire.tie import Tie


class Announce(Protocol):
    """Is told where the daemon listens."""

    def __call__(self, endpoint: str) -> None:
        """It does."""


class Daemon(Protocol):
    """A daemon that serves until told to stop, or until ``lifeline`` closes at its other end."""

    def __call__(self, *, announce: Announce, lifeline: int) -> int:
        """The exit code."""


def for_parent(daemon: Daemon, descriptor: int) -> int:
    """Run it, and tell the parent over ``descriptor`` where it listens or why it does not."""
    with socket.socket(fileno=descriptor) as end:
        tie = Tie(end)
        try:
            return daemon(
                announce=lambda endpoint: tie.tell({"endpoint": endpoint}), lifeline=descriptor
            )
        except PilotfishError as error:
            tie.refuse(error)
            return error.exit_code
        except EngineError as error:
            tie.refuse(ListenError(str(error)))
            return error.exit_code
