"""Agreement of draft tokens with the target's own choices: `greedy`, and coupling by shared noise.

Where both ends choose by argmax(log p + g) with the same Gumbel noise g (none at temperature 0), a
draft token is right if it is the one that the target chooses itself. No distribution is needed to
see that, and what comes out is the target's own sequence, whatever was drafted (DESIGN §5, §6.11).
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray


def agreed(
    window: Sequence[int] | NDArray[np.uint32], choose: Callable[[int], int]
) -> tuple[int, int]:
    """How many of the window's tokens [γ] agree with ``choose(0)``, ``choose(1)``, …; what follows.

    Only as many choices are made as are needed: the last is the token that differs, or the one
    after the window.
    """
    for index, token in enumerate(window):
        choice = choose(index)
        if choice != token:
            return index, choice
    return len(window), choose(len(window))
