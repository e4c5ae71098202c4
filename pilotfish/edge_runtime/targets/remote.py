"""The base of targets with nodes: the table of passes under way, and their time-outs.

In:  passes, and the nodes' results. Out: scores, or `TargetLostError` for a pass that has taken too
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

_LOOK_S = 0.3  # longer than a loop waits for news of its nodes


@dataclass(eq=False)
class RemotePass:
    """A pass under way.

    spans: still to be sent. started_s, sent_s: start, and when its last step was sent (None before
    that), by the target's clock.
    """

    number: int
    spans: list[Span]
    started_s: float
    sent_s: float | None = None


class WakingClock:
    """Tells seconds, and stands still while this process does.

    What nodes said while the edge was suspended, paused with its machine or starved was not read:
    it is no reason to call them late. Time that the process works in counts.
    """

    def __init__(self) -> None:
        self._updated_s, self._ran_s = time.monotonic(), time.process_time()
        self._stopped_s = 0.0

    def update(self) -> float:
        """Return the time; to be called again and again, at least every `_LOOK_S`."""
        now_s, ran_s = time.monotonic(), time.process_time()
        worked_s = max(0.0, ran_s - self._ran_s)
        self._stopped_s += max(0.0, now_s - self._updated_s - _LOOK_S - worked_s)
        self._updated_s, self._ran_s = now_s, ran_s
        return self.now_s

    @property
    def now_s(self) -> float:
        """The time, as far as is known since the last look."""
        return time.monotonic() - self._stopped_s


P = TypeVar("P", bound=RemotePass)


class RemoteTarget(Target, Generic[P]):
    """A target with nodes; their kind is the subclass's."""

    def __init__(self) -> None:
        self._clock = WakingClock()
        self._passes: dict[int, P] = {}  # by number, the oldest first
        self._scores: list[Scores] = []  # of passes that have finished

    def collect_scores(self) -> Sequence[Scores]:
        """Let the subclass work (`_work`), give up overdue passes, and return finished scores."""
        now_s = self._clock.update()
        self._work(now_s)
        for pending in list(self._passes.values()):
            if now_s >= self._timeout_at(pending):
                self._fail(pending, TargetLostError(self._timeout_message(pending, now_s)))
        scores, self._scores = self._scores, []
        return scores

    @property
    def due_s(self) -> float | None:
        """Seconds until `finished` must be called again, for a time-out or a node."""
        ends_s = [*self._deadlines(), *map(self._timeout_at, self._passes.values())]
        return max(0.0, min(ends_s) - self._clock.now_s) if ends_s else None

    @abstractmethod
    def _work(self, now_s: float) -> None:
        """Take the nodes' results, and send what can be sent."""

    @abstractmethod
    def _deadlines(self) -> Iterable[float]:
        """The times at which `_work` is due even without messages, by the target's clock."""

    @abstractmethod
    def _timeout_at(self, pending: P) -> float:
        """Return when a pass is given up, by the target's clock."""

    @abstractmethod
    def _timeout_message(self, pending: P, now_s: float) -> str:
        """Return the error message for a pass that has taken too long."""

    def _forget(self, pending: P) -> None:
        """Treat the slots of a failed pass as empty, since the nodes' content is unknown."""
        return

    def _finish(self, pending: P, outputs: Sequence[Output]) -> None:
        del self._passes[pending.number]
        self._scores.append(Scores(pending.number, outputs))

    def _fail(self, pending: P, error: Exception) -> None:
        del self._passes[pending.number]
        self._forget(pending)
        self._scores.append(Scores(pending.number, error=error))
