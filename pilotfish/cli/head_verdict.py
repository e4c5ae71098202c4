"""What a head's card says about its worth: the results of `judge sweep --update-head`, as text."""

from pilotfish.edge_runtime.head_file import HeadCard
from pilotfish.lab.judge.baselines import RULES

_NAMES = {"coin": "a coin", "gap": "a bound of the target's logit gap"}


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
