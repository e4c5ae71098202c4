"""Agreement of a chain of draft tokens with the target's own choices.

`greedy` and `coupled` accept while the draft token is the one that the target chooses itself: its
argmax, or its sample under noise that both ends share. No distribution is needed for that.
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
