"""An edge that comes, or comes back, without the decision head that an answer needs."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from pilotfish import Device, EdgeServer
from pilotfish.base.errors import UnsupportedError
from pilotfish.device_runtime.plan import Auto
from tests.conftest import Pair
from tests.support.daemons import free_port
from tests.support.hostile import PROMPT


def answer(device: Device, act: Any, at: int, **options: Any) -> list[str]:
    """Return the pieces' origins; ``act`` is called after the first ``at``."""
    origins: list[str] = []
    for piece in device.stream(PROMPT, max_tokens=80, **options):
        origins.append(piece.origin)
        if len(origins) == at:
            act()
    return origins


def test_under_local_the_drafter_goes_on_beside_an_edge_that_lost_its_head(
    pair: Pair, head: str
) -> None:
    edges = [EdgeServer(pair.target, head=head, threads=1).start()]

    def behead() -> None:
        os.kill(edges[0].pid, signal.SIGKILL)
        edges[0].stop()
        edges.append(EdgeServer(pair.target, edges[0].endpoint, threads=1).start())

    try:
        endpoint = edges[0].endpoint
        with Device(pair.draft, endpoint, threads=1, on_link_loss="local") as device:
            origins = answer(device, behead, 4, protocol="wisv-selective", threshold=0.5)
            assert set(origins[:4]) <= {"drafted", "corrected", "bonus"}
            assert origins[-1] == "local"
            assert device.last is not None
            assert len(device.last.tokens) == 80 or device.last.finish_reason == "stop"
            # of the edge that is there now the next answer asks what it has
            assert "local" not in answer(device, lambda: None, 1, protocol="greedy")
            with pytest.raises(UnsupportedError, match="--head"):
                device.generate(PROMPT, protocol="wisv-full", max_tokens=4)
    finally:
        for edge in edges:
            edge.stop()


@pytest.mark.parametrize(
    ("auto", "ends"),
    [
        # what needs no head is chosen where it is not known that there is one
        (Auto(among=("wisv-full", "greedy")), {"drafted", "corrected", "bonus"}),
        (Auto(lossy=True, policy="threshold"), {"local"}),
    ],
)
def test_under_local_an_edge_without_a_head_comes_late(
    pair: Pair, auto: Auto, ends: set[str]
) -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    edges: list[EdgeServer] = []

    def come() -> None:
        edges.append(EdgeServer(pair.target, endpoint, threads=1).start())
        time.sleep(1.5)  # the device looks for it by and by

    try:
        with Device(pair.draft, endpoint, threads=1, on_link_loss="local") as device:
            origins = answer(device, come, 3, protocol=auto)
            assert origins[:3] == ["local"] * 3
            assert origins[-1] in ends
    finally:
        for edge in edges:
            edge.stop()
