"""A probe of the rates whose connection breaks between its trains."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pilotfish import EdgeServer
from pilotfish.device_runtime.draft_source import DraftSource
from pilotfish.device_runtime.link import probing
from pilotfish.device_runtime.link.edge_link import EdgeLink
from pilotfish.device_runtime.link.pending import SentRequest
from pilotfish.emulation.emulator import Conditions, Emulator
from pilotfish.wire.link import train
from pilotfish.wire.link.train import TrainRate
from tests.conftest import Pair
from tests.support.known_rtt import TRIES


def test_rates_of_a_connection_that_broke_are_unknown(
    pair: Pair, edge: EdgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first train gives a rate that counts, but not precisely, so a second one follows."""
    monkeypatch.setattr(
        train, "estimate_rate", lambda arrivals_s, sizes, rtt_s: TrainRate(8e6, 0.2)
    )
    send_trains, sent = probing._send_trains, 0

    def cut_before_the_second(
        link: EdgeLink, up_sizes: Sequence[int], down_sizes: Sequence[int]
    ) -> list[SentRequest]:
        nonlocal sent
        sent += 1
        if sent == 2:
            road.cut()
        return send_trains(link, up_sizes, down_sizes)

    monkeypatch.setattr(probing, "_send_trains", cut_before_the_second)
    with Emulator(edge.endpoint, Conditions(rtt_s=0.02)) as road:
        link = EdgeLink(road.endpoint, None)
        link.set_hello(DraftSource.open(pair.draft, text=False, text_location=None).hello)
        link.handshake()
        first = link.connection
        for _ in range(TRIES):  # a machine that suspends the device ends a probe after one train
            sent = 0
            probing.measure_rates(link)
            if sent == 2:
                break
        assert link.connection != first
        state = link.state()
        link.close()
    assert (state.up, state.down) == (None, None)
