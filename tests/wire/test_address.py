"""An address that is none is refused with what to write in its place."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import zmq

from pilotfish.base.errors import ListenError, UnsupportedError
from pilotfish.wire.address import require_address, require_listenable
from pilotfish.wire.connections import Bounds
from pilotfish.wire.keys import EdgeKeys
from pilotfish.wire.transport import Listener

BOUNDS = Bounds(16, 16, 1024)


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://127.0.0.1:7077",
        "tcp://edge.example:1",
        "tcp://Edge.example:1",
        "tcp://[::1]:7077",
        "tcp://[fe80::1%eth0]:7077",
        "ipc:///run/edge",
        "inproc://edge",
    ],
)
def test_an_address(endpoint: str) -> None:
    require_address(endpoint)


@pytest.mark.parametrize(
    ("endpoint", "advice"),
    [
        ("127.0.0.1:7077", "write tcp://127.0.0.1:7077."),
        ("edge.example:7077", "write tcp://edge.example:7077."),
        ("[::1]:7077", r"write tcp://\[::1\]:7077."),
        ("http://127.0.0.1:7077", "write tcp://127.0.0.1:7077."),
        ("edge.example", r"the port is missing\): write tcp://HOST:PORT."),
        ("tcp://edge.example", r"the port is missing\): write tcp://HOST:PORT."),
        ("tcp://edge.example:0", "write tcp://HOST:PORT."),
        ("tcp://127.0.0.1:99999", "write tcp://HOST:PORT."),
        ("tcp://[::1:7077", "write tcp://HOST:PORT."),
        ("TCP://Edge.example:7077", "write tcp://edge.example:7077."),
        ("tcp://127.0.0.1:7077/", "write tcp://127.0.0.1:7077."),
        ("tcp://127.0.0.1:7077?a", "write tcp://127.0.0.1:7077."),
        ("tcp://127.0.0.1:7077\n", "write tcp://127.0.0.1:7077."),
        ("tcp://user@edge.example:7077", "write tcp://edge.example:7077."),
        ("tcp://an edge:7077", "write tcp://HOST:PORT."),
        ("tcp://*:7077", "write tcp://HOST:PORT."),
        ("tcp://:7077", "write tcp://HOST:PORT."),
        ("7077", r"a port alone\): write tcp://HOST:7077."),
        ("", "write tcp://HOST:PORT."),
    ],
)
def test_what_to_write_instead(endpoint: str, advice: str) -> None:
    with pytest.raises(UnsupportedError, match=advice):
        require_address(endpoint)


@pytest.mark.parametrize(
    "endpoint", ["tcp://*:7077", "tcp://[::]:0", "tcp://eth0:1", "tcp://127.0.0.1:0", "ipc://edge"]
)
def test_what_can_be_listened_on(endpoint: str) -> None:
    require_listenable(endpoint)


@pytest.mark.parametrize(
    ("endpoint", "advice"),
    [
        ("7077", r"a port alone\): write tcp://HOST:7077."),
        ("0.0.0.0:7077", "write tcp://0.0.0.0:7077."),
        ("tcp://0.0.0.0", r"the port is missing\): write tcp://HOST:PORT."),
        ("tcp://*:70777", "write tcp://HOST:PORT."),
        ("http://*:7077", r"write tcp://\*:7077."),
    ],
)
def test_what_to_listen_on_instead(endpoint: str, advice: str) -> None:
    with pytest.raises(ListenError, match=advice):
        Listener(zmq.Context.instance(), endpoint, None, BOUNDS)


@pytest.mark.parametrize(
    ("host", "advice"),
    [
        ("127.0.0.1", r"another process listens there\. Stop it, or use another port\."),
        ("192.0.2.1", r"no interface .*tcp://\*:{port} .*tcp://\[::\]:{port} "),
    ],
)
def test_where_nobody_can_listen(key_folders: dict[str, Path], host: str, advice: str) -> None:
    context = zmq.Context()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ListenError, match=advice.replace("{port}", str(port))):
            Listener(context, f"tcp://{host}:{port}", EdgeKeys.load(key_folders["edge"]), BOUNDS)
    context.term()
