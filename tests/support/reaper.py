"""End whatever a run of the tests has started, once the run is gone, however it went.

`Reaper` marks the environment, which all children inherit, and theirs, also those in sessions of
their own; and starts this file as a program, which waits for the end of a pipe that nobody else
holds. When the run ends, in order or killed, what bears the mark is killed, and all below it.
What the run mounts goes with it too: `own_mounts`.
Standard library only: it runs without site-packages, and takes some 10 MB and 20 ms.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

MARK = "PILOTFISH_TEST_RUN"  # a run within a run bears both marks
_LIMIT_S = 10.0  # for all to be gone
_CLONE_NEWNS, _MS_REC, _MS_PRIVATE = 0x20000, 0x4000, 1 << 18  # of sched.h and sys/mount.h


def own_mounts() -> None:
    """Let this process, and its children, mount what nobody else sees, and what ends with them.

    Where that is not allowed, as without root, nothing can be mounted either.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) == 0:
        libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)


class Reaper:
    """Watches over this process from now until `close`, or its end."""

    def __init__(self) -> None:
        self._before = os.environ.get(MARK, "")
        unmarked = {name: value for name, value in os.environ.items() if name != MARK}
        token = secrets.token_hex(8)
        # in a session of its own, and without a mark: it outlives what it watches
        self._program = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, token],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=unmarked, start_new_session=True,
        )  # fmt: skip
        os.environ[MARK] = f"{self._before} {token}".strip()

    def close(self) -> None:
        """Kill what has been left, and name it on stderr."""
        os.environ[MARK] = self._before
        assert self._program.stdin is not None
        self._program.stdin.close()
        self._program.wait()


def _marked(token: bytes) -> dict[int, str]:
    """Processes whose environment had this token at their start, and those below them."""
    result, parents = {}, {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        with suppress(OSError):  # it has ended, or is another user's
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if state in "ZX":
                continue
            words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            parents[int(folder.name)] = (int(parent), words.strip())
            if token in (folder / "environ").read_bytes():
                result[int(folder.name)] = words.strip()
    more = True
    while more:
        more = {
            pid: words
            for pid, (parent, words) in parents.items()
            if parent in result and pid not in result
        }
        result |= more
    return result


def _main(token: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdin.buffer.read()
    names: set[int] = set()
    deadline = time.monotonic() + _LIMIT_S
    while (left := _marked(token.encode())) and time.monotonic() < deadline:
        for pid, words in left.items():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            if pid not in names:
                names.add(pid)
                with suppress(OSError):
                    print(f"left by the tests, and killed: {pid} {words[:200]}", file=sys.stderr)
        time.sleep(0.05)


if __name__ == "__main__":
    _main(sys.argv[1])
