"""Target as a pipeline of stages on several nodes (decentralized §2.2).

In:  passes. The edge itself runs stage 1 and the head; the other stages are nodes.
Out: the passes' scores. A pass crosses all nodes, edge → stage 2 → … → stage N → edge, so a round
     takes N hops for any window. Only hidden states cross the network.

A pass is one step. If its slots lack many tokens, further steps precede it. Steps follow each other
through the stages, so the passes of several sessions, or the chunks of a long prompt, keep all
stages busy. All stages run the same steps in the same order, so stage 1's slots show what the slots
of every stage hold before its next step.

Law: answers arrive in the order of the steps. When the stages are attached again, every pass under
way is sent again, with as many tokens of its sequence as needed.
"""

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import numpy as np
import zmq
from numpy.typing import NDArray

from pilotfish.base.errors import ConfigError, MalformedError, TargetLostError
from pilotfish.edge_runtime.steps import encode_works
from pilotfish.edge_runtime.targets.node_client import NodeAddress, expect_encrypted
from pilotfish.edge_runtime.targets.node_list import Pipeline, read_addresses, read_node_list
from pilotfish.edge_runtime.targets.remote import RemotePass, RemoteTarget
from pilotfish.edge_runtime.targets.stages import Stages
from pilotfish.edge_runtime.targets.target import TargetOptions, split_outputs, wait_for_nodes
from pilotfish.engines.engine import CHUNK, StageEngine, Work
from pilotfish.engines.stage import Head, Stage
from pilotfish.wire.codecs.hidden import decode_hidden, encode_hidden
from pilotfish.wire.messages import Buffer
from pilotfish.wire.nodes import Scored

_log = logging.getLogger("pilotfish.edge")

_TRIES = 8  # upper limit of repetitions of a pass, since the pass itself may crash the stages


@dataclass(eq=False)
class _PipelinePass(RemotePass):
    """Pass under way; ``tries``: number of times that it was sent again."""

    tries: int = 0


class _SentStep(NamedTuple):
    """Step under way.

    pass_number: number of the pass that the step completes; None: the step only reads tokens that a
    slot lacks. rows: number of rows of its answer. alone: whether no other step was under way when
    it was sent.
    """

    number: int
    pass_number: int | None
    rows: int
    sent_s: float
    alone: bool


class PipelineDepth:
    """Estimator of ``passes``, the number of passes that should be under way at once.

    The best number is the number of passes that the slowest stage computes while one pass crosses
    all stages. With fewer passes stages are idle; with more, passes only wait for the slowest
    stage. The number is at least the number of stages and at most the number of slots.
    """

    def __init__(self, stages: int, slots: int) -> None:
        self._least, self._most = min(stages, slots), slots
        self._hops_s = 0.0  # duration of a step without its computing times
        self.passes = self._least

    def update(self, step_s: float, compute_ns: Sequence[int], *, alone: bool) -> None:
        """Learn from a step's duration (from stage 1's end to the answer) and computing times.

        A step that was not alone may have waited for other steps, so its duration is only an upper
        bound.
        """
        computed_s = sum(compute_ns) * 1e-9
        hops_s = max(0.0, step_s - sum(compute_ns[1:]) * 1e-9)
        self._hops_s = hops_s if alone else min(hops_s, self._hops_s)
        slowest_s = max(compute_ns, default=0) * 1e-9
        if slowest_s > 0.0:
            fitting = round((self._hops_s + computed_s) / slowest_s)
            self.passes = min(max(self._least, fitting), self._most)


class PipelineTarget(RemoteTarget[_PipelinePass]):
    """Target that runs stage 1 and the head in this process, and the other stages at nodes."""

    def __init__(
        self,
        first: StageEngine,
        head: Head,
        pipeline: Pipeline,
        addresses: Sequence[NodeAddress],
        options: TargetOptions,
    ) -> None:
        super().__init__()
        self._first, self._head = first, head
        stage = first.stage
        self._stages = Stages(stage, pipeline, addresses, options)
        self._incarnation = self._stages.incarnation  # attachment that the state below belongs to
        self._sent: deque[_SentStep] = deque()
        self._pipeline = pipeline
        self._metrics = options.metrics
        self._numbers = count()  # step numbers
        self._answered_s = 0.0  # time of the last answer
        self._patience_s = pipeline.late_s
        self.context = stage.context
        self.idle_gpu = stage.idle_gpu or head.idle_gpu
        self.digest = stage.cut.whole
        self._depth = PipelineDepth(stage.cut.count, stage.slots)
        self.chunks_per_pass = 2 * stage.cut.count
        self._set_depth()

    @property
    def attached(self) -> bool:
        """Whether all stages are attached."""
        return self._stages.incarnation is not None

    # Target interface

    def start(self, number: int, works: Sequence[Work]) -> None:
        """Run stage 1 and send its states, now or when the stages are attached."""
        pending = self._passes[number] = _PipelinePass(number, works, self._clock.now_s)
        if self._incarnation is not None:
            self._send(pending)

    def cached(self, slot: int, tokens: NDArray[np.uint32], rows: int) -> int:
        """Return the number of first tokens that the stages have cached."""
        return self._first.contents.find(slot, tokens, rows).tokens

    def clear(self, slot: int) -> None:
        """Empty a slot of stage 1; the other stages empty it at the slot's next step."""
        self._first.clear(slot)

    def _work(self, now_s: float) -> None:
        """Process answers, attach stages, and send the next steps."""
        for scored, frames in self._stages.receive():
            self._take_answer(scored, frames)
        for name, size in self._stages.received_bytes.items():
            self._metrics.node_bytes[name, "from"] = size
        self._reattach_if_overdue()
        if self._stages.incarnation != self._incarnation:
            self._restart_passes()
        if (waiting := self._next_to_send()) is not None:
            self._send(waiting)

    @property
    def sources(self) -> "Sequence[zmq.Socket[bytes] | int]":
        """Sockets and descriptors of the stages' connections."""
        return self._stages.sources

    def _deadlines(self) -> list[float]:
        """Return the times at which a step can be sent or is overdue, or a stage is contacted."""
        now_s, due_s = self._clock.now_s, self._stages.due_s
        ends_s = [] if due_s is None else [now_s + due_s]
        if self._sent:
            ends_s.append(self._overdue_at(self._sent[0]))
        if self._next_to_send() is not None:
            ends_s.append(now_s)
        return ends_s

    @property
    def problem(self) -> str:
        """Stages that are not attached, with the reasons; "" if there is none."""
        return self._stages.problem

    @property
    def nodes(self) -> Mapping[str, bool]:
        """Node name → whether its stage is attached."""
        return self._stages.nodes

    def close(self) -> None:
        """Close the connections to the stages."""
        self._stages.close()

    # Steps out

    def _next_to_send(self) -> _PipelinePass | None:
        """Return a pass that has a step to send now, or None.

        The number of steps under way is just enough to keep the stages busy, so that a new pass
        does not wait for all steps of a prompt.
        """
        if self._incarnation is None or len(self._sent) > self.concurrent_passes:
            return None
        return next((pending for pending in self._passes.values() if pending.sent_s is None), None)

    def _send(self, pending: _PipelinePass) -> None:
        """Run stage 1 for the next step of a pass, and send its states."""
        works = self._next_step(pending)
        last = works is pending.works
        begun_ns = time.monotonic_ns()
        try:
            items, tokens, parents = encode_works(works, self._first.contents)
            states = self._first.run(works)
            spent_ns = time.monotonic_ns() - begun_ns
            frame = encode_hidden(states, self._pipeline.states) if len(self._stages) else b""
        except Exception as error:  # only this pass fails
            self._fail(pending, error)
            return
        if last:
            pending.sent_s = self._clock.now_s
        if not len(self._stages):
            self._count_compute([spent_ns])
            if last:
                self._complete(pending, states)
            return
        rows = sum(work.rows for work in works)
        completes = pending.number if last else None
        alone = not self._sent
        step = _SentStep(next(self._numbers), completes, rows, self._clock.now_s, alone)
        self._sent.append(step)
        self._stages.send(step.number, items, (tokens, parents, frame), spent_ns)

    def _next_step(self, pending: _PipelinePass) -> Sequence[Work]:
        """Return the pass's works; if a slot lacks many tokens, one chunk of them instead."""
        for work in pending.works:
            held = self._first.contents.find(work.slot, work.tokens, work.rows, work.parents).tokens
            end = min(held + CHUNK, len(work.tokens) - work.rows)
            if held < end and len(work.tokens) - held > CHUNK:
                return [Work(work.slot, work.tokens[:end], 0)]
        return pending.works

    # Answers in

    def _take_answer(self, scored: Scored, frames: Sequence[Buffer]) -> None:
        """Process an answer of the last stage; a malformed answer detaches all stages."""
        if self._stages.incarnation is None:
            return  # an earlier answer was malformed and detached the stages
        try:
            if not self._sent or scored.number != self._sent[0].number:
                raise MalformedError(
                    f"It answers step {scored.number}, which is not the next step."
                )
            if len(frames) != 1:
                raise MalformedError(f"An answer has 1 frame, not {len(frames)}.")
            hidden = decode_hidden(
                frames[0], self._sent[0].rows, self._head.width, self._pipeline.states
            )
        except MalformedError as error:
            self._stages.reject_answer(f"its answer is not valid: {error}")
            return
        self._stages.record_success()
        self._count_compute(scored.compute_ns)
        step = self._sent.popleft()
        now_s = self._clock.now_s
        # adapt the limit, so that slow stages are not attached again at every step
        waited_s = now_s - max(step.sent_s, self._answered_s)
        self._patience_s = max(self._pipeline.late_s, min(self._patience_s, 2.0 * waited_s))
        self._answered_s = now_s
        if step.pass_number is not None:
            self._depth.update(now_s - step.sent_s, scored.compute_ns, alone=step.alone)
            self._set_depth()
            if (pending := self._passes.get(step.pass_number)) is not None:
                self._complete(pending, hidden)

    def _set_depth(self) -> None:
        """Set the depth that keeps the stages busy; while they are detached, one pass per slot."""
        self.concurrent_passes = self._depth.passes
        self.depth = self.concurrent_passes if self.attached else self._first.stage.slots

    def _count_compute(self, compute_ns: Sequence[int]) -> None:
        for name, ns in zip(["edge", *self._stages.names], compute_ns, strict=False):
            self._metrics.node_compute_s[name] += ns * 1e-9

    def _complete(self, pending: _PipelinePass, hidden: NDArray[np.float32]) -> None:
        """Compute the logits of a pass from its hidden states f32 [Σ rows, d], and finish it."""
        begun_ns = time.monotonic_ns()
        try:
            logits = self._head.logits(hidden)
        except Exception as error:
            self._fail(pending, error)
            return
        self._count_compute([time.monotonic_ns() - begun_ns])
        self._finish(pending, split_outputs(pending.works, logits, hidden))

    # Losses

    def _restart_passes(self) -> None:
        """Mark all passes as unsent, after the stages were lost or attached again."""
        self._incarnation = self._stages.incarnation
        self._set_depth()
        self._sent.clear()
        self._first.clear_all()
        for pending in list(self._passes.values()):
            pending.sent_s = None
            pending.tries += self._incarnation is not None
            if pending.tries > _TRIES:
                self._fail(
                    pending,
                    TargetLostError(
                        f"The stages of this edge's target were lost {_TRIES} times during this "
                        "pass, which may be the cause; see the logs of the stages."
                    ),
                )

    def _overdue_at(self, step: _SentStep) -> float:
        """Return the time at which the answer to a step is overdue."""
        return max(step.sent_s, self._answered_s) + self._patience_s

    def _reattach_if_overdue(self) -> None:
        """If an answer is overdue, attach all stages again and double the time limit."""
        if self._sent and self._clock.now_s > self._overdue_at(self._sent[0]):
            _log.warning(
                "a step through the stages has taken %.1f s: attaching the stages again",
                self._patience_s,
            )
            self._patience_s = min(2.0 * self._patience_s, self._pipeline.give_up_s)
            self._stages.detach_overdue()

    def _timeout_at(self, pending: _PipelinePass) -> float:
        return max(pending.started_s, self._answered_s) + self._pipeline.give_up_s

    def _timeout_message(self, pending: _PipelinePass, now_s: float) -> str:
        return (
            "The stages of this edge's target did not answer within "
            f"{self._pipeline.give_up_s:g} s. {self.problem}"
        )

    def _forget(self, pending: _PipelinePass) -> None:
        for work in pending.works:
            self._first.clear(work.slot)


def open_target(options: TargetOptions) -> PipelineTarget:
    """Open the listed pipeline; return the target when all stages are attached."""
    config = options.config
    if config.nodes is None:
        raise ConfigError("A pipeline needs a list of its stages (--pipeline FILE).")
    pipeline = read_node_list(config.nodes, Pipeline)
    addresses = read_addresses(config.nodes, pipeline.stage)
    expect_encrypted(config.nodes, addresses, options.keys)
    stage = Stage(
        options.artifact,
        slots=config.limits.sessions,
        context=config.limits.context,
        threads=config.threads,
        provider=config.provider,
    )
    if not stage.first or stage.cut.count != len(addresses) + 1:
        raise ConfigError(
            f"--target is {stage.cut}, and {config.nodes} lists {len(addresses)} stages: the edge "
            f"runs stage 1 itself, so the list must name the other {stage.cut.count - 1} stages "
            "in their order."
        )
    head = Head(options.artifact, threads=config.threads, provider=config.provider)
    target = PipelineTarget(StageEngine(stage), head, pipeline, addresses, options)
    try:
        wait_for_nodes(target, lambda: target.attached, options.on_idle, None)
    except BaseException:
        target.close()
        raise
    return target
