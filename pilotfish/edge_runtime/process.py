"""`EdgeServer`, an edge daemon in a child process, for tests, demos and notebooks.

The child runs `pilotfish edge serve` with a socket to its parent. It sends its endpoint over this
socket once it listens and once it serves, or its error, and stops when the socket closes. So it
always ends with its parent.
"""

import os
import select
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from pilotfish.base.child import STOP_S, ChildProcess
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
        return self._running.process.pid

    @property
    def lifeline(self) -> int:
        """A descriptor that becomes readable when the daemon ends."""
        return self._running.pipe.fileno()

    def check(self) -> None:
        """Raise `EdgeLostError` if the daemon has ended by itself."""
        child = self._running
        if not select.select([child.pipe], [], [], 0)[0]:
            return
        code = child.process.wait(STOP_S)
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        raise EdgeLostError(f"The edge's process {child.process.pid} ended {how}: start it again.")

    @property
    def _running(self) -> ChildProcess:
        if self._child is None:
            raise EdgeLostError("The edge server is not running; enter it with `with` first.")
        return self._child

    def start(self) -> "EdgeServer":
        """Start the daemon and wait until it serves; raise `EdgeLostError` if it does not."""
        self.launch()
        self.await_target()
        return self

    def launch(self) -> None:
        """Start the daemon and wait until it listens; raise `EdgeLostError` if it does not.

        Devices may connect at once. Their requests wait until the daemon has loaded the target.
        """
        self._child = child = ChildProcess([*self._command, "--parent-fd"], START_S)
        # set the cores before the process starts threads, which inherit them
        if self._cores is not None:
            os.sched_setaffinity(child.process.pid, self._cores)
        self.endpoint = self._receive()["endpoint"]

    def await_target(self) -> None:
        """Wait until a launched daemon has loaded its target; raise `EdgeLostError` otherwise."""
        self._receive()

    def _receive(self) -> dict[str, Any]:
        """Return the daemon's next message; if none comes, stop it and raise `EdgeLostError`."""
        child = self._running
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
        return report

    def stop(self) -> None:
        """Stop the daemon; kill it if it does not stop after SIGTERM."""
        child, self._child = self._child, None
        if child is not None:
            child.stop(terminate=True)

    def __enter__(self) -> "EdgeServer":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()
