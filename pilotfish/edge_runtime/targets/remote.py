"""Base class of targets with nodes: it tracks the passes under way and their time-outs.

In:  passes, and the nodes' results. Out: scores, or `TargetLostError` for a pass that timed out.
"""

import time
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from pilotfish.base.errors import TargetLostError
from pilotfish.edge_runtime.targets.target import Scores, Target
from pilotfish.engines.engine import Work
from pilotfish.engines.language_model import Output

_LOOK_S = 0.3  # longest time (s) between two updates of the clock while the process runs


@dataclass(eq=False)
class RemotePass:
    """Pass under way; all times are on the target's clock.

    started_s: time of the start. sent_s: time at which its last step was sent; None: not sent yet.
    """

    number: int
    works: Sequence[Work]
    started_s: float
    sent_s: float | None = None


class WakingClock:
    """Clock in seconds that stops while this process cannot run.

    An edge that is suspended, paused with its machine, or without processor time reads no answers;
    its nodes must not count as late because of that. Time in which the process computes counts.
    """

    def __init__(self) -> None:
        self._updated_s, self._ran_s = time.monotonic(), time.process_time()
        self._stopped_s = 0.0

    def update(self) -> float:
        """Update the clock and return the time; call it at least every `_LOOK_S` seconds."""
        now_s, ran_s = time.monotonic(), time.process_time()
        worked_s = max(0.0, ran_s - self._ran_s)
        self._stopped_s += max(0.0, now_s - self._updated_s - _LOOK_S - worked_s)
        self._updated_s, self._ran_s = now_s, ran_s
        return self.now_s

    @property
    def now_s(self) -> float:
        """Present time; the time since the last update counts in full."""
        return time.monotonic() - self._stopped_s


P = TypeVar("P", bound=RemotePass)


class RemoteTarget(Target, Generic[P]):
    """Base class of a target with nodes; a subclass for each kind of node."""

    def __init__(self) -> None:
        self._clock = WakingClock()
        self._passes: dict[int, P] = {}  # number → pass under way, oldest first
        self._scores: list[Scores] = []  # scores of finished passes

    def collect_scores(self) -> Sequence[Scores]:
        """Process the nodes' results, fail passes that timed out, and return finished scores."""
        now_s = self._clock.update()
        self._work(now_s)
        for pending in list(self._passes.values()):
            if now_s >= self._timeout_at(pending):
                self._fail(pending, TargetLostError(self._timeout_message(pending, now_s)))
        scores, self._scores = self._scores, []
        return scores

    @property
    def due_s(self) -> float | None:
        """Seconds until `collect_scores` must be called even without events; None: no need."""
        ends_s = [*self._deadlines(), *map(self._timeout_at, self._passes.values())]
        return max(0.0, min(ends_s) - self._clock.now_s) if ends_s else None

    @abstractmethod
    def _work(self, now_s: float) -> None:
        """Process the nodes' results, and send steps that can be sent."""

    @abstractmethod
    def _deadlines(self) -> Iterable[float]:
        """Return the times (target's clock) at which `_work` is due even without messages."""

    @abstractmethod
    def _timeout_at(self, pending: P) -> float:
        """Return the time (target's clock) at which a pass times out."""

    @abstractmethod
    def _timeout_message(self, pending: P, now_s: float) -> str:
        """Return the error message for a pass that timed out."""

    def _forget(self, pending: P) -> None:
        """Record the slots of a failed pass as empty, because their content is unknown."""
        return

    def _finish(self, pending: P, outputs: Sequence[Output]) -> None:
        del self._passes[pending.number]
        self._scores.append(Scores(pending.number, outputs))

    def _fail(self, pending: P, error: Exception) -> None:
        del self._passes[pending.number]
        self._forget(pending)
        self._scores.append(Scores(pending.number, error=error))
