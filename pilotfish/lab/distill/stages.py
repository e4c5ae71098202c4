"""The names of a run's stages, for progress reports."""

from __future__ import annotations

from collections.abc import Callable

StageReport = Callable[[str, int, int, "float | None"], None]
"""A callback, called as report(stage, steps done, number of all steps, seconds left or None)."""

ANSWERS = "answers"  # the collection of answers, which several sessions make in parallel
