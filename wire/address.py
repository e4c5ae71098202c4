"""The address of an edge, as people write it: to connect to, or to listen on."""

import ipaddress
from urllib.parse import urlsplit

from pilotfish.wire.errors import ListenError, UnsupportedError

_LOCAL = ("ipc://", "inproc://")


def require_address(endpoint: str, whose: str = "an edge") -> None:
    """Raise `UnsupportedError`, with what to write, unless it is ``tcp://HOST:PORT`` or local."""
    if advice := _advice(endpoint, 1):
        raise UnsupportedError(f"{endpoint!r} is no address of {whose}{advice}")


def require_listenable(endpoint: str) -> None:
    """Raise `ListenError`, with what to write, likewise; port 0 is a free one."""
    if advice := _advice(endpoint, 0):
        raise ListenError(f"{endpoint!r} is no address to listen on{advice}")


def _advice(endpoint: str, least_port: int) -> str:
    """Return how a sentence goes on that begins with "it is no address"; "" if it is one."""
    if endpoint.startswith(_LOCAL):
        return ""
    if endpoint.isdecimal():
        return f" (a port alone): write tcp://HOST:{endpoint}."
    scheme, separator, _ = endpoint.partition("://")
    try:
        parts = urlsplit(endpoint if separator else f"tcp://{endpoint}")
        host, port = parts.hostname, parts.port
    except ValueError:  # a port beyond 65,535, or brackets that do not match
        host = port = None
    placed = bool(host) and port is not None and port >= least_port
    if placed and separator and scheme == "tcp":
        return ""
    written = f"tcp://{parts.netloc}" if placed else "tcp://HOST:PORT"
    lacking = " (the port is missing)" if host and port is None else ""
    return f"{lacking}: write {written}."


def literal_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the address that is written there, an IPv4-mapped one as IPv4; None for a name."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
