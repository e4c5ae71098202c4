"""The odds that a draft token is the target's, learnt while the text comes.

In:  how clear the draft is, and afterwards whether the target chose the same. Of a model's draft
     that is its margin, by how many logits it leads the next one (`drawn`); of a repeated one
     (`Repeat`), how many tokens before it are the same.
Out: a probability, given that every draft before it was right.

The drafter's own probability is no such odds: the default pair, two precisions of one model, agrees
in 98 of 100 places, in most of which the drafter gives its choice far less. What decides is how the
margin compares with how far the two models' logits lie apart, and that differs from pair to pair:
about 0.1 logits there, 1 where the drafter has been rounded twice, 4 where layers were left out or
the models were trained apart. Hence a family of curves

    odds(margin) = ceiling · (1 − (1 − floor) · exp(−margin / scale))

and the mean of them all, each weighted by its prior and by what it foretold of the tokens that were
compared: Bayes' rule. Old comparisons fade, so that it follows a text that changes its kind. It
begins optimistic, for a draft too many costs little and one too few a pass of the target.

Repeats follow the same curves: their scale is a few tokens, and more of them go astray.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from pilotfish.speculation.distributions import Floats

ENOUGH = 0.3  # predicted acceptance of a whole window, below which ``window="auto"`` ends it
MODEL_PRIOR = 0.5  # for models
REPEAT_PRIOR = 1.5  # for repeats

_SCALES = 0.06 * 2.0 ** np.arange(10)  # f64 [scales], logits or tokens, to 31
_FLOORS = {0.3: 0.8, 0.03: 0.1, 0.7: 0.1}  # with their weights: 0.3 is what all pairs measured had
# For drafters whose margin tells nothing, or that are wrong throughout.
_CEILINGS = {0.997: 0.94, 0.9: 0.04, 0.5: 0.01, 0.05: 0.01}
_MEMORY = 300.0  # comparisons; older ones count for less than 1/e


def _outer(*weights: NDArray[np.float64]) -> NDArray[np.float64]:
    product = weights[0]
    for more in weights[1:]:
        product = np.multiply.outer(product, more)
    return product


_FLAT = 1.0 - np.array(list(_FLOORS))  # f64 [floors]
_CEILING = np.array(list(_CEILINGS))  # f64 [ceilings]


@lru_cache(maxsize=128)  # of repeats, a few lengths come again and again
def _curves(margin: float) -> NDArray[np.float64]:
    """Return what each curve says, f64 [scales, floors, ceilings], all in (0, 1)."""
    missed = np.exp(-max(0.0, margin) / _SCALES)  # in this order: 0 for what is no number
    return _outer(1.0 - np.multiply.outer(missed, _FLAT), _CEILING)


class AcceptanceEstimator:
    """Odds by the margin, for one pair of models or for repeats. One thread at a time.

    doubt: what each scale weighs at first, compared with half of it; `HOPEFUL` or `DOUBTFUL`.
    """

    def __init__(self, scale_prior: float = MODEL_PRIOR) -> None:
        scales = np.power(scale_prior, np.arange(len(_SCALES)), dtype=np.float64)
        floors, ceilings = (np.array(list(kind.values())) for kind in (_FLOORS, _CEILINGS))
        # f64 [scales, floors, ceilings]
        self._prior = np.log(_outer(scales, floors, ceilings))
        self._evidence = np.zeros_like(self._prior)  # log-likelihood of what was compared, faded
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
        """Return the odds in (0, 1) of a draft, given that those before it are right.

        ``margin`` is 0 to infinity, in logits or tokens; the odds never fall as it grows.
        """
        return self.estimate_each([margin])[0]

    def estimate_each(self, margins: Sequence[float]) -> list[float]:
        """Return the odds of several drafts [n], as `of`."""
        if not self._weighed:
            self._weigh()
        # [n, 1]
        numbers = np.array([max(0.0, margin) for margin in margins]).reshape(-1, 1)
        missed = np.exp(-numbers / _SCALES)
        odds: list[float] = (self._most - missed @ self._fall).tolist()
        return odds

    def update(self, margin: float, agreed: bool) -> None:
        """Take in whether the target chose the draft that had this margin."""
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
