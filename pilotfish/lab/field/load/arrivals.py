"""When a load's device asks its next prompt, and which.

Closed loop: a device thinks after each answer, for an exponentially distributed time. So N devices
have at most N answers under way, as N people have.

Open loop: each device has a Poisson stream of questions, which does not wait for the answers. A
question that comes during an answer waits in the device; its time counts from its arrival.
"""

from collections.abc import Iterator, Sequence

import numpy as np


class Arrivals:
    """The questions of one device, in seconds since the load began.

    seed, device: devices and seeds have independent times. think_s: mean of the time to think, s.
    rate: questions per second; None: the closed loop. prompts: number of prompts.
    """

    def __init__(
        self, *, seed: int, device: int, think_s: float, rate: float | None, prompts: int
    ) -> None:
        self._random = np.random.default_rng([seed, device])
        self._think_s, self._rate = think_s, rate
        self._prompts = _orders(self._random, prompts)
        self._last_s = 0.0

    def next_s(self, ended_s: float) -> float:
        """Return the time of the next question. ended_s: end of the last answer; 0 at first."""
        if self._rate is None:
            return ended_s + float(self._random.exponential(self._think_s))
        self._last_s += float(self._random.exponential(1.0 / self._rate))
        return self._last_s

    def next_prompt(self) -> int:
        """Return the next prompt: each comes once before any comes again."""
        return next(self._prompts)


def _orders(random: np.random.Generator, count: int) -> Iterator[int]:
    """Yield random permutations; none begins with the end of the last one.

    So no prompt comes twice in succession, since the second answer would find it read.
    """
    last = -1
    while True:
        order: Sequence[int] = random.permutation(count).tolist()
        if order[0] == last:
            order = [*order[1:], order[0]]
        yield from order
        last = order[-1]
