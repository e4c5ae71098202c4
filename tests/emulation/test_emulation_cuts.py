"""The emulated link breaks, and comes back."""

from __future__ import annotations

import time

import pytest

from pilotfish.base.errors import UnsupportedError
from pilotfish.emulation.emulator import Emulator
from tests.support.tcp import connected, echo, received, serving


def test_a_cut_resets_connections_and_refuses_new_ones_for_a_while() -> None:
    with serving(echo) as endpoint, Emulator(endpoint) as link:
        with connected(link.endpoint) as client:
            client.sendall(b"before")
            assert received(client, 6) == b"before"
            began = time.monotonic()
            link.cut(0.4)
            with pytest.raises(ConnectionError):
                client.recv(1)
        with pytest.raises(ConnectionError), connected(link.endpoint) as client:
            client.recv(1)
        time.sleep(max(0.0, began + 0.5 - time.monotonic()))
        with connected(link.endpoint) as client:
            client.sendall(b"after")
            assert received(client, 5) == b"after"


@pytest.mark.timing
def test_a_silent_cut_only_delays() -> None:
    with serving(echo) as endpoint, Emulator(endpoint) as link, connected(link.endpoint) as client:
        began = time.monotonic()
        link.cut(0.5, silent=True)
        client.sendall(b"late")
        assert received(client, 4) == b"late"
        assert time.monotonic() - began >= 0.5
        began = time.monotonic()
        client.sendall(b"soon")
        assert received(client, 4) == b"soon"
        assert time.monotonic() - began < 0.4


@pytest.mark.parametrize("for_s", [-1.0, float("inf"), float("nan")])
def test_a_cut_takes_a_time(for_s: float) -> None:
    with serving(echo) as endpoint, Emulator(endpoint) as link:
        with pytest.raises(UnsupportedError, match="for_s"):
            link.cut(for_s)
        with connected(link.endpoint) as client:
            client.sendall(b"still there")
            assert received(client, 11) == b"still there"
