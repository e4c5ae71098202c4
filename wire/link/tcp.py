"""What the kernel knows about a TCP connection: how much it sent, and how much of that again."""

import socket
import struct
from contextlib import suppress
from typing import NamedTuple

_TCP_INFO = 11  # Linux's; the socket module lacks the name before Python 3.14
# struct tcp_info of linux/tcp.h: 8 bytes, 24 u32 of which total_retrans is the last, 4 u64, then
# segs_out, segs_in, notsent_bytes, min_rtt, data_segs_in, data_segs_out
_RETRANSMITTED_AT, _SENT_AT = 8 + 23 * 4, 8 + 24 * 4 + 4 * 8 + 5 * 4


class Segments(NamedTuple):
    """Of a TCP connection: segments with data, and how often any was sent again.

    The latter counts the handshake's, too, so it may be the greater one.
    """

    sent: int
    retransmitted: int


def segments(descriptor: int, port: int) -> Segments | None:
    """Of the connection behind a descriptor that somebody else owns; None if it is not ours.

    Its owner may have closed it meanwhile and the number be in use again: ``port``, the peer's,
    tells that.
    """
    try:
        borrowed = socket.socket(fileno=descriptor)
    except OSError:
        return None
    try:
        peer = borrowed.getpeername()
        if not isinstance(peer, tuple) or peer[1] != port:
            return None
        info = borrowed.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 256)
    except OSError:
        return None
    finally:
        with suppress(OSError):
            borrowed.detach()
    if len(info) < _SENT_AT + 4:  # a kernel older than 4.6
        return None
    return Segments(_u32(info, _SENT_AT), _u32(info, _RETRANSMITTED_AT))


def _u32(info: bytes, at: int) -> int:
    number: int = struct.unpack_from("=I", info, at)[0]
    return number
