"""Start daemons by forking a process that has imported all they need, not by a new interpreter.

That saves 0.4 s of processor time an edge and 0.9 s a device service. `popen` does so, and after
`install` so do `EdgeServer` and `Emulator`. The daemon runs in a process of its own all the same, a
child of the tests. Where the start itself is tested (`commands`), it is that of a user's command;
``PILOTFISH_TEST_FORK=0`` makes all starts so.

A fork server forks twice, and the process between ends at once: so the daemon becomes a child of
the next subreaper above, which the tests are for that moment.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from typing import IO, Any

from pilotfish.base.child import ChildPipe, ChildProcess
from pilotfish.edge_runtime import process as edge_process
from pilotfish.emulation import emulator

_PR_SET_CHILD_SUBREAPER = 36  # of sys/prctl.h
EMULATOR = "pilotfish.emulation.proxy_process"
# What is imported before the first fork for such a daemon.
_DAEMONS = {
    "edge": (
        "pilotfish.cli.edge",
        "pilotfish.cli.edge_worker",
        "pilotfish.edge_runtime.edge_daemon",
        "pilotfish.edge_runtime.node.node_daemon",
        "pilotfish.edge_runtime.targets.federated",
        "pilotfish.edge_runtime.targets.local",
        "pilotfish.edge_runtime.targets.pipeline",
        "pilotfish.engines.backends.cpu",
        "llguidance",
        "onnxruntime",
    ),
    "device": (
        "pilotfish.cli.device",
        "pilotfish.device_runtime.service.serve",
        "pilotfish.device_runtime.service.service_daemon",
        "pilotfish.engines.backends.cpu",
        "llguidance",
        "onnxruntime",
    ),
    EMULATOR: (EMULATOR,),
}
# Variables that are read while modules are imported.
_IMPORTED_BY = ("PILOTFISH_PROTOCOLS", "PYTHON", "LANG", "LC_", "LD_", "OMP_", "OPENBLAS_")


class Forked:
    """A child that was forked, as a `subprocess.Popen`."""

    def __init__(self, pid: int, args: Sequence[str], stderr: IO[str] | None = None) -> None:
        self.pid, self.args, self.stderr = pid, args, stderr
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Return the exit status, None while it runs."""
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; raises `subprocess.TimeoutExpired`."""
        if self.poll() is None:
            end = os.pidfd_open(self.pid)
            try:
                select.select([end], [], [], timeout)
            finally:
                os.close(end)
            if self.poll() is None:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """The process that forks, until its socket closes."""

    def __init__(self) -> None:
        self._imported_by = _imported_by(os.environ)
        self._network = _network()
        self._end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.forking", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self._lock = threading.Lock()

    def fits(self, environment: Mapping[str, str]) -> bool:
        """Return whether a daemon with this environment would import what the server did.

        A thread that has entered another network namespace cannot have a daemon forked there.
        """
        same = _imported_by(environment) == self._imported_by and _network() == self._network
        return same and self._process.poll() is None

    def fork(self, request: dict[str, Any], files: Sequence[int]) -> int:
        """Fork a daemon with these files: 0, 1, 2 and, by its number, another one."""
        with self._lock:
            _reap_orphans(True)
            try:
                socket.send_fds(self._end, [json.dumps(request).encode()], files)
                return int(self._end.recv(64))
            finally:
                _reap_orphans(False)

    def close(self) -> None:
        """End the process; the daemons run on."""
        self._end.close()
        self._process.wait()


def _imported_by(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: info for name, info in environment.items() if name.startswith(_IMPORTED_BY)}


def _reap_orphans(ours: bool) -> None:
    """Have orphans below this process become its children, or no longer."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(ours), 0, 0, 0)


_servers: list[ForkServer] = []  # none before the first daemon, then one
_starting = threading.Lock()


def _network() -> str:
    """Return the name of the calling thread's network namespace."""
    return os.readlink("/proc/thread-self/ns/net")


def _server_for(command: Sequence[str], environment: Mapping[str, str]) -> ForkServer | None:
    """Return the server if it can fork a daemon of this command line, else None."""
    if os.environ.get("PILOTFISH_TEST_FORK") == "0" or _daemon(command) is None:
        return None
    with _starting:
        if not _servers:
            _servers.append(ForkServer())
    return _servers[0] if _servers[0].fits(environment) else None


def _daemon(command: Sequence[str]) -> str | None:
    """Return which of `_DAEMONS` a command line starts, None if it is another command."""
    if [*command[:2]] != [sys.executable, "-m"]:
        return None
    words = [command[2]] if command[2] == EMULATOR else command[3:]
    first = next((word for word in words if not word.startswith("-")), "")
    return first if first in _DAEMONS and command[2] in ("pilotfish", EMULATOR) else None


def fork_request(
    command: Sequence[str], environment: Mapping[str, str], *, session: bool
) -> dict[str, Any]:
    return {
        "daemon": _daemon(command),
        "arguments": [*command[3:]],
        "folder": os.getcwd(),
        "environment": {**environment},
        "session": session,
    }


def popen(
    command: Sequence[str], environment: Mapping[str, str], files: Sequence[int] = ()
) -> subprocess.Popen[str] | Forked:
    """Start a daemon without stdin and with its stderr in a pipe, as `subprocess.Popen`.

    files: descriptors for it; with some it is never forked.
    """
    if files or (server := _server_for(command, environment)) is None:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            pass_fds=files,
        )
    ours, theirs = os.pipe()
    nothing = os.open(os.devnull, os.O_RDONLY)
    try:
        wanted = fork_request(command, environment, session=False)
        return Forked(
            server.fork(wanted, [nothing, 1, theirs]), command, os.fdopen(ours, encoding="utf-8")
        )
    finally:
        os.close(theirs)
        os.close(nothing)


class ForkedChild(ChildProcess):
    """A tied process that is forked, if it can be."""

    def __init__(self, command: Sequence[str], timeout_s: float) -> None:
        if (server := _server_for(command, os.environ)) is None:
            super().__init__(command, timeout_s)
            return
        ours, theirs = socket.socketpair()
        with theirs, ExitStack() as stack:
            nothing = os.open(os.devnull, os.O_RDONLY)
            stack.callback(os.close, nothing)
            wanted = fork_request(command, os.environ, session=True)
            pid = server.fork(wanted, [nothing, 1, 2, theirs.fileno()])
        self.process = Forked(pid, command)
        ours.settimeout(timeout_s)
        self.pipe = ChildPipe(ours)


def install() -> None:
    """Have every `EdgeServer` and `Emulator` of this process fork."""
    edge_process.ChildProcess = emulator.ChildProcess = ForkedChild


def uninstall() -> None:
    """Have them start processes as for a user, and end the server."""
    edge_process.ChildProcess = emulator.ChildProcess = ChildProcess
    while _servers:
        _servers.pop().close()


# In the server


def _serve(end: socket.socket) -> None:
    while True:
        packed, files, _, _ = socket.recv_fds(end, 1 << 20, 4)
        if not packed:
            return
        payload = json.loads(packed)
        for name in _DAEMONS[payload["daemon"]]:
            import_module(name)
        gc.freeze()
        info, tell = os.pipe()
        between = _fork()
        if not between:
            child = _fork()
            if not child:
                for each in (end.fileno(), info, tell):
                    os.close(each)
                _run(payload, files)
            os.write(tell, str(child).encode())
            os._exit(0)
        os.waitpid(between, 0)
        end.send(os.read(info, 64))
        for each in (info, tell, *files):
            os.close(each)


def _fork() -> int:
    with warnings.catch_warnings():
        # OpenBLAS has a thread, and sees to it itself that it may be forked
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _run(request: dict[str, Any], files: Sequence[int]) -> None:
    """Be a daemon."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if request["session"]:
            os.setsid()
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"])
        for number, each in enumerate(files[:3]):
            os.dup2(each, number)
            os.close(each)
        # what the old ones know of their files is no longer true
        sys.stdin = os.fdopen(0, closefd=False)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
        code = _main(request["daemon"], request["arguments"], files[3:])
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    threading._shutdown()  # threads that are no daemons end first, as at any end
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the interpreter's own end takes longer than all before


def _main(daemon: str, arguments: Sequence[str], passed: Sequence[int]) -> int:
    for each in passed:
        os.set_inheritable(each, True)
    if daemon == EMULATOR:
        from pilotfish.emulation.proxy_process import main as emulate

        return emulate(*passed)
    from pilotfish.cli import main

    words = [*arguments, *map(str, passed)]
    sys.argv = ["pilotfish", *words]
    return main(words)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests
    # Else onnxruntime starts a thread, which would be missing after a fork.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    _serve(socket.socket(fileno=int(sys.argv[1])))
