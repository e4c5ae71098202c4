"""A service that has no open files left says so once, serves on, and is busy with nothing."""

from __future__ import annotations

import resource
import signal
import socket
import time
from contextlib import ExitStack, suppress

import pytest

from pilotfish import EdgeServer
from pilotfish.device_runtime.service.refusal import refusal_of
from tests.conftest import Pair
from tests.support.serving import Serving, chat, eventually, serving

FILES = 64
ROOM = "no room for another connection"
AGAIN = "there is room for connections again"


def cpu_s(service: Serving) -> float:
    with open(f"/proc/{service.process.pid}/stat") as info:
        fields = info.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def count(service: Serving, words: str) -> int:
    return sum(words in line for line in service.lines)


def connected(service: Serving, sent: bytes) -> socket.socket:
    raw = socket.socket()
    raw.setblocking(False)
    raw.connect_ex(("127.0.0.1", service.port))
    time.sleep(0.01)
    with suppress(OSError):
        raw.send(sent)
    return raw


@pytest.mark.parametrize("busy", [False, True])
def test_a_service_without_open_files_goes_on(pair: Pair, edge: EdgeServer, busy: bool) -> None:
    """Idle connections make room for who asks; where all are busy, who comes waits for one."""
    # half a request: busy, until its body is late
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\n{"
    with serving(pair.draft, edge.endpoint, "--lanes", 2) as service, ExitStack() as crowd:
        chat(service.client())
        resource.prlimit(service.process.pid, resource.RLIMIT_NOFILE, (FILES, FILES))
        talking = service.client()
        chat(talking)
        lines, began_s = len(service.lines), cpu_s(service)
        for _ in range(90):
            crowd.callback(connected(service, head if busy else b"").close)
        time.sleep(1.5)
        spent_s = cpu_s(service) - began_s
        assert chat(service.client()).choices  # while busy ones hold it: once one is late
        assert service.get("/status").json()["connections"]["crowded"] or busy
        assert spent_s < 1.0, "it was busy with nothing"
        assert count(service, ROOM) >= 1
        crowd.close()
        eventually(lambda: not service.get("/status").json()["connections"]["crowded"], 20)
        assert service.metric("pilotfish_http_connections_crowded") == 0
        assert chat(talking, extra_body={"structured_outputs": {"regex": "[a-z]+"}}).choices
        assert count(service, ROOM) == count(service, AGAIN) == 1
        assert len(service.lines) - lines < 30
        assert count(service, "Traceback") == 0


def test_who_asks_as_others_leave_is_answered(pair: Pair, edge: EdgeServer) -> None:
    """The descriptors of closing connections become free late, and no connection is idle."""
    with serving(pair.draft, edge.endpoint) as service:
        resource.prlimit(service.process.pid, resource.RLIMIT_NOFILE, (FILES, FILES))
        for _ in range(3):
            with ExitStack() as crowd:
                for _ in range(FILES):
                    crowd.callback(connected(service, b"").close)
                eventually(lambda: service.get("/status").json()["connections"]["crowded"])
                for _ in range(2):  # take the place of who asked
                    crowd.callback(connected(service, b"").close)
                time.sleep(0.5)
                service.tell(signal.SIGSTOP)  # it notices all that follows at once, in this order
            with socket.create_connection(("127.0.0.1", service.port), 20.0) as asking:
                asking.sendall(b"GET /status HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
                service.tell(signal.SIGCONT)
                assert asking.recv(1 << 10).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "error",
    [MemoryError(), OSError(24, "Too many open files"), RuntimeError("can't start new thread")],
)
def test_what_the_machine_lacks_is_told_as_busy(error: Exception) -> None:
    refusal = refusal_of(error)
    assert (refusal.status, refusal.code) == (503, "busy")
    assert refusal.retry_s


def test_other_errors_are_no_shortage() -> None:
    for error in (RuntimeError("no"), OSError(2, "No such file"), ValueError()):
        assert refusal_of(error).code == "internal"
