"""The CPU time of an edge on this machine: of the process that listens at its port.

In:  the edge's address. Out: its CPU seconds so far, with those of its child processes.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_LISTENING = "0A"  # state of a socket in /proc/net/tcp
_LOOPBACK = ("tcp://127.0.0.1:", "tcp://localhost:", "tcp://[::1]:")


def edge_process(address: str, root: Path = Path("/proc")) -> int | None:
    """Return the process that listens at a loopback address; None if none can be seen."""
    if not address.startswith(_LOOPBACK):
        return None
    sockets = {f"socket:[{inode}]" for inode in _listening(int(address.rpartition(":")[2]), root)}
    for process in filter(str.isdecimal, os.listdir(root)):
        with suppress(OSError):  # another user's process, or one that has ended
            for descriptor in (root / process / "fd").iterdir():
                with suppress(OSError):
                    if os.readlink(descriptor) in sockets:
                        return int(process)
    return None


def _listening(port: int, root: Path) -> Iterator[str]:
    """Yield the inodes of the sockets that listen at a port."""
    for name in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (root / "net" / name).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                    yield fields[9]


def cpu_s(process: int | None, root: Path = Path("/proc")) -> float | None:
    """Return the CPU seconds of a process and its children so far.

    None without a process, and if the time of any of them is unknown: a part is no sum.
    """
    if process is None:
        return None
    try:
        ticks = sum(_ticks(member, root) for member in (process, *_children(process, root)))
    except (OSError, ValueError):
        return None
    return ticks / os.sysconf("SC_CLK_TCK")


def _ticks(process: int, root: Path) -> int:
    text = (root / str(process) / "stat").read_text()
    user, system = text.rpartition(")")[2].split()[11:13]
    return int(user) + int(system)


def _children(process: int, root: Path) -> Iterator[int]:
    """Yield all descendants of a process; raise OSError if they are unknown."""
    for task in (root / str(process) / "task").iterdir():
        try:
            children = (task / "children").read_text()
        except OSError:
            if task.exists():
                raise
            continue  # a thread that has ended
        for child in map(int, children.split()):
            yield child
            yield from _children(child, root)
