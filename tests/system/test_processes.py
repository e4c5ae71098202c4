"""Ends that die or freeze in the middle: one clear line, in time, and nothing left.

A line on stderr within three seconds (the interpreter's own start aside), the exit code of
`base.errors`, no traceback, no process left behind.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from pilotfish import Device, EdgeServer
from pilotfish.base.errors import EdgeLostError
from pilotfish.wire.channel import EdgeChannel
from pilotfish.wire.keys import DeviceKeys
from pilotfish.wire.messages import Ping
from tests.conftest import Pair
from tests.support.commands import (
    alive,
    await_end,
    children,
    command,
    complaint,
    device_run,
    orphan,
    patience_s,
    start,
)
from tests.support.daemons import free_port
from tests.support.thinned import thinned

PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture(autouse=True)
def no_process_is_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """How processes begin and end is what this file is about."""
    monkeypatch.setenv("PILOTFISH_TEST_FORK", "0")


# In the middle of the work


@pytest.fixture(scope="module")
def default_target(default_artifacts: Pair) -> Path:
    """The target of the demo: it takes a while to load."""
    return default_artifacts.target


@pytest.fixture
def running(long_pair: Pair) -> Iterator[tuple[EdgeServer, subprocess.Popen[str]]]:
    """An edge, and a device in the middle of a long answer."""
    with EdgeServer(long_pair.target, context=32768, threads=1) as server:
        process = device_run(
            long_pair, server.endpoint, "--max-tokens", 32000, "--window", 1, "--threads", 1
        )
        assert process.stdout is not None
        os.read(process.stdout.fileno(), 1)
        yield server, process
        process.kill()
        process.communicate()
        os.kill(server.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("blow", "unnoticed_s"),
    [
        (signal.SIGKILL, 0.0),
        (signal.SIGTERM, 0.0),
        (signal.SIGSTOP, 1.2),  # so long silence may last before it is noticed
    ],
)
def test_edge_lost_in_the_middle(running, blow: signal.Signals, unnoticed_s: float) -> None:
    server, process = running
    os.kill(server.pid, blow)
    line = complaint(process, 69, patience_s() + unnoticed_s)
    assert server.endpoint in line


def test_interrupted_device(running) -> None:
    server, process = running
    process.send_signal(signal.SIGINT)
    assert complaint(process, 130, patience_s()) == "pilotfish: interrupted"
    assert alive(server.pid)


def test_interrupted_device_of_a_frozen_edge(running) -> None:
    server, process = running
    os.kill(server.pid, signal.SIGSTOP)
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert complaint(process, 130, patience_s()) == "pilotfish: interrupted"


@pytest.mark.parametrize(("blow", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_stopping_an_edge(pair: Pair, blow: signal.Signals, code: int) -> None:
    process = start("edge", "serve", "--target", pair.target, "--listen", "tcp://127.0.0.1:0")
    assert process.stderr is not None
    line = process.stderr.readline()
    address = re.fullmatch(r"pilotfish: the edge serves on (tcp://127\.0\.0\.1:\d+)\n", line)
    assert address
    with Device(pair.draft, address[1]) as device:
        assert device.generate(PROMPT, protocol="greedy", max_tokens=4).tokens
        began = time.monotonic()
        process.send_signal(blow)
        _, rest = process.communicate(timeout=20)
        assert time.monotonic() - began < patience_s()
        assert process.returncode == code
        assert rest in ("", "pilotfish: interrupted\n")
        began = time.monotonic()
        with pytest.raises(EdgeLostError, match="did not come back"):
            device.generate(PROMPT, protocol="greedy", max_tokens=4)
        assert time.monotonic() - began < patience_s()


def loading_edge(target: Path, *options: object) -> tuple[subprocess.Popen[str], str]:
    """An edge that listens already, but does not serve yet; and its address."""
    port = free_port()
    address = f"tcp://127.0.0.1:{port}"
    process = start("edge", "serve", "--target", target, "--listen", address, *options)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            time.sleep(0.01)
        else:
            return process, address
    process.kill()
    pytest.fail("the edge does not listen")


def test_an_edge_that_is_still_loading_is_not_absent(default_target: Path, key_folders) -> None:
    process, address = loading_edge(default_target, "--keys", key_folders["edge"])
    channel = EdgeChannel(address, DeviceKeys.load(key_folders["alice"]), 2**20)
    assert process.stderr is not None
    try:
        deadline = time.monotonic() + patience_s()
        while not channel.connected and time.monotonic() < deadline:
            channel.receive(0.1)
        assert channel.connected
        assert not select.select([process.stderr], [], [], 0)[0]  # it does not yet say it serves
        channel.send(Ping(nonce=5))
        while (answer := channel.receive(60)) is None:
            pass
        assert answer[0].nonce == 5
        assert "serves on" in process.stderr.readline()
    finally:
        channel.close()
        process.terminate()
        process.communicate()


# Among imports and a library's calls.
@pytest.mark.parametrize(
    ("locked", "after_s"),
    thinned([*product((False, True), (0.0, 0.06, 0.12, 0.3))], [(False, 0.06), (True, 0.3)]),
)
def test_interrupted_edge_that_is_still_loading(
    default_target: Path, key_folders, locked: bool, after_s: float
) -> None:
    options = ["--keys", key_folders["edge"]] if locked else []
    process, _ = loading_edge(default_target, *options)
    time.sleep(after_s)
    process.send_signal(signal.SIGINT)
    assert complaint(process, 130, patience_s()) == "pilotfish: interrupted"


def test_an_edge_interrupted_twice_does_not_load_to_the_end(default_target: Path) -> None:
    process, _ = loading_edge(default_target)
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.05)
    process.communicate(timeout=patience_s())
    assert process.returncode in (-signal.SIGINT, 130)


# Nothing left behind


def test_an_edge_goes_when_its_parent_is_killed(pair: Pair) -> None:
    await_end(orphan(pair.target))


def test_an_edge_keeps_to_its_cores(pair: Pair) -> None:
    core = max(os.sched_getaffinity(0))
    with EdgeServer(pair.target, cores={core}) as edge, Device(pair.draft, edge.endpoint) as device:
        device.generate("abc", protocol="greedy", max_tokens=4)
        threads = [int(path.name) for path in Path(f"/proc/{edge.pid}/task").iterdir()]
        assert {frozenset(os.sched_getaffinity(thread)) for thread in threads} == {
            frozenset({core})
        }


def test_an_edge_that_ends_by_itself_is_told_of(pair: Pair) -> None:
    server = EdgeServer(pair.target).start()
    os.kill(server.pid, signal.SIGKILL)
    server.stop()
    with pytest.raises(EdgeLostError):
        print(server.pid)


@pytest.mark.usefixtures("default_target")
@pytest.mark.parametrize(
    "blow", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_demo_that_is_cut_short(blow: signal.Signals, tmp_path: Path) -> None:
    process = subprocess.Popen(
        command("demo"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.read(20)
    (edge_pid,) = children(process.pid)
    began = time.monotonic()
    process.send_signal(blow)
    _, stderr = process.communicate(timeout=20)
    assert time.monotonic() - began < patience_s()
    await_end(edge_pid)
    assert process.returncode == (130 if blow == signal.SIGINT else -blow)
    assert "Traceback" not in stderr
    if blow == signal.SIGINT:
        assert stderr.splitlines()[-1] == "pilotfish: interrupted"
        assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("default_target")
@pytest.mark.parametrize("count", thinned([12, 48], [12]))
def test_the_demos_drafter_is_accepted_nearly_always(tmp_path: Path, count: int) -> None:
    info = tmp_path / "figures.json"
    subprocess.run(
        command("demo", "--max-tokens", count, "--json", info), check=True, capture_output=True
    )
    rows = json.loads(info.read_text())["protocols"]
    assert list(rows) == ["greedy", "coupled", "stream", "stream, T=1", "local"]
    drafting = [rows.pop(name) for name in ("greedy", "coupled")]
    assert min(row["acceptance"] for row in drafting) > 0.85  # rounded once more: 0.6 to 0.75
    assert min(row["tokens_per_round"] for row in drafting) > (3.5 if count > 12 else 3.0)
    assert all(row["speedup"] > 0 for row in drafting)
    assert not any("speedup" in row for row in rows.values())
