"""The results of a run: agreement before and after training, by depth and kind; learning curve."""

from __future__ import annotations

from typing import Any

import msgspec

from pilotfish.lab.distill.measuring import ALL
from pilotfish.lab.distill.training_rows import Agreement

DEPTH = 4  # k of the survival S(k) that tables show: the default window of drafting protocols


class Distilled(msgspec.Struct, frozen=True, kw_only=True):
    """A run's results.

    learnt: number of answers for training. held: number of held-out answers. tokens: number of
    tokens in all answers. left_out: number of prompts that exceed the context. kinds: kinds of
    prompts in training. before, after: agreement of the artifact before and after training, on
    held-out answers, by kind and for `ALL`. step: step that gave the best weights. steps: number of
    steps made. curve: lines of learning.jsonl.
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
        """Return the rows of the report's table, one for each kind; trained kinds come first.

        A row has the kind, its positions, α before and after, S(4) before and after training.
        """
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

    @property
    def cells(self) -> list[list[str]]:
        """Return the rows as text, with the change of α after both α."""
        return [
            [
                f"{kind} (not learnt)" if self.unlearnt(kind) else kind,
                f"{positions}",
                *(f"{before:.3f}", f"{after:.3f}", f"{after - before:+.3f}"),
                *(f"{survival:.3f}" for survival in survivals),
            ]
            for kind, positions, before, after, *survivals in self.rows
        ]

    def unlearnt(self, kind: str) -> bool:
        """Return whether a kind was not in training; its agreement shows what was forgotten."""
        return kind != ALL and kind not in self.kinds

    def figures(self) -> dict[str, Any]:
        """Return all results for JSON; each `Agreement` becomes an object with field names."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        for name, agreements in (("before", self.before), ("after", self.after)):
            values[name] = {kind: agreement._asdict() for kind, agreement in agreements.items()}
        return values
