"""What makes the target's passes, wherever its weights are.

In:  numbered passes over a few slots, each with the sequence that its slot is to hold.
Out: their scores: the logits and hidden states of the rows that were wanted, or what went wrong.

The serving loop starts a pass and goes on; a target in this process has finished by then, others
finish when their nodes have answered. Law: a slot is in one pass at a time; what a slot holds
follows from its last finished pass and the path that was kept since, whatever the target's nodes
went through in between: a node that lost its keys and values is fed them again, out of the
sequence.
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

from pilotfish.edge_runtime.config import EdgeConfig
from pilotfish.edge_runtime.tally import Tally
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.decoder import Output
from pilotfish.wire.errors import TargetLostError
from pilotfish.wire.keys import EdgeKeys

_log = logging.getLogger("pilotfish.edge")

_TRIALS = count(2**62)  # numbers of passes that no scheduler starts
_LOADED_S = 600.0  # for one pass at the start
_PAUSE_S = 0.2
_TELL_S = 5.0  # between two words about nodes that are waited for


class Span(NamedTuple):
    """What one slot is to do in a pass.

    tokens: u32 [n], the whole sequence up to the last token of this pass; the slot holds the first
    ``base`` of them. rows: wanted of the last ones. parents: i64 [nodes], if the last tokens are a
    tree: of each node the one before it, −1 the token before the tree. temperature: that logits are
    meant for, of an ensemble; 0 is greedy.
    """

    slot: int
    tokens: NDArray[np.uint32]
    base: int
    rows: int
    parents: NDArray[np.int64] | None = None
    temperature: float = 0.0

    @property
    def size(self) -> int:
        """Tokens of the pass."""
        return len(self.tokens) - self.base

    @property
    def nodes(self) -> int:
        """Of these, the last so many are a tree."""
        return 0 if self.parents is None else len(self.parents)


class Scores(NamedTuple):
    """What a pass has come to: an output for each span, or an error for them all.

    The outputs are views that the target may overwrite when it is called again.
    """

    number: int
    outputs: Sequence[Output] = ()
    error: Exception | None = None


class Opening(NamedTuple):
    """What a target is opened with.

    artifact: the one that the edge was started with: its vocabulary and end tokens hold. meanwhile:
    to be called a few times a second while nodes are waited for.
    """

    config: EdgeConfig
    artifact: Artifact
    keys: EdgeKeys | None
    tally: Tally
    meanwhile: Callable[[str], None] = lambda trouble: None


class Target(ABC):
    """One owner: the serving thread.

    Attributes:
        context: positions of each slot.
        digest: which target this is, in hex digits; two that answer differently differ in it.
        states: whether answers have hidden states.
        lanes: parts that compute side by side; slot s is in lane s mod lanes.
        depth: passes that may be under way in one lane.
        abreast: of these, so many are computed at the same time, by different nodes: the jobs that
            wait are shared out over them.
        pieces: chunks of a prompt that a pass takes: more than one where they follow each other.
    """

    context: int
    digest: str
    states: bool = True
    lanes: int = 1
    depth: int = 1
    abreast: int = 1
    pieces: int = 1

    @abstractmethod
    def start(self, number: int, spans: Sequence[Span]) -> None:
        """Begin a pass; never raises for what is wrong with it or with a node."""

    @abstractmethod
    def keep(self, slot: int, path: Sequence[int]) -> None:
        """Of the tree that the slot's last pass ended in, keep these nodes, numbered from 0."""

    @abstractmethod
    def finished(self) -> Sequence[Scores]:
        """The scores of the passes that have finished since the last call; never waits."""

    @property
    def sources(self) -> "Sequence[zmq.Socket[bytes] | int]":
        """What may be polled to learn of news; after it, call `finished`."""
        return ()

    @property
    def due_s(self) -> float | None:
        """Seconds until `finished` should be called even without news; None: no need."""
        return None

    @property
    def trouble(self) -> str:
        """What is wrong with its nodes at the moment, in a few words; "" if nothing is."""
        return ""

    @property
    def nodes(self) -> Mapping[str, bool]:
        """Its nodes by name, and whether each takes part at the moment. For any thread."""
        return {}

    @property
    def over(self) -> str:
        """Why it can never compute again in this process; "" as long as it can."""
        return ""

    def close(self) -> None:
        """Let go of nodes and connections."""
        return

    def run(
        self,
        number: int,
        spans: Sequence[Span],
        timeout_s: float = _LOADED_S,
    ) -> Sequence[Output]:
        """Make a pass and wait for its outputs; raises its error."""
        self.start(number, spans)
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            for scores in self.finished():
                if scores.number == number:
                    if scores.error is not None:
                        raise scores.error
                    return scores.outputs
            self.pause()
        raise TargetLostError(f"The target did not answer within {timeout_s:g} s. {self.trouble}")

    def pause(self) -> None:
        """Wait for news, for a moment."""
        poller = zmq.Poller()
        for source in self.sources:
            poller.register(source, zmq.POLLIN)
        due_s = self.due_s
        poller.poll(int(1e3 * min(_PAUSE_S, _PAUSE_S if due_s is None else due_s)))


def pass_s(target: Target, width: int) -> float:
    """Seconds of a pass over so many tokens of slot 0, with all their rows, from nothing."""
    tokens = np.zeros(width, np.uint32)
    begun_s = time.perf_counter()
    target.run(next(_TRIALS), [Span(0, tokens, 0, width)])
    return time.perf_counter() - begun_s


def shared_out(
    spans: Sequence[Span], logits: NDArray[np.float32], hidden: NDArray[np.float32]
) -> list[Output]:
    """Each span's own of the rows of them all, [Σ rows, …]."""
    outputs, end = [], 0
    for span in spans:
        begin, end = end, end + span.rows
        outputs.append(Output(logits[begin:end], hidden[begin:end]))
    return outputs


def wait_for_nodes(
    target: Target,
    complete: Callable[[], bool],
    meanwhile: Callable[[str], None],
    patience_s: float | None,
) -> None:
    """Wait until the target's nodes are ``complete``, or for so long; None: as long as it takes.

    `TargetLostError` if they never will be.
    """
    begun_s = told_s = time.monotonic()
    target.finished()
    while not complete():
        now_s = time.monotonic()
        if target.over:
            raise TargetLostError(target.over)
        if patience_s is not None and now_s - begun_s > patience_s:
            return
        if now_s - told_s > _TELL_S:
            told_s = now_s
            _log.warning("waiting for nodes: %s", target.trouble)
        meanwhile(target.trouble)
        target.pause()
        target.finished()
