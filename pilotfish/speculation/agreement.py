"""Compare the tokens of a window with the target's own choices.

Where both ends choose by argmax(log p + g) with the same Gumbel noise g (none at temperature 0), a
draft token is right if it equals the target's choice. That needs no distribution, and the output is
the target's own sequence, whatever the draft (`greedy`, `coupled`, `stream`).

A *mismatch* is a draft token that is not the target's argmax after the draft's own prefix. One pass
of the target finds them all, and forgiving one changes no later one. A decision head may *forgive*
some (wisv §III-A, §V): with none forgiven that is the rule of `greedy`, with all the window is
accepted whole.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray


def count_agreed(
    window: Sequence[int] | NDArray[np.uint32], choose: Callable[[int], int]
) -> tuple[int, int]:
    """Count the tokens [γ] that equal ``choose(0)``, ``choose(1)``, …; return the next choice, too.

    ``choose`` is called only as often as needed. The last choice is the token that differs, or the
    one after the window.
    """
    for index, token in enumerate(window):
        choice = choose(index)
        if choice != token:
            return index, choice
    return len(window), choose(len(window))


def mismatches(
    window: Sequence[int] | NDArray[np.uint32], choices: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the positions in the window [γ] where the target chose another token; i64 [m].

    choices: the target's argmax after the root and after each token of the window, i64 [γ+1].
    Raises ValueError for another count.
    """
    # i64 [γ]
    ids = np.asarray(window, dtype=np.int64)
    if choices.shape != (len(ids) + 1,):
        raise ValueError(f"A window of {len(ids)} needs one choice more, not {choices.shape}.")
    return np.flatnonzero(ids != choices[:-1]).astype(np.int64, copy=False)


def accept_forgiven(
    window: Sequence[int] | NDArray[np.uint32],
    choices: NDArray[np.int64],
    rejected: Sequence[bool] | NDArray[np.bool_],
) -> tuple[int, int, int]:
    """Return the number of accepted tokens, the token after them, and the forgiven mismatches.

    window [γ] and choices [γ+1] as for `mismatches`; rejected: of its mismatches in order, [m].
    Acceptance ends at the first rejected mismatch, which the target's choice replaces; later
    decisions have no effect. Without a rejection the whole window is accepted, and the target's
    choice after it follows. Raises ValueError if the counts do not fit.
    """
    positions = mismatches(window, choices)
    verdicts = np.asarray(rejected, dtype=np.bool_)
    if verdicts.shape != positions.shape:
        raise ValueError(
            f"{len(positions)} mismatches need as many verdicts, not {verdicts.shape}."
        )
    ending = np.flatnonzero(verdicts)
    forgiven = int(ending[0]) if len(ending) else len(positions)
    accepted = int(positions[forgiven]) if len(ending) else len(window)
    return accepted, int(choices[accepted]), forgiven
