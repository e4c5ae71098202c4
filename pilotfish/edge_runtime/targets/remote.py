"""Base class of targets with nodes: the table of passes under way, and their time-outs.

In:  passes, and the nodes' results. Out: scores, or `TargetLostError` for a pass that took too
     long.
"""

import time
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from pilotfish.base.errors import TargetLostError
from pilotfish.edge_runtime.targets.target import Scores, Span, Target
from pilotfish.engines.onnx_decoder import Output

_LOOK_S = 0.3  # longest normal time between two updates of the clock


@dataclass(eq=False)
class RemotePass:
    """A pass under way.

    spans: spans still to be sent. started_s: when it started. sent_s: when its last step was sent;
    None before that. Times are by the target's clock.
    """

    number: int
    spans: list[Span]
    started_s: float
    sent_s: float | None = None


class WakingClock:
    """A clock in seconds that stops while this process is stopped.

    While the edge is suspended, paused with its machine or starved, it reads no answers; that must
    not make nodes late. Time in which the process works counts.
    """

    def __init__(self) -> None:
        self._updated_s, self._ran_s = time.monotonic(), time.process_time()
        self._stopped_s = 0.0

    def update(self) -> float:
        """Return the time; must be called at least every `_LOOK_S` seconds."""
        now_s, ran_s = time.monotonic(), time.process_time()
        worked_s = max(0.0, ran_s - self._ran_s)
        self._stopped_s += max(0.0, now_s - self._updated_s - _LOOK_S - worked_s)
        self._updated_s, self._ran_s = now_s, ran_s
        return self.now_s

    @property
    def now_s(self) -> float:
        """The time, counted as running since the last update."""
        return time.monotonic() - self._stopped_s


P = TypeVar("P", bound=RemotePass)


class RemoteTarget(Target, Generic[P]):
    """A target with nodes; the subclass knows their kind."""

    def __init__(self) -> None:
        self._clock = WakingClock()
        self._passes: dict[int, P] = {}  # by number, oldest first
        self._scores: list[Scores] = []  # scores of finished passes

    def collect_scores(self) -> Sequence[Scores]:
        """Call `_work`, fail passes that timed out, and return finished scores."""
        now_s = self._clock.update()
        self._work(now_s)
        for pending in list(self._passes.values()):
            if now_s >= self._timeout_at(pending):
                self._fail(pending, TargetLostError(self._timeout_message(pending, now_s)))
        scores, self._scores = self._scores, []
        return scores

    @property
    def due_s(self) -> float | None:
        """Seconds until `collect_scores` must be called again, for a time-out or a node."""
        ends_s = [*self._deadlines(), *map(self._timeout_at, self._passes.values())]
        return max(0.0, min(ends_s) - self._clock.now_s) if ends_s else None

    @abstractmethod
    def _work(self, now_s: float) -> None:
        """Process the nodes' results, and send steps that can be sent."""

    @abstractmethod
    def _deadlines(self) -> Iterable[float]:
        """Return when `_work` is due even without messages, by the target's clock."""

    @abstractmethod
    def _timeout_at(self, pending: P) -> float:
        """Return when a pass times out, by the target's clock."""

    @abstractmethod
    def _timeout_message(self, pending: P, now_s: float) -> str:
        """Return the error message for a pass that timed out."""

    def _forget(self, pending: P) -> None:
        """Treat the slots of a failed pass as empty, because their content is unknown."""
        return

    def _finish(self, pending: P, outputs: Sequence[Output]) -> None:
        del self._passes[pending.number]
        self._scores.append(Scores(pending.number, outputs))

    def _fail(self, pending: P, error: Exception) -> None:
        del self._passes[pending.number]
        self._forget(pending)
        self._scores.append(Scores(pending.number, error=error))
