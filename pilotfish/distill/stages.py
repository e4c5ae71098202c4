"""What a run tells of itself while it lasts."""

from __future__ import annotations

from collections.abc import Callable

StageReport = Callable[[str, int, int, "float | None"], None]
"""Called as told(what is done, steps done, steps in all, seconds left if that is known)."""

ANSWERS = "answers"  # the stage whose steps come back several at once
