"""Share a port between listening sockets, and choose the socket of each connection (Linux).

A classic BPF program (`SO_ATTACH_REUSEPORT_CBPF`, socket(7)) reads the source address of a
connection's first packet and returns the number of a socket. It can be replaced at any time. Only
sockets of the same user can share a port.
"""

import ctypes
import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from ipaddress import IPv4Address, ip_address
from itertools import islice
from typing import Final

from pilotfish.base.errors import ListenError

_ATTACH: Final = 51  # SO_ATTACH_REUSEPORT_CBPF, which the socket module lacks
# maximum number of addresses with a route: the program must fit in `optmem_max`
MOST_ADDRESSES: Final = 200
# Opcodes of linux/filter.h: load a word, load a byte, X = A, A ^= X, A >>= k; jumps, return.
_LOAD, _LOAD_BYTE, _COPY, _XOR, _SHIFT = 0x20, 0x30, 0x07, 0xAC, 0x74
_SKIP, _IF_EQUAL, _IF_BIT, _RETURN = 0x05, 0x15, 0x45, 0x06
_HEADER: Final = 0xFFF00000  # offset base: the packet's network layer (SKF_NET_OFF)
_RANDOM: Final = 0xFFFFF038
_V4_SOURCE, _V6_SOURCE = 12, 8  # offsets of the source address in a header

_Step = tuple[int, int, int, int]  # operation, steps to skip if true and if false, operand
Route = tuple[int] | tuple[int, int]  # a socket's number, or two numbers to choose from at random


class SharedPort:
    """The sockets of one port, numbered from 0 in the order in which they began to listen.

    first: the descriptor of number 0, which is not closed here.
    """

    def __init__(self, first: int) -> None:
        self._first = first

    def open_socket(self, backlog: int) -> int:
        """Open another listening socket; return its descriptor, which the caller owns.

        Raises `ListenError`, for instance if another user opened the first socket.
        """
        try:
            with _borrow_socket(self._first) as listening:
                sharing = socket.socket(listening.family, socket.SOCK_STREAM)
                with sharing:
                    if listening.family == socket.AF_INET6:
                        only = listening.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
                        sharing.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only)
                    for each in (listening, sharing):
                        each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                    sharing.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    sharing.setblocking(False)
                    sharing.bind(listening.getsockname())
                    sharing.listen(backlog)
                    return sharing.detach()
        except OSError as error:
            raise ListenError(
                f"A second socket cannot listen on this port: {error.strerror}."
            ) from error

    def steer(self, default: Route, routes: Mapping[str, Route]) -> None:
        """Route connections by source address; addresses without a route go to ``default``.

        Only the last `MOST_ADDRESSES` routes are used. Raises `ListenError`.
        """
        program = [*_load_source(), *_match_routes(default, routes)]
        code = ctypes.create_string_buffer(
            b"".join(struct.pack("=HBBI", *step) for step in program)
        )
        sock_fprog = struct.pack("@HP", len(program), ctypes.addressof(code))  # struct sock_fprog
        try:
            with _borrow_socket(self._first) as listening:
                listening.setsockopt(socket.SOL_SOCKET, _ATTACH, sock_fprog)
        except OSError as error:
            raise ListenError(
                f"The kernel cannot share a port between sockets: {error.strerror}."
            ) from error


def _load_source() -> Iterator[_Step]:
    """Yield steps that load the source address as a word: IPv4, or the XOR of IPv6's four words."""
    yield _LOAD_BYTE, 0, 0, _HEADER
    yield _SHIFT, 0, 0, 4
    yield _IF_EQUAL, 11, 0, 4  # IPv4: jump to the last step
    yield _LOAD, 0, 0, _HEADER + _V6_SOURCE
    for word in (1, 2, 3):
        yield _COPY, 0, 0, 0
        yield _LOAD, 0, 0, _HEADER + _V6_SOURCE + 4 * word
        yield _XOR, 0, 0, 0
    yield _SKIP, 0, 0, 1
    yield _LOAD, 0, 0, _HEADER + _V4_SOURCE


def _match_routes(default: Route, routes: Mapping[str, Route]) -> Iterator[_Step]:
    """Yield steps that return the socket's number for the loaded address."""
    for address, route in islice(routes.items(), max(0, len(routes) - MOST_ADDRESSES), None):
        if (word := _address_word(address)) is not None:
            steps = [*_return_number(route)]
            yield _IF_EQUAL, 0, len(steps), word
            yield from steps
    yield from _return_number(default)


def _return_number(route: Route) -> Iterator[_Step]:
    if len(route) > 1:
        yield _LOAD, 0, 0, _RANDOM
        yield _IF_BIT, 1, 0, 1
    yield from ((_RETURN, 0, 0, number) for number in route)


def _address_word(address: str) -> int | None:
    """Return the word that `_load_source` loads for an address; None if it is not an address."""
    try:
        read = ip_address(address.partition("%")[0])
    except ValueError:
        return None
    mapped = getattr(read, "ipv4_mapped", None) or read
    if isinstance(mapped, IPv4Address):
        return int(mapped)
    first, second, third, fourth = struct.unpack("!4I", mapped.packed)
    return int(first ^ second ^ third ^ fourth)


@contextmanager
def _borrow_socket(descriptor: int) -> Iterator[socket.socket]:
    """Borrow a socket that ZeroMQ owns and closes."""
    lent = socket.socket(fileno=descriptor)
    try:
        yield lent
    finally:
        lent.detach()
