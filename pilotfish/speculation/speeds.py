"""Seconds per token with a drafter: in rounds with the best window, and under protocol `ahead`.

In:  acceptance of drafts, pass times of both ends, and the link's RTT. Out: seconds per token, and
     the best of several drafters.

pass_s: seconds of a target pass with 0, 1, … drafts. draft_s: seconds of a drafter pass. Transfer
times are ignored, since only ids cross the link.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from pilotfish.speculation.ahead import draft_cost, draft_length, survival, token_costs

GAIN = 1.05  # lowest speed-up at which a drafter is worth using
ALIKE = 0.97  # share of the fastest speed from which a drafter counts as equally fast
_TAIL = 512  # depths added to a run, with the acceptance of the last measured depth


def best_window(
    tokens: Sequence[float], *, rtt_s: float, draft_s: float, pass_s: Sequence[float]
) -> tuple[int, float]:
    """Return the window with the least seconds per token, and these seconds (tslt (5), (8)).

    tokens: expected tokens of a round with a window of 1, 2, …; pass_s needs an entry for each.
    """
    seconds = {
        window: (window * draft_s + rtt_s + pass_s[window]) / committed
        for window, committed in enumerate(tokens, 1)
    }
    return min(seconds.items(), key=lambda item: item[1])


def hinted_token_s(
    acceptance_by_depth: NDArray[np.float64],
    *,
    rtt_s: float,
    draft_s: float,
    pass_s: Sequence[float],
) -> float:
    """Compute the seconds per token of a lone session under `ahead`.

    acceptance_by_depth: acceptance at each depth of a run, f64 [n]; deeper drafts have the last
    value. pass_s: one entry for each number of drafts that a pass may take, from 0.
    """
    run = survival(np.append(acceptance_by_depth, np.full(_TAIL, acceptance_by_depth[-1])))
    costs = token_costs(
        run,
        rtt_s=rtt_s,
        draft_s=draft_s,
        pass_s=pass_s,
        most_ahead=draft_length(run),
        draft_cost=draft_cost(pass_s),
    )
    return costs.token_s


def pick_drafter(tokens_per_s: Mapping[str, float]) -> str:
    """Return the first drafter that counts as fastest; the caller lists the smallest first."""
    most = max(tokens_per_s.values())
    return next(name for name, rate in tokens_per_s.items() if rate >= ALIKE * most)
