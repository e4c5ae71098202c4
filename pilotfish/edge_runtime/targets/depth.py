"""Find how many passes a row of stages should work on at once.

In:  the steps' durations, and each stage's computing time. Out: a number of passes: fewer leave
     stages idle, more only wait before the slowest one.
"""

from collections.abc import Sequence


class PipelineDepth:
    """``passes``: as many as the slowest stage computes while one of them crosses all stages.

    At least the number of stages, and at most the number of slots.
    """

    def __init__(self, stages: int, slots: int) -> None:
        self._least, self._most = min(stages, slots), slots
        self._hops_s = 0.0  # of a step, without computing
        self.passes = self._least

    def learn(self, taken_s: float, compute_ns: Sequence[int], *, alone: bool) -> None:
        """Learn from a step's duration from stage 1 to its answer, and its computing times.

        A step that was not alone may have waited for others: its duration is then an upper bound.
        """
        computed_s = sum(compute_ns) * 1e-9
        hops_s = max(0.0, taken_s - sum(compute_ns[1:]) * 1e-9)
        self._hops_s = hops_s if alone else min(hops_s, self._hops_s)
        slowest_s = max(compute_ns, default=0) * 1e-9
        if slowest_s > 0.0:
            fitting = round((self._hops_s + computed_s) / slowest_s)
            self.passes = min(max(self._least, fitting), self._most)
