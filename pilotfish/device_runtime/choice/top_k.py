"""Estimate the acceptance at any K, the number of tokens that the drafter's distributions keep.

K trades bytes for acceptance (tslt §2.4). The device measures σ(K), the mass that K cuts off, at
the first draft of each window, for all K at once. With the acceptance measured so far, this gives
the acceptance at any K (`speculation.cut_mass`). Bytes follow from the measured sizes of frames.

Acceptance is kept as it would be at the protocol's default K, so rounds at any K inform all others.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

import numpy as np

from pilotfish.device_runtime.choice.pass_pace import RecentValues
from pilotfish.device_runtime.plan import Plan
from pilotfish.device_runtime.record import Round
from pilotfish.speculation.cut_mass import CUT_SIZES, Values, acceptance_change

TOP_KS: Final = (16, 32, 64, 256, 1024)  # "auto" chooses among these
# σ at each K of `CUT_SIZES` before any evidence: the default drafter's at temperature 1
_PRIOR: Final = (0.141, 0.097, 0.066, 0.045, 0.029, 0.018, 0.006, 0.001)
_LOG_SIZES: Final[Values] = np.log(CUT_SIZES)


class CutMasses:
    """σ(K) by temperature of the drafter, over the last rounds."""

    def __init__(self) -> None:
        self._values: dict[float, list[RecentValues]] = defaultdict(
            lambda: [RecentValues() for _ in CUT_SIZES]
        )
        self._means: dict[float, Values] = {}

    def add(self, plan: Plan, rounds: Sequence[Round]) -> None:
        """Add the cut masses of an answer's rounds."""
        temperature = _temperature(plan)
        for round_ in rounds:
            for values, mass in zip(self._values[temperature], round_.cut_masses, strict=False):
                values.append(mass)
        self._means.pop(temperature, None)

    def sigma(self, plan: Plan, top_k: int) -> float:
        """Estimate σ at this K, with the plan's temperature of the drafter; 0: all tokens."""
        if not top_k:
            return 0.0
        temperature = _temperature(plan)
        if temperature not in self._means:
            means = [
                values.mean(prior)
                for values, prior in zip(self._values[temperature], _PRIOR, strict=True)
            ]
            self._means[temperature] = np.array(means)
        return float(np.interp(np.log(top_k), _LOG_SIZES, self._means[temperature]))

    def acceptance_change(self, plan: Plan, acceptance: float) -> float:
        """Estimate the acceptance at the plan's K, less that at the default K (``acceptance``)."""
        default = 0 if plan.exchange is None else plan.exchange.default_top_k
        top_k = plan.drafting.sampling.top_k
        if not default or top_k in (0, default) or plan.drafting.sampling.greedy:
            return 0.0
        return acceptance_change(acceptance, self.sigma(plan, default), self.sigma(plan, top_k))


def _temperature(plan: Plan) -> float:
    return round(plan.drafting.sampling.temperature, 1)
