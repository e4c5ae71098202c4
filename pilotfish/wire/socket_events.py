"""Read the events of a socket's connections from ZeroMQ's monitor."""

from struct import Struct

import zmq

_EVENT = Struct("=Hi")  # event and value
_NOBLOCK = int(zmq.NOBLOCK)


def next_event(monitor: "zmq.Socket[bytes]") -> tuple[int, int] | None:
    """Return the next event (`zmq.Event`) and its value; None without one.

    `zmq.utils.monitor` does the same, but imports asyncio: 7 % of a daemon's start.
    """
    try:
        payload, _endpoint = monitor.recv_multipart(_NOBLOCK)
    except zmq.Again:
        return None
    event, value = _EVENT.unpack(payload)
    return event, value
