"""The mass that top-K truncation cuts off, and what it costs in acceptance (tslt §2.4).

In:  the drafter's logits. Out: σ(K), the mass of q outside its K likeliest tokens.
In:  an acceptance α, measured at one K. Out: a forecast of the acceptance at another K.

**Model.** Drafts are sampled from q̂ = q/(1 − σ) on the K likeliest tokens. A token x is accepted
with min(1, W), W = p(x)/q̂(x). If the target has as much mass outside these tokens as the drafter,
W has the mean 1 − σ under q̂. Let its deviation from this mean be normal with the standard deviation
s, the *spread* of the pair. Then the acceptance is

    α(σ) = E min(1, W) = 1 − σ·Φ(σ/s) − s·φ(σ/s)

with the normal distribution's Φ and φ. A measured α determines s. The slope dα/dσ = −Φ(σ/s) lies
between −1 and −½, so a forecast never leaves Lemma 1: |α(σ′) − α(σ)| ≤ |σ′ − σ|.
"""

import math
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pilotfish.speculation.distributions import Floats, Sampling

Values = NDArray[np.float64]

# The K at which cut masses are kept.
CUT_SIZES: Final = (8, 16, 32, 64, 128, 256, 1024, 4096)
_SIZES: Final = np.array(CUT_SIZES)
_CELLS_PER_OCTAVE, _OCTAVES = 4, 40  # tokens more than 2⁻⁴⁰ lighter than the heaviest do not count
_CELLS = _CELLS_PER_OCTAVE * _OCTAVES
# f64 [_CELLS]: the weight of a token in the middle of each cell
_WEIGHTS: Final[Values] = 2.0 ** (-(np.arange(_CELLS) + 0.5) / _CELLS_PER_OCTAVE)
_LARGEST_SPREAD, _STEPS = 8.0, 30  # `pair_spread` bisects up to this spread, in these steps


def cut_masses(logits: Floats, sampling: Sampling) -> Values:
    """Compute σ(K) for each K of `CUT_SIZES`, f64, from a row of logits [V]; not for temperature 0.

    Tokens are counted in cells of a quarter octave, and not sorted: σ is right to about 1 %.
    """
    cells = logits.max() - logits
    cells *= _CELLS_PER_OCTAVE / (math.log(2.0) * sampling.temperature)
    if sampling.min_p:
        cells[cells > -_CELLS_PER_OCTAVE * math.log2(sampling.min_p)] = _CELLS
    np.minimum(cells, _CELLS, out=cells)
    counts = np.bincount(cells.astype(np.uint8), minlength=_CELLS + 1)[:_CELLS]
    masses = (counts * _WEIGHTS).cumsum()
    # within a cell all tokens count as equal; before the first cell there is no token
    held = np.interp(_SIZES, np.append(0, counts.cumsum()), np.append(0.0, masses))
    cut: Values = 1.0 - held / masses[-1]
    return cut


def acceptance_at(sigma: float, spread: float) -> float:
    """Return the model's acceptance α(σ) for a pair with this spread s."""
    if spread <= 0.0:
        return 1.0 - sigma
    x = sigma / spread
    phi = math.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)
    return 1.0 - sigma * 0.5 * (1.0 + math.erf(x / math.sqrt(2.0))) - spread * phi


@lru_cache(maxsize=64)
def pair_spread(acceptance: float, sigma: float) -> float:
    """Return the spread at which the model's acceptance is ``acceptance`` at this σ; 0 if none."""
    if acceptance >= 1.0 - sigma:
        return 0.0
    low, high = 0.0, _LARGEST_SPREAD
    for _ in range(_STEPS):
        middle = 0.5 * (low + high)
        if acceptance_at(sigma, middle) > acceptance:
            low = middle
        else:
            high = middle
    return low


def acceptance_change(acceptance: float, sigma: float, other_sigma: float) -> float:
    """Forecast α(σ′) − α(σ), if α was measured at σ: ``other_sigma`` is σ′."""
    spread = pair_spread(acceptance, sigma)
    return acceptance_at(other_sigma, spread) - acceptance_at(sigma, spread)
