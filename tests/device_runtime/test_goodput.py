"""The goodput of a link by a transfer: within a tenth, or a lower bound, over the kernel's TCP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pilotfish import EdgeServer
from pilotfish.device_runtime.link.edge_link import EdgeLink
from pilotfish.device_runtime.link.goodput import GoodputReading, measure_goodput
from pilotfish.device_runtime.link.link_group import connect
from pilotfish.device_runtime.link.probing import measure_rates, ping
from pilotfish.wire.link.transfer_rate import Arrival, Goodput, estimate_goodput
from tests.conftest import Pair
from tests.support.kernel_path import KernelPath, needs_paths

MOST_BYTES = 1_000_000
HEADROOM = 1.03


class FarEdge:
    """An edge behind a path, and new links to it."""

    def __init__(self, path: KernelPath, endpoint: str, keys: Path) -> None:
        self._path, self._endpoint, self._keys = path, endpoint, keys

    def measure(self, most_bytes: int = MOST_BYTES, **conditions: Any) -> GoodputReading:
        """Measure over a new connection under these conditions."""
        ideal = {"up_bps": None, "down_bps": None, "rtt_s": 0.0, "loss": 0.0}
        self._path.set(**{**ideal, "queue_bytes": 2_000_000, **conditions})
        link = connect(self._endpoint, self._keys, 20.0)
        try:
            return _measure(link, most_bytes)
        finally:
            link.close()
            self._path.forget()


def _measure(link: EdgeLink, most_bytes: int) -> GoodputReading:
    rtts_s = [each.rtt_s for each in (ping(link) for _ in range(5)) if each.rtt_s is not None]
    measure_rates(link, brief=True)
    return measure_goodput(link, most_bytes, rtt_s=min(rtts_s))


@pytest.fixture(scope="module")
def far(pair: Pair, key_folders: dict[str, Path]) -> Iterator[FarEdge]:
    with KernelPath() as path:
        with path.at_edge():
            listen = f"tcp://{path.address}:7077"
            server = EdgeServer(
                pair.target, listen=listen, keys=key_folders["edge"], threads=1
            ).start()
        try:
            with path.at_device():
                yield FarEdge(path, server.endpoint, key_folders["alice"])
        finally:
            server.stop()


def assert_honest(goodput: Goodput | None, true_bps: float) -> None:
    """Goodput is without headers, which are 4 to 6 % of the path's rate."""
    assert goodput is not None
    assert goodput.bps <= HEADROOM * true_bps
    assert goodput.is_bound or goodput.bps >= 0.87 * true_bps


@needs_paths()
@pytest.mark.parametrize(
    ("mbit", "rtt_s", "more"),
    [
        (1, 0.05, {}),
        (10, 0.005, {}),
        (10, 0.05, {"queue_bytes": 64 * 1024}),
        (10, 0.05, {"loss": 0.01}),
        (50, 0.05, {}),
        (50, 0.2, {"loss": 0.01}),
    ],
)
def test_goodput_is_within_a_tenth_or_a_bound(
    far: FarEdge, mbit: float, rtt_s: float, more: dict[str, Any]
) -> None:
    true_bps = mbit * 1e6
    reading = far.measure(up_bps=true_bps, down_bps=true_bps, rtt_s=rtt_s, **more)
    assert_honest(reading.up, true_bps)
    assert_honest(reading.down, true_bps)


@needs_paths()
@pytest.mark.timing
def test_both_directions_are_steady_and_apart(far: FarEdge) -> None:
    reading = far.measure(up_bps=2e6, down_bps=8e6, rtt_s=0.04)
    assert reading.up is not None
    assert reading.down is not None
    assert not reading.up.is_bound
    assert not reading.down.is_bound
    assert reading.up.bps == pytest.approx(1.9e6, rel=0.1)
    assert reading.down.bps == pytest.approx(7.6e6, rel=0.1)


@needs_paths()
def test_a_transfer_too_short_for_the_link_is_a_bound(far: FarEdge) -> None:
    reading = far.measure(100_000, up_bps=50e6, down_bps=50e6, rtt_s=0.1)
    for goodput in (reading.up, reading.down):
        assert goodput is not None
        assert goodput.is_bound
        assert goodput.bps < 50e6
    assert reading.cost.uplink_bytes < 120_000
    assert reading.cost.downlink_bytes < 120_000


@needs_paths()
def test_a_very_slow_link_is_not_filled_for_long(far: FarEdge) -> None:
    reading = far.measure(up_bps=100e3, down_bps=100e3, rtt_s=0.1)
    assert_honest(reading.up, 100e3)
    assert_honest(reading.down, 100e3)
    assert reading.cost.uplink_bytes < 60_000


def test_an_edge_whose_budget_is_spent_refuses_the_transfer(pair: Pair) -> None:
    """The rate of messages is too low for a transfer; later pings get their own answers."""
    with EdgeServer(pair.target, threads=1, rate=30.0) as edge:
        link = connect(edge.endpoint, None)
        try:
            reading = measure_goodput(link, MOST_BYTES, rtt_s=0.001)
            assert reading.up is None or reading.up.is_bound
            assert reading.down is None
            assert reading.cost.pings > 0
        finally:
            link.close()


def arrivals(*points: tuple[float, int], repeated: int | None = None) -> list[Arrival]:
    return [Arrival(at_s, received, repeated) for at_s, received in points]


def steady(*, messages: int = 100, each_s: float = 0.01) -> list[Arrival]:
    return arrivals(*((at * each_s, at * 10_000) for at in range(messages)))


def test_a_steady_transfer() -> None:
    goodput = estimate_goodput(steady(), 0.05)
    assert goodput is not None
    assert not goodput.is_bound
    assert goodput.bps == pytest.approx(8e6)


def test_slow_start_is_a_bound() -> None:
    """Each round trip of 0.2 s brings twice as much, in a burst at 80 Mbit/s."""
    points, received = [], 0
    for turn in range(7):
        for message in range(2**turn):
            received += 10_000
            points.append((turn * 0.2 + message * 1e-3, received))
    goodput = estimate_goodput(arrivals(*points), 0.2)
    assert goodput is not None
    assert goodput.is_bound
    assert goodput.bps < 80e6


def test_bursts_of_a_small_window_are_a_bound() -> None:
    """A steady window, after a loss: ten messages in 10 ms of each 0.1 s."""
    points = [
        (turn * 0.1 + message * 1e-3, (turn * 10 + message) * 10_000)
        for turn in range(20)
        for message in range(10)
    ]
    goodput = estimate_goodput(arrivals(*points), 0.1)
    assert goodput is not None
    assert goodput.is_bound
    assert goodput.bps < 80e6


def test_repeated_segments_make_it_a_bound_of_the_whole_transfer() -> None:
    lossy = [each._replace(repeated=int(each.at_s > 0.8)) for each in steady()]
    goodput = estimate_goodput(lossy, 0.05)
    assert goodput is not None
    assert goodput.is_bound
    assert goodput.bps == pytest.approx(8e6)
    early = [each._replace(repeated=int(each.at_s > 0.1)) for each in steady()]
    goodput = estimate_goodput(early, 0.05)
    assert goodput is not None
    assert not goodput.is_bound


def test_too_few_messages_are_a_bound() -> None:
    goodput = estimate_goodput(steady(messages=12, each_s=0.1), 0.01)
    assert goodput is not None
    assert goodput.is_bound


@pytest.mark.parametrize(
    "points", [[], [(0.0, 10)], [(1.0, 10), (1.0, 20)], [(2.0, 10), (1.0, 20)]]
)
def test_arrivals_that_take_no_time_tell_nothing(points: list[tuple[float, int]]) -> None:
    assert estimate_goodput(arrivals(*points), 0.05) is None


def test_an_impossible_rate_counts_as_not_measured() -> None:
    """An edge tells the arrivals of an upload, and may lie; a report would refuse the file."""
    assert estimate_goodput(steady(each_s=1e-9), 0.05) is None
