"""``pilotfish field``: measure latency, report it, replay it, hold it against the papers."""

from pilotfish.cli.field import measure, paper, replay, report
from pilotfish.cli.options import Commands

_ACTIONS = (measure, report, replay, paper)


def add_to(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "field", help="measure latency, report it, replay it", description="Measuring in the field."
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    for action in _ACTIONS:
        action.add_to(actions)
