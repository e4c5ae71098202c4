"""The serving loop of the edge daemon and the node daemon.

One thread does it all, and it alone feeds the supervisor's watchdog, once a turn: a message, a rule
or a pass that hangs starves it, whatever the background receiver still answers. A long prompt does
not: it is read in passes of bounded length.
"""

import logging
import math
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import zmq

from pilotfish.base.supervisor import Supervisor
from pilotfish.edge_runtime.signals import Signals
from pilotfish.engines.engine_errors import ArtifactError
from pilotfish.engines.inspection import Inspection
from pilotfish.wire.transport import Envelope, Listener

_log = logging.getLogger("pilotfish.edge")

# Most messages of one turn, and its longest time: neither a flood nor costly messages keep replies
# from leaving.
_BURST, _TURN_S = 256, 0.002
_TICK_S = 0.25  # how often connections, idle sessions and the status line are looked after
SIGNAL_EXIT_CODES = {int(signal.SIGINT): 130, int(signal.SIGHUP): 129}  # by SIGTERM: 0

EventHandler = Callable[[], bool]


def event_handlers(listener: Listener) -> dict[int, EventHandler]:
    """What is to be done when something arrives, by the descriptor that tells; not of messages."""
    connections = listener.connections
    handlers: dict[int, EventHandler] = {int(connections.monitor.fd): connections.read_events}
    if listener.gate is not None:
        handlers[int(listener.gate.socket.fd)] = listener.gate.answer_requests
    return handlers


class ServingLoop(ABC):
    """Does each socket's duty, heeds signals and the parent's end, and keeps the watchdog fed.

    handle: serves one message. lifeline: a descriptor; when it closes at its other end, or says
    anything, the loop ends. more: further duties, by the descriptor that tells.
    """

    def __init__(
        self,
        listener: Listener,
        handle: Callable[[Envelope], None],
        signals: Signals,
        supervisor: Supervisor,
        inspection: Inspection | None,
        lifeline: int | None,
        more: Mapping[int, EventHandler] | None = None,
    ) -> None:
        self._listener = listener
        self._handle = handle
        self._signals = signals
        self._supervisor = supervisor
        self._inspection = inspection
        self._orphaned = self._crowded = False
        # often enough for the watchdog
        self._idle_s = min(_TICK_S, supervisor.feed_s / 2 if supervisor.feed_s else _TICK_S)
        self._tick_s = 0.0
        # of the others the descriptors are polled, which costs a turn less than their sockets
        self._duties: dict[object, Callable[[], object]] = dict(event_handlers(listener).items())
        self._duties.update((more or {}).items())
        self._duties[listener.socket] = self._receive
        self._duties[signals.descriptor] = signals.clear
        if lifeline is not None:
            self._duties[lifeline] = partial(setattr, self, "_orphaned", True)
        self._poller = zmq.Poller()
        for polled in self._duties:
            self._poller.register(polled, zmq.POLLIN | (zmq.POLLERR if polled == lifeline else 0))
        self._watched: Sequence[zmq.Socket[bytes] | int] = ()

    @property
    @abstractmethod
    def status(self) -> str:
        """What `systemctl status` shows."""

    @abstractmethod
    def step(self) -> None:
        """One turn: take in what has come, and work on it."""

    def run(self) -> int:
        """Serve; returns the exit code."""
        while True:
            if self._orphaned:
                return 0
            if (code := self._handle_signals()) is not None:
                return code
            if time.monotonic() >= self._tick_s:
                self._tick_s = time.monotonic() + self._idle_s
                self._supervisor.feed()
                self._note_crowd()
                self._listener.check_drained()
                if (code := self._tick()) is not None:
                    return code
                self._supervisor.status(self.status)
                if self._inspection is not None and self._inspection.damage:
                    # it has told; no answer is better than a wrong one
                    self._supervisor.stopping(self._inspection.damage)
                    return ArtifactError.exit_code
            self.step()

    @abstractmethod
    def _tick(self) -> int | None:
        """What is to be looked after now and then; an exit code if the loop is to end."""

    @abstractmethod
    def _reload(self) -> str:
        """Read the configuration again; what of it is not in force."""

    @abstractmethod
    def _stop(self, number: int) -> int | None:
        """This signal asks for an end: an exit code if it comes now."""

    def _note_crowd(self) -> None:
        """Log when connections begin to be turned away, and when that is over."""
        connections = self._listener.connections
        if connections.crowded != self._crowded:
            self._crowded = not self._crowded
            if self._crowded:
                most = connections.bounds.connections
                _log.warning("no room for another connection: %d are the most", most)
            else:
                _log.warning("there is room for connections again")

    @property
    def _room(self) -> str:
        """What the status line says of it."""
        return "; no room for more connections" if self._crowded else ""

    def _take_in(self, timeout_s: float) -> None:
        """Wait for news for so long at most, and do the duties."""
        for source, _ in self._poller.poll(math.ceil(1e3 * timeout_s)):
            duty = self._duties.get(source)
            if duty is not None:
                duty()

    def _watch(self, sources: "Sequence[zmq.Socket[bytes] | int]") -> None:
        """Poll these, too, from now on, and no longer those that were watched before."""
        if sources != self._watched:
            for source in self._watched:
                self._poller.unregister(source)
            for source in sources:
                self._poller.register(source, zmq.POLLIN)
            self._watched = sources

    def _receive(self) -> bool:
        """Serve the messages that have arrived; True if some of them had to be left."""
        listener, until_s = self._listener, time.monotonic() + _TURN_S
        for _ in range(_BURST):
            envelope = listener.receive()
            more = (
                listener.has_message
            )  # asked now: how long the next one lies is held, not its link's
            if envelope is not None:
                self._handle(envelope)
            if not (more or listener.has_message):
                return False
            if time.monotonic() >= until_s:
                break
        return True

    def _handle_signals(self) -> int | None:
        """Do as the signals say; an exit code if the loop is to end."""
        if self._signals.reload:
            self._signals.reload = False
            self._supervisor.reloading()
            problem = self._reload()
            self._supervisor.reloaded(self.status, problem)
        for number in self._signals.take_stops():
            if (code := self._stop(number)) is not None:
                return code
        return None
