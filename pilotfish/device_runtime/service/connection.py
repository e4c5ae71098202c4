"""Limit the number of uvicorn's HTTP/1.1 connections, and their waiting times.

uvicorn waits forever for the rest of a request's head, and for a client that does not read. Here
heads and writes have time limits, and if there are too many connections, the one that has been idle
longest is closed. TLS handshakes, which uvicorn does not see before they end, are limited here as
well. The certificate may be replaced at any time; later connections use the new one.
"""

import asyncio
import ssl
from collections.abc import Iterable
from typing import Any, ClassVar

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

HEAD_S = 10.0  # time limit (s) for a head to arrive, and for the pause between two requests
STALL_S = 20.0  # time limit (s) for a client to read bytes that were written
CONNECTIONS = 256


class Connection(H11Protocol):
    """One client's connection, with time-outs."""

    head_s: ClassVar[float] = HEAD_S
    stall_s: ClassVar[float] = STALL_S
    most: ClassVar[int] = CONNECTIONS

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._head: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._idle_since_s = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Start the time-out of the first head; make room if there are too many connections."""
        super().connection_made(transport)
        self._await_request()
        if len(self.connections) > self.most:
            self._make_room()

    def _make_room(self) -> None:
        others = Connection.open_among(self.connections)
        if len(others) > self.most:
            (
                Connection.idle_longest(other for other in others if other is not self) or self
            ).abort()

    @staticmethod
    def open_among(connections: Iterable[object]) -> "list[Connection]":
        """Return uvicorn's connections, except connections that are closing."""
        protocols = (connection for connection in connections if isinstance(connection, Connection))
        return [connection for connection in protocols if not connection.transport.is_closing()]

    @staticmethod
    def idle_longest(connections: "Iterable[Connection]") -> "Connection | None":
        """Return the connection that has been idle longest; None if all are busy."""
        idle = (connection for connection in connections if not connection._busy)
        return min(idle, key=lambda connection: connection._idle_since_s, default=None)

    def abort(self) -> None:
        """Close the connection at once."""
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Take bytes of a head or a body; cancel the head's time-out once a request runs."""
        super().data_received(data)
        if self._busy:
            _cancel(self._head)

    def on_response_complete(self) -> None:
        """After an answer, wait for the next request, unless the next request has already come."""
        super().on_response_complete()
        if not self._busy:
            self._await_request()

    def pause_writing(self) -> None:
        """Start the time-out for a client that does not read."""
        super().pause_writing()
        self._stall = self.loop.call_later(self.stall_s, self.transport.abort)

    def resume_writing(self) -> None:
        """Cancel the time-out for a client that does not read."""
        super().resume_writing()
        _cancel(self._stall)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel all time-outs."""
        super().connection_lost(exc)
        _cancel(self._head)
        _cancel(self._stall)

    @property
    def _busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_request(self) -> None:
        """Start the time-out for the next request's head."""
        _cancel(self._head)
        self._idle_since_s = self.loop.time()
        self._head = self.loop.call_later(self.head_s, self._hang_up)

    def _hang_up(self) -> None:
        """Close an idle connection; an answer's unsent rest gets `stall_s` first."""
        if self.transport.get_write_buffer_size():
            self._head = self.loop.call_later(self.stall_s, self.transport.abort)
        else:
            self.transport.abort()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


class TlsConfig(uvicorn.Config):
    """uvicorn's configuration. tls: certificate for later connections; None: plain HTTP."""

    tls: ssl.SSLContext | None = None


class TlsHandshake(asyncio.Protocol):
    """The TLS handshake with a new client, if there is a certificate; then a `Connection`."""

    handshake_s: ClassVar[float] = HEAD_S
    most: ClassVar[int] = CONNECTIONS
    # handshakes under way, the oldest first
    _under_way: ClassVar[dict[asyncio.Transport, "asyncio.Task[None]"]] = {}

    def __init__(
        self,
        config: TlsConfig,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._tls = config.tls
        self._loop = _loop or asyncio.get_event_loop()
        self._connection = Connection(config, server_state, app_state, _loop)
        self._early = b""  # bytes that came together with the end of the handshake

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Start the handshake, or hand over at once if the service has no certificate."""
        if self._tls is None:
            self._hand_over(transport)
            return
        # The task starts before anything is read, and start_tls pauses reading until it is ready.
        # A second pause here would break that: Python 3.10 would lose the client's first bytes.
        greeting = self._under_way
        greeting[transport] = self._loop.create_task(self._shake_hands(transport, self._tls))
        if len(greeting) > self.most:
            next(iter(greeting)).abort()

    @classmethod
    def abort_oldest(cls) -> bool:
        """Abort the oldest handshake under way; return whether there was one."""
        oldest = next(
            (transport for transport in cls._under_way if not transport.is_closing()), None
        )
        if oldest is not None:
            oldest.abort()
        return oldest is not None

    @classmethod
    def abort_all(cls) -> None:
        """Abort all handshakes under way."""
        for transport in list(cls._under_way):
            transport.abort()

    def data_received(self, data: bytes) -> None:
        """Keep bytes that come after the handshake and before `_shake_hands` has resumed."""
        self._early += data

    def _hand_over(self, transport: asyncio.Transport) -> None:
        transport.set_protocol(self._connection)
        self._connection.connection_made(transport)

    async def _shake_hands(self, transport: asyncio.Transport, tls: ssl.SSLContext) -> None:
        try:
            secured = await self._loop.start_tls(
                transport,
                self,
                tls,
                server_side=True,
                ssl_handshake_timeout=self.handshake_s,
            )
        except OSError:  # the client spoke no TLS or an old version, or it was gone or too slow
            transport.abort()
        else:
            if secured is not None and not secured.is_closing():
                self._hand_over(secured)
                if self._early:
                    self._connection.data_received(self._early)
        finally:
            self._under_way.pop(transport, None)
