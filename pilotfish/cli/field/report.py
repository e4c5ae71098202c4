"""``pilotfish field report``: show measurements as one HTML page with plots."""

import argparse
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from rich.console import Console

from pilotfish.base.errors import UnsupportedError
from pilotfish.base.progress import ProgressDisplay
from pilotfish.cli.options import Commands, json_option, write_json
from pilotfish.lab.field.report.measured import read_run, with_unique_names

_EXAMPLE = """\
example:
  pilotfish field report office.pilotfish lte.pilotfish --out report
  xdg-open report/report.html                 needs no network, nor any other file
"""


def add_to(actions: Commands) -> None:
    """Register the action."""
    parser = actions.add_parser(
        "report",
        help="show measurements as a page with plots",
        description="Makes one HTML page of one or more run files, and the plots as PNG "
        "files.\nNeeds the extra 'field' (matplotlib).",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="run files, made by field measure or field watch",
    )
    parser.add_argument(
        "--out",
        required=True,
        type=Path,
        metavar="DIR",
        help="folder to write the page and the plots into",
    )
    json_option(parser)
    parser.set_defaults(run=_run)


def _expect_others(results: Sequence[Path], runs: Sequence[Path]) -> None:
    """Raise `UnsupportedError` if a result is one of the run files, also by a link."""
    for result, run in product(results, runs):
        if result.exists() and result.samefile(run):
            raise UnsupportedError(
                f"The report would overwrite the run file {run}: name another folder by --out, or "
                "another file by --json."
            )


def _run(args: argparse.Namespace) -> int:
    from pilotfish.lab.field.report.report_page import PAGE, write  # late: imports matplotlib

    runs = with_unique_names([read_run(path) for path in args.runs])
    results = [args.out / PAGE, *args.out.glob("*.png")]
    if args.json not in (None, "-"):
        results.append(Path(args.json))
    _expect_others(results, args.runs)
    with ProgressDisplay() as display:
        page = write(runs, args.out, lambda done, total: display.show("drawing", done, total))
    if args.json:
        write_json(args.json, {"page": str(page), "runs": [run.as_json() for run in runs]})
    notes = Console(stderr=True, highlight=False)
    notes.print(f"written: {page}", soft_wrap=True, markup=False)
    return 0
