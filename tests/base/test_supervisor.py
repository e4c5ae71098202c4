"""What a daemon tells systemd, heard on a socket of systemd's kind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pilotfish.base.errors import NotReloadedError
from pilotfish.base.supervisor import Supervisor, reload


class Ear:
    """The socket that systemd would listen on."""

    def __init__(self, path: Path) -> None:
        self.address = str(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.address)
        self._socket.settimeout(5.0)

    def receive(self) -> dict[str, str]:
        lines = self._socket.recv(4096).decode().splitlines()
        return {name: value for name, _, value in (line.partition("=") for line in lines)}

    @property
    def silent(self) -> bool:
        self._socket.setblocking(False)
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        finally:
            self._socket.settimeout(5.0)
        return False

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def ear(tmp_path: Path) -> Iterator[Ear]:
    ear = Ear(tmp_path / "notify")
    yield ear
    ear.close()


def test_what_it_tells(ear: Ear) -> None:
    supervisor = Supervisor(ear.address, watchdog_s=10.0)
    supervisor.extend(2.5)
    assert ear.receive() == {"EXTEND_TIMEOUT_USEC": "2500000"}
    supervisor.ready("serving")
    assert ear.receive() == {"READY": "1", "STATUS": "serving"}
    supervisor.status("serving")
    supervisor.status("serving 1")
    assert ear.receive() == {"STATUS": "serving 1"}
    before_us = time.monotonic_ns() // 1000
    supervisor.reloading()
    told = ear.receive()
    assert told["RELOADING"] == "1"
    assert before_us <= int(told["MONOTONIC_USEC"]) <= time.monotonic_ns() // 1000
    supervisor.stopping("bye")
    assert ear.receive() == {"STOPPING": "1", "STATUS": "bye"}


def test_a_status_of_several_lines_is_one_message(ear: Ear) -> None:
    Supervisor(ear.address).ready("serving a\nSTOPPING=1\x1b[2J")
    assert ear.receive() == {"READY": "1", "STATUS": "serving a STOPPING=1\\x1b[2J"}


@pytest.mark.parametrize("trouble", ["", "edge.toml is not valid TOML."])
def test_a_reload_waits_for_its_own_outcome(
    ear: Ear, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    """Not for that of a reload which was under way when it was asked for, nor for READY alone."""
    monkeypatch.setenv("RUNTIME_DIRECTORY", f"{tmp_path}:/elsewhere")
    monkeypatch.setenv("NOTIFY_SOCKET", ear.address)
    supervisor = Supervisor.from_environment()
    monkeypatch.setenv("RUNTIME_DIRECTORY", f"{tmp_path}:/elsewhere")
    asked = threading.Event()
    before = signal.signal(signal.SIGHUP, lambda *_: asked.set())

    def serve() -> None:
        supervisor.reloading()
        assert asked.wait(10)
        supervisor.reloaded("serving", "of another reload")
        time.sleep(0.1)
        supervisor.reloading()
        supervisor.reloaded("serving", trouble)

    thread = threading.Thread(target=serve)
    thread.start()
    ear.receive()  # it has begun
    try:
        if trouble:
            with pytest.raises(NotReloadedError, match=trouble):
                reload(os.getpid(), 10.0)
        else:
            reload(os.getpid(), 10.0)
    finally:
        thread.join()
        signal.signal(signal.SIGHUP, before)


def test_it_feeds_as_often_as_is_needed(ear: Ear) -> None:
    supervisor = Supervisor(ear.address, watchdog_s=0.4)
    assert supervisor.feed_s == pytest.approx(0.2)
    supervisor.feed()
    assert ear.receive() == {"WATCHDOG": "1"}
    supervisor.feed()
    assert ear.silent
    time.sleep(0.1)
    supervisor.feed()
    assert ear.receive() == {"WATCHDOG": "1"}


def test_a_supervisor_that_does_not_read_blocks_nothing(ear: Ear) -> None:
    supervisor = Supervisor(ear.address)
    began = time.monotonic()
    for number in range(5000):
        supervisor.status(str(number))
    assert time.monotonic() - began < 5.0


def test_no_listener(tmp_path: Path) -> None:
    for supervisor in (Supervisor(), Supervisor(str(tmp_path / "gone"), 1.0)):
        supervisor.ready("x")
        supervisor.feed()
        supervisor.stopping("y")
    assert Supervisor(None, 1.0).feed_s is None


_CHILD = """
import os
from pilotfish.base.supervisor import Supervisor, inherited_socket
os.environ["WATCHDOG_PID"] = str(os.getpid() + int(os.environ.pop("OFF_BY")))
if "LISTEN_FDS" in os.environ:
    os.environ["LISTEN_PID"] = str(os.getpid())
supervisor = Supervisor.from_environment()
supervisor.ready("from a child")
print(supervisor.feed_s, inherited_socket(), inherited_socket())
print([name for name in os.environ if name.startswith(("NOTIFY", "WATCHDOG", "LISTEN"))])
"""


@pytest.mark.parametrize(("off_by", "feed_s"), [(0, "1.5"), (1, "None")])
@pytest.mark.parametrize("listening", [True, False])
def test_what_systemd_gives(ear: Ear, off_by: int, feed_s: str, listening: bool) -> None:
    given = {
        "NOTIFY_SOCKET": ear.address, "WATCHDOG_USEC": "3000000", "OFF_BY": str(off_by),
        "LISTEN_FDNAMES": "x",
    }  # fmt: skip
    if listening:
        given["LISTEN_FDS"] = "1"
    child = subprocess.run(
        [sys.executable, "-c", _CHILD], env=os.environ | given, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert child.stdout.splitlines() == [f"{feed_s} {3 if listening else None} None", "[]"]
    assert ear.receive() == {"READY": "1", "STATUS": "from a child"}
