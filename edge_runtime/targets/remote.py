"""The base of targets with nodes: the table of passes under way, and their time-outs.

In:  passes, and the nodes' results. Out: scores, or `TargetLostError` for a pass that has taken too
     long.
"""

import time
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from pilotfish.edge_runtime.targets.target import Scores, Span, Target
from pilotfish.engines.decoder import Output
from pilotfish.wire.errors import TargetLostError


@dataclass(eq=False)
class RemotePass:
    """A pass under way.

    spans: still to be sent. started_s, sent_s: start, and when its last step was sent (None before
    that), by ``time.monotonic()``.
    """

    number: int
    spans: list[Span]
    started_s: float
    sent_s: float | None = None


P = TypeVar("P", bound=RemotePass)


class RemoteTarget(Target, Generic[P]):
    """A target with nodes; their kind is the subclass's."""

    def __init__(self) -> None:
        self._passes: dict[int, P] = {}  # by number, the oldest first
        self._scores: list[Scores] = []  # of passes that have finished

    def finished(self) -> Sequence[Scores]:
        """Let the subclass work (`_work`), give up overdue passes, and return finished scores."""
        now_s = time.monotonic()
        self._work(now_s)
        for one in list(self._passes.values()):
            if now_s >= self._gives_up_at(one):
                self._fail(one, TargetLostError(self._complaint(one, now_s)))
        scores, self._scores = self._scores, []
        return scores

    @property
    def due_s(self) -> float | None:
        """Seconds until `finished` must be called again, for a time-out or a node."""
        ends_s = [*self._deadlines(), *map(self._gives_up_at, self._passes.values())]
        return max(0.0, min(ends_s) - time.monotonic()) if ends_s else None

    @abstractmethod
    def _work(self, now_s: float) -> None:
        """Take the nodes' results, and send what can be sent."""

    @abstractmethod
    def _deadlines(self) -> Iterable[float]:
        """The times at which `_work` is due even without messages, by ``time.monotonic()``."""

    @abstractmethod
    def _gives_up_at(self, one: P) -> float:
        """Return when a pass is given up, by ``time.monotonic()``."""

    @abstractmethod
    def _complaint(self, one: P, now_s: float) -> str:
        """Return the error message for a pass that has taken too long."""

    def _forget(self, one: P) -> None:
        """Treat the slots of a failed pass as empty, since the nodes' content is unknown."""
        return

    def _finish(self, one: P, outputs: Sequence[Output]) -> None:
        del self._passes[one.number]
        self._scores.append(Scores(one.number, outputs))

    def _fail(self, one: P, error: Exception) -> None:
        del self._passes[one.number]
        self._forget(one)
        self._scores.append(Scores(one.number, error=error))
