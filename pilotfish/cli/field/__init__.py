"""``pilotfish field``: measure latency, watch links, load edges; report, replay and export runs."""

from collections.abc import Sequence
from importlib import import_module

from pilotfish.cli import named_in
from pilotfish.cli.configuration import ConfiguredParser
from pilotfish.cli.options import Commands, choices_as

_ACTIONS = ("measure", "watch", "load", "compare", "report", "replay", "export", "paper")


def add_to(commands: Commands, arguments: Sequence[str] = ()) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "field",
        help="measure latency, watch links, load an edge, compare drafters, write reports",
        description="Measurements over real links, and their evaluation.",
    )
    actions = choices_as(ConfiguredParser, parser)
    for name in named_in(_ACTIONS, arguments):
        import_module(f"{__name__}.{name}").add_to(actions)
