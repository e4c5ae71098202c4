"""Report to systemd (readiness, watchdog, reload), and inherit the socket that it opened.

In: the environment from systemd (sd_notify(3), sd_listen_fds(3)). Out: datagrams of ``NAME=value``
lines. Without systemd every call does nothing, so a daemon started from a shell needs no other
code. Calls from a daemon never block: a datagram that systemd does not receive is lost.

A datagram cannot report a failed reload: ``Type=notify-reload`` (systemd 253) waits for the end of
a reload, but knows no failure. So the daemon writes a file of two lines to its runtime directory:
the start of the reload (µs of the monotonic clock), and the problem, if any. `reload`, which the
units run as ``ExecReload=``, waits for that file; ``systemctl reload`` returns its exit status,
under any version of systemd.
"""

import os
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pilotfish.base.errors import NotReloadedError
from pilotfish.base.files import write_whole
from pilotfish.base.prose import one_line

_FIRST_DESCRIPTOR = 3  # first descriptor from systemd (SD_LISTEN_FDS_START)
_RUNTIME = "RUNTIME_DIRECTORY"  # systemd's environment variable: folders separated by ':'
_OUTCOME = "reload"  # name of the file with the outcome of a reload
_POLL_S = 0.02


class Supervisor:
    """The connection to systemd; without systemd it does nothing.

    address: systemd's datagram socket, as a path, or as "@" and an abstract name; None: no systemd.
    watchdog_s: the watchdog's time-out; None: no watchdog. runtime: the process's runtime folder;
    None: none.
    """

    def __init__(
        self,
        address: str | None = None,
        watchdog_s: float | None = None,
        runtime: Path | None = None,
    ) -> None:
        self._socket: socket.socket | None = None
        if address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.setblocking(False)
            self._address = "\0" + address[1:] if address.startswith("@") else address
        # half the time-out, so that one late feed does not make systemd kill the daemon
        self.feed_s = watchdog_s / 2 if self._socket is not None and watchdog_s else None
        self._fed_s = -1e9
        self._last_status = ""
        self._runtime = runtime
        self._reloading_us = 0

    @classmethod
    def from_environment(cls) -> "Supervisor":
        """Connect to the supervisor that started this process.

        The variables are removed, so that child processes cannot send messages in its name.
        """
        address = os.environ.pop("NOTIFY_SOCKET", None)
        watchdog = _number(os.environ.pop("WATCHDOG_USEC", None))
        pid = _number(os.environ.pop("WATCHDOG_PID", None))
        ours = pid is None or pid == os.getpid()
        folders = os.environ.pop(_RUNTIME, None)
        runtime = Path(folders.partition(":")[0]) if folders else None
        return cls(address, watchdog * 1e-6 if watchdog and ours else None, runtime)

    def ready(self, status: str) -> None:
        """Report that the daemon has started; ``systemctl status`` shows ``status``."""
        self._last_status = status
        self._send(f"READY=1\n{_status_line(status)}")

    def status(self, text: str) -> None:
        """Report a status line; the same line is not sent twice in a row."""
        if text != self._last_status:
            self._last_status = text
            self._send(_status_line(text))

    def feed(self) -> None:
        """Feed the watchdog if a feed is due; the caller may call this at any rate."""
        if self.feed_s is not None:
            now_s = time.monotonic()
            if now_s - self._fed_s >= self.feed_s / 2:
                self._fed_s = now_s
                self._send("WATCHDOG=1")

    def allow(self, seconds: float) -> None:
        """Extend the watchdog's time-out to at least ``seconds`` before slow work."""
        if self.feed_s is not None and seconds > 2 * self.feed_s:
            self.feed_s = seconds / 2
            self._send(f"WATCHDOG_USEC={int(seconds * 1e6)}")

    def reloading(self) -> None:
        """Report the start of a reload; `reloaded` reports its end."""
        self._reloading_us = _now_us()
        self._send(f"RELOADING=1\nMONOTONIC_USEC={self._reloading_us}")

    def reloaded(self, status: str, problem: str) -> None:
        """Report the end of a reload. problem: the failure in one line; "": success."""
        # READY comes before the outcome file, which ends the ExecReload= command
        self.ready(status)
        if self._runtime is not None:
            outcome = f"{self._reloading_us}\n{one_line(problem)}\n"
            with suppress(OSError):
                write_whole(self._runtime / _OUTCOME, outcome.encode(), 0o644)

    def stopping(self, status: str) -> None:
        """Report that the daemon stops."""
        self._send(f"STOPPING=1\n{_status_line(status)}")

    def extend(self, seconds: float) -> None:
        """Request more time to start, reload or stop, counted from now."""
        self._send(f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}")

    def _send(self, lines: str) -> None:
        if self._socket is not None:
            with suppress(OSError):
                self._socket.sendto(lines.encode(), self._address)


def extend_start(seconds: float) -> None:
    """Request more time to start, counted from now, before the process has its `Supervisor`."""
    Supervisor(os.environ.get("NOTIFY_SOCKET")).extend(seconds)


def inherited_socket() -> int | None:
    """Return the descriptor of the socket that systemd opened for this process, or None."""
    pid = _number(os.environ.pop("LISTEN_PID", None))
    count = _number(os.environ.pop("LISTEN_FDS", None))
    os.environ.pop("LISTEN_FDNAMES", None)
    if pid != os.getpid() or not count:
        return None
    os.set_inheritable(_FIRST_DESCRIPTOR, False)
    return _FIRST_DESCRIPTOR


def summarize(problems: Sequence[str]) -> str:
    """Return the first problem and the number of the others; "" without problems."""
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return problems[0] + more if problems else ""


def reload(pid: int, within_s: float) -> None:
    """Make a daemon of the same systemd unit reload, and wait for the outcome.

    Raises `NotReloadedError` with the problem, or if the daemon does not report in time.
    """
    folders = os.environ.get(_RUNTIME)
    if not folders:
        raise NotReloadedError(
            "Run this command only as ExecReload= of a systemd unit that has RuntimeDirectory=."
        )
    outcome = Path(folders.partition(":")[0]) / _OUTCOME
    requested_us = _now_us()
    with suppress(OSError):  # an earlier file may hold a time of another boot
        outcome.unlink()
    _signal(pid, signal.SIGHUP)
    deadline_s = time.monotonic() + within_s
    while time.monotonic() < deadline_s:
        with suppress(OSError, ValueError):  # the file does not exist yet, or is invalid
            began_us, _, problem = outcome.read_text().partition("\n")
            if int(began_us) >= requested_us:  # otherwise the file is from an earlier reload
                if problem.strip():
                    raise NotReloadedError(problem.strip())
                return
        _signal(pid, 0)
        time.sleep(_POLL_S)
    raise NotReloadedError(
        f"Process {pid} did not report within {within_s:g} s that it reloaded; see its log."
    )


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except OSError as error:
        raise NotReloadedError(
            f"Process {pid} cannot be sent the signal to reload: {error.strerror}."
        ) from None


def _status_line(text: str) -> str:
    """Return the line ``STATUS=text``; a line break in ``text`` would begin another field."""
    return f"STATUS={one_line(text)}"


def _now_us() -> int:
    return time.monotonic_ns() // 1000


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None
