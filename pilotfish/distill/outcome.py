"""Figures of a run: agreement before and after, by depth and by kind, and the learning curve."""

from __future__ import annotations

from typing import Any

import msgspec

from pilotfish.distill.measuring import ALL
from pilotfish.distill.training_rows import Agreement

DEPTH = 4  # k of the S(k) in tables: the default window of drafting protocols


class Distilled(msgspec.Struct, frozen=True, kw_only=True):
    """A run's figures.

    learnt, held: numbers of answers for training, and held out. tokens: tokens of all answers.
    left_out: prompts too long for the context. kinds: kinds trained on. before, after: agreement of
    the artifacts on held-out answers, by kind and for `ALL`. step: step of the best weights, of
    ``steps``. curve: the lines of learning.jsonl.
    """

    drafter: str
    target: str
    artifact: str
    learnt: int
    held: int
    tokens: int
    left_out: int
    kinds: list[str]
    before: dict[str, Agreement]
    after: dict[str, Agreement]
    step: int
    steps: int
    curve: list[dict[str, Any]]

    @property
    def rows(self) -> list[tuple[str, int, float, float, float, float]]:
        """Kind, positions, α and S(4) before and after, for each kind; trained kinds first."""
        order = [*self.kinds, *(kind for kind in sorted(self.before) if kind not in self.kinds)]
        names = [kind for kind in order if kind in self.before and kind != ALL]
        return [
            (
                kind,
                self.before[kind].positions,
                self.before[kind].alpha,
                self.after[kind].alpha,
                self.before[kind].survival[DEPTH - 1],
                self.after[kind].survival[DEPTH - 1],
            )
            for kind in [*names, ALL]
        ]

    def unlearnt(self, kind: str) -> bool:
        """Whether a kind was never trained on; such kinds show forgetting."""
        return kind != ALL and kind not in self.kinds

    def figures(self) -> dict[str, Any]:
        """Return all figures for JSON, with names for the fields of `Agreement`."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        for name, agreements in (("before", self.before), ("after", self.after)):
            values[name] = {kind: agreement._asdict() for kind, agreement in agreements.items()}
        return values
