"""A small HTTP server for metrics, whose cost to the edge is bounded for any clients.

In:  a WSGI application that needs only method, path, query and headers. Out: its answers, with one
thread and few connections.

Law: at most `_CONNECTIONS` at once, none for longer than `_TIMEOUT_S`. For a further connection
one is closed: one without a request yet, if any, else one being answered; among these the oldest of
the address with most connections. So a scrape succeeds beside any number of idle connections and of
clients that do not read their answers.
"""

import logging
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

_log = logging.getLogger("pilotfish.edge")

_CONNECTIONS: Final = 16
_PATIENCE_S: Final = 10.0  # for request and answer together
_REQUEST_BYTES: Final = 8192
_BACKLOG: Final = 64
_TICK_S: Final = 0.5

Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


@dataclass(eq=False)
class _Client:
    connection: socket.socket
    address: str
    since_s: float = field(default_factory=time.monotonic)
    asked: bytes = b""
    answer: memoryview | None = None  # its unsent rest; None: the request is not complete


class Exposition:
    """Serves on (host, port) until it is closed; raises `OSError` if it cannot listen there."""

    def __init__(self, application: Application, host: str, port: int) -> None:
        family, *_, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        self._application = application
        self._listening = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
        self._listening.setblocking(False)
        self.port: int = self._listening.getsockname()[1]
        self._clients: list[_Client] = []  # the oldest first
        self._short = False  # the last connection could not be accepted
        self._wake, self._woken = socket.socketpair()
        self._poller = selectors.DefaultSelector()
        self._poller.register(self._listening, selectors.EVENT_READ)
        self._poller.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._wake.close()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            for key, _ in self._poller.select(_TICK_S):
                if key.fileobj is self._woken:
                    self._end()
                    return
                if key.fileobj is self._listening:
                    self._accept()
                elif key.data in self._clients:  # it may have been closed in this turn
                    self._go_on(key.data)
            before_s = time.monotonic() - _PATIENCE_S
            for client in [each for each in self._clients if each.since_s < before_s]:
                self._leave(client)

    def _accept(self) -> None:
        try:
            connection, address = self._listening.accept()
        except (BlockingIOError, ConnectionError):  # gone already
            return
        except OSError as error:  # no descriptor is left
            if not self._short:  # until one comes in again
                _log.error("figures cannot be asked for: %s", error)
            self._short = True
            if self._clients:
                self._leave(self._least())
            else:  # the connection stays queued: retrying at once would loop
                time.sleep(_TICK_S)
            return
        if self._short:
            _log.warning("figures can be asked for again")
        self._short = False
        connection.setblocking(False)
        client = _Client(connection, str(address[0]))
        if len(self._clients) >= _CONNECTIONS:
            self._leave(self._least())
        self._clients.append(client)
        self._poller.register(connection, selectors.EVENT_READ, client)

    def _least(self) -> _Client:
        """Return the client to close for a new one."""
        silent = [each for each in self._clients if each.answer is None] or self._clients
        crowd = Counter(each.address for each in silent)
        return max(silent, key=lambda each: crowd[each.address])  # of equals, the first

    def _go_on(self, client: _Client) -> None:
        try:
            if client.answer is None:
                self._read(client)
            else:
                client.answer = client.answer[client.connection.send(client.answer) :]
            if client.answer is not None and not client.answer:
                self._leave(client)
        except BlockingIOError:
            pass
        except OSError:  # gone
            self._leave(client)

    def _read(self, client: _Client) -> None:
        more = client.connection.recv(_REQUEST_BYTES)
        client.asked += more
        if b"\r\n\r\n" in client.asked:
            client.answer = memoryview(self._answer(client.asked))
            self._poller.modify(client.connection, selectors.EVENT_WRITE, client)
        elif not more or len(client.asked) > _REQUEST_BYTES:
            self._leave(client)

    def _answer(self, request: bytes) -> bytes:
        head: list[str] = []

        def start(status: str, headers: list[tuple[str, str]], *_: object) -> None:
            head.append(f"HTTP/1.1 {status}")
            head.extend(f"{name}: {value}" for name, value in headers)

        body, environment = b"", _environment(request)
        if environment is None:
            start("400 Bad Request", [])
        else:
            try:
                body = b"".join(self._application(environment, start))
            except Exception:
                _log.exception("the figures cannot be told")
                head.clear()
                start("500 Internal Server Error", [])
        head += [f"Content-Length: {len(body)}", "Connection: close", "", ""]
        return "\r\n".join(head).encode("latin-1") + body

    def _leave(self, client: _Client) -> None:
        self._clients.remove(client)
        self._poller.unregister(client.connection)
        with suppress(OSError):
            client.connection.close()

    def _end(self) -> None:
        for client in [*self._clients]:
            self._leave(client)
        self._poller.close()
        for open_ in (self._listening, self._woken):
            open_.close()


def _environment(request: bytes) -> dict[str, Any] | None:
    """Parse a request for WSGI; None for bytes that are no HTTP request."""
    first, *lines = request.partition(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        return None
    path, _, query = words[1].partition("?")
    environment = {"REQUEST_METHOD": words[0], "PATH_INFO": path, "QUERY_STRING": query}
    for line in lines:
        name, colon, value = line.partition(":")
        if colon and name.strip().upper() == "HOST" and "HTTP_HOST" in environment:
            return None  # which of them would count?
        if colon:
            environment[f"HTTP_{name.strip().upper().replace('-', '_')}"] = value.strip()
    return environment
