"""Acceptance of a chain of draft tokens (Leviathan et al.; tslt Algorithm 3, ratio corrected).

Words: the *window* x₁…x_γ was drawn from q₁…q_γ; p₁…p_{γ+1} are the target's distributions at the
same positions and after the last. A token is *accepted* with probability min(1, p(x)/q(x)); the
first one that is not is replaced by a sample of the *residual* norm(max(0, p − q)); when all are
accepted the *bonus* is a sample of p_{γ+1}. The committed tokens then follow p exactly, whatever q.

p and q may be given in any float dtype and need to sum to 1 only roughly: each row is divided by
its float64 sum, which is what "sampled from these numbers" means under a race (see `randomness`).
"""

import numpy as np
from numpy.typing import NDArray

from speculation.distributions import Floats

Ids = NDArray[np.integer]


def acceptance(window: Ids, q: Floats, p: Floats) -> NDArray[np.float64]:
    """min(1, p(xᵢ)/q(xᵢ)) for window [γ], q [γ, V], p [≥ γ, V]; float64 [γ]. q(xᵢ) must be > 0."""
    gamma = len(window)
    rows = np.arange(gamma)
    # [γ]
    p_x = p[rows, window].astype(np.float64) / p[:gamma].sum(axis=1, dtype=np.float64)
    q_x = q[rows, window].astype(np.float64) / q.sum(axis=1, dtype=np.float64)
    ratio: NDArray[np.float64] = np.minimum(1.0, p_x / q_x)
    return ratio


def accepted_count(accepts: NDArray[np.bool_]) -> int:
    """Length of the accepted prefix: the tokens before the first False of [γ]."""
    return int(np.argmin(np.append(accepts, False)))


def residual(p: Floats, q: Floats) -> NDArray[np.float64]:
    """norm(max(0, p − q)) of two rows [V]; float64 [V].

    Where p ≤ q everywhere the draft was certain to be accepted and nobody may ask for the residual
    but by rounding; p itself is the answer then.
    """
    # [V]
    exact_p: NDArray[np.float64] = p.astype(np.float64) / p.sum(dtype=np.float64)
    exact_q = q.astype(np.float64) / q.sum(dtype=np.float64)
    rest: NDArray[np.float64] = np.maximum(0.0, exact_p - exact_q)
    mass = rest.sum()
    if mass > 0.0:
        rest /= mass
        return rest
    return exact_p


def matching_prefix(window: Ids, choices: Ids) -> int:
    """Greedy verification: how many window tokens [γ] equal the target's choices [≥ γ]."""
    return accepted_count(window == choices[: len(window)])
