"""``pilotfish field``: measure latency, compare drafters, load edges, report, replay, papers."""

from collections.abc import Sequence
from importlib import import_module

from pilotfish.cli import named_in
from pilotfish.cli.options import Commands, choices_of

_ACTIONS = ("measure", "compare", "load", "report", "replay", "paper")


def add_to(commands: Commands, arguments: Sequence[str] = ()) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "field",
        help="measure latency, compare drafters, write reports, replay runs",
        description="Measurements over real links, and their evaluation.",
    )
    actions = choices_of(parser)
    for name in named_in(_ACTIONS, arguments):
        import_module(f"{__name__}.{name}").add_to(actions)
