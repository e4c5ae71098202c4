"""A head's worth, on its card: `judge sweep --update-head` stores it, and `demo wisv` tells it.

In:  the results of a sweep at the head's recommended threshold. Out: entries in the card's record
     of training; and a sentence about them.
"""

from collections.abc import Iterable

from msgspec import structs

from pilotfish.edge_runtime.head_file import HeadCard, Training, Value
from pilotfish.lab.judge.baselines import RULES
from pilotfish.lab.judge.figures import Figure
from pilotfish.lab.judge.rivals import Rivalry

_NAMES = {"coin": "a coin", "gap": "a bound of the target's logit gap"}


def with_worth(training: Training, figure: Figure, compared: Iterable[Rivalry]) -> Training:
    """Return the record of training with these results, in place of those of an earlier sweep.

    figure: the results at the recommended threshold. compared: the sweep's comparisons; those of
    other settings have no effect.
    """
    ours = {each.rule: each for each in compared if each.setting == figure.setting}
    worth: dict[str, Value] = {
        "swept": figure.n,
        "gained": figure.gained,
        "gained_low": figure.gained_within[0],
        "gained_high": figure.gained_within[1],
        "rounds_saved": figure.rounds_saved,
    }
    for rule in RULES:
        rival = ours.get(rule)
        values = (None, None, None) if rival is None else (rival.gained, *rival.gained_within)
        worth |= zip((rule, f"{rule}_low", f"{rule}_high"), values, strict=True)
    known = {name: value for name, value in worth.items() if value is not None}
    others = {name: value for name, value in training.options.items() if name not in worth}
    return structs.replace(training, options={**others, **known})


def verdict(card: HeadCard) -> str:
    """Return a sentence: whether the head beats rules that forgive the same share."""
    record = card.training.options
    if not {"swept", *RULES} <= record.keys():
        return (
            f"The head {card.name} has not been compared with a coin and a bound of the target's "
            "logit gap: its worth is unknown."
        )
    beaten = [_NAMES[rule] for rule in RULES if float(record[f"{rule}_low"] or 0) > 0]
    compared = "; ".join(
        f"{100 * float(record[rule] or 0):+.1f} points of right answers against {_NAMES[rule]} "
        f"({100 * float(record[f'{rule}_low'] or 0):+.1f}…"
        f"{100 * float(record[f'{rule}_high'] or 0):+.1f})"
        for rule in RULES
    )
    worth = f"beats {' and '.join(beaten)}" if beaten else "beats neither of two simpler rules"
    return (
        f"The head {worth} that forgive the same share of mismatches, on {record['swept']} "
        f"questions kept out of its training: {compared}."
    )
