"""What a device's machine and the edge's welcome mean for the rates of the link."""

from __future__ import annotations

from pilotfish.device_runtime.link.link_estimator import LinkEstimator
from pilotfish.device_runtime.record import Probing
from pilotfish.wire.link.tcp import Segments

FAR = Segments(10, 0, 0.04)


def test_on_a_machine_with_bbr_a_high_rate_up_is_unknown_on_every_connection() -> None:
    """On a path of 40 ms, trains measure the pace of BBR."""
    estimator = LinkEstimator(paced=True)
    for connection in (1, 2):
        estimator.on_rates(connection, 7e6, 7e6, Probing())
        state = estimator.state(FAR)
        assert state.up is None
        assert state.down is not None


def test_at_an_edge_with_bbr_a_high_rate_down_is_unknown_on_every_connection() -> None:
    estimator = LinkEstimator()
    estimator.on_rates(1, 7e6, 7e6, Probing())
    assert estimator.state(FAR).down is not None
    estimator.on_welcome(paced=True)
    assert estimator.state(FAR).down is None
    estimator.on_rates(2, 7e6, 7e6, Probing())
    state = estimator.state(FAR)
    assert state.up is not None
    assert state.down is None
