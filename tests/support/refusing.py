"""A relay of messages between a device and an edge; it refuses some of them for the edge."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from typing import Any

import zmq

from pilotfish.wire import messages as m


class Refusing:
    """Passes messages on while entered; ``code_of`` returns the code of a refusal, or None.

    refused: number of the refused messages.
    """

    def __init__(self, target: str, code_of: Callable[[m.DeviceMessage], str | None]) -> None:
        self._target, self._code_of = target, code_of
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._front = self._socket(zmq.ROUTER)
        port = self._front.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self.refused = 0
        self._failures: dict[int, m.Failure] = {}  # by the nonce of the ping in the message's place
        self._backs: dict[bytes, zmq.Socket[bytes]] = {}  # by client
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.linger = 0
        return socket

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                if self._wait(self._front):
                    self._pass_up(*self._front.recv_multipart())
                for client, back in self._backs.items():
                    while back.poll(0):
                        self._pass_down(client, *back.recv_multipart())
        finally:
            self._context.destroy(linger=0)

    def _wait(self, front: zmq.Socket[bytes]) -> bool:
        """Wait briefly for a message of either end; returns whether ``front`` has one."""
        poller = zmq.Poller()
        for socket in (front, *self._backs.values()):
            poller.register(socket, zmq.POLLIN)
        return front in dict(poller.poll(20))

    def _pass_up(self, client: bytes, header: bytes, *frames: bytes) -> None:
        if client not in self._backs:
            self._backs[client] = self._socket(zmq.DEALER)
            self._backs[client].connect(self._target)
        code = self._code_of(m.decode_device_message(header))
        if code is not None:  # a ping in its place, so that replies keep their order
            self.refused += 1
            nonce = secrets.randbits(63)
            self._failures[nonce] = m.Failure(code=code, message="No.")
            header, frames = m.encode(m.Ping(nonce=nonce)), ()
        self._backs[client].send_multipart([header, *frames])

    def _pass_down(self, client: bytes, header: bytes, *frames: bytes) -> None:
        reply = m.decode_reply(header)
        if isinstance(reply, m.Pong) and reply.nonce in self._failures:
            header, frames = m.encode(self._failures.pop(reply.nonce)), ()
        self._front.send_multipart([client, header, *frames])

    def __enter__(self) -> Refusing:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        self._thread.join()
