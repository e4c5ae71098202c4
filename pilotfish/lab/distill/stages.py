"""The names of a run's stages, for progress reports."""

from __future__ import annotations

from typing import Protocol

ANSWERS = "answers"  # the collection of answers, which several sessions make in parallel


class StageReport(Protocol):
    """A callback that shows the progress of a stage."""

    def __call__(
        self, label: str, done: int, total: int | None, left_s: float | None = None, /
    ) -> None:
        """Show that ``done`` of ``total`` steps are finished; None: unknown. left_s: time left."""
