"""A process on a pseudo-terminal of its own, as in a user's window."""

from __future__ import annotations

import os
import pty
import select
import time
from collections.abc import Mapping, Sequence

WAIT_S = 90.0


class TerminalProcess:
    """The process, and what it has written to its terminal."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.pid, self._end = pty.fork()
        if not self.pid:
            os.execvpe(command[0], [*command], {**environment, "TERM": "xterm"})
        self.text = ""
        self._closed = False

    def send(self, keys: str) -> None:
        os.write(self._end, keys.encode())

    def until(self, words: str, since: int = 0) -> str:
        """Wait until these words were written after this place; returns the text so far."""
        end_s = time.monotonic() + WAIT_S
        while words not in self.text[since:]:
            assert time.monotonic() < end_s, f"no {words!r} in {self.text[since:]!r}"
            if select.select([self._end], [], [], 0.5)[0]:
                self.text += os.read(self._end, 65536).decode(errors="replace")
        return self.text

    def close(self) -> None:
        """Close the terminal, as a user closes the window."""
        if not self._closed:
            self._closed = True
            os.close(self._end)

    def ends(self) -> int:
        """Wait for the end; returns the exit code."""
        end_s = time.monotonic() + WAIT_S
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            assert time.monotonic() < end_s, f"still running: {self.text!r}"
            if not self._closed and select.select([self._end], [], [], 0.05)[0]:
                try:  # a full terminal would stop the process
                    self.text += os.read(self._end, 65536).decode(errors="replace")
                except OSError:  # its other end is closed
                    time.sleep(0.05)
            else:
                time.sleep(0.02)
