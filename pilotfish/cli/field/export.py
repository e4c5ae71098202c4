"""``pilotfish field export``: write measurements as tables for other programs."""

import argparse
from pathlib import Path

from rich.console import Console

from pilotfish.base.errors import UnsupportedError
from pilotfish.base.progress import ProgressDisplay
from pilotfish.cli.options import Commands
from pilotfish.lab.field.export.rows import RunRows
from pilotfish.lab.field.export.table_files import expect_parquet, tables
from pilotfish.lab.field.run import Run

_EXAMPLE = """\
example:
  pilotfish field export walk.pilotfish --csv walk
  pilotfish field export boat.pilotfish van.pilotfish --parquet fleet
  duckdb -c "SELECT device, median(rtt_s) FROM 'fleet/rtts.parquet' GROUP BY device"
"""
_SHOWN = 1_000  # rows between two reports of progress


def add_to(actions: Commands) -> None:
    """Register the action."""
    parser = actions.add_parser(
        "export",
        help="write measurements as CSV or Parquet tables",
        description="Writes the tables answers, rounds, probes, outages and rtts of one or more\n"
        "runs or watches into a folder; docs/field.md lists their columns. The columns run and\n"
        "device tell the runs apart. Existing tables are not overwritten.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="run files, made by field measure or field watch, of any format",
    )
    forms = parser.add_mutually_exclusive_group(required=True)
    forms.add_argument(
        "--csv",
        type=Path,
        metavar="DIR",
        help="folder for CSV files (UTF-8); a text that "
        "a spreadsheet would compute, such as =1+1, has a ' in front",
    )
    forms.add_argument(
        "--parquet",
        type=Path,
        metavar="DIR",
        help="folder for Apache Parquet files; needs the extra 'table' (pyarrow)",
    )
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    ending = "csv" if args.parquet is None else "parquet"
    folder: Path = args.csv if args.parquet is None else args.parquet
    if ending == "parquet":
        expect_parquet()
    for path in args.runs:
        Run.open(path).close()  # fail now if one of them is no run file
    _expect_each_once(args.runs)
    with ProgressDisplay() as display, tables(folder, ending) as add:
        done = 0
        for path, name in zip(args.runs, _names(args.runs), strict=True):
            with Run.open(path) as run:
                for table, row in RunRows(run, name):
                    add(table, row)
                    done += 1
                    if done % _SHOWN == 0:
                        display.show(f"exporting {name}, rows", done, None)
    notes = Console(stderr=True, highlight=False)
    notes.print(f"written: {folder} ({done:,} rows)", soft_wrap=True, markup=False)
    return 0


def _expect_each_once(paths: list[Path]) -> None:
    """Raise `UnsupportedError` if a file is named twice: the tables would have its rows twice."""
    files = set()
    for path in paths:
        status = path.stat()
        if (file := (status.st_dev, status.st_ino)) in files:
            raise UnsupportedError(f"{path} is named twice: name each run once.")
        files.add(file)


def _names(paths: list[Path]) -> list[str]:
    """Return the files' names without their ends; of equal names, later ones get numbers."""
    names: list[str] = []
    for path in paths:
        stem = path.stem.encode(errors="replace").decode()
        name, number = stem, 1
        while name in names:
            number += 1
            name = f"{stem} ({number})"
        names.append(name)
    return names
