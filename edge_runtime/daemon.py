"""The edge daemon: load the target, listen, serve until told to stop."""

import gc
import logging
import select
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import zmq

from pilotfish.edge_runtime.config import EdgeConfig
from pilotfish.edge_runtime.loop import EdgeLoop
from pilotfish.edge_runtime.metrics import MetricsServer, MetricsSources
from pilotfish.edge_runtime.receiver import BackgroundReceiver
from pilotfish.edge_runtime.reload import LiveSettings, bounds_of
from pilotfish.edge_runtime.scheduler import CHUNK, NARROW, Scheduler
from pilotfish.edge_runtime.service import Service
from pilotfish.edge_runtime.serving import duties
from pilotfish.edge_runtime.signals import Signals
from pilotfish.edge_runtime.supplies import Supplies
from pilotfish.edge_runtime.tally import Tally
from pilotfish.edge_runtime.targets import Opening, Target, open_target
from pilotfish.edge_runtime.targets.target import pass_s
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.inspection import Inspection
from pilotfish.engines.pace import least_times
from pilotfish.wire.keys import EdgeKeys
from pilotfish.wire.messages import Buffer, PassTime, Reply
from pilotfish.wire.supervisor import Supervisor, inherited_socket
from pilotfish.wire.transport import Listener

_log = logging.getLogger("pilotfish.edge")

_WIDTHS = (1, 2, 4, 8, 16, 32)  # of the passes whose times devices are told
_PATIENCE = 5.0  # longest passes that a watchdog has to wait for at least
_LOADING_S = 600.0  # a large target may take so long, and a supervisor may not stop it before


def serve(
    config: EdgeConfig,
    *,
    announce: Callable[[str], None] = lambda endpoint: None,
    lifeline: int | None = None,
    reread: Callable[[], EdgeConfig] | None = None,
) -> int:
    """Serve until SIGINT or SIGTERM, or until ``lifeline`` (a descriptor) closes at its other end.

    ``announce`` is called with the endpoint, once devices may come; ``reread`` at SIGHUP, for the
    configuration as it is by then. Returns the exit code.
    """
    supervisor = Supervisor.from_environment()
    supervisor.extend(_LOADING_S)
    keys = EdgeKeys.load(config.keys) if config.keys is not None else None
    tally = Tally()
    settings = LiveSettings(config, keys, reread or (lambda: config), tally)
    with ExitStack() as stack:
        signals = stack.enter_context(Signals())
        metrics = MetricsServer(*config.metrics) if config.metrics is not None else None
        if metrics is not None:
            stack.callback(metrics.close)
        artifact = Artifact.open(config.target, stage=True)
        inspection = Inspection(artifact)
        stack.callback(inspection.close)
        supplies = Supplies.of(
            artifact.manifest, config.judges, config.threshold, config.relaxation
        )
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        stack.callback(context.destroy, linger=0)
        listener = Listener(context, config.listen, keys, bounds_of(config), inherited_socket())
        stack.callback(listener.close)
        try:
            with _handshakes(listener):
                waiting = partial(_tell_of_waiting, supervisor, lifeline)
                target = open_target(Opening(config, artifact, keys, tally, waiting))
                stack.callback(target.close)
                supplies = supplies if target.states else supplies.stateless()
                passes = _pass_times(target)
        except _OrphanedError:
            return 0
        # a pass may be a piece of a prompt, or a window of every session, and a busy machine slower
        # than it was now
        most = max(CHUNK, NARROW * config.limits.sessions, config.limits.window)
        longest_s = passes[-1].ns * 1e-9 * most / passes[-1].tokens
        supervisor.allow(_PATIENCE * longest_s)
        scheduler = Scheduler(target, tally=tally)
        service = Service(
            artifact,
            target,
            config.limits,
            scheduler.submit,
            _sender(listener, tally),
            passes,
            supplies=supplies,
            allowed=None if keys is None else keys.allowed,
            tally=tally,
        )
        gc.collect()
        gc.freeze()  # what was loaded stays; no collection between two rounds looks through it
        signals.take_over()
        model = artifact.manifest.model
        loop = EdgeLoop(
            *(listener, scheduler, target, service, settings, signals, supervisor),
            model,
            inspection,
            lifeline,
        )
        if metrics is not None:
            metrics.show(
                MetricsSources(artifact.manifest, tally, listener, service, target, inspection)
            )
        announce(listener.endpoint)
        supervisor.ready(loop.status)
        inspection.start()
        _log.info("serving %s on %s", model, listener.endpoint)
        for name in supplies.heads:
            _log.info("decision head: %s", name)
        code = loop.run()
        listener.close(loop.linger_s)
        _log.info("stopped after %d target passes", scheduler.passes)
        return code


class _OrphanedError(Exception):
    """The parent went while nodes were waited for."""


def _tell_of_waiting(supervisor: Supervisor, lifeline: int | None, trouble: str) -> None:
    """While nodes are waited for: the supervisor is to wait too, and to see for what."""
    if lifeline is not None and select.select([lifeline], [], [], 0)[0]:
        raise _OrphanedError
    supervisor.extend(_LOADING_S)
    supervisor.status(f"waiting for nodes: {trouble}")


def _pass_times(target: Target) -> list[PassTime]:
    """How long the target's passes take."""
    times = least_times(partial(pass_s, target), _WIDTHS, target.context)
    return [
        PassTime(tokens=width, ns=max(1, int(seconds * 1e9))) for width, seconds in times.items()
    ]


@contextmanager
def _handshakes(listener: Listener) -> Iterator[None]:
    """Let devices in while the target loads: a restarted edge is not an absent one."""
    receiver = BackgroundReceiver(duties(listener))
    receiver.start()
    receiver.begin()
    try:
        yield
    finally:
        receiver.end()


def _sender(listener: Listener, tally: Tally) -> Callable[[bytes, Reply, Sequence[Buffer]], None]:
    def send(client: bytes, message: Reply, frames: Sequence[Buffer]) -> None:
        try:
            tally.bytes_out += listener.send(client, message, frames)
        except zmq.ZMQError as error:  # it does not read, or went away: it asks again, or never
            tally.drops += 1
            _log.debug("a reply was not taken: %s", error)

    return send
