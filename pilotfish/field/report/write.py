"""Write a report: runs in, a folder with ``report.html`` and its plots out."""

from collections.abc import Callable, Sequence
from pathlib import Path

from pilotfish.field.report.measured import Measured
from pilotfish.field.report.page import page
from pilotfish.field.report.pictures import draw

PAGE = "report.html"


def write(
    runs: Sequence[Measured], folder: Path, show: Callable[[int, int], None] = lambda *_: None
) -> Path:
    """Write page and plots into ``folder``, which is created; return the page's path.

    show: called after each plot with how many of how many are done. OSError where something cannot
    be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / PAGE
    path.write_text(page(runs, draw(runs, folder, show)), encoding="utf-8")
    return path
