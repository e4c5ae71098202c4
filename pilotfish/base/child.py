"""A child process with a pipe to its parent: a socket pair that carries lines of JSON.

When the parent ends for any reason, its end of the pipe closes and the child stops: no orphans.
"""

import json
import os
import socket
import subprocess
from collections.abc import Sequence
from typing import Any

from pilotfish.base.errors import PilotfishError, from_code

STOP_S = 5.0


class ChildPipe:
    """One end of the pipe between parent and child."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._unread = b""

    def receive(self) -> dict[str, Any] | None:
        """Return the next message; None: the peer has closed its end. May raise `TimeoutError`."""
        while b"\n" not in self._unread:
            try:
                part = self._end.recv(65536)
            except ConnectionError:
                return None
            if not part:
                return None
            self._unread += part
        line, self._unread = self._unread.split(b"\n", 1)
        message: dict[str, Any] = json.loads(line)
        return message

    def send(self, message: dict[str, Any]) -> None:
        """Send a message to the peer."""
        self._end.sendall(json.dumps(message, default=os.fspath).encode() + b"\n")

    def send_error(self, error: PilotfishError) -> None:
        """Send an error to the parent, where `ChildProcess.receive` raises it."""
        self.send({"code": error.code, "message": str(error)})

    def fileno(self) -> int:
        """Return the descriptor of this end; it is readable once the peer has closed its end."""
        return self._end.fileno()

    def close(self) -> None:
        """Close this end of the pipe."""
        self._end.close()


class ChildProcess:
    """A child process with a pipe.

    command: gets one more argument, the descriptor number of the child's end of the pipe.
    timeout_s: the longest wait of `receive`.
    """

    def __init__(self, command: Sequence[str], timeout_s: float) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            # in its own session the child gets no Ctrl-C; the parent does, and stops the child
            self.process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        ours.settimeout(timeout_s)
        self.pipe = ChildPipe(ours)

    def receive(self) -> dict[str, Any] | None:
        """Return the child's next message; None: the child ended. Raise an error that it sent."""
        message = self.pipe.receive()
        if message is not None and "code" in message:
            raise from_code(message["code"], message["message"])
        return message

    def stop(self, *, terminate: bool = False) -> None:
        """Close the pipe (and send SIGTERM); kill the child if it does not end in time."""
        self.pipe.close()
        if terminate:
            self.process.terminate()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
