"""How long it takes to reach edges by names of either family, in a network of this process alone.

Run as ``unshare --mount --net python -m tests.support.named_edges``, which takes root; prints JSON:
seconds until connected, or null, by name and by where the edge listens.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import zmq

from pilotfish.wire.channel import EdgeChannel

_V4, _V6 = "10.9.9.9", "fd00::9"
_UNROUTED = "203.0.113.9"
_HOSTS = f"""\
127.0.0.1 localhost
{_V4} four.test
{_V6} six.test
{_V4} both.test
{_V6} both.test
{_UNROUTED} far.test
{_V6} far.test
"""
_PORTS = {"0.0.0.0": 7001, f"[{_V6}]": 7002, "[::]": 7003}
_LIMIT_S = 2.2
_CASES = [
    ("localhost", "0.0.0.0"),
    ("localhost", "[::]"),
    ("four.test", "0.0.0.0"),
    ("four.test", "[::]"),
    ("six.test", f"[{_V6}]"),
    ("six.test", "[::]"),
    ("both.test", "0.0.0.0"),
    ("both.test", f"[{_V6}]"),
    ("far.test", f"[{_V6}]"),
    ("none.test", "[::]"),
]


def _command(*words: str) -> None:
    subprocess.run(words, check=True)


def _edge(host: str) -> zmq.Socket[Any]:
    edge = zmq.Context.instance().socket(zmq.ROUTER)
    edge.linger = 0
    edge.ipv6 = "[" in host
    edge.bind(f"tcp://{host}:{_PORTS[host]}")
    return edge


def _reach(name: str, port: int) -> float | None:
    channel = EdgeChannel(f"tcp://{name}:{port}", None, 1024)
    began_s = time.monotonic()
    try:
        while time.monotonic() - began_s < _LIMIT_S:
            channel.receive_raw(0.05)
            if channel.connected:
                return time.monotonic() - began_s
        return None
    finally:
        channel.close(0)


def _moved(hosts: Path) -> float | None:
    """Reach an edge whose name gets another address while it is tried."""
    channel = EdgeChannel(f"tcp://moves.test:{_PORTS['[::]']}", None, 1024)
    began_s, moved = time.monotonic(), False
    try:
        while not channel.connected and time.monotonic() - began_s < 2 * _LIMIT_S:
            channel.receive_raw(0.05)
            if not moved and time.monotonic() - began_s > 0.5:
                moved = bool(hosts.write_text(f"{_HOSTS}{_V6} moves.test\n"))
        return time.monotonic() - began_s if channel.connected else None
    finally:
        channel.close(0)


def main() -> None:
    """Print what comes of each case."""
    hosts = Path(tempfile.mkstemp()[1])
    hosts.write_text(f"{_HOSTS}{_UNROUTED} moves.test\n")
    _command("mount", "--make-rprivate", "/")
    _command("mount", "--bind", str(hosts), "/etc/hosts")
    _command("ip", "link", "set", "lo", "up")
    _command("ip", "address", "add", f"{_V4}/32", "dev", "lo")
    _command("ip", "address", "add", f"{_V6}/128", "dev", "lo", "nodad")
    edges = [_edge(host) for host in ("0.0.0.0", f"[{_V6}]", "[::]")]
    taken = [[name, host, _reach(name, _PORTS[host])] for name, host in _CASES]
    print(json.dumps([*taken, ["moves.test", "[::]", _moved(hosts)]]))
    for edge in edges:
        edge.close()
    hosts.unlink()


if __name__ == "__main__":
    main()
