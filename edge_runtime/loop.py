"""The serving loop: messages in, target passes, verdicts out, until somebody says stop.

One thread does it all, and it alone feeds the supervisor's watchdog, at every turn: a message, a
rule or a target pass that hangs starves it, whatever the doorkeeper still answers. A long prompt
does not: it is read in passes of bounded length.
"""

import logging
import math
import signal
import time
from collections.abc import Callable
from functools import partial

import zmq

from pilotfish.edge_runtime.doorkeeper import Doorkeeper
from pilotfish.edge_runtime.reload import Settings
from pilotfish.edge_runtime.scheduler import Job, Scheduler
from pilotfish.edge_runtime.service import Service
from pilotfish.edge_runtime.signals import Signals
from pilotfish.edge_runtime.targets.target import Target
from pilotfish.engines.errors import ArtifactError
from pilotfish.engines.inspection import Inspection
from pilotfish.wire.errors import TargetLostError
from pilotfish.wire.supervisor import Supervisor
from pilotfish.wire.transport import Listener

_log = logging.getLogger("pilotfish.edge")

# Messages taken in one turn, and the time after which it takes no more: a flood, or messages that
# cost much to read, do not keep verdicts from leaving.
_BURST, _TURN_S = 256, 0.01
_TICK_S = 0.25  # how often connections, idle sessions and the status line are looked after
_LEAVING_S = 5.0  # what stopping takes besides
_STOPPED_BY = {signal.SIGINT: 130, signal.SIGHUP: 129}  # by SIGTERM: 0

Duty = Callable[[], bool]


def duties(listener: Listener, receive: Duty | None = None) -> dict["zmq.Socket[bytes]", Duty]:
    """What is to be done when something arrives, by the socket where it does."""
    found: dict[zmq.Socket[bytes], Duty] = {}
    if receive is not None:
        found[listener.socket] = receive
    if listener.gate is not None:
        found[listener.gate.socket] = listener.gate.answer
    found[listener.connections.monitor] = listener.connections.hear
    return found


class Loop:
    """Owns the turn at the sockets, the sessions and the target."""

    def __init__(
        self,
        listener: Listener,
        scheduler: Scheduler,
        target: Target,
        service: Service,
        settings: Settings,
        signals: Signals,
        supervisor: Supervisor,
        model: str,
        inspection: Inspection,
        lifeline: int | None = None,
    ) -> None:
        self._listener = listener
        self._scheduler = scheduler
        self._target = target
        self._service = service
        self._settings = settings
        self._signals = signals
        self._supervisor = supervisor
        self._model = model
        self._inspection = inspection
        self._lifeline = lifeline
        found = duties(listener, partial(_receive, listener, service))
        self._doorkeeper = Doorkeeper({int(source.fd): duty for source, duty in found.items()})
        # who comes and goes is asked for at its descriptor, which costs a turn less than the socket
        monitor = listener.connections.monitor
        self._duties: dict[object, Duty] = {int(monitor.fd): found.pop(monitor)}
        for source, duty in found.items():
            self._duties[source] = duty
        self._poller = zmq.Poller()
        for polled in (*self._duties, *target.sources, signals.descriptor):
            self._poller.register(polled, zmq.POLLIN)
        if lifeline is not None:
            self._poller.register(lifeline, zmq.POLLIN | zmq.POLLERR)
        # often enough for the watchdog
        self._idle_s = min(_TICK_S, supervisor.feed_s / 2 if supervisor.feed_s else _TICK_S)
        self._tick_s = 0.0
        self._leave_s: float | None = None  # when a drain ends; None: nobody said stop

    @property
    def status(self) -> str:
        """What `systemctl status` shows."""
        devices, sessions = self._listener.connections.devices, len(self._service.sessions)
        doing = "serving" if self._leave_s is None else "draining"
        trouble = self._settings.trouble
        lacking = self._target.trouble
        return (
            f"{doing} {self._model}: {_count(devices, 'device')}, {_count(sessions, 'session')}, "
            f"{_count(self._scheduler.passes, 'pass', 'passes')}"
            f"{f'; {lacking}' if lacking else ''}"
            f"{f'; not in force: {trouble}' if trouble else ''}"
        )

    @property
    def linger_s(self) -> float:
        """How long the last replies have to leave: none, unless this was a drain."""
        return 0.0 if self._leave_s is None else min(1.0, self._settings.config.drain_s)

    def run(self) -> int:
        """Serve; returns the exit code."""
        self._doorkeeper.start()
        wait_s: float | None = None
        while True:
            waits = (wait_s, self._target.due_s)
            timeout_s = min([self._idle_s, *(each for each in waits if each is not None)])
            called = self._leave_s is not None
            for source, _ in self._poller.poll(math.ceil(1e3 * timeout_s)):
                duty = self._duties.get(source)
                if duty is not None:
                    duty()
                elif source == self._lifeline:
                    return 0
                elif source == self._signals.descriptor:
                    called = True
            if called and (code := self._heed()) is not None:
                return code
            if time.monotonic() >= self._tick_s:
                self._tick()
                if self._target.over:
                    _log.error("the target is lost for good: %s", self._target.over)
                    return TargetLostError.exit_code
                if self._inspection.damage:  # it has told; no answer is better than a wrong one
                    self._supervisor.stopping(self._inspection.damage)
                    return ArtifactError.exit_code
            if self._scheduler.flying:
                self._finish(self._scheduler.collect)
            else:
                self._target.landed()  # none has: it sees to its nodes
            wait_s = self._scheduler.wait_s()
            if wait_s == 0.0:
                self._finish(self._scheduler.run)

    def _finish(self, work: Callable[[], list[Job]]) -> None:
        """Have the target do ``work``, and answer for the jobs that it has done."""
        self._doorkeeper.begin()
        done = work()
        self._doorkeeper.end()
        for job in done:
            self._service.finish(job)

    def _tick(self) -> None:
        self._tick_s = time.monotonic() + self._idle_s
        self._supervisor.feed()
        gate = self._listener.gate
        self._listener.connections.hear()
        self._listener.connections.police(gate.allowed if gate is not None else None)
        self._service.expire()
        self._supervisor.status(self.status)

    def _heed(self) -> int | None:
        """Do as the signals say; an exit code if the loop is to end."""
        self._signals.hush()
        if self._signals.reload:
            self._signals.reload = False
            self._supervisor.reloading()
            self._settings.reload(self._listener, self._service)
            self._supervisor.reloaded(self.status, self._settings.trouble)
        for number in self._signals.take_stops():
            if number in _STOPPED_BY:
                return _STOPPED_BY[signal.Signals(number)]
            if self._leave_s is not None:  # asked twice
                return 0
            self._drain()
        if self._leave_s is None:
            return None
        return 0 if self._service.drained or time.monotonic() >= self._leave_s else None

    def _drain(self) -> None:
        """Take nothing new, and leave when what is here has been answered."""
        self._leave_s = time.monotonic() + self._settings.config.drain_s
        self._listener.stop_accepting()
        self._service.drain()
        self._supervisor.stopping(self.status)
        self._supervisor.extend(self._settings.config.drain_s + _LEAVING_S)


def _receive(listener: Listener, service: Service) -> bool:
    """Serve the messages that have arrived; True if some of them had to be left."""
    until_s = time.monotonic() + _TURN_S
    for _ in range(_BURST):
        envelope = listener.receive()
        if envelope is not None:
            service.handle(envelope)
        if not listener.waiting:
            return False
        if time.monotonic() >= until_s:
            break
    return True


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
