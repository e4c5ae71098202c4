"""The address of an edge, as people write it."""

import re
from urllib.parse import urlsplit

from pilotfish.wire.errors import UnsupportedError

_LOCAL = ("ipc://", "inproc://")
_STRANGE = re.compile(r"[\s*@/?#]")  # what no name of a host has


def require_address(endpoint: str) -> None:
    """Raise `UnsupportedError`, with what to write, unless it is ``tcp://HOST:PORT`` or local."""
    if endpoint.startswith(_LOCAL):
        return
    try:
        parts = urlsplit(endpoint if "://" in endpoint else f"tcp://{endpoint}")
        host, port = parts.hostname, parts.port
    except ValueError:  # a port beyond 65,535, or brackets that do not match
        host = port = None
    known = host and port and not _STRANGE.search(host)
    written = "tcp://HOST:PORT"
    if known:
        written = f"tcp://[{host}]:{port}" if ":" in str(host) else f"tcp://{host}:{port}"
        if endpoint.startswith("tcp://") and endpoint.lower() == written.lower():
            return
    lacking = " (the port is missing)" if host and not port else ""
    raise UnsupportedError(f"{endpoint!r} is no address of an edge{lacking}: write {written}.")
