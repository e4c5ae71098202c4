"""Target on a Ray cluster: replicas, each of which is a whole model or a chain of stages.

In:  passes. Each slot belongs to one replica, so its session stays at this replica.
Out: the passes' scores. States go from actor to actor; the edge calls all actors, and receives only
     the last actor's result.

Ray places the actors, and restarts lost actors and worker processes. It does not restore the
actors' slots, and does not notice a frozen process. So when a replica has lost an actor, the edge
attaches the replica again and repeats its passes, with as many tokens of the sequences as needed.
The edge kills the actors of an overdue replica, so that Ray restarts them.

Ray transports pickled Python objects, so everyone who reaches its ports can run code. A cluster is
only for machines that trust each other, protected by a firewall (`docs/scale.md`).
"""

import logging
import os
import queue
import secrets
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import zmq
from numpy.typing import NDArray

from pilotfish.base.errors import ConfigError, TargetLostError
from pilotfish.edge_runtime.edge_config import ClusterPlan
from pilotfish.edge_runtime.node.actor import ActorInfo, StageResult
from pilotfish.edge_runtime.steps import encode_works, record_works
from pilotfish.edge_runtime.targets.ray_cluster import (
    cause_of,
    is_permanent,
    leave,
    restart,
    start_actors,
)
from pilotfish.edge_runtime.targets.remote import RemotePass, RemoteTarget
from pilotfish.edge_runtime.targets.target import TargetOptions, split_outputs, wait_for_nodes
from pilotfish.engines.artifact import open_stages
from pilotfish.engines.contents import SlotContents
from pilotfish.engines.engine import CHUNK, Work
from pilotfish.engines.stage import Head

_log = logging.getLogger("pilotfish.edge")

_LOADING_S = 600.0  # time limit (s) of a replica's first start
_LOADED = 10.0  # time limit of later starts, as a multiple of the first start's duration
_RETRY_S = 0.5  # pause (s) before a replica is attached again


@dataclass(eq=False)
class _ReplicaPass(RemotePass):
    """Pass under way, with works on the slots of its replica.

    lane: index of the replica. size: number of tokens sent.
    """

    lane: int = 0
    size: int = 0


@dataclass(eq=False)
class _Replica:
    """Replica of the target: its actors, in the order of their stages, and their attachment.

    contents: contents of its slots after all steps that were sent to it.
    """

    actors: list[Any]
    contents: SlotContents
    incarnation: bytes = b""  # present or requested incarnation of its actors
    joining: int = 0  # number of actors that have not confirmed the incarnation
    ready: bool = False
    retry_s: float | None = 0.0  # time of the next attachment; None: attached or under way
    joined_s: float = 0.0  # time at which the attachment began
    loading_s: float | None = None  # time limit of an attachment; None: `_LOADING_S`
    answered_s: float = 0.0  # time of the last result
    actor_infos: dict[int, ActorInfo] = field(default_factory=dict)


class _CallResult(NamedTuple):
    """Result of a call: of ``hold`` (with the actor's index) or of a step (with its number)."""

    lane: int
    incarnation: bytes
    actor: int | None
    number: int | None
    result: "ActorInfo | StageResult | None"
    error: BaseException | None


class ClusterTarget(RemoteTarget[_ReplicaPass]):
    """Target that runs passes at replicas on a cluster."""

    def __init__(
        self,
        plan: ClusterPlan,
        chains: Sequence[Sequence[Any]],
        head: Head | None,
        options: TargetOptions,
        digest: str,
    ) -> None:
        super().__init__()
        self._plan = plan
        self._head = head
        self._metrics = options.metrics
        self._results: queue.SimpleQueue[_CallResult] = queue.SimpleQueue()
        self._fatal_error = ""
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ringing = threading.Lock()  # guards the bell against a write after its close
        self._closed = False
        self.lanes = len(chains)
        self.depth = len(chains[0])
        self.context = min(
            options.config.limits.context, options.artifact.manifest.dimensions.context
        )
        self.digest = digest
        self.idle_gpu = None if head is None else head.idle_gpu
        slots = -(-options.config.limits.sessions // self.lanes)
        self._replicas = [
            _Replica(list(actors), SlotContents(slots, self.context)) for actors in chains
        ]

    @property
    def attached(self) -> int:
        """Number of replicas that can compute."""
        return sum(replica.ready for replica in self._replicas)

    # Target interface

    def start(self, number: int, works: Sequence[Work]) -> None:
        """Send the pass to its replica, now or when the replica is ready."""
        lane = works[0].slot % self.lanes
        local = [work._replace(slot=work.slot // self.lanes) for work in works]
        pending = self._passes[number] = _ReplicaPass(number, local, self._clock.now_s, lane=lane)
        if self._replicas[lane].ready:
            self._send(pending)

    def cached(self, slot: int, tokens: NDArray[np.uint32], rows: int) -> int:
        """Return the number of first tokens that the slot's replica has cached."""
        contents = self._replicas[slot % self.lanes].contents
        return contents.find(slot // self.lanes, tokens, rows).tokens

    def clear(self, slot: int) -> None:
        """Have the slot's replica empty the slot at its next step."""
        self._replicas[slot % self.lanes].contents.clear(slot // self.lanes)

    def _work(self, now_s: float) -> None:
        """Process results, attach replicas, and restart the actors of overdue passes."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        while not self._results.empty():
            call = self._results.get()
            replica = self._replicas[call.lane]
            if call.incarnation == replica.incarnation:
                self._receive(replica, call)
        for lane, replica in enumerate(self._replicas):
            self._attach_if_ready(lane, replica)
        for pending in list(self._passes.values()):
            self._reattach_if_overdue(pending, now_s)

    @property
    def sources(self) -> "Sequence[zmq.Socket[bytes] | int]":
        """Descriptor that is readable after the end of an actor's call."""
        return (self._bell,)

    def _deadlines(self) -> list[float]:
        """Return the times at which a replica is to be attached, or a pass becomes overdue."""
        ends_s = [replica.retry_s for replica in self._replicas if replica.retry_s is not None]
        ends_s += [
            self._overdue_at(pending)
            for pending in self._passes.values()
            if pending.sent_s is not None
        ]
        ends_s += [r.joined_s + (r.loading_s or _LOADING_S) for r in self._replicas if r.joining]
        return ends_s

    @property
    def problem(self) -> str:
        """Replicas that cannot compute, in words; "" if there is none."""
        away = [str(n) for n, replica in enumerate(self._replicas, 1) if not replica.ready]
        return f"replica {', '.join(away)} being started" if away else ""

    @property
    def nodes(self) -> Mapping[str, bool]:
        """Replica name → whether the replica can compute."""
        return {_replica_name(lane): replica.ready for lane, replica in enumerate(self._replicas)}

    @property
    def fatal_error(self) -> str:
        """Error after which Ray will not restart an actor; "" if there was none."""
        return self._fatal_error

    def close(self) -> None:
        """Leave the cluster; a private cluster ends."""
        self._replicas = []
        leave()
        with self._ringing:
            self._closed = True
            os.close(self._bell)

    # Passes

    def _send(self, pending: _ReplicaPass) -> None:
        replica = self._replicas[pending.lane]
        sent = encode_works(pending.works, replica.contents)
        record_works(pending.works, replica.contents)
        pending.sent_s, pending.size = self._clock.now_s, sent.size
        result: Any = None
        try:
            for actor in replica.actors:
                result = actor.step.remote(replica.incarnation, sent, result)
            self._post_result_of(result, pending.lane, replica, number=pending.number)
        except Exception as error:  # Ray could not take the call
            self._fail(pending, error)
            self._lose_actor(pending.lane, error)

    def _post_result_of(
        self,
        call: Any,
        lane: int,
        replica: _Replica,
        *,
        actor: int | None = None,
        number: int | None = None,
    ) -> None:
        """Put the call's result into the queue when the call ends (in a thread of Ray)."""
        post = partial(self._post, lane, replica.incarnation, actor, number)
        call.future().add_done_callback(post)

    def _post(
        self, lane: int, incarnation: bytes, actor: int | None, number: int | None, future: Any
    ) -> None:
        error = future.exception()
        result = None if error is not None else future.result()
        self._results.put(_CallResult(lane, incarnation, actor, number, result, error))
        with self._ringing:
            if not self._closed:
                os.eventfd_write(self._bell, 1)

    def _receive(self, replica: _Replica, call: _CallResult) -> None:
        pending = None if call.number is None else self._passes.get(call.number)
        if isinstance(call.result, ActorInfo) and call.actor is not None:
            replica.actor_infos[call.actor] = call.result
            replica.joining -= 1
        elif isinstance(call.result, StageResult) and pending is not None:
            replica.answered_s = self._clock.now_s
            self._complete(pending, call.result)
        elif call.error is not None:
            cause = cause_of(call.error)
            if cause is not None and not isinstance(cause, TargetLostError):
                if pending is not None:
                    self._fail(pending, cause)
                    return
                if call.number is not None:
                    return  # the pass has already timed out
            if is_permanent(call.error):
                self._fatal_error = (
                    f"An actor of {_replica_name(call.lane)} is lost and will not be restarted: "
                    f"{call.error}"
                )
            self._lose_actor(call.lane, call.error)

    def _lose_actor(self, lane: int, error: BaseException) -> None:
        """Record the loss of a replica's actor, and detach the replica."""
        replica = self._replicas[lane]
        if replica.ready:
            self._record_event(lane, "gone")
        _log.warning("%s has lost an actor: %s", _replica_name(lane), _first_line(error))
        self._reset(replica)

    def _complete(self, pending: _ReplicaPass, result: StageResult) -> None:
        for index, ns in enumerate(result.compute_ns, 1):
            self._metrics.node_compute_s[f"{_replica_name(pending.lane)}, stage {index}"] += (
                ns * 1e-9
            )
        logits = result.logits
        if logits is None:
            assert self._head is not None
            try:
                logits = self._head.logits(result.states)
            except Exception as error:
                self._fail(pending, error)
                return
        self._finish(pending, split_outputs(pending.works, logits, result.states))

    def _forget(self, pending: _ReplicaPass) -> None:
        for work in pending.works:
            self._replicas[pending.lane].contents.clear(work.slot)

    def _overdue_at(self, pending: _ReplicaPass) -> float:
        """Return the time at which a pass is overdue: ``late_s`` for each chunk of its tokens."""
        assert pending.sent_s is not None
        since_s = max(pending.sent_s, self._replicas[pending.lane].answered_s)
        return since_s + self._plan.late_s * max(1, -(-pending.size // CHUNK))

    def _timeout_at(self, pending: _ReplicaPass) -> float:
        return (
            max(pending.started_s, self._replicas[pending.lane].answered_s) + self._plan.give_up_s
        )

    def _timeout_message(self, pending: _ReplicaPass, now_s: float) -> str:
        return (
            f"In this edge's target, {_replica_name(pending.lane)} did not answer within "
            f"{self._plan.give_up_s:g} s."
        )

    def _reattach_if_overdue(self, pending: _ReplicaPass, now_s: float) -> None:
        """Restart the actors of a pass that is overdue, unless the pass times out now."""
        if pending.sent_s is None or now_s >= self._timeout_at(pending):
            return
        if now_s > self._overdue_at(pending):
            self._record_event(pending.lane, "late")
            _log.warning("%s is overdue: restarting its actors", _replica_name(pending.lane))
            self._restart(self._replicas[pending.lane])

    # Replicas

    def _reset(self, replica: _Replica) -> None:
        """Detach a replica; it will be attached again, with empty slots."""
        replica.ready, replica.incarnation, replica.joining = False, b"", 0
        replica.retry_s = self._clock.now_s + _RETRY_S
        for pending in self._passes.values():
            if self._replicas[pending.lane] is replica:
                pending.sent_s = None

    def _restart(self, replica: _Replica) -> None:
        """Kill the processes of all actors of a replica, and detach the replica."""
        for actor in replica.actors:
            restart(actor)
        self._reset(replica)

    def _attach_if_ready(self, lane: int, replica: _Replica) -> None:
        """Begin or complete a replica's attachment if it is due, and send its waiting passes."""
        now_s = self._clock.now_s
        if replica.retry_s is not None and now_s >= replica.retry_s:
            replica.retry_s, replica.joined_s = None, now_s
            replica.incarnation, replica.joining = secrets.token_bytes(16), len(replica.actors)
            try:
                for index, actor in enumerate(replica.actors):
                    call = actor.hold.remote(replica.incarnation)
                    self._post_result_of(call, lane, replica, actor=index)
            except Exception as error:  # Ray could not take the call
                self._lose_actor(lane, error)
        elif replica.joining and now_s > replica.joined_s + (replica.loading_s or _LOADING_S):
            if replica.loading_s is not None:  # the disk may now be slower than at the first start
                replica.loading_s = min(2.0 * replica.loading_s, max(replica.loading_s, _LOADING_S))
            self._restart(replica)
        elif not replica.ready and replica.incarnation and not replica.joining:
            took_s = now_s - replica.joined_s
            replica.loading_s = replica.loading_s or max(_LOADED * took_s, self._plan.give_up_s)
            replica.ready = True
            replica.contents.clear_all()
            self.context = min(
                self.context, *(held.context for held in replica.actor_infos.values())
            )
            _log.info("%s is ready", _replica_name(lane))
        for pending in list(self._passes.values()):
            if replica.ready and pending.lane == lane and pending.sent_s is None:
                self._send(pending)

    def _record_event(self, lane: int, what: str) -> None:
        self._metrics.node_events[_replica_name(lane), what] += 1


def _replica_name(lane: int) -> str:
    return f"replica {lane + 1}"


def _first_line(error: object) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def open_target(options: TargetOptions) -> ClusterTarget:
    """Start the replicas on the configured cluster; return the target when all are ready."""
    config, plan = options.config, options.config.cluster
    artifacts = [options.artifact]
    head = None
    if options.artifact.manifest.stage is not None:
        artifacts = open_stages(options.artifact.path.parent)
        head = Head(artifacts[0], threads=config.threads, provider=config.provider)
    if len(artifacts) != plan.stages:
        raise ConfigError(
            f"--target holds a model in {len(artifacts)} stages, not {plan.stages}: split it with "
            "`pilotfish export split`."
        )
    stage = artifacts[0].manifest.stage
    digest = artifacts[0].manifest.digest if stage is None else stage.whole
    chains = start_actors(options, artifacts)
    target = ClusterTarget(plan, chains, head, options, digest)
    try:
        wait_for_nodes(target, lambda: target.attached == plan.replicas, options.on_idle, None)
    except BaseException:
        target.close()
        raise
    return target
