"""A TCP relay between a device and its edge, for tests to cut connections."""

import socket
import threading
import time
from contextlib import suppress


class Relay:
    """Listens on ``endpoint``, passes bytes to ``target`` and back, until it is cut or closed.

    port: the port to listen on; 0: any. pause_s: seconds of pause after each read.
    """

    read_bytes = 65536  # maximum bytes of a read

    def __init__(self, target, port=0):
        self.pause_s = 0.0
        self.turn_to(target)
        self._listener = socket.create_server(("127.0.0.1", port))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._open = []
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def turn_to(self, target):
        """Connect new connections to another target."""
        host, port = target.removeprefix("tcp://").rsplit(":", 1)
        self._target = (host, int(port))

    def _accept(self):
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._target)
            except OSError:  # no listener
                near.close()
                continue
            self.connections += 1
            self._open += [near, far]
            for source, sink, read in zip((near, far), (far, near), self.readers(), strict=True):
                ends = (source, sink, read)
                threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def readers(self):
        """Return what takes the bytes of a new connection, up and down: nothing does."""
        return None, None

    def _pass_on(self, source, sink, read):
        try:
            while data := source.recv(self.read_bytes):
                if read is not None:
                    read(data)
                sink.sendall(data)
                time.sleep(self.pause_s)
        except OSError:
            pass
        for end in (source, sink):
            end.close()

    def cut(self):
        """Break all connections; new ones are accepted."""
        for end in self._open:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._open.clear()

    def close(self):
        self._listener.close()
        self.cut()
