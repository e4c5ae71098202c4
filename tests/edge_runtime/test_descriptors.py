"""An edge, and a node, whose connections are as many as open files allow: told once, and over."""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import zmq

from pilotfish.base.descriptors import connection_room
from pilotfish.base.errors import BusyError
from pilotfish.base.shortage import shortage
from pilotfish.edge_runtime.scheduler import Job, Scheduler
from pilotfish.edge_runtime.targets.local import LocalTarget
from pilotfish.engines.engine import Engine
from pilotfish.engines.onnx_decoder import Decoder
from pilotfish.wire import messages as m
from tests.conftest import Pair
from tests.support.daemons import Daemon, Systemd, await_sample, free_port, running, scrape
from tests.support.hostile import RawClient
from tests.support.passes import run

FILES = 64
ROOM = "no room for another connection"
AGAIN = "there is room for connections again"


def cpu_s(daemon: Daemon) -> float:
    fields = Path(f"/proc/{daemon.pid}/stat").read_text("ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def count(daemon: Daemon, words: str) -> int:
    return sum(words in line for line in daemon.lines)


def crowd(stack: ExitStack, daemon: Daemon) -> None:
    """Strangers who say nothing."""
    host, _, port = daemon.endpoint.rpartition("/")[2].rpartition(":")
    for _ in range(2 * FILES):
        raw = stack.enter_context(socket.socket())
        raw.setblocking(False)
        raw.connect_ex((host, int(port)))
        time.sleep(0.005)


def told_once(daemon: Daemon) -> None:
    """It was crowded, and is no more."""
    deadline = time.monotonic() + 30
    while not count(daemon, AGAIN):
        assert time.monotonic() < deadline, daemon.lines
        time.sleep(0.1)
    assert count(daemon, ROOM) == count(daemon, AGAIN) == 1
    assert len(daemon.lines) < 20
    assert count(daemon, "Traceback") == 0


def test_an_edge_without_open_files_goes_on(pair: Pair, tmp_path: Path) -> None:
    systemd, port = Systemd(tmp_path), free_port()
    flags = ("--target", pair.target, "--threads", 1, "--metrics", f"127.0.0.1:{port}")
    with (
        running(*flags, descriptors=FILES, systemd=systemd, watchdog_s=5.0) as edge,
        RawClient(edge.endpoint) as friend,
    ):
        friend.say(m.Ping(nonce=1))
        assert isinstance(friend.receive(), m.Pong)
        with ExitStack() as strangers:
            began_s = cpu_s(edge)
            crowd(strangers, edge)
            await_sample(port, "connections_crowded", 1.0)
            time.sleep(1.0)
            assert cpu_s(edge) - began_s < 1.0, "it was busy with nothing"
            friend.say(m.Ping(nonce=2))
            assert isinstance(friend.receive(), m.Pong)
            assert any("no room for more" in info.get("STATUS", "") for _, info in systemd.received)
        told_once(edge)
        assert scrape(port)["connections_crowded"] == 0
        with RawClient(edge.endpoint) as another:
            another.say(m.Ping(nonce=3))
            assert isinstance(another.receive(), m.Pong)


def test_a_worker_without_open_files_goes_on(pair: Pair) -> None:
    flags = ("--target", pair.target, "--threads", 1)
    with running(*flags, action="worker", descriptors=FILES) as worker, ExitStack() as strangers:
        began_s = cpu_s(worker)
        crowd(strangers, worker)
        time.sleep(1.0)
        assert cpu_s(worker) - began_s < 1.0, "it was busy with nothing"
        strangers.close()
        told_once(worker)


@pytest.mark.parametrize(
    ("limit", "connections", "results"),
    [(1024, 300, 300), (1024, 2000, 896), (256, 300, 128), (64, 300, 16), (49, 300, 2)],
)
def test_connections_leave_open_files_for_other_needs(
    limit: int, connections: int, results: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pilotfish.base.descriptors.raise_limit", lambda wanted: limit)
    assert connection_room(connections, 128) == results


@pytest.mark.parametrize("where", ["pass", "rule"])
def test_a_lack_of_memory_is_told_as_busy(pair: Pair, where: str, monkeypatch) -> None:
    def lacking(*_: object) -> None:
        raise MemoryError

    decoder = Decoder(pair.target, slots=1, threads=1)
    scheduler = Scheduler(LocalTarget(Engine(decoder)))
    scheduler.submit(Job(b"a" * 16, 0, np.array([1, 2, 3], np.uint32), rows=1, verify=lacking))
    if where == "pass":
        monkeypatch.setattr(Decoder, "forward", lacking)
    [done] = run(scheduler)
    assert isinstance(done.error, BusyError)


def test_what_is_a_shortage() -> None:
    for error in (MemoryError(), OSError(24, ""), RuntimeError("can't start new thread")):
        assert shortage(error)
    for error in (RuntimeError("no"), FileNotFoundError(2, ""), zmq.Again()):
        assert shortage(error) is None
