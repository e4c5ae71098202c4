"""stream and local: the baselines without speculation.

stream   up: nothing      down: the target's tokens as they come
local    up: nothing      down: nothing; the drafter alone
law      the model's own: argmax at temperature 0, else a sample with the noise of
         (seed, position). `stream` and `coupled` have the same noise.
"""

from pilotfish.speculation.distributions import Floats, probabilities
from pilotfish.speculation.randomness import Purpose, noise, sample
from pilotfish.wire.protocols.protocol import SamplingParams

STREAM = "stream"
LOCAL = "local"


def choose(logits: Floats, params: SamplingParams, position: int, purpose: Purpose) -> int:
    """Return the token at ``position`` from one row of logits [V]."""
    if params.sampling.greedy:
        return int(logits.argmax())
    p = probabilities(logits[None], params.sampling)[0]
    return sample(p, noise(len(p), params.seed, purpose, position))
