"""Main loop of the edge; `EdgeLoop.step` is the edge's half of a round."""

import logging
import time
from collections.abc import Collection, Mapping
from typing import Final

from pilotfish.base.errors import TargetLostError
from pilotfish.base.supervisor import Supervisor
from pilotfish.edge_runtime.invitations import Invitations
from pilotfish.edge_runtime.live_settings import LiveSettings
from pilotfish.edge_runtime.message_handler import MessageHandler
from pilotfish.edge_runtime.receiver import BackgroundReceiver
from pilotfish.edge_runtime.scheduler import Scheduler
from pilotfish.edge_runtime.serving import SIGNAL_EXIT_CODES, ServingLoop, event_handlers
from pilotfish.edge_runtime.signals import Signals
from pilotfish.edge_runtime.targets.target import Target
from pilotfish.engines.inspection import Inspection
from pilotfish.wire.transport import Envelope, Listener

_log = logging.getLogger("pilotfish.edge")

_LEAVING_S: Final = 5.0  # time (s) that the daemon needs to stop after a drain
_LOG_PAUSE_S: Final = 1.0  # pause (s) between log entries about devices that connect or disconnect
_MOST_NAMES: Final = 10  # upper limit of device names in one log entry


class EdgeLoop(ServingLoop):
    """Loop that receives messages, runs target passes and sends verdicts until a signal ends it."""

    def __init__(
        self,
        *,
        listener: Listener,
        scheduler: Scheduler,
        target: Target,
        handler: MessageHandler,
        settings: LiveSettings,
        signals: Signals,
        supervisor: Supervisor,
        model: str,
        inspection: Inspection,
        invitations: Invitations | None = None,
        lifeline: int | None = None,
    ) -> None:
        compiled = {handler.compiler.descriptor: handler.compiler.run_callbacks}
        super().__init__(
            listener=listener,
            handle=handler.handle if invitations is None else self._route,
            signals=signals,
            supervisor=supervisor,
            inspection=inspection,
            lifeline=lifeline,
            more=compiled,
        )
        self._scheduler = scheduler
        self._target = target
        self._handler = handler
        self._settings = settings
        self._invitations = invitations
        self._model = model
        messages = int(listener.socket.fd)
        self._receiver = BackgroundReceiver(
            {messages: self._receive, **compiled, **event_handlers(listener)}
        )
        self._receiver.start()
        self._set_sources(target.sources)
        self._device_log = DeviceLog()
        self._leave_s: float | None = None  # time at which a drain ends; None: not draining

    def step(self) -> None:
        """Receive messages, batch their jobs, run one target pass, verify each job, and reply.

        A local target computes the pass in `start`. Other targets compute it later; this method
        then collects the passes that have finished.
        """
        self._poll(self._wait_s())
        batch = self._scheduler.next_batch(patient=True)
        self._receiver.begin()  # receives messages during the pass
        if batch is not None:
            number, jobs = batch
            self._target.start(number, [job.work for job in jobs])
        done = [
            job
            for scores in self._target.collect_scores()
            for job in self._scheduler.finish_pass(scores)
        ]
        self._receiver.end()
        for job in done:
            self._handler.finish_job(job)

    def _route(self, envelope: Envelope) -> None:
        """Handle a device's message; relay an invited device's message to its inviter."""
        assert self._invitations is not None
        if envelope.owner in self._invitations.open:
            self._invitations.relay(envelope)
        else:
            self._handler.handle(envelope)

    @property
    def status(self) -> str:
        """Line that `systemctl status` shows."""
        devices, sessions = self._listener.connections.devices, len(self._handler.sessions)
        doing = "serving" if self._leave_s is None else "draining"
        problem = self._settings.problem
        target_problem = self._target.problem
        figures = f", {status}" if (status := self._target.status) else ""
        return (
            f"{doing} {self._model}{figures}: "
            f"{_count(devices, 'device')}, {_count(sessions, 'session')}, "
            f"{_count(self._scheduler.passes, 'pass', 'passes')}"
            f"{'; the GPU is idle' if self._target.idle_gpu else ''}"
            f"{f'; {target_problem}' if target_problem else ''}{self._rotation_status}"
            f"{self._invitation_status}"
            f"{f'; not in force: {problem}' if problem else ''}{self._crowd_status}"
        )

    @property
    def _rotation_status(self) -> str:
        """Part of the status line about a rotation of the edge's key."""
        listener = self._listener
        if listener.gate is None or listener.rollover is None or not listener.rollover.overlaps:
            return ""
        devices = _count(len(listener.gate.clients_of_former_key), "device")
        return f"; two keys are accepted, {devices} last connected with the former key"

    @property
    def _invitation_status(self) -> str:
        """Part of the status line about open invitations."""
        number = 0 if self._invitations is None else len(self._invitations.open)
        return f"; {_count(number, 'invitation')} open" if number else ""

    @property
    def linger_s(self) -> float:
        """Seconds for sending the last replies after a drain; 0 without a drain."""
        return 0.0 if self._leave_s is None else min(1.0, self._settings.config.drain_s)

    def _wait_s(self) -> float:
        """Return the seconds to wait for messages; 0 if a pass can start now."""
        waits = (self._idle_s, self._scheduler.wait_s(), self._target.due_s)
        return min(wait_s for wait_s in waits if wait_s is not None)

    def _tick(self) -> int | None:
        gate = self._listener.gate
        self._listener.connections.read_events()
        if self._invitations is not None:
            self._invitations.update()
        self._listener.connections.cut_revoked(gate.admitted if gate is not None else None)
        self._handler.expire()
        owners = self._listener.connections.owners()
        self._device_log.log_changes(owners, self._settings.allowed or {})
        if self._target.fatal_error:
            _log.error("the target is lost and cannot be restored: %s", self._target.fatal_error)
            return TargetLostError.exit_code
        return None

    def _reload(self) -> str:
        self._settings.reload(self._listener, self._handler)
        return self._settings.problem

    def _handle_signals(self) -> int | None:
        code = super()._handle_signals()
        if code is not None or self._leave_s is None:
            return code
        return 0 if self._handler.drained or time.monotonic() >= self._leave_s else None

    def _stop(self, number: int) -> int | None:
        if number in SIGNAL_EXIT_CODES:
            return SIGNAL_EXIT_CODES[number]
        if self._leave_s is not None:  # the second signal ends the drain
            return 0
        self._drain()
        return None

    def _drain(self) -> None:
        """Begin to drain: refuse new work, and stop when all pending windows are answered."""
        self._leave_s = time.monotonic() + self._settings.config.drain_s
        self._listener.stop_accepting()
        self._handler.drain()
        self._supervisor.stopping(self.status)
        self._supervisor.extend(self._settings.config.drain_s + _LEAVING_S)


class DeviceLog:
    """Log of devices that connect and disconnect, by name; the number of entries is limited."""

    def __init__(self) -> None:
        self._present: set[str] = set()
        self._noted_s = -_LOG_PAUSE_S

    def log_changes(self, owners: Collection[bytes], allowed: Mapping[bytes, str]) -> None:
        """Log the changes since the last entry, at most once a second.

        owners: keys of all connections. A key that is not on the allow-list is not logged here; its
        removal was logged.
        """
        if time.monotonic() - self._noted_s < _LOG_PAUSE_S:
            return
        self._noted_s = time.monotonic()
        present = {allowed[owner] for owner in owners if owner in allowed}
        for event, names in (
            ("connected", present - self._present),
            ("no longer connected", self._present - present),
        ):
            if names:
                first = ", ".join(sorted(names)[:_MOST_NAMES])
                more = len(names) - _MOST_NAMES
                _log.info("%s: %s%s", event, first, f" and {more} more" if more > 0 else "")
        self._present = present


def _count(number: int, singular: str, plural: str = "") -> str:
    return f"{number} {singular if number == 1 else plural or singular + 's'}"
