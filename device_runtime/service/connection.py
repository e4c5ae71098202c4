"""A connection that cannot be held open for nothing: uvicorn's HTTP/1.1 with bounds of its own.

uvicorn waits for ever for the rest of a head, and for a client that does not read. Here a head must
be complete in time, what was written must be taken in time, and of too many connections the one
that has been without a request for longest makes room.

With a certificate a connection begins with a handshake. uvicorn does not know of it before that has
ended; so it is bounded here, too. The certificate may be exchanged at any time, for the connections
that follow.
"""

import asyncio
import ssl
from typing import Any, ClassVar

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

HEAD_S = 10.0  # for a head, and between two requests
STALL_S = 20.0  # for what was written to be taken
CONNECTIONS = 256


class Connection(H11Protocol):
    """One client's connection."""

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
        """A client came."""
        super().connection_made(transport)
        self._rest()
        if len(self.connections) > self.most:
            self._make_room()

    def _make_room(self) -> None:
        others = [
            one
            for one in self.connections
            if isinstance(one, Connection) and not one.transport.is_closing()
        ]
        if len(others) > self.most:
            idle = [one for one in others if one is not self and not one._busy]
            oldest = min(idle, key=lambda one: one._idle_since_s, default=self)
            oldest.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Bytes came: of a head, or of a body."""
        super().data_received(data)
        if self._busy:
            _cancel(self._head)

    def on_response_complete(self) -> None:
        """An answer is over; the next request may have come already."""
        super().on_response_complete()
        if not self._busy:
            self._rest()

    def pause_writing(self) -> None:
        """The client does not take what was written."""
        super().pause_writing()
        self._stall = self.loop.call_later(self.stall_s, self.transport.abort)

    def resume_writing(self) -> None:
        """It does again."""
        super().resume_writing()
        _cancel(self._stall)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        super().connection_lost(exc)
        _cancel(self._head)
        _cancel(self._stall)

    @property
    def _busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _rest(self) -> None:
        """Wait for a request, but not for ever."""
        _cancel(self._head)
        self._idle_since_s = self.loop.time()
        self._head = self.loop.call_later(self.head_s, self._hang_up)

    def _hang_up(self) -> None:
        """Nothing was asked; but of the last answer something may still be on its way."""
        if self.transport.get_write_buffer_size():
            self._head = self.loop.call_later(self.stall_s, self.transport.abort)
        else:
            self.transport.abort()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


class Config(uvicorn.Config):
    """uvicorn's, with the certificate of the connections to come; None for HTTP in clear text."""

    tls: ssl.SSLContext | None = None


class Doorway(asyncio.Protocol):
    """A new client: a handshake first, where there is a certificate, then a `Connection`."""

    handshake_s: ClassVar[float] = HEAD_S
    most: ClassVar[int] = CONNECTIONS
    # handshakes under way, the oldest first
    _greeting: ClassVar[dict[asyncio.Transport, "asyncio.Task[None]"]] = {}

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._tls = config.tls
        self._loop = _loop or asyncio.get_event_loop()
        self._connection = Connection(config, server_state, app_state, _loop)
        self._early = b""  # what came with the end of the handshake

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """A client came."""
        if self._tls is None:
            self._hand_over(transport)
            return
        # The task begins before anything is read, and start_tls pauses until it is ready for that.
        # To pause here as well would undo it: Python 3.10 would lose the client's first words.
        greeting = self._greeting
        greeting[transport] = self._loop.create_task(self._greet(transport, self._tls))
        if len(greeting) > self.most:
            next(iter(greeting)).abort()

    @classmethod
    def turn_away(cls) -> None:
        """End all handshakes that are under way."""
        for transport in list(cls._greeting):
            transport.abort()

    def data_received(self, data: bytes) -> None:
        """The handshake is over, but `_greet` has not heard of it yet."""
        self._early += data

    def _hand_over(self, transport: asyncio.Transport) -> None:
        transport.set_protocol(self._connection)
        self._connection.connection_made(transport)

    async def _greet(self, transport: asyncio.Transport, tls: ssl.SSLContext) -> None:
        try:
            secured = await self._loop.start_tls(
                transport,
                self,
                tls,
                server_side=True,
                ssl_handshake_timeout=self.handshake_s,
            )
        except OSError:  # it speaks no TLS, or none that will do, or went away, or was too slow
            transport.abort()
        else:
            if secured is not None and not secured.is_closing():
                self._hand_over(secured)
                if self._early:
                    self._connection.data_received(self._early)
        finally:
            self._greeting.pop(transport, None)
