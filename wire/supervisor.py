"""What a daemon and systemd tell each other: readiness, a watchdog's food, an inherited socket.

In:  the environment that systemd gives (sd_notify(3), sd_listen_fds(3)).
Out: datagrams of ``NAME=value`` lines. Without systemd every call does nothing, so that a daemon
reads the same on a shell. Nothing here waits: a message that systemd does not take is lost.
"""

import os
import socket
import time
from contextlib import suppress

_FIRST_DESCRIPTOR = 3  # SD_LISTEN_FDS_START


class Supervisor:
    """systemd as this process knows it, or nobody.

    address: of the datagram socket, a path or "@" and an abstract name; None: nobody listens.
    watchdog_s: how long the supervisor waits between two signs of life; None: for ever.
    """

    def __init__(self, address: str | None = None, watchdog_s: float | None = None) -> None:
        self._socket: socket.socket | None = None
        if address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.setblocking(False)
            self._address = "\0" + address[1:] if address.startswith("@") else address
        # twice in each interval, so that one that comes late does not kill
        self.feed_s = watchdog_s / 2 if self._socket is not None and watchdog_s else None
        self._fed_s = -1e9
        self._told = ""

    @classmethod
    def from_environment(cls) -> "Supervisor":
        """The supervisor that started this process.

        Children of the process are not to speak for it, so the variables are taken away.
        """
        address = os.environ.pop("NOTIFY_SOCKET", None)
        watchdog = _number(os.environ.pop("WATCHDOG_USEC", None))
        pid = _number(os.environ.pop("WATCHDOG_PID", None))
        ours = pid is None or pid == os.getpid()
        return cls(address, watchdog * 1e-6 if watchdog and ours else None)

    def ready(self, status: str) -> None:
        """Started, or done with reloading; ``status`` is shown by ``systemctl status``."""
        self._told = status
        self._send(f"READY=1\nSTATUS={status}")

    def status(self, text: str) -> None:
        """What the daemon is doing, in one line; the same line is not sent twice in a row."""
        if text != self._told:
            self._told = text
            self._send(f"STATUS={text}")

    def feed(self) -> None:
        """A sign of life. Call it as often as you like: it is sent when one is due."""
        if self.feed_s is not None:
            now_s = time.monotonic()
            if now_s - self._fed_s >= self.feed_s / 2:
                self._fed_s = now_s
                self._send("WATCHDOG=1")

    def allow(self, seconds: float) -> None:
        """Have the watchdog wait for at least so long from now on: slow work is no hang."""
        if self.feed_s is not None and seconds > 2 * self.feed_s:
            self.feed_s = seconds / 2
            self._send(f"WATCHDOG_USEC={int(seconds * 1e6)}")

    def reloading(self) -> None:
        """Reading the configuration again; ends with `ready`."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self, status: str) -> None:
        """On the way out."""
        self._send(f"STOPPING=1\nSTATUS={status}")

    def extend(self, seconds: float) -> None:
        """Starting, reloading or stopping takes so much longer, counted from now."""
        self._send(f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}")

    def _send(self, lines: str) -> None:
        if self._socket is not None:
            with suppress(OSError):
                self._socket.sendto(lines.encode(), self._address)


def inherited_socket() -> int | None:
    """The descriptor of the socket that systemd listens on for this process; None without one."""
    pid = _number(os.environ.pop("LISTEN_PID", None))
    count = _number(os.environ.pop("LISTEN_FDS", None))
    os.environ.pop("LISTEN_FDNAMES", None)
    if pid != os.getpid() or not count:
        return None
    os.set_inheritable(_FIRST_DESCRIPTOR, False)
    return _FIRST_DESCRIPTOR


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None
