"""One probe of the link, over a real edge and the emulator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pilotfish import EdgeServer
from pilotfish.base.errors import EdgeLostError, EdgeUnreachableError
from pilotfish.device_runtime.link.edge_link import EdgeLink
from pilotfish.device_runtime.link.link_group import connect
from pilotfish.emulation.emulator import Conditions, Emulator
from pilotfish.lab.field.watch.probe import ProbeSettings, measure_link
from tests.conftest import Pair

QUICK = ProbeSettings(pings=5, position=False)


@pytest.fixture(scope="module")
def link(edge: EdgeServer) -> Iterator[EdgeLink]:
    with Emulator(edge.endpoint, Conditions(rtt_s=0.03, up_bps=4e6, down_bps=8e6)) as road:
        opened = connect(road.endpoint, None)
        try:
            yield opened
        finally:
            opened.close()


@pytest.mark.timing
def test_a_probe_measures_the_link(link: EdgeLink) -> None:
    probe = measure_link(link, QUICK)
    assert len(probe.rtts_s) + probe.lost <= 5
    assert min(probe.rtts_s) == pytest.approx(0.03, abs=0.01)
    assert probe.lost == 0
    assert probe.up_bps is not None
    assert probe.up_bps == pytest.approx(4e6, rel=0.15)
    assert probe.down_bps is not None
    assert probe.down_bps == pytest.approx(8e6, rel=0.15)
    assert probe.link is not None
    assert probe.position is None
    assert 0.0 < probe.took_s < 10.0


def test_it_costs_at_most_what_it_may(link: EdgeLink) -> None:
    settings = ProbeSettings(pings=3, goodput_bytes=60_000, position=False)
    probe = measure_link(link, settings)
    assert probe.uplink_bytes < 60_000 + 20_000
    assert probe.downlink_bytes < 60_000 + 20_000
    assert probe.up_bps is not None
    assert probe.down_bps is not None


def test_without_a_transfer_trains_tell(link: EdgeLink) -> None:
    settings = ProbeSettings(pings=1, goodput_bytes=0, position=False)
    probe = measure_link(link, settings)
    assert not probe.up_bound
    assert not probe.down_bound
    assert probe.uplink_bytes < 110_000


def test_an_edge_that_limits_the_device(pair: Pair) -> None:
    """The transfer is refused, and the next probe gets its own answers."""
    with EdgeServer(pair.target, threads=1, rate=60.0) as edge:
        link = connect(edge.endpoint, None)
        try:
            probe = measure_link(link, QUICK)
            assert len(probe.rtts_s) == 5
            assert probe.took_s < 10.0
            assert link.is_connected
        finally:
            link.close()


def test_no_edge_is_an_error() -> None:
    link = EdgeLink("tcp://127.0.0.1:1", None)
    try:
        with pytest.raises((EdgeLostError, EdgeUnreachableError)):
            measure_link(link, QUICK)
    finally:
        link.close()
