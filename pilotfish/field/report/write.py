"""Runs in, a folder out: ``report.html``, and beside it the plots that the page also holds."""

from collections.abc import Callable, Sequence
from pathlib import Path

from pilotfish.field.report.measured import Measured
from pilotfish.field.report.page import page
from pilotfish.field.report.pictures import draw

PAGE = "report.html"


def write(
    runs: Sequence[Measured], folder: Path, show: Callable[[int, int], None] = lambda *_: None
) -> Path:
    """Write page and plots into ``folder``, which is made; returns the page's path.

    show: is told after each plot how many of how many are done. OSError where something cannot be
    written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / PAGE
    path.write_text(page(runs, draw(runs, folder, show)), encoding="utf-8")
    return path
