"""Count the tokens that a model computes."""

from __future__ import annotations

from collections.abc import Sequence

from pilotfish.engines.language_model import LanguageModel, Output
from pilotfish.engines.passes import Pass


class PassCounter:
    """Counts a model's passes from now on. counts: tokens of each pass, over all slots."""

    def __init__(self, model: LanguageModel) -> None:
        self._forward = model.forward
        model.forward = self._counted
        self.counts: list[int] = []

    def _counted(self, passes: Sequence[Pass]) -> list[Output]:
        self.counts += [len(item.tokens) for item in passes]
        return self._forward(passes)

    def take(self) -> int:
        """Return the number of tokens since the last call."""
        total = sum(self.counts)
        self.counts.clear()
        return total
