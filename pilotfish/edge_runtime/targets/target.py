"""The interface of targets, which compute passes in this process or on nodes.

In:  numbered passes over some slots, each with the whole sequence of its slot.
Out: their scores: the logits and hidden states of the requested rows, or an error.

The serving loop starts a pass and continues. A local target has finished it by then; others finish
when their nodes have answered. Law: a slot is in one pass at a time. Its content follows from its
last finished pass and the path kept since; a node that lost its K/V cache gets the sequence again.
"""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import NamedTuple

import numpy as np
import zmq
from numpy.typing import NDArray

from pilotfish.base.errors import TargetLostError
from pilotfish.edge_runtime.edge_config import EdgeConfig
from pilotfish.edge_runtime.edge_metrics import EdgeMetrics
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.language_model import Execution, Output
from pilotfish.wire.keys import EdgeKeys

_log = logging.getLogger("pilotfish.edge")

_TRIAL_NUMBERS = count(2**62)  # numbers of trial passes
_FIRST_PASS_S = 600.0  # time limit of a pass at the start
_PAUSE_S = 0.2
_LOG_EVERY_S = 5.0  # interval of log lines about missing nodes


class Span(NamedTuple):
    """One slot's part of a pass.

    tokens: u32 [n], the whole sequence up to the last token of this pass; the slot has cached the
    first ``base`` of them. rows: number of last tokens to output. parents: i64 [nodes], if the last
    tokens are a tree: each node's parent, −1 for the token before the tree. temperature: the one
    that an ensemble's logits must be valid for; 0 is greedy.
    """

    slot: int
    tokens: NDArray[np.uint32]
    base: int
    rows: int
    parents: NDArray[np.int64] | None = None
    temperature: float = 0.0

    @property
    def size(self) -> int:
        """Number of tokens to compute."""
        return len(self.tokens) - self.base

    @property
    def nodes(self) -> int:
        """Number of last tokens that form a tree."""
        return 0 if self.parents is None else len(self.parents)


class Scores(NamedTuple):
    """The result of a pass: an output for each span, or an error for all.

    The outputs are views that the target may overwrite when it is called again.
    """

    number: int
    outputs: Sequence[Output] = ()
    error: Exception | None = None


class TargetOptions(NamedTuple):
    """Arguments for opening a target.

    artifact: the edge's, with vocabulary and end tokens. on_idle: called a few times a second with
    the present problem while waiting for nodes.
    """

    config: EdgeConfig
    artifact: Artifact
    keys: EdgeKeys | None
    metrics: EdgeMetrics
    on_idle: Callable[[str], None] = lambda problem: None


class Target(ABC):
    """Computes passes. Used by the serving thread.

    Attributes:
        context: positions of each slot.
        digest: identifies the target, in hex; targets with different outputs have different ones.
        has_hidden_states: whether outputs have hidden states.
        model_logits: whether logits are one model's own, so that bias and penalties apply to them.
        lanes: parts that compute in parallel; slot s is in lane s mod lanes.
        depth: passes that may be under way in one lane.
        concurrent_passes: passes of a lane that different nodes compute at the same time; waiting
            jobs are spread over them.
        chunks_per_pass: chunks of a prompt in one pass; more than 1 if stages pipeline them.
        execution: provider, precision and threads in this process; None: nodes compute.
    """

    context: int
    digest: str
    has_hidden_states: bool = True
    model_logits: bool = True
    lanes: int = 1
    depth: int = 1
    concurrent_passes: int = 1
    chunks_per_pass: int = 1
    execution: Execution | None = None

    @abstractmethod
    def start(self, number: int, spans: Sequence[Span]) -> None:
        """Start a pass; its scores carry any error, also of nodes."""

    @abstractmethod
    def keep_path(self, slot: int, path: Sequence[int]) -> None:
        """Keep a path (nodes, numbered from 0) of the tree that ended the slot's last pass."""

    @abstractmethod
    def collect_scores(self) -> Sequence[Scores]:
        """Return the scores of passes finished since the last call; never waits."""

    @property
    def sources(self) -> "Sequence[zmq.Socket[bytes] | int]":
        """Sockets to poll; after an event, call `collect_scores`."""
        return ()

    @property
    def due_s(self) -> float | None:
        """Seconds until `collect_scores` should be called without events; None: no need."""
        return None

    @property
    def problem(self) -> str:
        """The present problems of its nodes, in a few words; "" for none."""
        return ""

    @property
    def nodes(self) -> Mapping[str, bool]:
        """Its nodes by name, and whether each takes part now. Thread-safe."""
        return {}

    @property
    def fatal_error(self) -> str:
        """Why this process can never use the target again; "" if it can."""
        return ""

    def close(self) -> None:
        """Close the connections to nodes."""
        return

    def run(
        self,
        number: int,
        spans: Sequence[Span],
        timeout_s: float = _FIRST_PASS_S,
    ) -> Sequence[Output]:
        """Make a pass and wait for its outputs; raises its error."""
        self.start(number, spans)
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            for scores in self.collect_scores():
                if scores.number == number:
                    if scores.error is not None:
                        raise scores.error
                    return scores.outputs
            self.pause()
        raise TargetLostError(f"The target did not answer within {timeout_s:g} s. {self.problem}")

    def pause(self) -> None:
        """Wait briefly for events."""
        poller = zmq.Poller()
        for source in self.sources:
            poller.register(source, zmq.POLLIN)
        due_s = self.due_s
        poller.poll(int(1e3 * min(_PAUSE_S, _PAUSE_S if due_s is None else due_s)))


def time_pass(target: Target, width: int) -> float:
    """Time a pass over ``width`` tokens of the empty slot 0, with all their rows, in seconds."""
    tokens = np.zeros(width, np.uint32)
    begun_s = time.perf_counter()
    target.run(next(_TRIAL_NUMBERS), [Span(0, tokens, 0, width)])
    return time.perf_counter() - begun_s


def split_outputs(
    spans: Sequence[Span], logits: NDArray[np.float32], hidden: NDArray[np.float32]
) -> list[Output]:
    """Split the rows [Σ rows, …] of a pass into each span's output."""
    outputs, end = [], 0
    for span in spans:
        begin, end = end, end + span.rows
        outputs.append(Output(logits[begin:end], hidden[begin:end]))
    return outputs


def wait_for_nodes(
    target: Target,
    complete: Callable[[], bool],
    on_idle: Callable[[str], None],
    patience_s: float | None,
) -> None:
    """Wait until the target's nodes are ``complete``, up to ``patience_s``; None: without limit.

    Raises `TargetLostError` if they never can be.
    """
    begun_s = logged_s = time.monotonic()
    target.collect_scores()
    while not complete():
        now_s = time.monotonic()
        if target.fatal_error:
            raise TargetLostError(target.fatal_error)
        if patience_s is not None and now_s - begun_s > patience_s:
            return
        if now_s - logged_s > _LOG_EVERY_S:
            logged_s = now_s
            _log.warning("waiting for nodes: %s", target.problem)
        on_idle(target.problem)
        target.pause()
        target.collect_scores()
