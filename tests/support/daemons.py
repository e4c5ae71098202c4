"""Edge daemons as systemd runs them: supervised, configured by a file, controlled by signals.

`Systemd` is the notification socket of a service manager; `ServiceDaemon` is `pilotfish edge serve`
or `edge worker`.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.forking import popen

START_S = 90.0
WAIT_S = 90.0  # for what is to be told or counted: on a busy machine that may take a while
# Slows passes over prompts of given lengths: a slow or hanging target.
SLOW = """
import sys, time
from pilotfish.engines.onnx_decoder import Decoder
from pilotfish.cli import main
forward = Decoder.forward
def slow(self, passes, *more, **others):
    time.sleep({128: 0.2, 66: 3.0, 33: 1.0}.get(max(len(item.tokens) for item in passes), 0.0))
    return forward(self, passes, *more, **others)
Decoder.forward = slow
sys.exit(main(sys.argv[1:]))
"""
# Passes on a socket like systemd: as descriptor 3, named by the environment.
_WITH_SOCKET = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS="1")
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


class Systemd:
    """A service manager's notification socket: a daemon's messages with their times."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = str(folder / "notify")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.address)
        self.received: list[tuple[float, dict[str, str]]] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while True:
            lines = self._socket.recv(4096).decode().splitlines()
            table = dict(line.split("=", 1) for line in lines)
            self.received.append((time.monotonic(), table))

    def await_(self, name: str, value: str = "", since: int = 0, within_s: float = WAIT_S) -> str:
        """Wait for a variable with this beginning of its value; returns the whole value."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            for _, info in self.received[since:]:
                if name in info and info[name].startswith(value):
                    return info[name]
            time.sleep(0.01)
        raise AssertionError(f"no {name}={value} in {self.received[since:]}")

    def fed(self, since_s: float) -> list[float]:
        """List the times at which the watchdog was fed."""
        return [at for at, info in list(self.received) if "WATCHDOG" in info and at >= since_s]


def reload_as_systemd(systemd: Systemd, pid: int) -> subprocess.CompletedProcess[str]:
    """Run the units' ExecReload=, as ``systemctl reload`` does."""
    command = [sys.executable, "-m", "pilotfish", "reload", str(pid), "--within", "30"]
    environment = os.environ | {"RUNTIME_DIRECTORY": str(systemd.folder)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


class Daemon:
    """A running `pilotfish edge serve`, or another ``action`` of `edge`.

    script: runs instead of the package, with its flags. serves: wait until it serves.
    """

    def __init__(
        self,
        *flags: object,
        action: str = "serve",
        serves: bool = True,
        systemd: Systemd | None = None,
        watchdog_s: float = 1.0,
        script: str | None = None,
        listening: socket.socket | None = None,
        descriptors: int | None = None,
    ) -> None:
        words = ["-m", "pilotfish"] if script is None else ["-c", script]
        command = [*words, "edge", action, *map(str, flags)]
        if listening is not None:
            command = ["-c", _WITH_SOCKET, str(listening.fileno()), *command]
        environment = {**os.environ}
        if systemd is not None:
            environment["NOTIFY_SOCKET"] = systemd.address
            environment["WATCHDOG_USEC"] = str(int(watchdog_s * 1e6))
            environment["RUNTIME_DIRECTORY"] = str(systemd.folder)
        prefix = [] if descriptors is None else ["prlimit", f"--nofile={descriptors}"]
        whole = [*prefix, sys.executable, *command]
        files = [] if listening is None else [listening.fileno()]
        self.process = popen(whole, environment, files)
        self.lines: list[str] = []
        self.endpoint = ""
        threading.Thread(target=self._read, daemon=True).start()
        if serves:
            self.await_endpoint()

    def await_endpoint(self) -> str:
        """Wait for the endpoint."""
        deadline = time.monotonic() + START_S
        while not self.endpoint and time.monotonic() < deadline and self.process.poll() is None:
            time.sleep(0.01)
        assert self.endpoint, self.lines
        return self.endpoint

    @property
    def pid(self) -> int:
        return self.process.pid

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            match = re.search(r"the (?:edge|node) serves on (\S+)", line)
            if match:
                self.endpoint = match[1]

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def await_line(self, pattern: str, within_s: float = WAIT_S) -> str:
        """Wait for a line on stderr."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            for line in list(self.lines):
                if re.search(pattern, line):
                    return line
            time.sleep(0.01)
        raise AssertionError(f"no line {pattern!r} in {self.lines}")

    def ends(self, within_s: float = 30.0) -> int:
        return self.process.wait(within_s)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def running(*flags: object, **options: object) -> Iterator[Daemon]:
    """Run a daemon on loopback, and kill it in the end if it still runs."""
    daemon = Daemon("--listen", "tcp://127.0.0.1:0", *flags, **options)
    try:
        yield daemon
    finally:
        daemon.kill()


def free_port() -> int:
    """Find a port without a listener, outside the range of connections' own ports.

    Otherwise a client that connects to it again and again could be connected to itself.
    """
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(10_000, first)
        with socket.socket() as result, suppress(OSError):
            result.bind(("127.0.0.1", port))
            return port


def exposition(port: int) -> str:
    """Read the metrics as Prometheus does."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text: str = answer.read().decode()
        return text


def scrape(port: int) -> dict[str, float]:
    """Read every sample, by name and labels, without the common prefix."""
    samples = (line.rsplit(" ", 1) for line in exposition(port).splitlines() if line[0] != "#")
    return {name.removeprefix("pilotfish_edge_"): float(value) for name, value in samples}


def await_sample(port: int, name: str, at_least: float, within_s: float = WAIT_S) -> float:
    """Wait until a sample is at least this large."""
    deadline = time.monotonic() + within_s
    while (value := scrape(port).get(name, 0.0)) < at_least:
        assert time.monotonic() < deadline, (name, value, scrape(port))
        time.sleep(0.05)
    return value


def check_exposition(text: str) -> None:
    """Let Prometheus's own `promtool` check what a daemon exposes, if it is installed."""
    promtool = shutil.which("promtool")
    if promtool is not None:
        checked = subprocess.run(
            [promtool, "check", "metrics"], input=text, text=True, capture_output=True, check=False
        )
        assert (checked.returncode, checked.stderr) == (0, "")
