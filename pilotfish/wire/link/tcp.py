"""Read the events and the kernel's counters of TCP connections, and set their options.

ZeroMQ owns the connections: it reports their descriptors, and may close a descriptor at any time.
Then another file may get its number. So each descriptor is checked before it is used.
"""

import ctypes
import fcntl
import socket
import struct
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import zmq

_EVENT = struct.Struct("=Hi")  # event of ZeroMQ's monitor, and its value
_NOBLOCK = int(zmq.NOBLOCK)
_TCP_INFO = 11  # Linux; the socket module has the name from Python 3.14 on
# struct tcp_info of linux/tcp.h: 8 bytes, 24 u32 of which total_retrans is the last, 4 u64, then
# segs_out, segs_in, notsent_bytes, min_rtt, data_segs_in, data_segs_out
_RETRANSMITTED_AT, _SENT_AT = 8 + 23 * 4, 8 + 24 * 4 + 4 * 8 + 5 * 4
_ACKNOWLEDGED_AT, _RECEIVED_AT = 8 + 24 * 4 + 2 * 8, 8 + 24 * 4 + 3 * 8  # offsets of u64 fields
_LEAST_RTT_AT = 8 + 24 * 4 + 4 * 8 + 3 * 4  # in µs
_ARRIVED_AT = 8 + 24 * 4 + 4 * 8 + 4
_SEGMENTS_AT = _ARRIVED_AT + 3 * 4
# Error (s) of times that the kernel counts in ticks and rounds to milliseconds: one tick (the
# resolution of CLOCK_MONOTONIC_COARSE, clock 6) and one millisecond.
_TICK_S = time.clock_getres(6) + 0.001
_LAST_RECEIVED_AT, _RTT_AT, _DEVIATION_AT = 8 + 11 * 4, 8 + 15 * 4, 8 + 16 * 4  # in ms, µs, µs
_THIN_LINEAR_TIMEOUTS, _USER_TIMEOUT, _RTO_MAX_MS = 16, 18, 44  # linux/tcp.h
# The kernel gives up after this time without an acknowledgement; `Liveness` gives up earlier.
_GIVEN_UP_MS = 60_000
_ATTACH_FILTER, _DETACH_FILTER = 26, 27  # asm-generic/socket.h
# the socket class without Python's additions, which double the time of `queued_s`
_BareSocket = socket.SocketType
_CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")
_AT_ONCE = struct.pack("ii", 1, 0)  # struct linger with 0 s: `close` resets the connection


class Segments(NamedTuple):
    """Counters of a TCP connection: data segments sent, and retransmissions.

    Retransmissions include the handshake's, so they may exceed the data segments. least_rtt_s:
    TCP's smallest round-trip time so far.
    """

    sent: int
    retransmitted: int
    least_rtt_s: float = 0.0


class Volume(NamedTuple):
    """The kernel's byte counts and times of a TCP connection.

    received: bytes that arrived. read: bytes of these that the process has read. acknowledged:
    bytes that the peer acknowledged. outstanding: bytes written and not acknowledged. idle_s:
    seconds since bytes last arrived. rtt_s, deviation_s: TCP's round-trip time and its mean
    deviation. arrived: packets that arrived, with or without new bytes. segments: data segments
    that arrived.
    """

    received: int
    read: int
    acknowledged: int
    outstanding: int = 0
    idle_s: float = 0.0
    rtt_s: float = 0.0
    deviation_s: float = 0.0
    arrived: int = 0
    segments: int = 0


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


@contextmanager
def borrow_socket(
    descriptor: int | None, is_ours: Callable[[socket.socket], bool]
) -> Iterator[socket.socket | None]:
    """Borrow the socket of ZeroMQ's descriptor; None: there is none, or ``is_ours`` rejects it.

    The descriptor is not copied: when connections must be cut, the process may have no free one.
    """
    if descriptor is None:
        yield None
        return
    try:
        lent = socket.socket(fileno=descriptor)
    except OSError:
        yield None
        return
    try:
        try:
            ours = is_ours(lent)
        except OSError:  # ZeroMQ has just closed it
            ours = False
        yield lent if ours else None
    finally:
        lent.detach()


def has_peer_port(port: int) -> Callable[[socket.socket], bool]:
    """Return a function that checks whether a connection goes to this port of the peer."""

    def check(connection: socket.socket) -> bool:
        peer = connection.getpeername()
        return isinstance(peer, tuple) and peer[1] == port

    return check


def read_segments(descriptor: int, port: int) -> Segments | None:
    """Read a descriptor's segment counters; None if it does not go to the peer's ``port``."""
    with borrow_socket(descriptor, has_peer_port(port)) as connection:
        info = _info(connection)
    if len(info) < _SENT_AT + 4:  # a kernel older than 4.6
        return None
    least_rtt_s = _u32(info, _LEAST_RTT_AT) * 1e-6
    return Segments(_u32(info, _SENT_AT), _u32(info, _RETRANSMITTED_AT), least_rtt_s)


def is_paced() -> bool:
    """Whether this machine's TCP sends at a pace (BBR), and not as fast as the link takes it."""
    try:
        return _CONTROL.read_text().startswith("bbr")
    except OSError:
        return False


def read_volume(connection: socket.socket | None) -> Volume | None:
    """Read a connection's byte counts; None: unknown."""
    waiting = _read_queue(connection, termios.FIONREAD)
    outstanding = _read_queue(connection, termios.TIOCOUTQ)
    info = _info(connection)
    if len(info) < _SEGMENTS_AT + 4:  # a kernel older than 4.6
        return None
    received = _u64(info, _RECEIVED_AT)
    return Volume(
        received,
        received - waiting,
        _u64(info, _ACKNOWLEDGED_AT),
        outstanding,
        _u32(info, _LAST_RECEIVED_AT) * 1e-3,
        _u32(info, _RTT_AT) * 1e-6,
        _u32(info, _DEVIATION_AT) * 1e-6,
        _u32(info, _ARRIVED_AT),
        _u32(info, _SEGMENTS_AT),
    )


def limit_retransmission_pause(connection: socket.socket | None, most_s: float) -> None:
    """Limit the kernel's pause between two retransmissions to ``most_s`` seconds.

    By default the pauses double: after an outage of some seconds, a connection is silent for the
    same time again. most_s: 1 to 120, more than a retransmission takes. Before Linux 6.15, only
    the first pauses can be kept from growing.
    """
    if connection is not None:
        with suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, _THIN_LINEAR_TIMEOUTS, 1)
            connection.setsockopt(socket.IPPROTO_TCP, _USER_TIMEOUT, _GIVEN_UP_MS)
            connection.setsockopt(socket.IPPROTO_TCP, _RTO_MAX_MS, int(1000 * most_s))


def local_host(connection: socket.socket | None) -> str:
    """Return the local address; "" without a connection."""
    with suppress(OSError):
        name = connection.getsockname() if connection is not None else ""
        return str(name[0]) if isinstance(name, tuple) else ""
    return ""


def queued_s(descriptor: int | None) -> float:
    """Return a lower bound of the time since bytes last arrived, in seconds; 0: unknown.

    A message that is received now has waited on this machine for at least this time. The function
    runs for each message, so it does not check the descriptor: a check would take several times as
    long, and a wrong value only spoils one measurement.
    """
    if descriptor is None:
        return 0.0
    try:
        lent = _BareSocket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, descriptor)
    except OSError:
        return 0.0
    try:
        info = lent.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _LAST_RECEIVED_AT + 4)
        return max(0.0, _u32(info, _LAST_RECEIVED_AT) * 1e-3 - _TICK_S)
    except (OSError, struct.error):
        return 0.0
    finally:
        lent.detach()


def sent_segments(descriptor: int | None) -> Segments | None:
    """Return a connection's segment counters; None: unknown. As `queued_s`, it does not check."""
    if descriptor is None:
        return None
    try:
        lent = _BareSocket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, descriptor)
    except OSError:
        return None
    try:
        info = lent.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _SENT_AT + 4)
        return Segments(_u32(info, _SENT_AT), _u32(info, _RETRANSMITTED_AT))
    except (OSError, struct.error):
        return None
    finally:
        lent.detach()


def hang_up(connection: socket.socket | None) -> None:
    """Reset a connection; bytes in flight are lost."""
    if connection is not None:
        with suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
            connection.shutdown(socket.SHUT_RDWR)


def drop_incoming(listening: socket.socket | None, enable: bool) -> None:
    """Make the kernel drop all packets to a listening socket, or stop doing so (Linux only).

    A peer that tries to connect retries after a second, as on a path that loses packets.
    """
    if listening is None:
        return
    drop = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0))  # BPF: accept 0 bytes
    program = struct.pack("@HP", 1, ctypes.addressof(drop))  # struct sock_fprog
    with suppress(OSError):
        if enable:
            listening.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, program)
        else:
            listening.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)


def _info(connection: socket.socket | None) -> bytes:
    if connection is not None and connection.family != socket.AF_UNIX:
        with suppress(OSError):
            return connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 256)
    return b""


def _read_queue(connection: socket.socket | None, request: int) -> int:
    """Return the number of unread bytes (FIONREAD) or of unacknowledged bytes (TIOCOUTQ)."""
    if connection is not None:
        with suppress(OSError):
            return _u32(fcntl.ioctl(connection.fileno(), request, bytes(4)), 0)
    return 0


def _u32(info: bytes, at: int) -> int:
    number: int = struct.unpack_from("=I", info, at)[0]
    return number


def _u64(info: bytes, at: int) -> int:
    number: int = struct.unpack_from("=Q", info, at)[0]
    return number
