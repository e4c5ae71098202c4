"""``pilotfish judge``: make decision heads for ``wisv``, and relaxations for ``adaptive``."""

from collections.abc import Sequence
from importlib import import_module

from pilotfish.cli import named_in
from pilotfish.cli.options import Commands, choices_of

_ACTIONS = ("questions", "mine", "relabel", "train", "sweep", "calibrate")


def add_to(commands: Commands, arguments: Sequence[str] = ()) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "judge",
        help="make decision heads for protocol wisv, and calibrate protocol adaptive",
        description="Makes a decision head from questions: mine the mismatches of a pair, "
        "inspect how channels relabel them, train the head, sweep its thresholds. Makes a "
        "relaxation for protocol adaptive from prompts: calibrate.",
    )
    actions = choices_of(parser)
    for name in named_in(_ACTIONS, arguments):
        import_module(f"{__name__}.{name}").add_to(actions)
