"""Compare the tokens of a window with the target's own choices.

Both ends choose argmax(log p + g) with the same Gumbel noise g (no noise at temperature 0). A draft
token is right if it equals the target's choice. The comparison needs no distribution, and the
output is the target's own sequence for any draft (protocols `greedy`, `coupled`, `stream`).

A *mismatch* is a draft token that is not the target's argmax after the draft tokens before it. One
target pass finds all mismatches, and forgiving one of them does not change the later ones. A
decision head may *forgive* mismatches (wisv §III-A, §V). If it forgives none, the result is the
same as under `greedy`; if it forgives all, the whole window is accepted.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray


def count_agreed(
    window: Sequence[int] | NDArray[np.uint32], choose: Callable[[int], int]
) -> tuple[int, int]:
    """Return the number of leading tokens that equal the target's choices, and the next choice.

    window [γ]. choose: returns the target's choice at a position, 0 to γ; called up to the first
    difference. The next choice is the target's token there, or its token after the window.
    """
    for index, token in enumerate(window):
        choice = choose(index)
        if choice != token:
            return index, choice
    return len(window), choose(len(window))


def mismatches(
    window: Sequence[int] | NDArray[np.uint32], choices: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the positions in the window [γ] at which the target chose another token; i64 [m].

    choices: the target's argmax after the root and after each token of the window, i64 [γ + 1].
    Raises ValueError for any other number of choices.
    """
    # i64 [γ]
    ids = np.asarray(window, dtype=np.int64)
    if choices.shape != (len(ids) + 1,):
        raise ValueError(
            f"A window of {len(ids)} tokens needs {len(ids) + 1} choices, not an array of shape "
            f"{choices.shape}."
        )
    return np.flatnonzero(ids != choices[:-1]).astype(np.int64, copy=False)


def accept_forgiven(
    window: Sequence[int] | NDArray[np.uint32],
    choices: NDArray[np.int64],
    rejected: Sequence[bool] | NDArray[np.bool_],
) -> tuple[int, int, int]:
    """Return the number of accepted tokens, the token after them, and the forgiven mismatches.

    window [γ], choices [γ + 1]: as for `mismatches`. rejected [m]: whether each mismatch is
    rejected, in order. Acceptance ends at the first rejected mismatch, and the target's choice
    replaces it; later decisions have no effect. Without a rejection the whole window is accepted,
    and the target's choice after the window follows. Raises ValueError if the counts do not fit.
    """
    positions = mismatches(window, choices)
    verdicts = np.asarray(rejected, dtype=np.bool_)
    if verdicts.shape != positions.shape:
        raise ValueError(
            f"{len(positions)} mismatches need one verdict each, not an array of shape "
            f"{verdicts.shape}."
        )
    ending = np.flatnonzero(verdicts)
    forgiven = int(ending[0]) if len(ending) else len(positions)
    accepted = int(positions[forgiven]) if len(ending) else len(window)
    return accepted, int(choices[accepted]), forgiven
