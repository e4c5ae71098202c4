"""What a token takes with a drafter: in rounds of the best window, and under `ahead`.

In:  how many drafts come true, and the paces of both ends and the link. Out: seconds a token, and
     which of several drafters is worth having.

pass_s, here and below, are seconds of a target's pass that takes 0, 1, … drafts; draft_s those of a
drafter's. Bytes are left out: ids alone cross the link.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from pilotfish.speculation.ahead import draft_length, price, survival, token_costs

GAIN = 1.05  # below it the target may as well be left alone
ALIKE = 0.97  # of the fastest: as fast, within what times repeat to
_TAIL = 512  # depths of a run beyond those given, which go on as the last one


def best_window(
    tokens: Sequence[float], *, rtt_s: float, draft_s: float, pass_s: Sequence[float]
) -> tuple[int, float]:
    """Find the window with the least seconds a token in rounds, and these (tslt (5), (8)).

    tokens: of a round with windows of 1, 2, …; there is a pass for each of them.
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
    """Compute the seconds of a token under `ahead`, of a lone session.

    hazards: α at each depth of a run, f64 [n]; it goes on as the last. pass_s: its length tells the
    most drafts that a pass takes.
    """
    run = survival(np.append(acceptance_by_depth, np.full(_TAIL, acceptance_by_depth[-1])))
    costs = token_costs(
        run,
        rtt_s=rtt_s,
        draft_s=draft_s,
        pass_s=pass_s,
        most_ahead=draft_length(run),
        price=price(pass_s),
    )
    return costs.token_s


def pick_drafter(tokens_per_s: Mapping[str, float]) -> str:
    """Name the first of those that are as fast as the fastest: list the smallest first."""
    most = max(tokens_per_s.values())
    return next(name for name, rate in tokens_per_s.items() if rate >= ALIKE * most)
