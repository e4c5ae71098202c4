"""Processes of the command that a benchmark runs for minutes, their logs and their memory."""

import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median

from _common import Rows, free_port

START_S = 120.0
MEMORY = ("process", "warm_mib", "end_mib", "growth", "peak_mib", "file_mib")

Seen = dict[str, list[tuple[float, float]]]  # by process, what `memory_mib` said, in turn


class CommandProcess:
    """A `pilotfish` command that can be killed and started again; all starts write one log.

    log: its stderr; None: where this process's goes.
    """

    def __init__(self, *words: object, log: Path | None = None) -> None:
        self._command = [sys.executable, "-m", "pilotfish", *map(str, words)]
        self.log = log
        self.start()

    def start(self) -> None:
        """Start it (again)."""
        if self.log is None:
            self.process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL)
            return
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stderr=log)

    @property
    def pid(self) -> int:
        return self.process.pid

    def tell(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """At once, whatever it does."""
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """As systemd would."""
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.kill()


@contextmanager
def services(
    count: int, draft: Path, edge: str, keys: Path, *flags: object, logs: Path | None = None
) -> Iterator[dict[int, CommandProcess]]:
    """So many device services, by port; under `wait`, so that no answer ends with its edge."""
    started: dict[int, CommandProcess] = {}
    try:
        for number in range(count):
            port = free_port()
            words = ["device", "serve", "--draft", draft, "--edge", edge, "--keys", keys]
            words += ["--listen", f"127.0.0.1:{port}", "--threads", 1, "--on-link-loss", "wait"]
            log = None if logs is None else logs / f"device-{number + 1}.log"
            started[port] = CommandProcess(*words, *flags, log=log)
        for port, daemon in started.items():
            wait_until_healthy(port, daemon)
        yield started
    finally:
        for daemon in started.values():
            daemon.end()


def wait_until_healthy(port: int, daemon: CommandProcess) -> None:
    """Until the service has its edge."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and daemon.process.poll() is None:
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health") as answer:
            if answer.status == 200:
                return
        time.sleep(0.2)
    raise SystemExit(f"the service on port {port} did not come up")


def memory_mib(pid: int) -> tuple[float, float]:
    """Resident memory of a process: its own, and pages of files."""
    parts = Path(f"/proc/{pid}/status").read_text().split()
    ours, files = (
        int(parts[parts.index(f"{name}:") + 1]) / 1024 for name in ("RssAnon", "RssFile")
    )
    return ours, files


def growth(seen: Seen) -> Rows:
    """Of each process, the median of its own memory after a sixth of the time and at the end."""
    rows: Rows = []
    for name, samples in seen.items():
        ours = [sample[0] for sample in samples]
        sixth = max(1, len(ours) // 6)
        warm, end = median(ours[sixth : 2 * sixth] or ours), median(ours[-sixth:])
        rows.append(
            {
                "process": name, "warm_mib": warm, "end_mib": end, "growth": end / warm - 1.0,
                "peak_mib": max(ours), "file_mib": samples[-1][1],
            }
        )  # fmt: skip
    return rows
