"""A connection that ends within a message of several parts costs that message, not the next one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import zmq

from pilotfish.wire.channel import EdgeChannel
from pilotfish.wire.connections import Bounds
from pilotfish.wire.nodes import Greet
from pilotfish.wire.transport import Listener
from tests.support.relay import Relay


@pytest.fixture
def listener() -> Iterator[Listener]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    listening = Listener(context, "tcp://127.0.0.1:0", None, Bounds(8, 8, 2**20))
    yield listening
    listening.close()
    context.destroy(linger=0)


@pytest.fixture
def relay(listener: Listener) -> Iterator[Relay]:
    between = Relay(listener.endpoint)
    yield between
    between.close()


@pytest.fixture
def channel(relay: Relay) -> Iterator[EdgeChannel]:
    ours = EdgeChannel(relay.endpoint, None, 2**20)
    yield ours
    ours.close(0.0)


def test_what_follows_a_message_that_was_torn_arrives(
    listener: Listener, relay: Relay, channel: EdgeChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect(channel)
    channel.send(Greet(version=1), [b"a", b"b"])
    assert received(listener) == 2

    whole = zmq.Socket.send

    def torn(self: zmq.Socket[bytes], data: Any, flags: int = 0, **options: Any) -> Any:
        made = whole(self, data, flags, **options)
        relay.turn_to("tcp://127.0.0.1:1")  # no listener: it cannot come back in between
        relay.cut()
        while channel.connected:
            channel.read_events()
        time.sleep(0.1)  # ZeroMQ says so before it has let go of the connection
        return made

    with monkeypatch.context() as patch:
        patch.setattr(zmq.Socket, "send", torn)
        with suppress(zmq.Again):  # ZeroMQ may also accept the rest and drop it
            channel.send(Greet(version=1), [b"a", b"b"])
    relay.turn_to(listener.endpoint)
    connect(channel)
    channel.send(Greet(version=1), [b"a"])
    assert received(listener) == 1


def connect(channel: EdgeChannel) -> None:
    """Wait until the channel is connected."""
    end_s = time.monotonic() + 10.0
    while not channel.connected:
        assert time.monotonic() < end_s
        channel.receive_raw(0.05)


def received(listener: Listener) -> int:
    """How many frames the next message has."""
    assert listener.socket.poll(5000)
    envelope = listener.receive()
    assert envelope is not None
    return len(envelope.frames)
