"""A path between a device and an edge over which the kernel's own TCP runs, each in a namespace.

`pilotfish emulate` is a proxy: it ends TCP on both sides, and so cannot show what the kernel does
about loss, round trips, full queues or packets that are too large. Here packets cross one by one:

    with KernelPath(up_bps=64e3, rtt_s=0.1) as path:
        edge = subprocess.Popen(path.edge_command("pilotfish", "edge", "serve", …))
        device = subprocess.Popen(path.device_command("pilotfish", "device", "run", …))

The path's process and its namespaces end with this process, however it ends. It takes root, a tun
device and `nsenter`; tests that use it are marked with `needs_paths`, and skip without them.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from pilotfish.base.child import ChildProcess
from tests.support.path_connections import Connection
from tests.support.path_forwarder import DEVICE, EDGE, INTERFACE
from tests.support.path_ways import PathConditions, WayFigures

_ANSWER_S = 30.0
_CLONE_NEWNET = 0x40000000
_PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from tests.support.path_forwarder import main
main(int(sys.argv[2]))
"""


@cache
def why_impossible() -> str:
    """Return why there can be no such path here; empty if there can."""
    try:
        with KernelPath():
            return ""
    except OSError as error:
        return f"no path of the kernel can be made here: {error}"


def needs_paths() -> pytest.MarkDecorator:
    """Mark tests that want a path; they skip where none can be made."""
    reason = why_impossible()
    return pytest.mark.skipif(bool(reason), reason=reason or "paths can be made")


class KernelPath:
    """Runs the path while entered; ``changes`` are fields of `PathConditions`.

    address: of the edge, as devices reach it. since_s: the time, by ``time.monotonic()``, from
    which on the present conditions hold; traces begin then.
    """

    def __init__(self, **changes: Any) -> None:
        self.conditions = PathConditions(**changes)
        self.address = EDGE
        self.since_s = 0.0
        self._addresses = itertools.count(int(DEVICE.rsplit(".", 1)[1]) + 1)

    def start(self) -> KernelPath:
        """Make both namespaces. Raises OSError where that is not possible."""
        if os.geteuid() != 0:
            raise PermissionError("it takes root")
        if shutil.which("nsenter") is None:
            raise FileNotFoundError("there is no nsenter")
        command = [sys.executable, "-c", _PROGRAM, str(Path(__file__).parents[2])]
        self._child = ChildProcess(command, _ANSWER_S)
        self._child.pipe.send(asdict(self.conditions))
        reply = self._child.receive() or {"impossible": "the path's process has ended"}
        if "impossible" in reply:
            self._child.stop()
            raise OSError(reply["impossible"])
        folder = f"/proc/{self._child.process.pid}/fd"
        self._edge, self._device = f"{folder}/{reply['edge']}", f"{folder}/{reply['device']}"
        self.since_s = reply["since_s"]
        return self

    def stop(self) -> None:
        """End the path; namespaces go when the last process in them does."""
        self._child.stop()

    def edge_command(self, *words: object) -> list[str]:
        """Return this command as one that runs at the edge's end; the process id is the same."""
        return ["nsenter", f"--net={self._edge}", *map(str, words)]

    def device_command(self, *words: object) -> list[str]:
        """Return this command as one that runs at the device's end."""
        return ["nsenter", f"--net={self._device}", *map(str, words)]

    @contextmanager
    def at_edge(self) -> Iterator[None]:
        """Have this thread, and threads that it starts, open sockets at the edge's end."""
        with _entered(self._edge):
            yield

    @contextmanager
    def at_device(self) -> Iterator[None]:
        """Have this thread, and threads that it starts, open sockets at the device's end."""
        with _entered(self._device):
            yield

    def set(self, **changes: Any) -> None:
        """Change the path for what has not left yet; holds when the call is back."""
        self.conditions = replace(self.conditions, **changes)
        self.since_s = self._ask(set=asdict(self.conditions))["since_s"]

    def cut(self, *ways: str) -> None:
        """Let nothing cross any more, up, down or (by default) both; nobody is told."""
        self._ask(cut=list(ways or ("up", "down")))

    def restore(self) -> None:
        """Undo `cut`."""
        self._ask(cut=[])

    def forget(self) -> None:
        """Lose what is under way, such as what an earlier device has left in the queues."""
        self.cut()
        self.restore()

    def change_address(self) -> str:
        """Give the device another address, as a change of networks does; returns it.

        Its connections can neither send nor receive any more, and are not told.
        """
        address = f"{DEVICE.rsplit('.', 1)[0]}.{next(self._addresses)}"
        for change in (f"flush dev {INTERFACE}", f"add {address}/24 dev {INTERFACE}"):
            subprocess.run(self.device_command("ip", "address", *change.split()), check=True)
        return address

    def rebind(self) -> None:
        """Have a NAT before the edge forget the device's connections.

        What they go on to send comes from another address, so that the edge resets them; what the
        edge sends to them is lost.
        """
        self._ask(rebind=True)

    def up(self) -> WayFigures:
        """Return what has become of the packets to the edge so far."""
        return WayFigures(**self._ask(figures=True)["up"])

    def down(self) -> WayFigures:
        """Return what has become of the packets to the device so far."""
        return WayFigures(**self._ask(figures=True)["down"])

    def connections(self) -> list[Connection]:
        """Return the TCP connections so far, in the order of their beginning."""
        return [Connection.read(each) for each in self._ask(connections=True)["connections"]]

    def timeline(self) -> dict[str, dict[float, int]]:
        """Return the bytes that arrived, up and down, by tenth of a second (monotonic)."""
        reply = self._ask(timeline=True)
        return {way: {tenth / 10: size for tenth, size in reply[way]} for way in ("up", "down")}

    def _ask(self, **wanted: Any) -> dict[str, Any]:
        self._child.pipe.send(wanted)
        reply = self._child.receive()
        if reply is None:
            raise OSError("the path's process has ended; see its stderr")
        return reply

    def __enter__(self) -> KernelPath:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


@contextmanager
def _entered(namespace: str) -> Iterator[None]:
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/thread-self/ns/net") as before, open(namespace) as inside:
        if libc.setns(inside.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")
        try:
            yield
        finally:
            libc.setns(before.fileno(), _CLONE_NEWNET)
