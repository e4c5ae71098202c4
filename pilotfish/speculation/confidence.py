"""When to stop drafting: ``window="auto"``.

The drafter predicts the acceptance of what it drafts from its own distribution: β ≈ (1 + max q)/2
with q at temperature 1. On drafts of SmolLM2-135M that rises with the real β but exceeds it, by up
to 0.17 where max q is about 0.75. A window ends after the token at which the product of the
predictions falls below `ENOUGH`: later tokens would most likely be drafted in vain.

The rule uses only distributions and tokens that are sent in any case, and it decides on drafting
the *next* token after the last one is drawn and kept, so it cannot bias the law: whether a token is
sent never depends on that token (docs/decisions/2026-11-21-windows-stop-after-a-token.md).
"""

import numpy as np

from pilotfish.speculation.distributions import Floats

ENOUGH = 0.3


def predicted_acceptance(logits: Floats, candidates: int = 1) -> float:
    """Predict that one of so many candidates, drawn after ``logits`` [V], is accepted."""
    likeliest = 1.0 / float(np.exp(logits - logits.max()).sum(dtype=np.float64))
    return float(1.0 - (0.5 * (1.0 - likeliest)) ** candidates)
