"""Signals as something to poll: stop, stop at once, read the configuration again."""

import os
import signal
import socket
import sys
from types import FrameType

_STOPS = (signal.SIGINT, signal.SIGTERM)


class Signals:
    """From entry on SIGHUP is noted; from `take_over` on SIGINT and SIGTERM are too.

    Until then those two do what they do to every command. ``reload`` is True once a SIGHUP came,
    until it is set to False.
    """

    def __init__(self) -> None:
        self._stops: list[int] = []
        self.reload = False
        self._terminal = sys.stderr.isatty()
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)
        self.descriptor = self._read.fileno()
        self._before: dict[int, object] = {}

    def take_over(self) -> None:
        """Note SIGINT and SIGTERM from now on."""
        self._catch(*_STOPS)

    def take_stops(self) -> list[int]:
        """The signals that ask for an end since this was last called, in order."""
        stops, self._stops = self._stops, []
        return stops

    def hush(self) -> None:
        """The descriptor has told what it had to tell."""
        try:
            while self._read.recv(4096):
                pass
        except BlockingIOError:
            pass

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGHUP:
            self._stops.append(number)
        elif self._terminal and not os.isatty(2):
            self._stops.append(number)  # the terminal that it ran in was closed
        else:
            self.reload = True

    def _catch(self, *numbers: signal.Signals) -> None:
        for number in numbers:
            self._before[number] = signal.signal(number, self._note)

    def __enter__(self) -> "Signals":
        signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        self._catch(signal.SIGHUP)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(-1)
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # as signal.signal gave it
        self._read.close()
        self._write.close()
