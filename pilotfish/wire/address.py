"""Check an edge's address as people write it: an address to connect to, or to listen on."""

import ipaddress
import re
import socket
from contextlib import suppress
from urllib.parse import urlsplit

from pilotfish.base.errors import ListenError, UnsupportedError

_LOCAL = ("ipc://", "inproc://")
# addresses of documentation, which are routed like any other far address
_SOMEWHERE = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
_FORBIDDEN = re.compile(r"[\s@/?#]")  # characters that no host name has


def require_address(endpoint: str, party: str = "an edge") -> None:
    """Raise `UnsupportedError` with advice, unless ``endpoint`` is ``tcp://HOST:PORT`` or local."""
    if advice := _advice(endpoint, listens=False):
        raise UnsupportedError(f"{endpoint!r} is not an address of {party}{advice}")


def require_listenable(endpoint: str) -> None:
    """Raise `ListenError`, with advice, unless an edge can listen there; port 0: a free port."""
    if advice := _advice(endpoint, listens=True):
        raise ListenError(f"{endpoint!r} is not an address to listen on{advice}")


def _advice(endpoint: str, *, listens: bool) -> str:
    """Return the end of a sentence that begins "… is not an address"; "" for a valid address."""
    if endpoint.startswith(_LOCAL):
        return ""
    if endpoint.isdecimal():
        return f" (a port alone): write tcp://HOST:{endpoint}."
    try:
        parts = urlsplit(endpoint if "://" in endpoint else f"tcp://{endpoint}")
        host, port = parts.hostname or "", parts.port
    except ValueError:  # a port beyond 65,535, or brackets that do not match
        host, port = "", None
    suggestion = "tcp://HOST:PORT"
    named = host != "" and not _FORBIDDEN.search(host) and (listens or host != "*")
    if named and port is not None and (listens or port > 0):
        suggestion = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
        if endpoint.startswith("tcp://") and endpoint.lower() == suggestion.lower():
            return ""
    lacking = " (the port is missing)" if host and port is None else ""
    return f"{lacking}: write {suggestion}."


def split_listening(endpoint: str) -> tuple[str, int | None]:
    """Return host and port of an address to listen on; the port of a local endpoint is None."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return (host, int(port)) if endpoint.startswith("tcp://") else (endpoint, None)


def outgoing_address(*, ipv6: bool) -> str | None:
    """Return this machine's address towards its default route; None without a route.

    An IPv6 address, which only counts if ``ipv6``, is in brackets. No packet is sent.
    """
    for family, somewhere in _SOMEWHERE:
        if family == socket.AF_INET6 and not ipv6:
            continue
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((somewhere, 9))
            address = str(probe.getsockname()[0])
            return f"[{address}]" if family == socket.AF_INET6 else address
    return None


def literal_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Parse an IP address, and an IPv4-mapped address as IPv4; return None for a name."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
