"""The node daemon: load what it holds, listen, do steps until told to stop."""

import gc
import logging
import math
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import zmq

from pilotfish.edge_runtime.config import MEBIBYTE, NodeConfig
from pilotfish.edge_runtime.node.service import NodeService
from pilotfish.edge_runtime.node.stage import StageWork
from pilotfish.edge_runtime.node.work import Work
from pilotfish.edge_runtime.node.worker import Worker
from pilotfish.edge_runtime.signals import Signals
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.decoder import Decoder
from pilotfish.engines.errors import ArtifactError
from pilotfish.engines.inspection import Inspection
from pilotfish.engines.stage import Stage
from pilotfish.wire.connections import Bounds
from pilotfish.wire.errors import KeysError
from pilotfish.wire.keys import AllowList, EdgeKeys
from pilotfish.wire.supervisor import Supervisor, in_brief, inherited_socket
from pilotfish.wire.transport import Listener

_log = logging.getLogger("pilotfish.edge")

_LOADING_S = 600.0
_TICK_S = 0.25
_BURST = 64  # messages taken in one turn
_CONNECTIONS = 32  # edges, stages, and who they were a moment ago
_PATIENCE_S = 60.0  # a watchdog waits at least so long for one pass
_STOPPED_BY = {signal.SIGINT: 130, signal.SIGHUP: 129}  # by SIGTERM: 0


def serve_node(
    config: NodeConfig,
    *,
    announce: Callable[[str], None] = lambda endpoint: None,
    lifeline: int | None = None,
) -> int:
    """Serve until SIGINT or SIGTERM, or until ``lifeline`` (a descriptor) closes at its other end.

    ``announce`` is called with the endpoint, once edges may come. Returns the exit code.
    """
    supervisor = Supervisor.from_environment()
    supervisor.extend(_LOADING_S)
    keys = EdgeKeys.load(config.keys) if config.keys is not None else None
    with ExitStack() as stack:
        signals = stack.enter_context(Signals())
        artifact = Artifact.open(config.target, stage=True)
        inspection = Inspection(artifact)
        stack.callback(inspection.close)
        work = _load(artifact, config, keys, supervisor.feed)
        stack.callback(work.close)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        stack.callback(context.destroy, linger=0)
        bounds = Bounds(_CONNECTIONS, _CONNECTIONS, config.message_mib * MEBIBYTE)
        listener = Listener(context, config.listen, keys, bounds, inherited_socket())
        stack.callback(listener.close)
        service = NodeService(listener, work, bounds.message_bytes)
        supervisor.allow(_PATIENCE_S)
        gc.collect()
        gc.freeze()
        signals.take_over()
        announce(listener.endpoint)
        _log.info("%s on %s", work.ready.model, listener.endpoint)
        broken = () if keys is None else keys.listed.broken
        loop = NodeLoop(
            listener, service, work, signals, supervisor, config, lifeline, inspection, broken
        )
        supervisor.ready(loop.status)
        inspection.start()
        return loop.run()


def _load(
    artifact: Artifact, config: NodeConfig, keys: EdgeKeys | None, breathe: Callable[[], None]
) -> Work:
    """What the artifact is for, with its weights."""
    options: Any = {
        "slots": config.sessions,
        "context": config.context,
        "threads": config.threads,
        "provider": config.provider,
    }
    if artifact.manifest.stage is None:
        return Worker(Decoder(artifact, **options), breathe)
    return StageWork(Stage(artifact, **options), keys, breathe)


class NodeLoop:
    """Messages in, reports out, until somebody says stop. One thread does it all.

    While it computes nobody is answered. That costs nobody anything: an edge has a node for itself,
    and heartbeats are ZeroMQ's.
    """

    def __init__(
        self,
        listener: Listener,
        service: NodeService,
        work: Work,
        signals: Signals,
        supervisor: Supervisor,
        config: NodeConfig,
        lifeline: int | None,
        inspection: Inspection | None = None,
        broken: Sequence[str] = (),
    ) -> None:
        self._listener = listener
        self._service = service
        self._work = work
        self._signals = signals
        self._supervisor = supervisor
        self._config = config
        self._lifeline = lifeline
        self._inspection = inspection
        self._tick_s = 0.0
        feed_s = supervisor.feed_s
        self._idle_s = min(_TICK_S, feed_s / 2 if feed_s else _TICK_S)
        self._note(broken)

    @property
    def status(self) -> str:
        """What `systemctl status` shows."""
        doing = "attached" if self._service.attached else "waiting for an edge"
        trouble = f"; not in force: {self._trouble}" if self._trouble else ""
        return f"{self._work.ready.model}: {doing}, {self._service.steps} steps{trouble}"

    def run(self) -> int:
        """Serve; returns the exit code."""
        while True:
            news = self._poll()
            self._receive()  # first of all: somebody waits for it
            if self._lifeline in news:
                return 0
            if (code := self._heed()) is not None:
                return code
            gate = self._listener.gate
            if gate is not None:
                gate.answer()
            self._listener.connections.hear()
            self._service.attend()
            if time.monotonic() >= self._tick_s:
                self._tick()
                if self._inspection is not None and self._inspection.damage:  # it has told
                    self._supervisor.stopping(self._inspection.damage)
                    return ArtifactError.exit_code

    def _poll(self) -> "list[zmq.Socket[bytes] | int | None]":
        """Wait for news; where there are some."""
        poller = zmq.Poller()
        listener = self._listener
        for socket in (listener.socket, int(listener.connections.monitor.fd), *self._work.sources):
            poller.register(socket, zmq.POLLIN)
        if listener.gate is not None:
            poller.register(listener.gate.socket, zmq.POLLIN)
        poller.register(self._signals.descriptor, zmq.POLLIN)
        if self._lifeline is not None:
            poller.register(self._lifeline, zmq.POLLIN | zmq.POLLERR)
        return [source for source, _ in poller.poll(math.ceil(1e3 * self._idle_s))]

    def _receive(self) -> None:
        """Do what has come, but look after signals and watchdog as often as ever."""
        for _ in range(_BURST):
            if not self._listener.waiting:
                return
            envelope = self._listener.receive()
            if envelope is not None:
                self._service.handle(envelope)
            if time.monotonic() >= self._tick_s:
                return

    def _tick(self) -> None:
        self._tick_s = time.monotonic() + self._idle_s
        self._supervisor.feed()
        gate = self._listener.gate
        self._listener.connections.police(gate.allowed if gate is not None else None)
        self._supervisor.status(self.status)

    def _heed(self) -> int | None:
        """Do as the signals say; an exit code if the loop is to end."""
        self._signals.hush()
        if self._signals.reload:
            self._signals.reload = False
            self._supervisor.reloading()
            self._reload()
            self._supervisor.reloaded(self.status, self._trouble)
        for number in self._signals.take_stops():
            self._supervisor.stopping(self.status)
            return _STOPPED_BY.get(signal.Signals(number), 0)
        return None

    def _reload(self) -> None:
        """Read the allow-list again; what is sound of it holds from now on."""
        if self._config.keys is None or self._listener.gate is None:
            return
        try:
            listed = AllowList.load(self._config.keys)
        except KeysError as error:  # nothing says that a key was taken off it
            self._note([str(error)])
        else:
            self._listener.gate.allowed = listed.names
            self._note(listed.broken)

    def _note(self, troubles: Sequence[str]) -> None:
        for trouble in troubles:
            _log.error("not in force: %s", trouble)
        self._trouble = in_brief(troubles)
