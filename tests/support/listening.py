"""A listener of an edge, without the edge."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import zmq

from pilotfish.wire.connections import Bounds
from pilotfish.wire.keys import EdgeKeys
from pilotfish.wire.transport import Listener


@contextmanager
def listening(keys: EdgeKeys | None = None, message_bytes: int = 64 << 20) -> Iterator[Listener]:
    """Listen on a free port of loopback, for up to 64 connections, 32 of a key."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    listener = Listener(context, "tcp://127.0.0.1:0", keys, Bounds(64, 32, message_bytes))
    try:
        yield listener
    finally:
        listener.close()
        context.destroy(linger=0)
