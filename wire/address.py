"""The address of an edge, as people write it."""

import ipaddress
from urllib.parse import urlsplit

from pilotfish.wire.errors import UnsupportedError

_LOCAL = ("ipc://", "inproc://")


def require_address(endpoint: str) -> None:
    """Raise `UnsupportedError`, with what to write, unless it is ``tcp://HOST:PORT`` or local."""
    if endpoint.startswith(_LOCAL):
        return
    scheme, separator, _ = endpoint.partition("://")
    try:
        parts = urlsplit(endpoint if separator else f"tcp://{endpoint}")
        host, port = parts.hostname, parts.port
    except ValueError:  # a port beyond 65,535, or brackets that do not match
        host = port = None
    if host and port and separator and scheme == "tcp":
        return
    written = f"tcp://{parts.netloc}" if host and port else "tcp://HOST:PORT"
    lacking = " (the port is missing)" if host and not port else ""
    raise UnsupportedError(f"{endpoint!r} is no address of an edge{lacking}: write {written}.")


def literal_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the address that is written there, an IPv4-mapped one as IPv4; None for a name."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
