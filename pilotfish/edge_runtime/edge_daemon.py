"""Edge daemon: loads the target, listens, and serves until a signal stops it."""

import gc
import logging
import select
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import NamedTuple

import zmq

from pilotfish.base.supervisor import Supervisor, inherited_socket
from pilotfish.base.tracing import Tracer
from pilotfish.boards.start import warn_before_load, warn_of_idle_gpu
from pilotfish.edge_runtime.draft_cost import DraftCost
from pilotfish.edge_runtime.edge_config import EdgeConfig
from pilotfish.edge_runtime.edge_drafter import EdgeDrafter, open_drafter
from pilotfish.edge_runtime.edge_metrics import EdgeMetrics
from pilotfish.edge_runtime.invitations import Invitations
from pilotfish.edge_runtime.live_settings import LiveSettings, bounds_of
from pilotfish.edge_runtime.loop import EdgeLoop
from pilotfish.edge_runtime.message_handler import MessageHandler
from pilotfish.edge_runtime.metrics_server import MetricsServer
from pilotfish.edge_runtime.metrics_sources import MetricsSources, edge_families
from pilotfish.edge_runtime.receiver import BackgroundReceiver
from pilotfish.edge_runtime.replies import create_sender
from pilotfish.edge_runtime.resources import EdgeResources
from pilotfish.edge_runtime.scheduler import NARROW, Scheduler
from pilotfish.edge_runtime.serving import event_handlers
from pilotfish.edge_runtime.signals import Signals
from pilotfish.edge_runtime.targets import Target, TargetOptions, open_target
from pilotfish.edge_runtime.targets.target import time_pass
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.engine import CHUNK
from pilotfish.engines.engine_errors import GrammarError
from pilotfish.engines.inspection import Inspection
from pilotfish.engines.manifest import Manifest
from pilotfish.engines.pass_times import least_times
from pilotfish.engines.vocabulary import Vocabulary
from pilotfish.wire.keys import EdgeKeys
from pilotfish.wire.messages import PassTime
from pilotfish.wire.transport import Listener

_log = logging.getLogger("pilotfish.edge")

# sizes (tokens) of the passes that are timed at the start; devices use the times
_WIDTHS = (1, 2, 4, 8, 16, 32)
_PATIENCE = 5.0  # lower limit of the watchdog's interval, in times of the longest pass
_SWITCH_S = 5e-4  # interpreter's switch interval (s) with an edge drafter
_LOADING_S = 600.0  # start-up time (s) that the daemon requests from its supervisor


def serve(
    config: EdgeConfig,
    *,
    announce: Callable[[str], None] = lambda endpoint: None,
    listening: Callable[[str], None] = lambda endpoint: None,
    lifeline: int | None = None,
    reread: Callable[[], EdgeConfig] | None = None,
) -> int:
    """Serve until SIGINT or SIGTERM, or until the other end of ``lifeline`` closes.

    announce: function that is called with the endpoint once the edge serves. listening: function
    that is called with the endpoint once devices can connect, before the target is loaded.
    lifeline: a descriptor. reread: function that reads the configuration again at SIGHUP. Returns
    the exit code.
    """
    supervisor = Supervisor.from_environment()
    supervisor.extend(_LOADING_S)
    keys = EdgeKeys.load(config.keys) if config.keys is not None else None
    metrics = EdgeMetrics()
    settings = LiveSettings(config, keys, reread or (lambda: config), metrics)
    with ExitStack() as stack:
        signals = stack.enter_context(Signals())
        metrics_server = _start_metrics_server(config, stack)
        tracer = _start_tracer(config, stack)
        artifact = Artifact.open(config.target, stage=True)
        reading = stack.enter_context(ThreadPoolExecutor(1, "vocabulary")).submit(
            _read_vocabulary, artifact
        )
        inspection = Inspection(artifact)
        stack.callback(inspection.close)
        resources = EdgeResources.load(
            artifact.manifest, config.head_names, config.threshold, config.relaxation
        )
        listener = _listen(config, keys, stack)
        settings.start(listener)
        listening(listener.endpoint)
        waiting = partial(_report_waiting, supervisor, signals, lifeline)
        options = TargetOptions(config, artifact, keys, metrics, waiting)
        try:
            with _handshakes(listener):
                loaded = _load(options, resources, signals, stack)
        except _OrphanedError:
            return 0
        supervisor.allow(_PATIENCE * _longest_pass_s(config, loaded.passes))
        scheduler = Scheduler(loaded.target, metrics=metrics, draft_cost=loaded.draft_cost)
        # read the vocabulary before clients connect: its memory must not be charged to them
        handler = _create_handler(options, loaded, scheduler, listener, reading.result(), tracer)
        stack.callback(handler.compiler.close)
        stack.callback(handler.end_traces)
        scheduler.over_budget = handler.over_budget
        invitations = _create_invitations(listener, settings, handler)
        if invitations is not None:
            stack.callback(invitations.close)
        gc.collect()
        gc.freeze()  # exempt the loaded objects from garbage collection, since they stay
        signals.take_over()
        loop = EdgeLoop(
            listener=listener,
            scheduler=scheduler,
            target=loaded.target,
            handler=handler,
            settings=settings,
            signals=signals,
            supervisor=supervisor,
            model=artifact.manifest.model,
            inspection=inspection,
            invitations=invitations,
            lifeline=lifeline,
        )
        if metrics_server is not None:
            sources = MetricsSources(
                artifact.manifest, metrics, listener, handler, loaded.target, inspection
            )
            metrics_server.serve(partial(edge_families, sources, devices=config.metrics_devices))
        announce(listener.endpoint)
        supervisor.ready(loop.status)
        inspection.start()
        _log_start(artifact.manifest.model, listener.endpoint, loaded, settings)
        code = loop.run()
        listener.close(loop.linger_s)
        _log.info("stopped after %d target passes", scheduler.passes)
        return code


class _Loaded(NamedTuple):
    """What computes: the target, its pass times for devices, and the edge drafter, if any.

    resources: without decision heads if the target has no hidden states.
    """

    target: Target
    resources: EdgeResources
    passes: list[PassTime]
    draft_cost: DraftCost
    edge_drafter: EdgeDrafter | None


def _load(
    options: TargetOptions, resources: EdgeResources, signals: Signals, stack: ExitStack
) -> _Loaded:
    """Open the target and the edge drafter, and measure the target's passes."""
    warn_before_load(options.artifact, options.config.limits.context)
    target = open_target(options)
    stack.callback(target.close)
    warn_of_idle_gpu(options.artifact, target.idle_gpu)
    signals.check_interrupt()
    resources = resources if target.has_hidden_states else resources.without_heads()
    passes = _pass_times(target)
    draft_cost = DraftCost({each.tokens: each.ns * 1e-9 for each in passes})
    edge_drafter = _start_drafter(
        stack, options.config, options.artifact.manifest, draft_cost, options.metrics
    )
    return _Loaded(target, resources, passes, draft_cost, edge_drafter)


def _listen(config: EdgeConfig, keys: EdgeKeys | None, stack: ExitStack) -> Listener:
    """Open the edge's socket."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stack.callback(context.destroy, linger=0)
    listener = Listener(context, config.listen, keys, bounds_of(config), inherited_socket())
    stack.callback(listener.close)
    return listener


def _longest_pass_s(config: EdgeConfig, passes: Sequence[PassTime]) -> float:
    """Estimate the seconds of the longest pass.

    It has a chunk of a prompt, a window of each session, or the widest window.
    """
    most = max(CHUNK, NARROW * config.limits.sessions, config.limits.window)
    return passes[-1].ns * 1e-9 * most / passes[-1].tokens


def _create_handler(
    options: TargetOptions,
    loaded: _Loaded,
    scheduler: Scheduler,
    listener: Listener,
    vocabulary: Vocabulary,
    tracer: Tracer | None,
) -> MessageHandler:
    """Create the handler of devices' messages."""
    drafter = loaded.edge_drafter
    return MessageHandler(
        options.artifact,
        loaded.target,
        options.config.limits,
        scheduler.submit,
        create_sender(listener, options.metrics),
        loaded.passes,
        draft_cost=loaded.draft_cost,
        edge_drafter=drafter,
        drafter_pass_times=_to_messages({} if drafter is None else drafter.model.draft_times),
        resources=loaded.resources,
        allowed=None if options.keys is None else options.keys.allowed,
        metrics=options.metrics,
        vocabulary=vocabulary,
        tracer=tracer,
    )


def _create_invitations(
    listener: Listener, settings: LiveSettings, handler: MessageHandler
) -> Invitations | None:
    """Create the edge's side of invitations; None: without keys nobody needs one."""
    if listener.gate is None:
        return None
    return Invitations(
        listener,
        settings,
        on_enrolled=partial(settings.reload_list, listener, handler),
    )


def _log_start(model: str, endpoint: str, loaded: _Loaded, settings: LiveSettings) -> None:
    how = loaded.target.execution or "a target on nodes"
    _log.info("serving %s on %s: %s", model, endpoint, how)
    _log.info("%s", settings.keys_in_use)
    for name in loaded.resources.heads:
        _log.info("decision head: %s", name)


def _start_metrics_server(config: EdgeConfig, stack: ExitStack) -> MetricsServer | None:
    if config.metrics is None:
        return None
    server = MetricsServer(*config.metrics, config.metrics_hosts)
    stack.callback(server.close)
    return server


def _start_tracer(config: EdgeConfig, stack: ExitStack) -> Tracer | None:
    if config.traces is None:
        return None
    tracer = Tracer.to_collector(config.traces, "pilotfish-edge")
    stack.callback(tracer.close)
    return tracer


def _read_vocabulary(artifact: Artifact) -> Vocabulary:
    """Read the vocabulary and prepare it for grammars; this takes a second or more."""
    vocabulary = Vocabulary.from_artifact(artifact)
    with suppress(GrammarError):  # the model cannot end a constrained answer
        vocabulary.grammars.warm()
    return vocabulary


def _start_drafter(
    stack: ExitStack,
    config: EdgeConfig,
    target: Manifest,
    draft_cost: DraftCost,
    metrics: EdgeMetrics,
) -> EdgeDrafter | None:
    """Load and start the edge drafter, if one is configured."""
    if config.draft is None:
        return None
    drafter = open_drafter(config, target)
    warn_of_idle_gpu(drafter.engine.model.artifact, drafter.engine.model.idle_gpu)
    # a draw is milliseconds of Python code; by default a thread waits 5 ms for each switch
    stack.callback(sys.setswitchinterval, sys.getswitchinterval())
    sys.setswitchinterval(_SWITCH_S)
    edge_drafter = EdgeDrafter(
        drafter,
        lambda: draft_cost.tokens_per_draft,
        target.eos_ids,
        metrics,
        target_s=lambda: draft_cost.seconds_per_pass,
    )
    stack.callback(edge_drafter.close)
    edge_drafter.start()
    _log.info("%s drafts beside the target", drafter.engine.model.artifact.manifest.model)
    return edge_drafter


class _OrphanedError(Exception):
    """Error: the parent process ended while the edge waited for nodes."""


def _report_waiting(
    supervisor: Supervisor, signals: Signals, lifeline: int | None, problem: str
) -> None:
    """Request more time from the supervisor while nodes are missing; show the problem as status."""
    signals.check_interrupt()
    if lifeline is not None and select.select([lifeline], [], [], 0)[0]:
        raise _OrphanedError
    supervisor.extend(_LOADING_S)
    supervisor.status(f"waiting for nodes: {problem}")


def _pass_times(target: Target) -> list[PassTime]:
    """Measure the target's pass times for devices."""
    return _to_messages(least_times(partial(time_pass, target), _WIDTHS, target.context))


def _to_messages(times: Mapping[int, float]) -> list[PassTime]:
    return [
        PassTime(tokens=width, ns=max(1, int(seconds * 1e9))) for width, seconds in times.items()
    ]


@contextmanager
def _handshakes(listener: Listener) -> Iterator[None]:
    """Accept connections while the target loads, so that devices do not give up on the edge."""
    receiver = BackgroundReceiver(event_handlers(listener))
    receiver.start()
    receiver.begin()
    try:
        yield
    finally:
        receiver.end()
