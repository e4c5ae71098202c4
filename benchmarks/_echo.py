"""A bare encrypted echo between two processes: what ZeroMQ and this machine take by themselves."""

import multiprocessing
import time
from multiprocessing.connection import Connection
from types import TracebackType

import numpy as np
import zmq

UP, DOWN = (38, 16), 58  # bytes of a greedy round with four draft tokens: two frames, one frame


def _serve(pipe: Connection, secret: bytes, megabytes: int) -> None:
    weights = np.ones((megabytes, 1 << 18), np.float32)
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.curve_server = True
    socket.curve_secretkey = secret
    pipe.send(socket.bind_to_random_port("tcp://127.0.0.1"))
    while True:
        client, *_ = socket.recv_multipart()
        begun = time.perf_counter_ns()
        weights.sum()
        busy_ns = time.perf_counter_ns() - begun
        socket.send_multipart([client, busy_ns.to_bytes(DOWN, "little")])


class Echo:
    """An echoing process and a socket to it; a context manager.

    Before it answers, the process reads so many megabytes, as a target reads its weights.
    """

    def __init__(self, megabytes: int) -> None:
        ours, theirs = multiprocessing.Pipe()
        public, secret = zmq.curve_keypair()
        spawn = multiprocessing.get_context("spawn")
        self._process = spawn.Process(target=_serve, args=(theirs, secret, megabytes), daemon=True)
        self._process.start()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.curve_serverkey = public
        self._socket.curve_publickey, self._socket.curve_secretkey = zmq.curve_keypair()
        self._socket.connect(f"tcp://127.0.0.1:{ours.recv()}")
        self.seconds()  # the handshake

    def seconds(self) -> float:
        """One exchange, without the time in which the other process read."""
        begun_ns = time.perf_counter_ns()
        self._socket.send_multipart([bytes(size) for size in UP])
        reply = self._socket.recv()
        total_ns = time.perf_counter_ns() - begun_ns
        return (total_ns - int.from_bytes(reply, "little")) * 1e-9

    def __enter__(self) -> "Echo":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.terminate()
        self._process.join()
        self._context.destroy(linger=0)
