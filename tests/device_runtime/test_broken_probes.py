"""A probe of the rates that meets a broken connection, a refusal or a limit ends soon."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

import pytest

from pilotfish import Device, EdgeServer
from pilotfish.device_runtime.link.edge_link import EdgeLink
from pilotfish.device_runtime.link.probing import measure_rates, ping
from pilotfish.edge_runtime import admission
from pilotfish.wire import messages as m
from pilotfish.wire.link.train import FIRST_TRAIN
from tests.conftest import Pair
from tests.support.hostile import PROMPT, RawSession
from tests.support.refusing import Refusing
from tests.support.relay import Relay
from tests.support.socketless import SocketlessEdge

TRAIN_BYTES = sum(FIRST_TRAIN)


class Breaking(Relay):
    """A relay whose first connection breaks in the middle of a train.

    way: of the train, up or down. sizes: the bytes up on each connection so far.
    """

    read_bytes = 512

    def __init__(self, target: str, way: str, then: Callable[[], None] = lambda: None) -> None:
        self.sizes: list[int] = []
        self._is_up, self._then = way == "up", then
        super().__init__(target)

    def readers(self) -> tuple[Callable[[bytes], None], Callable[[bytes], None]]:
        number, down_bytes = len(self.sizes), 0
        self.sizes.append(0)

        def check(size: int, *, is_up: bool) -> None:
            if number == 0 and is_up == self._is_up and size > TRAIN_BYTES // 2:
                self._then()
                raise ConnectionResetError("in the middle of a train")

        def up(data: bytes) -> None:
            self.sizes[number] += len(data)
            check(self.sizes[number], is_up=True)

        def down(data: bytes) -> None:
            nonlocal down_bytes
            down_bytes += len(data)
            check(down_bytes, is_up=False)

        return up, down


@contextmanager
def breaking(
    endpoint: str, way: str, then: Callable[[], None] = lambda: None
) -> Iterator[Breaking]:
    relay = Breaking(endpoint, way, then)
    try:
        yield relay
    finally:
        relay.close()


@contextmanager
def linked(endpoint: str) -> Iterator[EdgeLink]:
    link = EdgeLink(endpoint, None)
    try:
        link.connect()
        ping(link)
        yield link
    finally:
        link.close()


@pytest.mark.parametrize("way", ["up", "down"])
def test_a_broken_probe_sends_one_message_again(edge: EdgeServer, way: str) -> None:
    """The other messages are lost, too, but the probe is over: it waits for none of them."""
    with breaking(edge.endpoint, way) as relay, linked(relay.endpoint) as link:
        measure_rates(link)
        ping(link)  # the link works
        assert len(relay.sizes) == 2
        # what was sent again is at most one message of the train
        assert relay.sizes[1] < 2 * FIRST_TRAIN[0]
        assert (link.state().up, link.state().down) == (None, None)


def test_a_probe_after_a_loss_hears_all_pongs(pair: Pair, edge: EdgeServer) -> None:
    """After a loss, large messages go in chunks; a train in chunks would lose its pongs."""
    with (
        breaking(edge.endpoint, "up") as relay,
        Device(pair.draft, relay.endpoint, threads=1) as device,
    ):
        device.probe(rates=True)
        assert len(relay.sizes) == 2
        begun_s = time.monotonic()
        device.probe(rates=True)
        assert time.monotonic() - begun_s < 5.0


@pytest.mark.parametrize("way", ["up", "down"])
def test_an_edge_that_takes_over_during_a_probe_and_refuses_trains(
    pair: Pair, edge: EdgeServer, way: str
) -> None:
    """That is no fault of the user's request."""
    broken: list[bool] = []

    def code_of(message: m.DeviceMessage) -> str | None:
        return "malformed" if broken and isinstance(message, m.Train) else None

    with (
        Refusing(edge.endpoint, code_of) as refusing,
        breaking(refusing.endpoint, way, lambda: broken.append(True)) as relay,
        Device(pair.draft, relay.endpoint, threads=1) as device,
    ):
        state = device.probe(rates=True)  # as an answer under auto does
        answer = device.generate("abc", max_tokens=12, protocol="greedy")
    assert refusing.refused >= 1
    assert len(answer.tokens) > 0
    assert (state.up, state.down) == (None, None)


def test_an_edge_of_another_version_has_unknown_rates(edge: EdgeServer) -> None:
    """Without a handshake, as in `pilotfish probe`, no version is compared before the trains."""

    def code_of(message: m.DeviceMessage) -> str | None:
        return "malformed" if isinstance(message, m.Train) else None

    with Refusing(edge.endpoint, code_of) as refusing, linked(refusing.endpoint) as link:
        measure_rates(link)
        ping(link)  # takes no failure of a train for its own
        assert refusing.refused == 1 + len(FIRST_TRAIN)
        assert link.state().rtt is not None
        assert (link.state().up, link.state().down) == (None, None)


@pytest.mark.parametrize("kind", ["bytes", "messages", "all messages"])
def test_a_key_at_its_limit_gets_no_rates_but_its_answer(
    pair: Pair, edge: EdgeServer, kind: str
) -> None:
    """The edge refuses some messages of a train. No refusal is taken for a later request's."""
    numbers = count()

    def code_of(message: m.DeviceMessage) -> str | None:
        if not isinstance(message, m.Train):
            return None
        refused = {
            "bytes": message.bytes > 0,  # as `Replies.expect_room` decides
            "messages": next(numbers) >= 4,
            "all messages": True,
        }
        return "rate-limited" if refused[kind] else None

    with (
        Refusing(edge.endpoint, code_of) as refusing,
        Device(pair.draft, refusing.endpoint, threads=1) as device,
    ):
        state = device.probe(rates=True)
        answer = device.generate("abc", max_tokens=12, protocol="greedy")
    messages = 1 + len(FIRST_TRAIN)  # with the request of the train down
    assert (
        refusing.refused == {"bytes": 1, "messages": messages - 4, "all messages": messages}[kind]
    )
    assert len(answer.tokens) > 0
    assert (state.up, state.down) == (None, None)


def test_a_train_counts_for_the_bytes_of_a_key(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without bytes left, the key gets no train down; pings and windows cost none."""
    monkeypatch.setattr(admission, "_REPLY_BURST", TRAIN_BYTES)
    monkeypatch.setattr(admission, "_REPLY_BYTES_PER_S", 0.0)
    down, up = m.Train(nonce=2, pongs=8, bytes=1_500), m.Train(nonce=3, pongs=1, bytes=0)
    with SocketlessEdge(pair.target) as edge:
        edge.start()
        edge.deliver([m.encode(down)])
        for _ in range(8):
            pong, (frame,) = edge.reply_all()
            assert isinstance(pong, m.Pong)
            assert len(frame) == 1_500
        edge.deliver([m.encode(down)])
        edge.fails("rate-limited")
        edge.deliver([m.encode(up), b"x" * 1_500])
        assert isinstance(edge.reply(), m.Pong)
        edge.deliver([m.encode(m.Ping(nonce=4)), b"x"])
        assert isinstance(edge.reply(), m.Pong)
        session = RawSession()
        edge.deliver(session.begin(PROMPT))
        edge.deliver(session.window([1, 2]))
        assert isinstance(edge.reply(), m.Verdict)
