"""Write a report: runs in, a folder with ``report.html`` and its plots out."""

from collections.abc import Callable, Sequence
from pathlib import Path

from pilotfish.base.files import PRIVATE, private_folder, write_whole
from pilotfish.field.report.measured import MeasuredRun
from pilotfish.field.report.pictures import draw
from pilotfish.field.report.report_page import page

PAGE = "report.html"


def write(
    runs: Sequence[MeasuredRun], folder: Path, show: Callable[[int, int], None] = lambda *_: None
) -> Path:
    """Write page and plots into ``folder``, which is created; return the page's path.

    show: called after each plot with how many of how many are done. OSError where something cannot
    be written.
    """
    private_folder(folder)
    path = folder / PAGE
    write_whole(path, page(runs, draw(runs, folder, show)).encode(), PRIVATE)
    return path
