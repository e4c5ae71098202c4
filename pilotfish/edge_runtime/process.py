"""`EdgeServer`, an edge daemon in a child process, for tests, demos and notebooks.

The child runs `pilotfish edge serve` with a socket to its parent. It sends its endpoint, or its
error, over this socket, and stops when the socket closes. So it always ends with its parent.
"""

import os
import sys
from collections.abc import Collection
from pathlib import Path

from pilotfish.base.child import ChildProcess
from pilotfish.base.errors import EdgeLostError

START_S = 120.0  # time limit (s) of the start, enough to load a large target


class EdgeServer:
    """Context manager that starts an edge on entry and stops it on exit.

    endpoint: the edge's address after the start. target: folder of the target's artifact. listen:
    address; with port 0 the system chooses a port. keys: folder with ``edge.key`` and ``allowed/``;
    None: no keys, only on loopback. action: "serve", or "worker" for a node of another edge's
    target (`pilotfish edge worker`). cores: CPU cores to run on; None: all. options: further flags
    of the command, for example ``sessions=4`` for ``--sessions 4``.
    """

    def __init__(
        self,
        target: str | Path,
        listen: str = "tcp://127.0.0.1:0",
        keys: str | Path | None = None,
        action: str = "serve",
        cores: Collection[int] | None = None,
        **options: object,
    ) -> None:
        self._command = [sys.executable, "-m", "pilotfish", "edge", action]
        self._command += ["--target", str(target), "--listen", listen]
        if keys is not None:
            self._command += ["--keys", str(keys)]
        for name, value in options.items():
            flag = f"--{name.replace('_', '-')}"
            if value is not False:
                self._command += [flag] if value is True else [flag, str(value)]
        self._cores = cores
        self._child: ChildProcess | None = None
        self.endpoint = ""

    @property
    def pid(self) -> int:
        """Process id of the daemon."""
        if self._child is None:
            raise EdgeLostError("The edge server is not running; enter it with `with` first.")
        return self._child.process.pid

    def start(self) -> "EdgeServer":
        """Start the daemon and wait until it serves; raise `EdgeLostError` if it does not."""
        self._child = child = ChildProcess([*self._command, "--parent-fd"], START_S)
        # set the cores before the process starts threads, which inherit them
        if self._cores is not None:
            os.sched_setaffinity(child.process.pid, self._cores)
        try:
            report = child.receive()
        except TimeoutError as error:
            self.stop()
            raise EdgeLostError(
                f"The edge was not ready within {START_S:g} s: see its log. An edge whose target "
                "runs on nodes waits for the nodes."
            ) from error
        except BaseException:
            self.stop()
            raise
        if report is None:
            code = child.process.wait()
            self.stop()
            raise EdgeLostError(f"The edge ended with exit code {code} before it could serve.")
        self.endpoint = report["endpoint"]
        return self

    def stop(self) -> None:
        """Stop the daemon; kill it if it does not stop after SIGTERM."""
        child, self._child = self._child, None
        if child is not None:
            child.stop(terminate=True)

    def __enter__(self) -> "EdgeServer":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()
