"""Small HTTP server for metrics; its cost to the edge is bounded for any clients.

In:  a WSGI application that needs only method, path, query and headers. Out: its answers, sent by
     the standard library's HTTP server (one thread per connection, one request per connection).

Law: there are at most `_CONNECTIONS` connections, none for longer than `_PATIENCE_S`. A further
connection replaces another: a connection without a complete request, if there is one, else a
connection that is being answered; among these, the oldest from the address with most connections.
So a scrape succeeds despite any number of idle connections and of clients that do not read.
"""

import io
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any, Final

from pilotfish.base.descriptors import EXHAUSTED

_log = logging.getLogger("pilotfish.edge")

_CONNECTIONS: Final = 8
_PATIENCE_S: Final = 10.0  # time limit (s) of a connection, for request and answer together
_REQUEST_BYTES: Final = 8192
_BACKLOG: Final = 64
_TICK_S: Final = 0.5

Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class Exposition:
    """HTTP server on (host, port); raises `OSError` if it cannot listen there."""

    def __init__(self, application: Application, host: str, port: int) -> None:
        family, *_, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
        self.port: int = listening.getsockname()[1]
        self._server = _Server(application, listening)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_TICK_S,), name="metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._server.stop()
        self._thread.join()


@dataclass
class _Client:
    address: str
    since_s: float = field(default_factory=time.monotonic)
    complete: bool = False  # whether the server has read its whole request


class _Server(ThreadingTCPServer):
    """Standard library's server, with a limit of connections and of each connection's time."""

    daemon_threads = True

    def __init__(self, application: Application, listening: socket.socket) -> None:
        super().__init__(listening.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.socket.setblocking(False)  # never wait in accept: a client may be gone by then
        self._application = application
        self._making = threading.Lock()  # allows one call of the application at a time
        self._clients: dict[Any, _Client] = {}  # socket → client, the oldest first
        self._changed = threading.Condition()  # guards _clients
        self._short = False  # whether the process had no descriptor left for the last connection

    def stop(self) -> None:
        """End `serve_forever` and all connections."""
        _shut(self.socket)  # ends the server thread's wait
        self.shutdown()
        with self._changed:
            for connection in self._clients:
                _shut(connection)
            self._changed.wait_for(lambda: not self._clients, _TICK_S)
        self.server_close()

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection; if the process has no descriptor left, close another connection."""
        try:
            accepted = super().get_request()
        except OSError as error:
            if error.errno in EXHAUSTED and not isinstance(error, BlockingIOError):
                if not self._short:  # log once, until a connection is accepted again
                    _log.error("metrics cannot be requested: %s", error)
                self._short = True
                with self._changed:
                    if self._clients:
                        _shut(self._least())
                    self._changed.wait(_TICK_S)  # the new connection stays in the backlog
            raise  # the server will try to accept again
        if self._short:
            _log.warning("metrics can be requested again")
        self._short = False
        return accepted

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a connection's thread; if there are too many, close another connection first."""
        with self._changed:
            if not self._has_room():
                _shut(self._least())
                if not self._changed.wait_for(self._has_room, _TICK_S):
                    self.shutdown_request(request)
                    return
            self._clients[request] = _Client(str(client_address[0]))
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Close connections older than `_PATIENCE_S`; the server calls this regularly."""
        before_s = time.monotonic() - _PATIENCE_S
        with self._changed:
            for connection, client in self._clients.items():
                if client.since_s < before_s:
                    _shut(connection)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection and forget its client."""
        with self._changed:
            super().shutdown_request(request)
            self._clients.pop(request, None)
            self._changed.notify_all()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log the error that ended a connection, at level DEBUG: clients may just disconnect."""
        _log.debug("a connection for metrics ended", exc_info=True)

    def answer(self, connection: Any, environment: dict[str, Any], start: Any) -> bytes:
        """Return the body of the application's answer."""
        self._clients[connection].complete = True
        with self._making:
            return b"".join(self._application(environment, start))

    def _least(self) -> Any:
        """Choose the connection to close in favour of a new connection."""
        clients = self._clients
        silent = [each for each in clients if not clients[each].complete] or clients
        crowd = Counter(clients[each].address for each in silent)
        return max(silent, key=lambda each: crowd[clients[each].address])  # among equals the oldest

    def _has_room(self) -> bool:
        return len(self._clients) < _CONNECTIONS


class _Handler(BaseHTTPRequestHandler):
    """Handler of one connection: reads one request, and answers it."""

    server: _Server
    protocol_version = "HTTP/1.1"
    # version of a request that names none; responses of 1.0 have a status line
    default_request_version = "HTTP/1.0"

    def setup(self) -> None:
        """Limit the bytes of a request that are read."""
        super().setup()
        self.rfile = _Head(self.connection.makefile("rb", buffering=0))

    def do_GET(self) -> None:
        """Answer a request of any method; the application refuses methods other than GET."""
        if self.headers.defects or len(self.headers.get_all("Host", [])) > 1:
            self.send_error(400)  # two Host headers could be read differently by two programs
            return
        path, _, query = self.path.partition("?")
        environment = {"REQUEST_METHOD": self.command, "PATH_INFO": path, "QUERY_STRING": query}
        for name, value in self.headers.items():
            environment[f"HTTP_{name.upper().replace('-', '_')}"] = value
        head: list[tuple[str, list[tuple[str, str]]]] = []
        try:
            body = self.server.answer(
                self.connection, environment, lambda *began: head.append((began[0], began[1]))
            )
            status, headers = head[-1]
        except Exception:
            _log.exception("the metrics could not be generated")
            self.send_error(500)
            return
        self._send(int(status[:3]), status[4:], headers, body)

    do_HEAD = do_OPTIONS = do_POST = do_PUT = do_DELETE = do_GET  # noqa: N815  # http.server's names

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse a request; the answer has no body, so it does not quote the request."""
        self._send(code, None, [], b"")

    def _send(
        self, code: int, phrase: str | None, headers: list[tuple[str, str]], body: bytes
    ) -> None:
        self.send_response_only(code, phrase)
        for header in headers:
            self.send_header(*header)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing about requests."""


class _Head(io.BufferedReader):
    """Reader of a request's lines, up to `_REQUEST_BYTES` in total."""

    left = _REQUEST_BYTES + 1

    def readline(self, size: int | None = -1, /) -> bytes:
        """Read a line; raise `ConnectionAbortedError` beyond `_REQUEST_BYTES`."""
        line = super().readline(self.left if size is None or size < 0 else min(size, self.left))
        self.left -= len(line)
        if not self.left:
            raise ConnectionAbortedError("the request is too long")
        return line


def _shut(connection: socket.socket) -> None:
    """End a connection; this also wakes its thread out of a blocking read or write."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
