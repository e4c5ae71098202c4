"""An address that is none is refused with what to write in its place."""

from __future__ import annotations

import pytest

from pilotfish.wire.address import require_address
from pilotfish.wire.errors import UnsupportedError


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
        ("", "write tcp://HOST:PORT."),
    ],
)
def test_what_to_write_instead(endpoint: str, advice: str) -> None:
    with pytest.raises(UnsupportedError, match=advice):
        require_address(endpoint)
