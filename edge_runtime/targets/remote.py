"""A target whose passes are made by nodes: the table of those under way, and when one is given up.

In:  passes that start, and what the nodes make of them. Out: their scores, or `TargetLostError`
     for one that has taken too long.
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

    spans: what is left to send of it. started_s and sent_s: by ``time.monotonic()``; sent_s: when
    its last step was sent, None as long as it is to be.
    """

    number: int
    spans: list[Span]
    started_s: float
    sent_s: float | None = None


P = TypeVar("P", bound=RemotePass)


class RemoteTarget(Target, Generic[P]):
    """A target with nodes; what kind of nodes is up to the subclass."""

    def __init__(self) -> None:
        self._passes: dict[int, P] = {}  # by number, the oldest first
        self._scores: list[Scores] = []  # of passes that have finished

    def finished(self) -> Sequence[Scores]:
        """Hear the nodes and see to them; the scores of the passes that are over."""
        now_s = time.monotonic()
        self._attend(now_s)
        for one in list(self._passes.values()):
            if now_s >= self._gives_up_at(one):
                self._fail(one, TargetLostError(self._complaint(one, now_s)))
        scores, self._scores = self._scores, []
        return scores

    @property
    def due_s(self) -> float | None:
        """Seconds until a pass is late or given up, or a node is to be seen to."""
        ends_s = [*self._deadlines(), *map(self._gives_up_at, self._passes.values())]
        return max(0.0, min(ends_s) - time.monotonic()) if ends_s else None

    @abstractmethod
    def _attend(self, now_s: float) -> None:
        """Hear the nodes, bring in what they have made, and send what can be sent."""

    @abstractmethod
    def _deadlines(self) -> Iterable[float]:
        """When `_attend` is needed even without news, by ``time.monotonic()``."""

    @abstractmethod
    def _gives_up_at(self, one: P) -> float:
        """When a pass has taken too long, by ``time.monotonic()``."""

    @abstractmethod
    def _complaint(self, one: P, now_s: float) -> str:
        """What is said of a pass that has taken too long."""

    def _forget(self, one: P) -> None:
        """It is not known what the nodes hold of the slots of a pass that failed."""
        return

    def _finish(self, one: P, outputs: Sequence[Output]) -> None:
        del self._passes[one.number]
        self._scores.append(Scores(one.number, outputs))

    def _fail(self, one: P, error: Exception) -> None:
        del self._passes[one.number]
        self._forget(one)
        self._scores.append(Scores(one.number, error=error))
