"""stream and local: the baselines without speculation.

stream   up: nothing      down: the target's tokens as they come
local    up: nothing      down: nothing; the drafter alone
law      the model's own: argmax at temperature 0, else its sample under the noise of
         (seed, position). `stream`'s noise is the one that `coupled` shares.
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
