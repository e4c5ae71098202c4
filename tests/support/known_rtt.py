"""Have a device know the RTT of its link, on a machine that may suspend it during a ping."""

from __future__ import annotations

import pytest

from pilotfish import Device

TRIES = 20


def know_rtt(device: Device) -> None:
    """Ping until a ping has measured the RTT."""
    for _ in range(TRIES):
        if device.probe().rtt is not None:
            return
    pytest.fail("no ping measured the RTT")
