"""A connection that cannot be held open for nothing: uvicorn's HTTP/1.1 with bounds of its own.

uvicorn waits for ever for the rest of a head, and for a client that does not read. Here a head must
be complete in time, what was written must be taken in time, and of too many connections the one
that has been without a request for longest makes room.
"""

import asyncio
from typing import Any, ClassVar

from uvicorn.config import Config
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
        config: Config,
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
