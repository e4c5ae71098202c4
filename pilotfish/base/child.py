"""A child process that is tied to its parent: by a socket pair, over which both say lines of JSON.

When the parent is gone, however it went, the child hears its end close, and stops: no orphans.
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
    """One end of the socket pair."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._unread = b""

    def receive(self) -> dict[str, Any] | None:
        """What the other end says next; None if it is gone. May raise `TimeoutError`."""
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
        """Say this to the other end."""
        self._end.sendall(json.dumps(message, default=os.fspath).encode() + b"\n")

    def send_error(self, error: PilotfishError) -> None:
        """Tell the parent of an error, which `ChildProcess.receive` raises there."""
        self.send({"code": error.code, "message": str(error)})

    def close(self) -> None:
        """Let go of it."""
        self._end.close()


class ChildProcess:
    """The child; its command gets one more argument, the descriptor of its end of the tie."""

    def __init__(self, command: Sequence[str], timeout_s: float) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            # a session of its own: Ctrl-C in the terminal reaches the parent, which stops the child
            self.process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        ours.settimeout(timeout_s)
        self.pipe = ChildPipe(ours)

    def receive(self) -> dict[str, Any] | None:
        """What the child says next; None if it has ended. Raises the typed error that it tells."""
        message = self.pipe.receive()
        if message is not None and "code" in message:
            raise from_code(message["code"], message["message"])
        return message

    def stop(self, *, terminate: bool = False) -> None:
        """Close the tie (and send SIGTERM); kills a child that does not end by itself."""
        self.pipe.close()
        if terminate:
            self.process.terminate()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
