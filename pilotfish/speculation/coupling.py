"""Compare draft tokens with the target's own choices: `greedy`, and coupling by shared noise.

Where both ends choose by argmax(log p + g) with the same Gumbel noise g (none at temperature 0), a
draft token is right if it equals the target's choice. That needs no distribution, and the output is
the target's own sequence, whatever was drafted.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray


def count_agreed(
    window: Sequence[int] | NDArray[np.uint32], choose: Callable[[int], int]
) -> tuple[int, int]:
    """Count the tokens [γ] that agree with ``choose(0)``, ``choose(1)``, …; return the next, too.

    ``choose`` is called only as often as needed: the last choice is the token that differs, or the
    one after the window.
    """
    for index, token in enumerate(window):
        choice = choose(index)
        if choice != token:
            return index, choice
    return len(window), choose(len(window))
