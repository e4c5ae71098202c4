"""Put all rows of a run file on one wall clock."""

from collections.abc import Sequence

import numpy as np

from pilotfish.lab.field.answer import Answer
from pilotfish.lab.field.link_rows import Outage, Probe
from pilotfish.lab.field.run_clock import on_wall_clock


class RowTimes:
    """Times of all rows by the wall clock: of answers, of probes, begin and end of outages.

    Answers of old files have no time by the run's clock; theirs are what the wall clock said.
    """

    def __init__(
        self, every: Sequence[Answer], probes: Sequence[Probe], outages: Sequence[Outage]
    ) -> None:
        pairs = np.array(
            [
                *((answer.clock_s, answer.started_unix_s) for answer in every),
                *((probe.clock_s, probe.began_unix_s) for probe in probes),
                *((outage.began_clock_s, outage.began_unix_s) for outage in outages),
                *((outage.ended_clock_s, outage.ended_unix_s) for outage in outages),
            ],
            np.float64,
        ).reshape(-1, 2)
        known = np.flatnonzero(~np.isnan(pairs).any(axis=1))
        known = known[np.argsort(pairs[known, 0], kind="stable")]
        wall = on_wall_clock(*pairs[known].T)
        at = pairs[:, 1].copy()
        at[known] = wall.unix_s
        self._clock_s, self._unix_s = pairs[known, 0], wall.unix_s
        self.answers, self.probes, begins, ends = np.split(
            at, np.cumsum([len(every), len(probes), len(outages)])
        )
        # an outage without an end is as long as the file tells, at least until it began
        self.outages = np.stack([begins, np.where(np.isnan(ends), begins, ends)], axis=1)
        self.steps = wall.steps

    def at(self, clock_s: float) -> float | None:
        """Return a time by the run's clock as one by the wall clock; None if no row has both."""
        if not len(self._clock_s):
            return None
        row = max(0, int(np.searchsorted(self._clock_s, clock_s, side="right")) - 1)
        return float(self._unix_s[row] + clock_s - self._clock_s[row])
