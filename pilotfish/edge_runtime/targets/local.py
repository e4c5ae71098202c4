"""Target in this process: an engine that computes each pass in `start`."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pilotfish.edge_runtime.targets.target import Scores, Target, TargetOptions
from pilotfish.engines.engine import Engine, Work, open_engine


class LocalTarget(Target):
    """Target that is an engine; the serving thread runs it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._finished: list[Scores] = []
        self.context = engine.model.context
        self.digest = engine.model.artifact.manifest.digest
        self.execution = engine.model.execution
        self.idle_gpu = engine.model.idle_gpu

    def start(self, number: int, works: Sequence[Work]) -> None:
        """Compute the pass; `collect_scores` returns the scores or the error."""
        try:
            scores = Scores(number, self._engine.run(works))
        except Exception as error:
            scores = Scores(number, error=error)
        self._finished.append(scores)

    def cached(self, slot: int, tokens: NDArray[np.uint32], rows: int) -> int:
        """Return the number of first tokens that the engine need not compute."""
        return self._engine.cached(slot, tokens, rows)

    def clear(self, slot: int) -> None:
        """Empty a slot of the engine."""
        self._engine.clear(slot)

    def collect_scores(self) -> Sequence[Scores]:
        """Return the scores of the passes since the last call."""
        finished, self._finished = self._finished, []
        return finished


def open_target(options: TargetOptions) -> LocalTarget:
    """Load the artifact's weights, and return the target."""
    config = options.config
    return LocalTarget(
        open_engine(
            options.artifact,
            slots=config.limits.sessions,
            context=config.limits.context,
            threads=config.target_threads,
            provider=config.provider,
        )
    )
