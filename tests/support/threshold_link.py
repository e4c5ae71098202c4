"""An emulated link before the edge, whose RTT moves across the threshold of policy `threshold`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pilotfish import EdgeServer
from pilotfish.emulation.emulator import Conditions, Emulator

NEAR_S, FAR_S = 0.002, 0.040  # RTTs below and above the paper's 10 ms
TRIES = 8  # a machine with other work makes a short trip long now and then


@pytest.fixture(scope="module")
def road(edge: EdgeServer) -> Iterator[Emulator]:
    """A link with the RTT `NEAR_S`."""
    with Emulator(edge.endpoint, Conditions(rtt_s=NEAR_S)) as link:
        yield link
