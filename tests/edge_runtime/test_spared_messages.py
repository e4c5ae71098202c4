"""Messages that can be done without leave room for requests, and memory for clients is bounded."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import suppress

import pytest

from pilotfish.base.errors import RateLimitedError
from pilotfish.edge_runtime.admission import Admission
from pilotfish.wire import messages as m
from tests.conftest import Pair
from tests.support.hostile import PROMPT, RawSession
from tests.support.socketless import SocketlessEdge

RATE = 100.0


def taken(admission: Admission, now_s: float, *, spared: bool, most: int = 1000) -> int:
    """How many messages of one client are admitted at this time."""
    for count in range(most):
        try:
            admission.admit(b"one", now_s, optional=spared)
        except RateLimitedError:
            return count
    return most


def test_what_can_be_spared_leaves_half_of_a_seconds_messages() -> None:
    admission = Admission(RATE)
    assert 0.4 * RATE <= taken(admission, 0.0, spared=True) <= 0.5 * RATE
    assert 0.4 * RATE <= taken(admission, 0.0, spared=False) <= 0.6 * RATE
    assert taken(admission, 0.0, spared=True) == 0
    assert 0.4 * RATE <= taken(admission, 100.0, spared=True) <= 0.5 * RATE  # and in time again


def test_a_flood_of_hints_keeps_no_request_of_the_same_client_out(pair: Pair) -> None:
    with SocketlessEdge(pair.target, messages_per_s=RATE) as edge:
        session = RawSession()
        edge.deliver(session.begin(PROMPT, "ahead"))
        for _ in range(3 * int(RATE)):
            edge.deliver(session.hint([1, 2]))
        assert edge.replies == []  # no hint is answered
        assert edge.metrics.hints["refused"] > RATE
        edge.deliver([m.encode(m.Ping(nonce=7))])
        assert isinstance(edge.reply(), m.Pong)


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.usefixtures("traced")
def test_clients_without_end_take_no_memory_without_end() -> None:
    """Without keys each connection is a client; what they sent, and what it cost, is forgotten."""
    admission = Admission(RATE)

    def come(first: int, count: int) -> int:
        for at in range(first, first + count):
            with suppress(RateLimitedError):
                admission.admit(b"client %d" % at, at * 1e-3)
            admission.charge(b"client %d" % at, 1e-4)
        return tracemalloc.get_traced_memory()[0]

    held = come(0, 2048)
    assert come(2048, 8192) - held < 200_000  # a client takes 250 bytes
