"""A connection that ends within a message of several parts costs that message, not the next one."""

from __future__ import annotations

import time
from typing import Any

import pytest
import zmq

from tests.relay import Relay
from wire.connections import Bounds
from wire.nodes import Greet
from wire.transport import Channel, Listener


def test_what_follows_a_message_that_was_torn_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    listener = Listener(context, "tcp://127.0.0.1:0", None, Bounds(8, 8, 2**20))
    relay = Relay(listener.endpoint)
    channel = Channel(relay.endpoint, None, 2**20)
    connect(channel, 1)
    channel.send(Greet(version=1), [b"a", b"b"])
    assert heard(listener) == 2

    whole = zmq.Socket.send

    def torn(self: zmq.Socket[bytes], data: Any, flags: int = 0, **options: Any) -> Any:
        made = whole(self, data, flags, **options)
        if flags & zmq.SNDMORE:
            relay.cut()
            time.sleep(0.05)  # less than until it is tried again
        return made

    with monkeypatch.context() as patch:
        patch.setattr(zmq.Socket, "send", torn)
        with pytest.raises(zmq.Again):
            channel.send(Greet(version=1), [b"a", b"b"])
    connect(channel, 2)
    channel.send(Greet(version=1), [b"a"])
    assert heard(listener) == 1
    channel.close(0.0)
    relay.close()
    listener.close()
    context.destroy(linger=0)


def connect(channel: Channel, connections: int) -> None:
    """Wait until the channel has been connected so often."""
    end_s = time.monotonic() + 10.0
    while channel.connections < connections or not channel.connected:
        assert time.monotonic() < end_s
        channel.take(0.05)


def heard(listener: Listener) -> int:
    """How many frames the next message has."""
    assert listener.socket.poll(5000)
    envelope = listener.receive()
    assert envelope is not None
    return len(envelope.frames)
