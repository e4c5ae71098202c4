"""Estimate the probability that the target accepts a draft token, learning as text is committed.

In:  each draft's margin, and later whether the target chose the same token. A model draft's margin
     is its lead over the next token in logits (`draft_with_margin`); a repeated draft's
     (`LookupMatch`) is the number of equal tokens before it.
Out: the acceptance of a draft, given that every draft before it was right.

The drafter's own probability is a bad estimate: the default pair, two precisions of one model,
agrees in 98 of 100 places, in most of which the drafter gives its choice far less. What matters is
the margin relative to the distance between the two models' logits, which differs from pair to pair:
about 0.1 logits there, 1 for a drafter that was quantised twice, 4 for models with layers left out
or trained separately. Hence a family of curves

    acceptance(margin) = ceiling · (1 − (1 − floor) · exp(−margin / scale))

and their mean, each weighted by its prior and its likelihood on the compared tokens (Bayes' rule).
Old comparisons fade, so that the estimate follows a text that changes. It starts optimistic, since
a draft too many costs little and a draft too few costs a target pass.

Repeated drafts follow the same curves: their scale is a few tokens, and more of them are wrong.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from pilotfish.speculation.distributions import Floats

ENOUGH = 0.3  # predicted acceptance of a whole window, below which ``window="auto"`` ends it
MODEL_PRIOR = 0.5  # prior weight of each scale, relative to half that scale: model drafts
REPEAT_PRIOR = 1.5  # the same for repeated drafts

_SCALES = 0.06 * 2.0 ** np.arange(10)  # f64 [scales], logits or tokens, to 31
_FLOORS = {0.3: 0.8, 0.03: 0.1, 0.7: 0.1}  # prior weights; all measured pairs had 0.3
# prior weights; low ceilings fit drafters that are often wrong whatever the margin
_CEILINGS = {0.997: 0.94, 0.9: 0.04, 0.5: 0.01, 0.05: 0.01}
_MEMORY = 300.0  # comparisons after which the weight has faded to 1/e


def _outer(*weights: NDArray[np.float64]) -> NDArray[np.float64]:
    product = weights[0]
    for more in weights[1:]:
        product = np.multiply.outer(product, more)
    return product


_FLAT = 1.0 - np.array(list(_FLOORS))  # f64 [floors]
_CEILING = np.array(list(_CEILINGS))  # f64 [ceilings]


@lru_cache(maxsize=128)  # repeats have only a few lengths
def _curves(margin: float) -> NDArray[np.float64]:
    """Return each curve's acceptance, f64 [scales, floors, ceilings], all in (0, 1)."""
    missed = np.exp(-max(0.0, margin) / _SCALES)  # max(0.0, NaN) is 0
    return _outer(1.0 - np.multiply.outer(missed, _FLAT), _CEILING)


class AcceptanceEstimator:
    """Estimates acceptance by margin, for one pair of models or for repeats. Not thread-safe.

    scale_prior: prior weight of each scale, relative to half that scale.
    """

    def __init__(self, scale_prior: float = MODEL_PRIOR) -> None:
        scales = np.power(scale_prior, np.arange(len(_SCALES)), dtype=np.float64)
        floors, ceilings = (np.array(list(kind.values())) for kind in (_FLOORS, _CEILINGS))
        # f64 [scales, floors, ceilings]
        self._prior = np.log(_outer(scales, floors, ceilings))
        self._evidence = np.zeros_like(self._prior)  # faded log-likelihood of the comparisons
        self._weighed = False

    def _weigh(self) -> None:
        self._weighed = True
        logarithms = self._prior + self._evidence
        weights = np.exp(logarithms - logarithms.max())
        weights *= _CEILING / weights.sum()
        # the mean of all curves is most − Σ fall · exp(−margin / scale)
        self._most = float(weights.sum())
        # f64 [scales]
        self._fall = weights.sum(axis=2) @ _FLAT

    def estimate(self, margin: float) -> float:
        """Return a draft's acceptance in (0, 1), given that those before it are right.

        ``margin`` is 0 to infinity, in logits or tokens; the result never falls as it grows.
        """
        return self.estimate_each([margin])[0]

    def estimate_each(self, margins: Sequence[float]) -> list[float]:
        """Return the acceptances of several drafts [n], as `estimate` does."""
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
    """Predict that one of ``candidates`` drawn from ``logits`` [V] is accepted.

    β ≈ (1 + max q)/2, q at temperature 1. On drafts of SmolLM2-135M it rises with the real β but
    exceeds it, by up to 0.17 where max q is about 0.75. A window ends after the token at which the
    product of the predictions falls below `ENOUGH`: later tokens would most likely be drafted in
    vain. Only distributions and tokens that are sent anyway enter, and whether a token is sent
    never depends on that token, so the output's law is not biased
    (docs/decisions/2026-11-21-windows-stop-after-a-token.md).
    """
    likeliest = 1.0 / float(np.exp(logits - logits.max()).sum(dtype=np.float64))
    return float(1.0 - (0.5 * (1.0 - likeliest)) ** candidates)
