"""Estimate the acceptance at any K, the number of tokens that the drafter's distributions keep.

K trades bytes for acceptance (tslt §2.4). The device measures σ(K), the mass that K cuts off, at
the first draft of each window, for all K at once. With the acceptance measured so far, this gives
the acceptance at any K (`speculation.cut_mass`). Bytes follow from the measured sizes of frames.

Acceptance is kept as it would be at the protocol's default K, so rounds at any K inform all others.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from pilotfish.device_runtime.choice.pass_pace import RecentValues
from pilotfish.device_runtime.plan import Plan
from pilotfish.device_runtime.record import Round
from pilotfish.speculation.cut_mass import CUT_SIZES, Values, acceptance_change

TOP_KS: Final = (16, 32, 64, 256, 1024)  # "auto" chooses among these
# σ at each K of `CUT_SIZES` before any evidence: the default drafter's at temperature 1
_PRIOR: Final[Values] = np.array([0.141, 0.097, 0.066, 0.045, 0.029, 0.018, 0.006, 0.001])
_LOG_SIZES: Final[Values] = np.log(CUT_SIZES)
_MAX_TEMPERATURES: Final = 64


class CutMasses:
    """σ(K) by temperature of the drafter, over the last rounds.

    Requests may name any temperature, so only the last `_MAX_TEMPERATURES` are kept.
    """

    def __init__(self) -> None:
        # temperature → the last values for each K, and their means
        self._values: dict[float, list[RecentValues]] = {}
        self._means: dict[float, Values] = {}

    def add(self, plan: Plan, rounds: Sequence[Round]) -> None:
        """Add the cut masses of an answer's rounds."""
        measured = [round_.cut_masses for round_ in rounds if round_.cut_masses]
        if not measured:
            return
        temperature = _temperature(plan)
        by_size = self._values.pop(temperature, None) or [RecentValues() for _ in CUT_SIZES]
        for values, masses in zip(by_size, zip(*measured, strict=True), strict=True):
            values.extend(masses)
        self._values[temperature] = by_size  # the newest comes last
        self._means[temperature] = np.array([values.mean(0.0) for values in by_size])
        if len(self._values) > _MAX_TEMPERATURES:
            oldest = next(iter(self._values))
            del self._values[oldest], self._means[oldest]

    def sigma(self, plan: Plan, top_k: int) -> float:
        """Estimate σ at this K, with the plan's temperature of the drafter; 0: all tokens."""
        if not top_k:
            return 0.0
        means = self._means.get(_temperature(plan), _PRIOR)
        return float(np.interp(np.log(top_k), _LOG_SIZES, means))

    def acceptance_change(self, plan: Plan, acceptance: float) -> float:
        """Estimate the acceptance at the plan's K, less that at the default K (``acceptance``)."""
        default = 0 if plan.exchange is None else plan.exchange.default_top_k
        top_k = plan.drafting.sampling.top_k
        if not default or top_k in (0, default) or plan.drafting.sampling.greedy:
            return 0.0
        return acceptance_change(acceptance, self.sigma(plan, default), self.sigma(plan, top_k))


def _temperature(plan: Plan) -> float:
    return round(plan.drafting.sampling.temperature, 1)
