"""Estimate σ(K), the mass that the drafter's distributions lose if they keep only K tokens.

The device measures σ at one position of each window, for all K at once; only positions that the
target verified count (`drafting.window`). From σ follows the acceptance at any K and with any
number of candidates (`window_acceptance`). Bytes follow from the measured sizes of frames.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from pilotfish.device_runtime.choice.pass_pace import RecentValues
from pilotfish.device_runtime.plan import Plan
from pilotfish.device_runtime.record import Round
from pilotfish.speculation.cut_mass import CUT_SIZES, Values

# σ at each K of `CUT_SIZES` before any evidence: the default drafter's at temperature 1
_PRIOR: Final[Values] = np.array([0.141, 0.097, 0.066, 0.045, 0.029, 0.018, 0.006, 0.001])
_LOG_SIZES: Final[Values] = np.log(CUT_SIZES)
_PRIOR_WEIGHT: Final = 4.0  # weight of the prior, in positions
_FADE: Final = 0.97  # factor by which the weight of σ shrinks with each answer, as that of α
_MAX_SAMPLINGS: Final = 64
_MAX_TOP_KS: Final = 64  # maximum number of pairs of protocol and K whose bytes are kept


class CutMasses:
    """σ(K) by the drafter's temperature and min_p: a mean over many positions, as σ varies widely.

    vocabulary: number of tokens; a K this large cuts nothing. Requests may name any temperature, so
    only the last `_MAX_SAMPLINGS` are kept.
    """

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        # temperature and min_p → faded number of positions, and the faded sum of their σ at each K
        self._sums: dict[tuple[float, float], tuple[float, Values]] = {}
        self._sigmas: dict[tuple[float, float, int], float] = {}  # cached σ, with K

    def add(self, plan: Plan, rounds: Sequence[Round]) -> None:
        """Add the cut masses of an answer's rounds."""
        measured = [round_.cut_masses for round_ in rounds if round_.cut_masses]
        if not measured:
            return
        self._sigmas.clear()
        sampling = _sampling(plan)
        prior = _PRIOR_WEIGHT, _PRIOR_WEIGHT * _PRIOR
        count, sums = self._sums.pop(sampling, prior)
        total = _FADE * sums + np.sum(measured, axis=0)
        self._sums[sampling] = _FADE * count + len(measured), total  # the newest comes last
        if len(self._sums) > _MAX_SAMPLINGS:
            del self._sums[next(iter(self._sums))]

    def sigma(self, plan: Plan, top_k: int) -> float:
        """Estimate σ at this K, with the plan's sampling of the drafter; 0: all tokens."""
        if not top_k or top_k >= self._vocabulary:
            return 0.0
        sampling = _sampling(plan)
        key = *sampling, top_k
        if key not in self._sigmas:
            count, sums = self._sums.get(sampling, (1.0, _PRIOR))
            self._sigmas[key] = float(np.interp(np.log(top_k), _LOG_SIZES, sums)) / count
        return self._sigmas[key]


class RatiosByTopK:
    """Ratios by protocol and K; another K of the protocol stands in for one without data.

    Requests may name any K, so only the last `_MAX_TOP_KS` are kept.
    """

    def __init__(self) -> None:
        self._ratios: dict[tuple[str, int], RecentValues] = {}
        self._last_top_k: dict[str, int] = {}

    def of(self, protocol: str, top_k: int) -> RecentValues:
        """Return the ratios to add to."""
        self._last_top_k[protocol] = top_k
        ratios = self._ratios.pop((protocol, top_k), RecentValues())
        self._ratios[protocol, top_k] = ratios  # the newest comes last
        if len(self._ratios) > _MAX_TOP_KS:
            del self._ratios[next(iter(self._ratios))]
        return ratios

    def mean(self, protocol: str, top_k: int) -> float:
        """Return the mean ratio at this K or, without data, at the last K; else 1."""
        ratios = self._ratios.get((protocol, top_k))
        if ratios is None:
            ratios = self._ratios.get((protocol, self._last_top_k.get(protocol, top_k)))
        return 1.0 if ratios is None else ratios.mean(1.0)


def _sampling(plan: Plan) -> tuple[float, float]:
    sampling = plan.drafting.sampling
    return round(sampling.temperature, 1), round(sampling.min_p, 2)
