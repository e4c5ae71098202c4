"""Floods an edge as fast as it can: `python -m tests.support.flood KIND ENDPOINT [KEYS]`."""

from __future__ import annotations

import socket
import sys
from contextlib import suppress
from pathlib import Path

import zmq

from pilotfish.wire.keys import DeviceKeys
from tests.support.bare_peer import greet
from tests.support.hostile import RawClient, RawSession


def hint() -> list[bytes]:
    """Make a well-formed message of 200 bytes that is not answered."""
    session = RawSession()
    session.generation = 0
    return session.hint([1] * 48)


def encoded(frames: list[bytes]) -> bytes:
    """Return a message as it is on the wire without encryption."""
    last = len(frames) - 1
    return b"".join(bytes([at < last, len(each)]) + each for at, each in enumerate(frames))


def by_zeromq(endpoint: str, keys: DeviceKeys | None = None) -> None:
    """Flood as a ZeroMQ client, which connects again by itself."""
    frames = hint()
    with RawClient(endpoint, keys) as flood:
        while True:
            with suppress(zmq.Again):  # its own queue is full while it may not connect
                for _ in range(200):
                    flood.socket.send_multipart(frames, zmq.NOBLOCK)


def until_cut(endpoint: str) -> None:
    """Flood as fast as bytes go, and connect again at once."""
    block = encoded(hint()) * 20_000
    while True:
        with suppress(OSError), greet(endpoint) as flood:
            while True:
                flood.sendall(block)


def hanging_up(endpoint: str) -> None:
    """Send a mebibyte over each connection, and end it."""
    message = encoded(hint())
    block = message * ((1 << 20) // len(message))
    while True:
        with suppress(OSError), greet(endpoint) as flood:
            flood.sendall(block)
            flood.shutdown(socket.SHUT_WR)


KINDS = {"zeromq": by_zeromq, "until-cut": until_cut, "hanging-up": hanging_up}

if __name__ == "__main__":
    kind, endpoint, *folders = sys.argv[1:]
    print("begun", flush=True)
    KINDS[kind](endpoint, *(DeviceKeys.load(Path(each)) for each in folders))
