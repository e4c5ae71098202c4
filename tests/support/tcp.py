"""Small TCP servers and clients, for tests of relays and emulators."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


@contextmanager
def serving(handler: Callable[[socket.socket], None], port: int = 0) -> Iterator[str]:
    """Serve on loopback with ``handler`` in a thread for each connection; yields the endpoint."""
    listener = socket.create_server(("127.0.0.1", port))

    def attend(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            handler(connection)

    def accept() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=attend, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def echo(connection: socket.socket) -> None:
    """Send back all bytes, then end."""
    while data := connection.recv(65536):
        connection.sendall(data)
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)


def connected(endpoint: str) -> socket.socket:
    """Connect a client's socket."""
    host, port = endpoint.removeprefix("tcp://").rsplit(":", 1)
    client = socket.create_connection((host, int(port)), 20.0)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return client


def received(connection: socket.socket, size: int) -> bytes:
    """Receive so many bytes, or fewer if the connection ends."""
    data = b""
    while len(data) < size and (part := connection.recv(size - len(data))):
        data += part
    return data


def round_trips_s(endpoint: str, count: int, size: int = 64) -> list[float]:
    """Time ``count`` echoes in seconds, after three to warm up."""
    times = []
    with connected(endpoint) as client:
        for _ in range(count + 3):
            start = time.monotonic()
            client.sendall(bytes(size))
            assert received(client, size) == bytes(size)
            times.append(time.monotonic() - start)
    return times[3:]


def arrivals(connection: socket.socket) -> Iterator[tuple[float, int]]:
    """Yield the time and number of bytes of each arrival until the end."""
    while data := connection.recv(65536):
        yield time.monotonic(), len(data)
