"""One end of a TCP connection that carries bytes one way, and tells at what rate they arrived.

    python _goodput.py serve ADDRESS
    python _goodput.py up|down ADDRESS WARM_BYTES BYTES [CONTROL]

The second form connects to the first, and prints the bit/s of the bytes after the first
WARM_BYTES: from the arrival of the last of those (or, if there are none, from the first arrival)
until all have arrived. CONTROL: the sender's congestion control instead of the kernel's default.
"""

import json
import socket
import sys
import time
from typing import Any

PORT = 7079
_PART = 65536


def main() -> None:
    """Serve until the process is killed, or measure once."""
    role, address, *words = sys.argv[1:]
    if role == "serve":
        _serve(address)
    else:
        warm, size = map(int, words[:2])
        print(_measure(address, role, warm, size, *words[2:]))


def _serve(address: str) -> None:
    with socket.create_server((address, PORT)) as listening:
        print("ready", flush=True)
        while True:
            connection, _ = listening.accept()
            with connection:
                wanted: dict[str, Any] = json.loads(connection.recv(_PART))
                connection.sendall(b"!")
                if wanted["way"] == "down":
                    _send(connection, wanted["warm"] + wanted["size"], wanted["control"])
                    connection.recv(1)
                else:
                    rate = _receive(connection, wanted["warm"], wanted["size"])
                    connection.sendall(repr(rate).encode())


def _measure(address: str, way: str, warm: int, size: int, control: str = "") -> float:
    with socket.create_connection((address, PORT)) as connection:
        wanted = {"way": way, "warm": warm, "size": size, "control": control}
        connection.sendall(json.dumps(wanted).encode())
        connection.recv(1)
        if way == "down":
            return _receive(connection, warm, size)
        _send(connection, warm + size, control)
        return float(connection.recv(_PART))


def _send(connection: socket.socket, size: int, control: str) -> None:
    if control:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, control.encode())
    connection.sendall(bytes(size))


def _receive(connection: socket.socket, warm: int, size: int) -> float:
    """Receive all; returns the bit/s of what came after the first ``warm`` bytes."""
    received, begun_at, begun_s = 0, 0, None
    while received < warm + size:
        part = connection.recv(_PART)
        if not part:
            raise ConnectionError("the other end has gone")
        received += len(part)
        if begun_s is None and received >= warm:
            begun_at, begun_s = received, time.monotonic()
    assert begun_s is not None
    return 8 * (received - begun_at) / (time.monotonic() - begun_s)


if __name__ == "__main__":
    main()
