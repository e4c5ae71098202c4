"""What ZeroMQ tells of a socket's connections, over the socket's monitor."""

from struct import Struct

import zmq

_EVENT = Struct("=Hi")  # event and value
_NOBLOCK = int(zmq.NOBLOCK)


def next_event(monitor: "zmq.Socket[bytes]") -> tuple[int, int] | None:
    """Return the next event (`zmq.Event`) and its value; None if nothing happened.

    As `zmq.utils.monitor` does, which imports asyncio: a fourteenth of a daemon's start.
    """
    try:
        payload, _endpoint = monitor.recv_multipart(_NOBLOCK)
    except zmq.Again:
        return None
    event, value = _EVENT.unpack(payload)
    return event, value
