"""Estimate the probability that the target accepts a draft token, learning as text is committed.

In:  each draft's margin, and later whether the target chose the same token. The margin of a
     model's draft is its lead in logits over the second token (`draft_with_margin`). The margin of
     a repeated draft (`LookupMatch`) is the number of equal tokens before it.
Out: the acceptance of a draft, given that every draft before it was right.

The drafter's own probability is a bad estimate. The default pair is one model in two precisions and
agrees in 98 of 100 places; in most of these the drafter gives its choice a probability far below
0.98. The margin has to be compared with the distance between the two models' logits. This distance
differs from pair to pair: about 0.1 logits in the default pair, 1 if the drafter was quantised
twice, 4 if it lacks some layers or was trained separately. Hence the estimator has a family of
curves:

    acceptance(margin) = ceiling · (1 − (1 − floor) · exp(−margin / scale))

The estimate is the mean of the curves, each weighted by its prior and its likelihood on the
compared tokens (Bayes' rule). Old comparisons fade, so the estimate follows a text that changes.
It starts optimistic, since a needless draft costs little and a missing draft costs a target pass.

Repeated drafts follow the same curves. Their scale is a few tokens, and more of them are wrong.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from pilotfish.speculation.distributions import Floats

PRIOR_ACCEPTANCE = 0.8  # acceptance of a model's drafts before any evidence
ENOUGH = 0.3  # lower limit of a window's joint acceptance: ``window="auto"`` ends a window below it
MODEL_PRIOR = 0.5  # prior weight of a scale relative to the next smaller one, for a model's drafts
REPEAT_PRIOR = 1.5  # prior weight of a scale relative to the next smaller one, for repeated drafts

_SCALES = 0.06 * 2.0 ** np.arange(10)  # f64 [scales], in logits or tokens, 0.06 to 31
_FLOORS = {0.3: 0.8, 0.03: 0.1, 0.7: 0.1}  # floor → prior weight; all measured pairs had 0.3
# ceiling → prior weight; a low ceiling fits a drafter that is often wrong at any margin
_CEILINGS = {0.997: 0.94, 0.9: 0.04, 0.5: 0.01, 0.05: 0.01}
_MEMORY = 300.0  # age (comparisons) at which a comparison's weight has faded to 1/e


def _outer(*weights: NDArray[np.float64]) -> NDArray[np.float64]:
    product = weights[0]
    for more in weights[1:]:
        product = np.multiply.outer(product, more)
    return product


_FLAT = 1.0 - np.array(list(_FLOORS))  # f64 [floors]
_CEILING = np.array(list(_CEILINGS))  # f64 [ceilings]


@lru_cache(maxsize=128)  # 128 entries: repeated drafts have few different margins
def _curves(margin: float) -> NDArray[np.float64]:
    """Return each curve's acceptance, f64 [scales, floors, ceilings], all in (0, 1)."""
    missed = np.exp(-max(0.0, margin) / _SCALES)  # max(0.0, NaN) is 0
    return _outer(1.0 - np.multiply.outer(missed, _FLAT), _CEILING)


class AcceptanceEstimator:
    """Estimates acceptance by margin, for one pair of models or for repeats. Not thread-safe.

    scale_prior: prior weight of a scale relative to the next smaller one (half as large).
    """

    def __init__(self, scale_prior: float = MODEL_PRIOR) -> None:
        scales = np.power(scale_prior, np.arange(len(_SCALES)), dtype=np.float64)
        floors, ceilings = (np.array(list(kind.values())) for kind in (_FLOORS, _CEILINGS))
        # f64 [scales, floors, ceilings]
        self._prior = np.log(_outer(scales, floors, ceilings))
        self._evidence = np.zeros_like(self._prior)  # faded log-likelihood of each curve
        self._weighed = False

    def _weigh(self) -> None:
        self._weighed = True
        logarithms = self._prior + self._evidence
        weights = np.exp(logarithms - logarithms.max())
        weights *= _CEILING / weights.sum()
        # the mean of all curves is _most − Σ _fall · exp(−margin / scale)
        self._most = float(weights.sum())
        # f64 [scales]
        self._fall = weights.sum(axis=2) @ _FLAT

    def estimate(self, margin: float) -> float:
        """Return a draft's acceptance in (0, 1), given that the drafts before it are right.

        margin: 0 to infinity, in logits or tokens; a higher margin never has a lower acceptance.
        """
        return self.estimate_each([margin])[0]

    def estimate_each(self, margins: Sequence[float]) -> list[float]:
        """Return the acceptances of n drafts, as `estimate` does for one; margins [n]."""
        if not self._weighed:
            self._weigh()
        # [n, 1]
        numbers = np.array([max(0.0, margin) for margin in margins]).reshape(-1, 1)
        missed = np.exp(-numbers / _SCALES)
        odds: list[float] = (self._most - missed @ self._fall).tolist()
        return odds

    def update(self, margin: float, agreed: bool) -> None:
        """Learn whether the target chose the draft that had this margin."""
        predicted = _curves(margin)
        self._evidence *= 1.0 - 1.0 / _MEMORY
        self._evidence += np.log(predicted if agreed else 1.0 - predicted)
        self._weighed = False


def predicted_acceptance(logits: Floats, candidates: int = 1) -> float:
    """Predict the probability that one of ``candidates`` tokens drawn from q is accepted.

    q is the distribution of ``logits`` [V] at temperature 1. A candidate's acceptance is taken as
    (1 + max q)/2. On drafts of SmolLM2-135M this rises with the true acceptance but exceeds it, by
    up to 0.17 where max q is about 0.75. A window ends after the token at which the product of the
    predictions falls below `ENOUGH`, since later tokens would most likely be rejected. The output's
    law is not biased: the predictions depend only on tokens and distributions that are sent anyway,
    and whether a token is sent never depends on that token
    (docs/decisions/2026-11-21-windows-stop-after-a-token.md).
    """
    likeliest = 1.0 / float(np.exp(logits - logits.max()).sum(dtype=np.float64))
    return float(1.0 - (0.5 * (1.0 - likeliest)) ** candidates)
