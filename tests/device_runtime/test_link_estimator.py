"""What the edge's welcome means for the rates of a device's link."""

from __future__ import annotations

from pilotfish.device_runtime.link.link_estimator import LinkEstimator
from pilotfish.device_runtime.record import Probing
from pilotfish.wire.link.tcp import Segments


def test_each_connection_knows_which_ways_are_paced() -> None:
    """The rate that trains measure on a path of 40 ms is the pace of BBR, on the uplink alone."""
    estimator, far = LinkEstimator(), Segments(10, 0, 0.04)
    for connection in (1, 2):
        if connection == 1:  # the measurement begins before the welcome, or on a later connection
            estimator.on_rates(connection, 7e6, 7e6, Probing())
            assert estimator.state(far).up is not None
            estimator.on_welcome((True, False))
        else:
            estimator.on_rates(connection, 7e6, 7e6, Probing())
        state = estimator.state(far)
        assert state.up is None
        assert state.down is not None
    estimator.on_welcome((False, False))
    assert estimator.state(far).up is not None
