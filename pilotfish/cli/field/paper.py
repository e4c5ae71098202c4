"""``pilotfish field paper``: a paper's closed forms as tables and plots."""

import argparse
from pathlib import Path

from rich.console import Console

from pilotfish.cli.options import Commands, json_option, write_json
from pilotfish.lab.field.papers import PAPERS

_EXAMPLE = """\
example:
  pilotfish field paper dssd --out plots      tables here, pictures in plots/
  pilotfish field paper tslt --json -         every table as JSON, and nothing else
"""


def add_to(actions: Commands) -> None:
    """Register the action."""
    paper = actions.add_parser(
        "paper",
        help="show a paper's closed forms as tables and plots",
        description="Evaluates a paper's equations for its own parameters, and compares them with\n"
        "the numbers that the paper prints. Each constant is marked as the paper's, or as ours if\n"
        "the paper has none.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    paper.add_argument("paper", choices=PAPERS, metavar="PAPER", help=", ".join(PAPERS))
    paper.add_argument(
        "--out", type=Path, metavar="DIR", help="draw into DIR (extra 'field': needs matplotlib)"
    )
    json_option(paper)
    paper.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    paper = PAPERS[args.paper]
    if args.json:
        write_json(args.json, paper.figures())
    if args.json != "-":
        screen = Console(highlight=False)
        screen.print(f"[bold]{paper.title}[/bold]\n")
        for sheet in (paper.constants_sheet(), *paper.sheets()):
            screen.print(f"[bold]{sheet.title}[/bold]", sheet.table(), sep="\n", end="")
            if sheet.note:
                screen.print(sheet.note, end="\n\n", markup=False)
        for remark in paper.remarks:
            screen.print(f"• {remark}", markup=False)
    if args.out:
        notes = Console(stderr=True, highlight=False)
        args.out.mkdir(parents=True, exist_ok=True)
        for picture in paper.draw(args.out):
            notes.print(f"drawn: {picture}", soft_wrap=True, markup=False)
    return 0
