"""Serving loop of the edge daemon and the node daemon.

One thread does all the work and feeds the supervisor's watchdog in every turn. So the watchdog
notices a message, a verification or a pass that hangs, even while the background receiver still
answers. A long prompt is read in passes of limited length, so it does not starve the watchdog.
"""

import logging
import math
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import zmq

from pilotfish.base.errors import SIGHUP_CODE, SIGINT_CODE
from pilotfish.base.supervisor import Supervisor
from pilotfish.edge_runtime.signals import Signals
from pilotfish.engines.engine_errors import ArtifactError
from pilotfish.engines.inspection import Inspection
from pilotfish.wire.transport import Envelope, Listener

_log = logging.getLogger("pilotfish.edge")

# upper limits of messages and of time (s) in one turn, so that a flood does not delay replies
_BURST, _TURN_S = 256, 0.002
_TICK_S = 0.25  # interval (s) between checks of connections and idle sessions, and status updates
# exit code by signal; after SIGTERM it is 0
SIGNAL_EXIT_CODES = {int(signal.SIGINT): SIGINT_CODE, int(signal.SIGHUP): SIGHUP_CODE}

EventHandler = Callable[[], bool]


def event_handlers(listener: Listener) -> dict[int, EventHandler]:
    """Return descriptor → event handler of a listener; the socket of messages is not included."""
    connections = listener.connections
    handlers: dict[int, EventHandler] = {int(connections.monitor.fd): connections.read_events}
    if listener.gate is not None:
        handlers[int(listener.gate.socket.fd)] = listener.gate.answer_requests
    return handlers


class ServingLoop(ABC):
    """Loop that serves sockets, signals and the watchdog until a signal or the parent's end.

    handle: function that serves one message. lifeline: descriptor; the loop ends when the other end
    closes, which makes the descriptor readable. more: descriptor → further handler.
    """

    def __init__(
        self,
        *,
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
        # seconds between ticks, at most half of the watchdog's interval
        self._idle_s = min(_TICK_S, supervisor.feed_s / 2 if supervisor.feed_s else _TICK_S)
        self._tick_s = 0.0
        # handlers by descriptor where possible: a descriptor is cheaper to poll than its socket
        self._handlers: dict[object, Callable[[], object]] = dict(event_handlers(listener).items())
        self._handlers.update((more or {}).items())
        self._handlers[listener.socket] = self._receive
        self._handlers[signals.descriptor] = signals.clear
        if lifeline is not None:
            self._handlers[lifeline] = partial(setattr, self, "_orphaned", True)
        self._poller = zmq.Poller()
        for polled in self._handlers:
            self._poller.register(polled, zmq.POLLIN | (zmq.POLLERR if polled == lifeline else 0))
        self._sources: Sequence[zmq.Socket[bytes] | int] = ()

    @property
    @abstractmethod
    def status(self) -> str:
        """Line that `systemctl status` shows."""

    @abstractmethod
    def step(self) -> None:
        """Run one turn: receive messages and work on them."""

    def run(self) -> int:
        """Serve until the loop ends; return the exit code."""
        while True:
            if self._orphaned:
                return 0
            if (code := self._handle_signals()) is not None:
                return code
            if time.monotonic() >= self._tick_s:
                self._tick_s = time.monotonic() + self._idle_s
                self._supervisor.feed()
                self._log_crowd()
                self._listener.check_drained()
                if (code := self._tick()) is not None:
                    return code
                self._supervisor.status(self.status)
                if self._inspection is not None and self._inspection.damage:
                    # stop, since damaged files could cause wrong answers; the damage is logged
                    self._supervisor.stopping(self._inspection.damage)
                    return ArtifactError.exit_code
            self.step()

    @abstractmethod
    def _tick(self) -> int | None:
        """Do periodic work; return an exit code to end the loop, or None."""

    @abstractmethod
    def _reload(self) -> str:
        """Reload the configuration; return its problems in one line."""

    @abstractmethod
    def _stop(self, number: int) -> int | None:
        """Handle a stop signal; return an exit code to end the loop now, or None."""

    def _log_crowd(self) -> None:
        """Log when the daemon begins or ceases to refuse connections for lack of room."""
        connections = self._listener.connections
        if connections.crowded != self._crowded:
            self._crowded = not self._crowded
            if self._crowded:
                most = connections.bounds.connections
                _log.warning("no room for another connection: the limit is %d", most)
            else:
                _log.warning("there is room for connections again")

    @property
    def _crowd_status(self) -> str:
        """Part of the status line about refused connections."""
        return "; no room for more connections" if self._crowded else ""

    def _poll(self, timeout_s: float) -> None:
        """Wait up to ``timeout_s`` for events, and call their handlers."""
        connections = self._listener.connections
        # while this thread waits, no message is left in the queue
        connections.waiting = timeout_s > 0 and not self._listener.has_message
        events = self._poller.poll(math.ceil(1e3 * timeout_s))
        connections.waiting = False
        for source, _ in events:
            handler = self._handlers.get(source)
            if handler is not None:
                handler()

    def _set_sources(self, sources: "Sequence[zmq.Socket[bytes] | int]") -> None:
        """Poll these sources from now on, instead of the previous ones."""
        if sources != self._sources:
            for source in self._sources:
                self._poller.unregister(source)
            for source in sources:
                self._poller.register(source, zmq.POLLIN)
            self._sources = sources

    def _receive(self) -> bool:
        """Serve the messages that have arrived; return True if messages are left."""
        listener, until_s = self._listener, time.monotonic() + _TURN_S
        for _ in range(_BURST):
            envelope = listener.receive()
            # check for messages now: a later wait is the daemon's, not the link's
            more = listener.has_message
            if envelope is not None:
                self._handle(envelope)
            if not (more or listener.has_message):
                return False
            if time.monotonic() >= until_s:
                break
        return True

    def _handle_signals(self) -> int | None:
        """Handle pending signals; return an exit code to end the loop, or None."""
        if self._signals.reload:
            self._signals.reload = False
            self._supervisor.reloading()
            problem = self._reload()
            self._supervisor.reloaded(self.status, problem)
        for number in self._signals.take_stops():
            if (code := self._stop(number)) is not None:
                return code
        return None
