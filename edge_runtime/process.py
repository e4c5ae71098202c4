"""`EdgeServer`: an edge daemon in a process of its own, for tests, demos and notebooks.

It is the daemon that `pilotfish edge serve` runs, with a socket to its parent: over it the daemon
says where it listens, or why it does not; and when the parent is gone, however it went, the daemon
sees the socket close and stops. No orphans.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from types import TracebackType

from pilotfish.wire.errors import EdgeLostError, from_code

START_S = 120.0  # loading a large target takes its time
STOP_S = 5.0


class EdgeServer:
    """Starts an edge on entry and stops it on exit; ``endpoint`` is where it listens.

    action: "serve", or "worker" for a node of another edge's target (`pilotfish edge worker`).
    target: the target's artifact. listen: port 0 takes a free one. keys: the folder with
    ``edge.key`` and ``allowed/``; None is allowed on loopback only. cores: those that it may use;
    None: all. options: further flags of the command, as ``sessions=4`` for ``--sessions 4``.
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
        self._command = [
            sys.executable,
            "-m",
            "pilotfish",
            "edge",
            action,
            "--target",
            str(target),
        ]
        self._command += ["--listen", listen]
        if keys is not None:
            self._command += ["--keys", str(keys)]
        for name, value in options.items():
            self._command += [f"--{name.replace('_', '-')}", str(value)]
        self._cores = cores
        self._process: subprocess.Popen[bytes] | None = None
        self._tie: socket.socket | None = None
        self.endpoint = ""

    @property
    def pid(self) -> int:
        """The daemon's process."""
        if self._process is None:
            raise EdgeLostError("The edge server is not running; enter it with `with` first.")
        return self._process.pid

    def start(self) -> "EdgeServer":
        """Start the daemon and wait until it serves; a typed error if it cannot."""
        ours, theirs = socket.socketpair()
        # a session of its own: Ctrl-C in the terminal reaches the parent, which stops the daemon
        self._process = subprocess.Popen(
            [*self._command, "--parent-fd", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        if self._cores is not None:  # long before it has threads, which inherit them
            os.sched_setaffinity(self._process.pid, self._cores)
        theirs.close()
        self._tie = ours
        try:
            ours.settimeout(START_S)
            with ours.makefile("r", encoding="utf-8") as lines:
                report = lines.readline()
        except TimeoutError as error:
            self.stop()
            raise EdgeLostError(
                f"The edge did not serve within {START_S:g} s: see its log. One whose target has "
                "nodes waits for them."
            ) from error
        except BaseException:
            self.stop()
            raise
        if not report:
            code = self._process.wait()
            self.stop()
            raise EdgeLostError(f"The edge ended with exit code {code} before it could serve.")
        told = json.loads(report)
        if "endpoint" not in told:
            self.stop()
            raise from_code(told["code"], told["message"])
        self.endpoint = told["endpoint"]
        return self

    def stop(self) -> None:
        """Stop the daemon; kills it if it does not stop by itself."""
        process, self._process = self._process, None
        if self._tie is not None:
            self._tie.close()
            self._tie = None
        if process is None:
            return
        if process.poll() is None:
            os.kill(process.pid, signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def __enter__(self) -> "EdgeServer":
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
