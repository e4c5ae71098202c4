"""Accept connections within the process's limit of descriptors.

In:  a listening socket. Out: a protocol on each connection.

The last descriptors are reserved for connections to the edge, a reload or the trial of a grammar. A
client that would take a reserved descriptor is accepted if an idle connection can be closed, or if
connections that are closing free enough descriptors. Otherwise the client's connection is closed,
and further clients wait in the kernel until there is room. The begin and the end of a shortage are
logged once each. (asyncio's own `accept` would log each failure, thousands a second.)
"""

import asyncio
import logging
import math
import resource
import socket
import time
from collections.abc import Callable

from pilotfish.base.descriptors import EXHAUSTED, open_files, raise_limit

_log = logging.getLogger("pilotfish.service")

# open files in addition to connections; the limit is raised by them, if it can be raised
_OWN = 128
_RESERVE = 16  # free descriptors that clients must not take
_PAUSE_S = 0.25  # pause before the next accept, if no idle connection could be closed
_CLOSING_S = 0.005  # time in which closing connections free their descriptors
_OVER_S = 3.0  # time since the last failed accept, after which a shortage may be over
_SPARE = 4  # free descriptors, beyond the reserve, that end a shortage


class Acceptor:
    """The acceptor of connections on a bound socket, from `start` until `close`.

    All methods are called on the asyncio loop.

    protocol_factory: returns the protocol of a new connection. make_room: closes an idle
    connection and returns whether there was one. connections: highest number of connections.
    """

    def __init__(
        self,
        listening: socket.socket,
        protocol_factory: Callable[[], asyncio.Protocol],
        make_room: Callable[[], bool],
        connections: int,
    ) -> None:
        self._listening = listening
        self._protocol_factory = protocol_factory
        self._make_room = make_room
        self._loop = asyncio.get_running_loop()
        limit = raise_limit(connections + _OWN)
        free = _RESERVE * 2 if limit is None else limit - open_files()
        self._reserve = min(_RESERVE, max(1, free // 2))
        self._entering: set[asyncio.Task[None]] = set()
        self._resume: asyncio.TimerHandle | None = None
        self._short_s = 0.0
        self.crowded = False  # whether there is a shortage
        self.turned_away = 0

    @property
    def _limit(self) -> float:
        """The limit of open files, read each time: an administrator may change it."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return soft if soft >= 0 else math.inf

    def start(self, backlog: int) -> None:
        """Start accepting."""
        self._listening.setblocking(False)
        self._listening.listen(backlog)
        self._loop.add_reader(self._listening, self._accept)

    def close(self) -> None:
        """Stop accepting."""
        if self._resume is not None:
            self._resume.cancel()
        self._loop.remove_reader(self._listening)

    def check_room(self) -> None:
        """Check whether the shortage is over; call it each second."""
        if not self.crowded or time.monotonic() - self._short_s < _OVER_S:
            return
        if self._is_free(self._reserve + _SPARE):
            self.crowded = False
            _log.warning("there is room for connections again")

    def _is_free(self, descriptors: int) -> bool:
        """Return whether this many descriptors are free."""
        try:
            return open_files() + descriptors <= self._limit
        except OSError:  # counting open files needs a free descriptor
            return False

    def _accept(self) -> None:
        try:
            connection, _ = self._listening.accept()
        except OSError as error:
            if error.errno in EXHAUSTED and not isinstance(error, BlockingIOError):
                self._note_shortage()
                self._pause(_CLOSING_S if self._make_room() else _PAUSE_S)
            return  # any other error: the client left before it was accepted
        room = True
        if connection.fileno() >= self._limit - self._reserve:
            self._note_shortage()
            room = self._make_room()
            self._pause(_CLOSING_S if room else _PAUSE_S)
        entering = self._loop.create_task(self._enter(connection, room))
        self._entering.add(entering)
        entering.add_done_callback(self._entering.discard)

    async def _enter(self, connection: socket.socket, room: bool) -> None:
        """Give the connection a protocol; without room, close it unless room appears shortly."""
        if not room:
            await asyncio.sleep(_CLOSING_S)
            if not (self._is_free(self._reserve) or self._make_room()):
                self.turned_away += 1
                connection.close()
                return
        try:
            await self._loop.connect_accepted_socket(self._protocol_factory, connection)
        except (OSError, MemoryError):
            connection.close()

    def _pause(self, pause_s: float) -> None:
        """Accept nothing for ``pause_s``; new connections wait in the kernel."""
        self._loop.remove_reader(self._listening)
        self._resume = self._loop.call_later(
            pause_s, self._loop.add_reader, self._listening, self._accept
        )

    def _note_shortage(self) -> None:
        self._short_s = time.monotonic()
        if not self.crowded:
            self.crowded = True
            _log.warning(
                "no room for another connection: the limit is %g open files, and the last %d are "
                "reserved; raise LimitNOFILE (ulimit -n)",
                self._limit,
                self._reserve,
            )
