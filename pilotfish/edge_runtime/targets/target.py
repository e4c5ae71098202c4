"""Interface of targets, which compute passes in this process or on nodes.

In:  numbered passes. A pass has a work for each of its slots, with the slot's whole sequence.
Out: the passes' scores: logits and hidden states of the requested rows, or an error.

The serving loop starts a pass and continues. A local target computes the pass in `start`; other
targets finish the pass when their nodes have answered.

Law: a slot is in at most one pass at a time. The outputs follow from the sequence alone, whatever
the slot has cached. A node that lost its K/V cache gets the sequence again.
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
from pilotfish.engines.engine import Work
from pilotfish.engines.gpus import IdleGpu
from pilotfish.engines.language_model import Execution, Output
from pilotfish.wire.keys import EdgeKeys

_log = logging.getLogger("pilotfish.edge")

FIRST_TRIAL = 2**62  # number of the first trial pass; other passes have smaller numbers
_TRIAL_NUMBERS = count(FIRST_TRIAL)
_FIRST_PASS_S = 600.0  # time limit (s) of a trial pass at the start
_PAUSE_S = 0.2  # longest wait (s) for events in `Target.pause`
_LOG_EVERY_S = 5.0  # interval (s) between log entries about missing nodes


class Scores(NamedTuple):
    """Result of a pass: an output for each work, or one error for the whole pass.

    The outputs are views, which the target's next call may overwrite.
    """

    number: int
    outputs: Sequence[Output] = ()
    error: Exception | None = None


class TargetOptions(NamedTuple):
    """Arguments of `open_target`.

    artifact: the edge's artifact, with vocabulary and end tokens. on_idle: function that is called
    a few times per second during a wait for nodes, with the present problem.
    """

    config: EdgeConfig
    artifact: Artifact
    keys: EdgeKeys | None
    metrics: EdgeMetrics
    on_idle: Callable[[str], None] = lambda problem: None


class Target(ABC):
    """Computes passes. Used by the serving thread.

    Attributes:
        context: number of positions of each slot.
        digest: identity of the target (hex); targets with different outputs have different digests.
        has_hidden_states: whether outputs have hidden states.
        model_logits: whether the logits come from one model. Otherwise they come from an ensemble,
            whose models process their logits by `Work.options`.
        vocab_size: width of an ensemble's rows; 0 for one model.
        lanes: number of parts that compute in parallel; slot s is in lane s mod lanes.
        depth: upper limit of passes under way in one lane.
        concurrent_passes: number of passes of a lane that different nodes compute at the same time;
            waiting jobs are spread over them.
        chunks_per_pass: number of a prompt's chunks in one pass; above 1 if stages pipeline them.
        execution: provider, precision and threads in this process; None: nodes compute.
        idle_gpu: the GPU of this machine that the target leaves idle; None if there is none.
    """

    context: int
    digest: str
    has_hidden_states: bool = True
    model_logits: bool = True
    vocab_size: int = 0
    lanes: int = 1
    depth: int = 1
    concurrent_passes: int = 1
    chunks_per_pass: int = 1
    execution: Execution | None = None
    idle_gpu: IdleGpu | None = None

    @abstractmethod
    def start(self, number: int, works: Sequence[Work]) -> None:
        """Start a pass; errors, also errors of nodes, are returned with its scores.

        A tree needs an output row for each of its nodes and for the token before it.
        """

    @abstractmethod
    def cached(self, slot: int, tokens: NDArray[np.uint32], rows: int) -> int:
        """Return the number of first tokens that a pass with these last rows need not compute.

        Only for a slot that is in no pass.
        """

    @abstractmethod
    def clear(self, slot: int) -> None:
        """Empty a slot that is in no pass."""

    @abstractmethod
    def collect_scores(self) -> Sequence[Scores]:
        """Return the scores of passes that finished after the last call; do not wait."""

    @property
    def sources(self) -> "Sequence[zmq.Socket[bytes] | int]":
        """Sockets and descriptors to poll; after an event, call `collect_scores`."""
        return ()

    @property
    def due_s(self) -> float | None:
        """Seconds until `collect_scores` must be called even without events; None: no need."""
        return None

    @property
    def problem(self) -> str:
        """Present problems of the target's nodes, in a few words; "" if there is none."""
        return ""

    @property
    def status(self) -> str:
        """Figures of the target for the status line, in a few words; "" if there are none."""
        return ""

    @property
    def nodes(self) -> Mapping[str, bool]:
        """Node name → whether the node takes part now. Thread-safe."""
        return {}

    @property
    def fatal_error(self) -> str:
        """Reason why this process can never use the target again; "" if it can."""
        return ""

    def close(self) -> None:
        """Close the connections to the target's nodes."""
        return

    def run(
        self,
        number: int,
        works: Sequence[Work],
        timeout_s: float = _FIRST_PASS_S,
    ) -> Sequence[Output]:
        """Run a pass, wait for its outputs and return them; raise the pass's error."""
        self.start(number, works)
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
        """Wait for events of the target, up to `_PAUSE_S`."""
        poller = zmq.Poller()
        for source in self.sources:
            poller.register(source, zmq.POLLIN)
        due_s = self.due_s
        poller.poll(int(1e3 * min(_PAUSE_S, _PAUSE_S if due_s is None else due_s)))


def time_pass(target: Target, width: int) -> float:
    """Return the seconds of a pass over ``width`` tokens in the empty slot 0, with all rows."""
    tokens = np.zeros(width, np.uint32)
    begun_s = time.perf_counter()
    try_pass(target, tokens, width)
    return time.perf_counter() - begun_s


def try_pass(target: Target, tokens: NDArray[np.uint32], rows: int) -> Output:
    """Run a pass at temperature 1 over these tokens [n] in the empty slot 0; return its output.

    No session may have the slot.
    """
    target.clear(0)
    (output,) = target.run(next(_TRIAL_NUMBERS), [Work(0, tokens, rows)])
    return output


def split_outputs(
    works: Sequence[Work], logits: NDArray[np.float32], hidden: NDArray[np.float32]
) -> list[Output]:
    """Split the logits and hidden states [Σ rows, …] of a pass into one output per work."""
    outputs, end = [], 0
    for work in works:
        begin, end = end, end + work.rows
        outputs.append(Output(logits[begin:end], hidden[begin:end]))
    return outputs


def wait_for_nodes(
    target: Target,
    complete: Callable[[], bool],
    on_idle: Callable[[str], None],
    patience_s: float | None,
) -> None:
    """Wait until ``complete()`` is true, which means that all of the target's nodes are ready.

    patience_s: time limit, after which the function returns; None: no limit. on_idle: function that
    is called during the wait with the present problem. Raises `TargetLostError` if the target is
    lost for good.
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
