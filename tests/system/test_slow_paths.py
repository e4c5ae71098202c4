"""Slow, long and broken paths, over which the kernel's own TCP runs: policies keep their times."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pilotfish import Device, EdgeServer
from pilotfish.base.errors import EdgeLostError
from tests.conftest import Pair
from tests.support.kernel_path import KernelPath, needs_paths

pytestmark = needs_paths()

LONG = [(7 * at) % 60 + 1 for at in range(6000)]  # 12 kB as sent
WISH: dict[str, Any] = {"protocol": "stream", "max_tokens": 4}
IDEAL: dict[str, Any] = {
    "up_bps": None,
    "down_bps": None,
    "rtt_s": 0.0,
    "mtu_up": 1500,
    "queue_bytes": 64 * 1024,
}


class Far:
    """An edge at the other end of a path."""

    def __init__(self, path: KernelPath, edge: EdgeServer, pair: Pair, keys: Path) -> None:
        self.path, self.edge = path, edge
        self._draft, self.keys = pair.draft, keys

    def device(self, policy: str, **options: Any) -> Device:
        options = {"threads": 1, "context": 16384, "on_link_loss": policy, **options}
        return Device(self._draft, self.edge.endpoint, keys=self.keys, **options)


@pytest.fixture(scope="module")
def far_end(long_pair: Pair, key_folders: dict[str, Path]) -> Iterator[Far]:
    with KernelPath() as path:
        with path.at_edge():
            server = EdgeServer(
                long_pair.target,
                listen=f"tcp://{path.address}:7077",
                keys=key_folders["edge"],
                threads=1,
                context=16384,
            ).start()
        try:
            with path.at_device():
                yield Far(path, server, long_pair, key_folders["alice"])
        finally:
            server.stop()


@pytest.fixture
def far(far_end: Far) -> Iterator[Far]:
    far_end.path.set(**IDEAL)
    yield far_end
    far_end.path.restore()


def test_a_message_that_takes_seconds_crosses_once(far: Far) -> None:
    with far.device("fail") as device:
        far.path.set(up_bps=64e3, rtt_s=0.1)
        before = far.path.connections()[-1].up.length
        answer = device.generate(LONG, **WISH)
        assert answer.recoveries == []
        assert far.path.connections()[-1].up.length - before < 1.2 * 2 * len(LONG)


def test_a_prompt_crosses_a_path_that_swallows_large_packets(far: Far) -> None:
    with far.device("fail") as device:
        undisturbed = device.generate(LONG, **WISH).tokens
    with far.device("fail") as device:
        far.path.set(rtt_s=0.02, mtu_up=600)
        assert device.generate(LONG, **WISH).tokens == undisturbed


def test_a_path_that_swallows_all_but_pings_ends_in_an_error(far: Far) -> None:
    """No part of a message is so small."""
    with far.device("fail") as device:
        far.path.set(rtt_s=0.02, mtu_up=450)
        began = time.monotonic()
        with pytest.raises(EdgeLostError, match=r"within 2\.2 s"):
            device.generate(LONG, **WISH)
        assert 2.2 < time.monotonic() - began < 9.0


def test_a_probe_says_that_large_messages_do_not_arrive(far: Far) -> None:
    far.path.set(rtt_s=0.02, mtu_up=600)
    command = [sys.executable, "-m", "pilotfish", "probe", far.edge.endpoint]
    options = ["--keys", str(far.keys), "--pings", "2"]
    done = subprocess.run(
        far.path.device_command(*command, *options),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == EdgeLostError.exit_code
    assert "RTT" in done.stdout
    assert "tcp_mtu_probing" in done.stderr


@pytest.mark.parametrize("rtt_s", [0.7, 1.5])
def test_a_long_way_is_none_too_long(far: Far, rtt_s: float) -> None:
    far.path.set(rtt_s=rtt_s)
    with far.device("fail") as device:
        # a ping that this machine delayed measures nothing
        assert any(device.probe().rtt is not None for _ in range(3))


def test_what_others_send_before_us_is_waited_for(far: Far) -> None:
    """They fill a router's queue with 4.8 s of the uplink, within which nothing of ours arrives."""
    with far.device("fail") as device, socket.socket(type=socket.SOCK_DGRAM) as others:
        device.generate([1, 3, 2], **WISH)
        far.path.set(up_bps=100e3, rtt_s=0.1)
        for _ in range(42):
            others.sendto(bytes(1400), (far.path.address, 9))
        assert len(device.generate([1, 3, 2], **WISH).tokens) == 4


def pauses(device: Device, act: Any) -> float:
    """Seconds for which an answer pauses when ``act`` happens to it."""
    pieces = device.stream([1, 3, 2], protocol="greedy", max_tokens=100_000)
    for _ in range(50):
        next(pieces)
    act()
    last_s = began_s = time.monotonic()
    longest_s = 0.0
    for _ in pieces:
        now_s = time.monotonic()
        longest_s, last_s = max(longest_s, now_s - last_s), now_s
        if now_s - began_s > 5.0:
            break
    pieces.close()
    return longest_s


def test_an_outage_of_seconds_ends_no_connection(far: Far) -> None:
    far.path.set(rtt_s=0.02)
    with far.device("wait", patience_s=20.0) as device:
        device.generate([1, 3, 2], **WISH)
        connection = device._link.connection

        def outage() -> None:
            far.path.cut()
            time.sleep(3.0)
            far.path.restore()

        pauses(device, outage)
        assert device._link.connection == connection


def test_another_address_goes_on_over_another_connection(far: Far) -> None:
    with far.device("fail") as device:
        assert pauses(device, far.path.change_address) < 2.5


@pytest.mark.parametrize("what", ["frozen", "cut off"])
def test_a_death_on_a_lan_shows_as_soon_as_ever(far: Far, what: str) -> None:
    def die() -> None:
        if what == "frozen":
            os.kill(far.edge.pid, signal.SIGSTOP)
        else:
            far.path.cut()

    with far.device("fail") as device:
        try:
            pieces = device.stream([1, 3, 2], protocol="greedy", max_tokens=100_000)
            for _ in range(50):
                next(pieces)
            die()
            began_s = time.monotonic()
            with pytest.raises(EdgeLostError):
                list(pieces)
            lost_ns = device._link.lost_ns
            assert lost_ns is not None
            assert lost_ns * 1e-9 - began_s < 1.5
        finally:
            os.kill(far.edge.pid, signal.SIGCONT)
