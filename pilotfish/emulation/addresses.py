"""Parse ZeroMQ's endpoints, ``tcp://HOST:PORT``, for plain TCP sockets."""

import re
import socket
from typing import Any, TypeAlias

from pilotfish.base.errors import EdgeUnreachableError, ListenError, UnsupportedError
from pilotfish.wire.address import require_address, require_listenable

Address: TypeAlias = "tuple[socket.AddressFamily, Any]"


def endpoint_of(sock: socket.socket) -> str:
    """Return the ZeroMQ endpoint to which a socket is bound."""
    host, port = sock.getsockname()[:2]
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def address_of(endpoint: str) -> Address:
    """Return the address of an edge's endpoint, for a TCP connection.

    Raises UnsupportedError (endpoint misspelt), EdgeUnreachableError (no such host).
    """
    require_address(endpoint)
    parsed = _parse(endpoint)
    if parsed is None or parsed[1] == 0:
        raise UnsupportedError(f"{endpoint!r} is not an edge's address: write tcp://HOST:PORT.")
    try:
        return _resolve(*parsed)
    except OSError as error:
        raise EdgeUnreachableError(f"There is no host {parsed[0]!r}: {error.strerror}.") from error


def listen_on(endpoint: str) -> socket.socket:
    """Open a non-blocking listener; host ``*`` is every IPv4 address. Raises ListenError."""
    require_listenable(endpoint)
    parsed = _parse(endpoint)
    if parsed is None:
        raise ListenError(f"{endpoint!r} is not an address to listen on: write tcp://HOST:PORT.")
    host, port = parsed
    try:
        family, address = _resolve("0.0.0.0" if host == "*" else host, port)
        listener = socket.create_server(address[:2], family=family, backlog=128)
    except OSError as error:
        raise ListenError(f"Cannot listen on {endpoint}: {error.strerror}.") from error
    listener.setblocking(False)
    return listener


def _parse(endpoint: str) -> tuple[str, int] | None:
    match = re.fullmatch(r"tcp://(?:\[([^]]+)\]|([^:/\[\]]+)):(\d{1,5})", endpoint, re.ASCII)
    if match is None or int(match[3]) > 65535:
        return None
    return match[1] or match[2], int(match[3])


def _resolve(host: str, port: int) -> Address:
    """Resolve a host's name to one address; prefer IPv4 to IPv6, as ZeroMQ does."""
    results = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, _, _, _, address = min(results, key=lambda entry: entry[0] != socket.AF_INET)
    return family, address
