"""Convert signals to events of a descriptor, so that a loop can poll for them."""

import signal
import socket
from types import FrameType

from pilotfish.base.terminal import Terminal

_STOPS = (signal.SIGINT, signal.SIGTERM)


class Signals:
    """Recorder of signals: SIGHUP and SIGINT from entry on, SIGTERM from `take_over` on.

    Before `take_over`, SIGTERM and a second SIGINT end the process. The first SIGINT is raised only
    in `check_interrupt`, which must be called now and then: an exception in the middle of an import
    or a library call could be lost, or could leave a lock locked. reload: True after a SIGHUP,
    until the caller sets it to False.
    """

    def __init__(self) -> None:
        self._stops: list[int] = []
        self.reload = False
        self._terminal = Terminal()
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)
        self.descriptor = self._read.fileno()
        self._before: dict[int, object] = {}

    def check_interrupt(self) -> None:
        """Raise `KeyboardInterrupt` if a SIGINT was received."""
        if signal.SIGINT in self._stops:
            raise KeyboardInterrupt

    def take_over(self) -> None:
        """Record every SIGINT and SIGTERM from now on; raise the SIGINT received earlier."""
        self._catch(*_STOPS)
        self.check_interrupt()

    def take_stops(self) -> list[int]:
        """Return the stop signals since the last call, in order."""
        stops, self._stops = self._stops, []
        return stops

    def clear(self) -> None:
        """Read all bytes of the descriptor, so that it is no longer readable."""
        try:
            while self._read.recv(4096):
                pass
        except BlockingIOError:
            pass

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGHUP or self._terminal.closed:
            self._stops.append(number)
        else:
            self.reload = True

    def _note_early(self, number: int, frame: FrameType | None) -> None:
        self._note(number, frame)
        signal.signal(number, signal.SIG_DFL)

    def _catch(self, *numbers: signal.Signals) -> None:
        for number in numbers:
            before = signal.signal(number, self._note)
            self._before.setdefault(number, before)

    def __enter__(self) -> "Signals":
        signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        self._catch(signal.SIGHUP)
        self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._note_early)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(-1)
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # Python set it, so not None
        self._read.close()
        self._write.close()
