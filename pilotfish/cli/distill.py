"""``pilotfish distill``: train a drafter for one target on this machine."""

import argparse

from msgspec import structs
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pilotfish.base.progress import ProgressDisplay
from pilotfish.cli.default_models import target_folder
from pilotfish.cli.extras import export_tools
from pilotfish.cli.flags import add_flags, from_args
from pilotfish.cli.options import Commands, json_option, write_json
from pilotfish.lab.distill.distill_settings import DistillSettings
from pilotfish.lab.distill.measuring import ALL
from pilotfish.lab.distill.outcome import DEPTH, Distilled
from pilotfish.lab.distill.stages import ANSWERS

_DESCRIPTION = """\
Trains a drafter for one target, on this machine. Collects the target's answers (several sessions
at once, over the wire), trains the drafter's weights on these answers in the form in which a
device reads them, and exports the result. Reports the gain on held-out prompts: α, the share of the
target's tokens that the drafter predicts, and S(k), the share of runs with k or more accepted
drafts.

To resume a run that was killed, give the same command again: the run's folder has its whole state
and the report. Needs the extra 'distill' (torch, transformers)."""
_EXAMPLE = """\
example:
  pilotfish distill --draft default --target target --prompts questions.jsonl --out drafter
  pilotfish distill --draft default --edge tcp://10.0.0.2:7077 --keys --minutes 45 --out drafter
  pilotfish device run --draft drafter --edge tcp://10.0.0.2:7077 --keys "Why is the sky blue?"

The edge batches eight sessions into one pass only if its artifact supports it: export the target
with --dialect opset24.

Prompts that resemble the later use help most. The built-in prompts are short and of nine kinds. Two
kinds are never used for training: they show what the drafter forgets.
"""


def add_to(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "distill",
        help="train a drafter for one target",
        description=_DESCRIPTION,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_flags(parser, DistillSettings)
    json_option(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    settings = from_args(args, DistillSettings)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    from pilotfish.lab.distill.distill_report import (
        write,
    )  # imported first: without matplotlib, the command fails before the work

    with export_tools():
        from pilotfish.lab.distill.running import distill

    if settings.target is not None:
        target = target_folder(settings.target, settings.provider)
        settings = structs.replace(settings, target=target)
    with ProgressDisplay(waves={ANSWERS: settings.sessions}) as display:
        distilled = distill(settings, display.show)
    page = write(settings.folder, distilled)
    console.print(_table(distilled))
    console.print(f"trained on {distilled.learnt} answers; the report is {page}", markup=False)
    if args.json:
        write_json(args.json, distilled.figures())
    if args.json != "-":
        print(settings.out)
    return 0


def _table(distilled: Distilled) -> Table:
    table = Table(title=Text(f"{distilled.drafter} for {distilled.target}, on held-out answers"))
    table.add_column("kind")
    for name in ("places", "α before", "after", "change", f"S({DEPTH}) before", "after"):
        table.add_column(name, justify="right")
    for (kind, *_), cells in zip(distilled.rows, distilled.cells, strict=True):
        if kind == ALL:
            table.add_section()
        # a Text, since rich would read brackets in a string as markup
        table.add_row(Text(cells[0]), *cells[1:])
    return table
