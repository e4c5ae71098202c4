"""Verification with a decision head that forgives mismatches (wisv §III-A, §V).

In: the window's ids, the target's own choices after the draft's prefixes, and the head's decision
on each mismatch. Out: how many tokens are accepted, the token after them, how many were forgiven.

A *mismatch* is a draft token that is not the target's argmax after the draft's own prefix, so one
pass of the target finds them all, and a forgiven one changes no later one. A mismatch
that is not rejected is *forgiven*. With all rejected this is `speculation.coupling`'s rule for
`greedy`; with none the window is accepted whole.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def mismatches(
    window: Sequence[int] | NDArray[np.uint32], choices: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Find where in the window [γ] the target chose otherwise; i64 [m], ascending, from 0.

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
    """Return accepted tokens, the token that follows, and the mismatches forgiven among them.

    window [γ] and choices [γ+1] as for `mismatches`; rejected: of its mismatches in order, [m].
    Acceptance ends at the first rejected one, where the target's choice takes its place; later
    decisions have no effect. Without a rejected one the whole window is accepted, and the target's
    choice after it follows. Raises ValueError where the counts do not fit.
    """
    found = mismatches(window, choices)
    verdicts = np.asarray(rejected, dtype=np.bool_)
    if verdicts.shape != found.shape:
        raise ValueError(f"{len(found)} mismatches need as many verdicts, not {verdicts.shape}.")
    ending = np.flatnonzero(verdicts)
    forgiven = int(ending[0]) if len(ending) else len(found)
    accepted = int(found[forgiven]) if len(ending) else len(window)
    return accepted, int(choices[accepted]), forgiven
