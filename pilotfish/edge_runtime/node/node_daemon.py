"""Node daemon: loads the artifact, listens, and runs steps until a signal stops it."""

import gc
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import zmq

from pilotfish.base.descriptors import connection_room
from pilotfish.base.errors import KeysError
from pilotfish.base.supervisor import Supervisor, inherited_socket, summarize
from pilotfish.boards.start import warn_of_idle_gpu
from pilotfish.edge_runtime.edge_config import MEBIBYTE, NodeConfig
from pilotfish.edge_runtime.key_rotation import KeyRotation
from pilotfish.edge_runtime.node.node_service import NodeService
from pilotfish.edge_runtime.node.stage import StageWork
from pilotfish.edge_runtime.node.work import NodeWork
from pilotfish.edge_runtime.node.worker import Worker
from pilotfish.edge_runtime.serving import SIGNAL_EXIT_CODES, ServingLoop
from pilotfish.edge_runtime.signals import Signals
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.engine import StageEngine, open_engine
from pilotfish.engines.inspection import Inspection
from pilotfish.engines.stage import Stage
from pilotfish.wire.connections import Bounds
from pilotfish.wire.keys import AllowList, EdgeKeys
from pilotfish.wire.transport import Listener

_log = logging.getLogger("pilotfish.edge")

_LOADING_S = 600.0  # start-up time (s) that the daemon requests from its supervisor
_CONNECTIONS = 32  # upper limit of connections from edges and stages, including stale connections
_OWN_DESCRIPTORS = 128  # descriptors of the process that are not connections
_PATIENCE_S = 60.0  # lower limit of the watchdog's interval (s), since a pass must fit into it


def serve_node(
    config: NodeConfig,
    *,
    announce: Callable[[str], None] = lambda endpoint: None,
    listening: Callable[[str], None] = lambda endpoint: None,
    lifeline: int | None = None,
) -> int:
    """Serve until SIGINT or SIGTERM, or until the other end of ``lifeline`` closes.

    announce, listening: functions that are called with the endpoint once edges can connect.
    lifeline: a descriptor. Returns the exit code.
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
        signals.check_interrupt()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        stack.callback(context.destroy, linger=0)
        connections = connection_room(_CONNECTIONS, _OWN_DESCRIPTORS)
        bounds = Bounds(connections, connections, config.message_mib * MEBIBYTE)
        listener = Listener(context, config.listen, keys, bounds, inherited_socket())
        stack.callback(listener.close)
        service = NodeService(listener, work, bounds.message_bytes)
        supervisor.allow(_PATIENCE_S)
        gc.collect()
        gc.freeze()
        signals.take_over()
        listening(listener.endpoint)
        announce(listener.endpoint)
        _log.info("%s on %s", work.ready.model, listener.endpoint)
        loop = NodeLoop(
            listener=listener,
            service=service,
            work=work,
            signals=signals,
            supervisor=supervisor,
            config=config,
            lifeline=lifeline,
            inspection=inspection,
            keys=keys,
        )
        supervisor.ready(loop.status)
        inspection.start()
        return loop.run()


def _load(
    artifact: Artifact, config: NodeConfig, keys: EdgeKeys | None, feed_watchdog: Callable[[], None]
) -> NodeWork:
    """Load the artifact: a whole model as a worker, a part of a model as a stage."""
    options: Any = {
        "slots": config.sessions,
        "context": config.context,
        "threads": config.threads,
        "provider": config.provider,
    }
    if artifact.manifest.stage is None:
        engine = open_engine(artifact, **options)
        warn_of_idle_gpu(artifact, engine.model.idle_gpu)
        return Worker(engine, feed_watchdog)
    stage = Stage(artifact, **options)
    warn_of_idle_gpu(artifact, stage.idle_gpu)
    return StageWork(StageEngine(stage), keys, feed_watchdog)


class NodeLoop(ServingLoop):
    """Loop that runs steps until a signal ends it.

    During a step no message is answered. This costs little, since a node serves only one edge, and
    ZeroMQ sends the heartbeats in another thread.
    """

    def __init__(
        self,
        *,
        listener: Listener,
        service: NodeService,
        work: NodeWork,
        signals: Signals,
        supervisor: Supervisor,
        config: NodeConfig,
        lifeline: int | None,
        inspection: Inspection | None = None,
        keys: EdgeKeys | None = None,
    ) -> None:
        super().__init__(
            listener=listener,
            handle=service.handle,
            signals=signals,
            supervisor=supervisor,
            inspection=inspection,
            lifeline=lifeline,
        )
        self._service = service
        self._work = work
        self._config = config
        self._rotation = None if keys is None else KeyRotation(keys)
        if keys is not None and self._rotation is not None:
            self._set_problems([*keys.allow_list.broken, *self._rotation.start(listener)])
            _log.info("%s; %d keys are allowed", self._rotation, len(keys.allowed))
        else:
            self._set_problems(())

    def step(self) -> None:
        """Wait for messages, run the steps that have arrived, and update the attachment."""
        self._set_sources(self._work.sources)
        self._poll(self._idle_s)
        self._service.update_attachment()

    @property
    def status(self) -> str:
        """Line that `systemctl status` shows."""
        doing = "attached" if self._service.attached else "waiting for an edge"
        problem = f"; not in force: {self._problem}" if self._problem else ""
        model, steps = self._work.ready.model, self._service.steps
        return f"{model}: {doing}, {steps} steps{problem}{self._crowd_status}"

    def _tick(self) -> None:
        gate = self._listener.gate
        self._listener.connections.read_events()
        self._listener.connections.cut_revoked(gate.allowed if gate is not None else None)

    def _stop(self, number: int) -> int:
        self._supervisor.stopping(self.status)
        return SIGNAL_EXIT_CODES.get(number, 0)

    def _reload(self) -> str:
        """Reload the allow-list and apply its valid part."""
        if self._config.keys is None or self._listener.gate is None or self._rotation is None:
            return self._problem
        try:
            listed = AllowList.load(self._config.keys)
        except KeysError as error:  # the list is unreadable: keep the allowed keys
            self._set_problems([str(error)])
        else:
            self._listener.gate.allowed = listed.names
            rotation_problems = self._rotation.reload(
                self._config.keys, self._listener, listed.names
            )
            self._set_problems([*listed.broken, *rotation_problems])
        return self._problem

    def _set_problems(self, problems: Sequence[str]) -> None:
        for problem in problems:
            _log.error("not in force: %s", problem)
        self._problem = summarize(problems)
