"""Run an edge over a Ray cluster in its own network namespace, since Ray listens everywhere.

All processes, Ray's too, are in a process namespace that ends with the edge. Devices reach the edge
by a socket in the file system.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

START_S = 120.0
_ALONE = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
# keeps the namespace after the edge's end, so that tests can see the processes left
_INSIDE = 'ip link set lo up; "$@"; echo $? > "$CODE"; sleep 60'
# an address beyond loopback, which Ray would use
_OUTSIDE = (
    "ip link add v0 type veth peer name v1; ip addr add 192.0.2.9/24 dev v0; "
    "ip link set v0 up; ip link set v1 up; ip route add default dev v0; "
)


def can_be_alone() -> bool:
    """Whether this machine allows such a namespace."""
    probe = [*_ALONE, "sh", "-c", "ip link set lo up"]
    try:
        return subprocess.run(probe, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


class ClusterEdge:
    """A running edge; ``endpoint`` is its address."""

    def __init__(self, target: Path, folder: Path, cache: Path, *flags: object) -> None:
        self.endpoint = f"ipc://{folder / 'edge'}"
        self._log = (folder / "log").open("w+")
        self._code = folder / "code"
        command = [sys.executable, "-m", "pilotfish", "-v", "edge", "serve", "--cluster", "ray"]
        command += ["--target", str(target), "--listen", self.endpoint, *map(str, flags)]
        self._process = subprocess.Popen(
            [*_ALONE, "sh", "-c", _OUTSIDE + _INSIDE, "sh", *command],
            stderr=self._log,
            stdout=self._log,
            env={**os.environ, "PILOTFISH_CACHE": str(cache), "CODE": str(self._code)},
            start_new_session=True,
        )
        self.await_line("the edge serves on", START_S)
        (shell,) = _children(self._process.pid)
        (self.pid,) = _children(shell)
        self._inside = _namespace(shell)

    @property
    def log(self) -> str:
        """Read its output so far."""
        return Path(self._log.name).read_text()

    def await_line(self, text: str, within_s: float = 60.0, times: int = 1) -> None:
        """Wait for a line with this text."""
        deadline = time.monotonic() + within_s
        while self.log.count(text) < times:
            assert self._process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.05)

    def listens_on(self) -> set[str]:
        """List the listening addresses of its network, in the kernel's hex digits."""
        names = set()
        for family in ("tcp", "tcp6"):
            lines = Path(f"/proc/{self.pid}/net/{family}").read_text().splitlines()[1:]
            names |= {line.split()[1].split(":")[0] for line in lines if line.split()[3] == "0A"}
        return names

    def actors(self) -> list[int]:
        """List the processes of its actors."""
        return self._processes("ray::NodeActor")

    def rays(self) -> list[int]:
        """List Ray's own processes."""
        return self._processes("/ray/")

    def _processes(self, words: str) -> list[int]:
        results = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and _namespace(int(entry.name)) == self._inside:
                try:
                    command = (entry / "cmdline").read_bytes().decode(errors="replace")
                    state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
                except OSError:  # gone by now
                    continue
                if words in command and state != "Z":
                    results.append(int(entry.name))
        return sorted(results)

    def ends(self) -> int:
        """Wait for the end; returns the exit code."""
        deadline = time.monotonic() + 30
        while not (self._code.exists() and self._code.read_text().strip()):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return int(self._code.read_text())

    def close(self) -> None:
        """Kill all processes."""
        self._process.kill()
        self._process.wait()
        self._log.close()


def _children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""


@contextmanager
def cluster_edge(target: Path, folder: Path, cache: Path, *flags: object) -> Iterator[ClusterEdge]:
    """Run an edge, and kill it in the end."""
    folder.mkdir(parents=True, exist_ok=True)
    edge = ClusterEdge(target, folder, cache, *flags)
    try:
        yield edge
    finally:
        edge.close()
