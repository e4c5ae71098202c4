"""The edge's figures are told beside any number of clients that say nothing, or read nothing."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from socketserver import TCPServer
from typing import Any

import pytest

from pilotfish.edge_runtime import exposition
from pilotfish.edge_runtime.exposition import Exposition
from pilotfish.wire import messages as m
from pilotfish.wire.keys import DeviceKeys
from tests.conftest import Pair
from tests.support.daemons import exposition as figures
from tests.support.daemons import free_port, running
from tests.support.hostile import PROMPT, RawClient, RawSession

LONG = b"x" * (8 << 20)  # more than sockets take in unread


def application(environ: dict[str, Any], start: Any) -> list[bytes]:
    if environ["PATH_INFO"] == "/broken":
        raise ValueError("no figures")
    start("200 OK", [("X-Asked", environ.get("HTTP_X_ASK", ""))])
    return [LONG if environ["PATH_INFO"] == "/long" else environ["QUERY_STRING"].encode()]


@pytest.fixture
def server() -> Iterator[Exposition]:
    with closing(Exposition(application, "127.0.0.1", 0)) as server:
        yield server


def connect(port: int, data: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=10)
    connection.sendall(data)
    return connection


def ask(port: int, path: str = "/metrics", *headers: str) -> bytes:
    """All that is answered to a GET, until the server hangs up."""
    request = "\r\n".join([f"GET {path} HTTP/1.1", "Host: x", *headers, "", ""])
    return read(connect(port, request.encode()))


def read(connection: socket.socket) -> bytes:
    with connection, connection.makefile("rb") as file:
        return file.read()


def ended(connection: socket.socket) -> bool:
    connection.settimeout(0.01)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


def test_a_request_and_its_answer(server: Exposition) -> None:
    head, _, body = ask(server.port, "/x?a=b", "X-Ask: this").partition(b"\r\n\r\n")
    assert head.split(b"\r\n") == [
        b"HTTP/1.1 200 OK", b"X-Asked: this", b"Content-Length: 3", b"Connection: close"
    ]  # fmt: skip
    assert body == b"a=b"
    assert ask(server.port, "/long").endswith(LONG)
    in_parts = connect(server.port, b"GET / HT")
    time.sleep(0.05)
    in_parts.sendall(b"TP/1.1\r\n\r\n")
    assert read(in_parts).startswith(b"HTTP/1.1 200 OK\r\n")


def test_what_is_no_request_is_refused(server: Exposition) -> None:
    assert read(connect(server.port, b"hello\r\n\r\n")).startswith(b"HTTP/1.1 400 ")
    assert ask(server.port, "/broken").startswith(b"HTTP/1.1 500 ")
    endless = connect(server.port, b"GET / HTTP/1.1\r\nx: " + b"y" * 9000)
    assert ended(endless) or read(endless) == b""
    assert ask(server.port).startswith(b"HTTP/1.1 200 ")


REQUESTS = {
    "GET / HTTP/1.0\r\n\r\n": 200,
    "GET / HTTP/1.1\n\n": 200,
    "GET /\r\n\r\n": 200,  # HTTP/0.9, and yet the answer has a status line
    "HEAD / HTTP/1.1\r\n\r\n": 200,  # what a method means is the application's
    "OPTIONS / HTTP/1.1\r\n\r\n": 200,
    "POST / HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc": 200,
    "GET / HTTP/1.1\r\nConnection: keep-alive\r\n\r\n": 200,
    "GET / HTTP/1.1\r\n\r\nGET / HTTP/1.1\r\n\r\n": 200,  # the first one only
    "BREW / HTTP/1.1\r\n\r\n": 501,
    "GET / HTTP/2.0\r\n\r\n": 505,
    "GET / HTTP/1.x\r\n\r\n": 400,
    "GET\r\n\r\n": 400,
    "GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n": 400,
    "GET / HTTP/1.1\r\nHost : a\r\n\r\n": 400,
    f"GET /{'x' * 8000} HTTP/1.1\r\n\r\n": 200,
    f"GET / HTTP/1.1\r\nX: {'y' * 8000}\r\n\r\n": 200,
    "GET / HTTP/1.1\r\n" + "X: y\r\n" * 200 + "\r\n": 431,
    f"GET /{'x' * 9000} HTTP/1.1\r\n\r\n": None,
    f"GET / HTTP/1.1\r\nX: {'y' * 9000}\r\n\r\n": None,
    "\r\n\r\n": None,
}


@pytest.mark.parametrize(
    "request_", REQUESTS, ids=[f"{i}-{each[:24]!r}" for i, each in enumerate(REQUESTS)]
)
def test_a_request_has_one_answer_or_none(server: Exposition, request_: str) -> None:
    answer = b""
    with suppress(ConnectionResetError), connect(server.port, request_.encode()) as connection:
        while part := connection.recv(1 << 16):
            answer += part
    status = REQUESTS[request_]
    assert answer.count(b"HTTP/1.") == (status is not None)
    assert answer.startswith(f"HTTP/1.1 {status} ".encode() if status else b"")


def test_clients_that_are_served_do_not_delay_the_end() -> None:
    before = threading.active_count()
    with ExitStack() as stack:
        with closing(Exposition(application, "127.0.0.1", 0)) as server:
            request = b"GET /long HTTP/1.1\r\n\r\n"
            deaf = [stack.enter_context(connect(server.port, request)) for _ in range(3)]
            for each in deaf:
                assert each.recv(5) == b"HTTP/"
            silent = [stack.enter_context(connect(server.port, b"GET / HT")) for _ in range(3)]
            began_s = time.monotonic()
        assert time.monotonic() - began_s < 5.0  # half of the time that a client has
        assert all(ended(each) for each in silent)
        for thread in serving_threads():
            thread.join(5)
        assert threading.active_count() <= before


def test_without_a_descriptor_a_connection_waits(
    server: Exposition, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    accept, fails = TCPServer.get_request, [errno.EMFILE] * 3

    def get_request(server: TCPServer) -> Any:
        if fails:
            raise OSError(fails.pop(), "too many open files")
        return accept(server)

    silent = connect(server.port, b"GET / HT")
    while not serving_threads():
        time.sleep(0.01)
    monkeypatch.setattr(TCPServer, "get_request", get_request)
    with caplog.at_level(logging.WARNING):
        assert ask(server.port).startswith(b"HTTP/1.1 200 ")
    assert ended(silent)  # it gave way
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]


def test_of_many_idle_clients_the_oldest_give_way(server: Exposition) -> None:
    with ExitStack() as stack:
        idle = [stack.enter_context(connect(server.port)) for _ in range(40)]
        assert ask(server.port).startswith(b"HTTP/1.1 200 ")
        assert [ended(each) for each in idle] == [True] * 33 + [False] * 7
        assert len(serving_threads()) <= 9  # one may be ending


def test_clients_that_do_not_read_give_way_after_those_that_do_not_ask(server: Exposition) -> None:
    request = b"GET /long HTTP/1.1\r\n\r\n"
    with ExitStack() as stack:
        deaf = [stack.enter_context(connect(server.port, request)) for _ in range(6)]
        for each in deaf:
            assert each.recv(5) == b"HTTP/"  # it is being answered
        for _ in range(30):
            stack.enter_context(connect(server.port))
        assert ask(server.port).startswith(b"HTTP/1.1 200 ")
        assert len(deaf[0].recv(1 << 20)) > 0
        for _ in range(30):
            stack.enter_context(connect(server.port, request))
        assert ask(server.port).startswith(b"HTTP/1.1 200 ")


def test_no_connection_stays_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposition, "_PATIENCE_S", 0.3)
    with closing(Exposition(application, "127.0.0.1", 0)) as server:
        silent = connect(server.port)
        deaf = connect(server.port, b"GET /long HTTP/1.1\r\n\r\n")
        dripping = connect(server.port)
        began_s = time.monotonic()
        while not ended(silent) or not ended(dripping):
            assert time.monotonic() - began_s < 5.0
            try:
                dripping.send(b"x")
            except OSError:
                break
        time.sleep(1.0)
        assert len(read(deaf)) < len(LONG)


def test_idle_clients_of_the_metrics_port_keep_no_device_out(pair: Pair) -> None:
    port = free_port()
    flags = ("--target", pair.target, "--threads", 1, "--metrics", f"127.0.0.1:{port}")
    with running(*flags, descriptors=256) as edge, ExitStack() as stack:
        before = held_by(edge.pid)
        for _ in range(300):
            stack.enter_context(connect(port))
        assert "pilotfish_edge_sessions 0.0" in figures(port)
        assert held_by(edge.pid)["task"] <= before["task"] + 9  # as above
        assert held_by(edge.pid)["fd"] <= before["fd"] + 16
        with RawClient(edge.endpoint) as device:
            device.say(m.Ping(nonce=1))
            assert isinstance(device.receive(), m.Pong)


def test_a_key_file_whose_name_is_no_text_spoils_no_figures(
    pair: Pair, key_folders: dict[str, Path], tmp_path: Path
) -> None:
    folder, port = tmp_path / "keys", free_port()
    shutil.copytree(key_folders["edge"], folder)
    listed = folder / "allowed" / "bob.pub"
    listed.rename(os.fsdecode(bytes(listed.parent) + b"/b\xff\nb.pub"))
    flags = ("--target", pair.target, "--threads", 1, "--keys", folder, "--metrics", port)
    flags += ("--metrics-devices",)
    bob = DeviceKeys.load(key_folders["bob"])
    with running(*flags) as edge, RawClient(edge.endpoint, bob) as device:
        session = RawSession()
        device.send(*session.begin(PROMPT))
        session.go_on(device, 1)
        assert 'pilotfish_edge_device_sessions{device="b\\\\udcff b"} 1.0' in figures(port)


def serving_threads() -> list[threading.Thread]:
    """The threads of this process that serve one connection each."""
    return [each for each in threading.enumerate() if "process_request" in each.name]


def held_by(pid: int) -> dict[str, int]:
    """Threads and descriptors of a process."""
    return {kind: len(list(Path(f"/proc/{pid}/{kind}").iterdir())) for kind in ("task", "fd")}
