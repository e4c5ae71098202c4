"""Progress reports of a run."""

from __future__ import annotations

from collections.abc import Callable

StageReport = Callable[[str, int, int, "float | None"], None]
"""Called as report(stage, steps done, steps in all, seconds left or None)."""

ANSWERS = "answers"  # the stage that completes several steps at once
