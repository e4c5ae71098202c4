"""stream and local: the honest baselines, in which nobody speculates.

stream   up: nothing      down: the target's tokens as they come
local    up: nothing      down: nothing; the drafter alone
law      the model's own: argmax at temperature 0, else its sample under the noise of
         (seed, position). `stream`'s noise is the one that `coupled` shares.
"""

from pilotfish.speculation.distributions import Floats, probabilities
from pilotfish.speculation.randomness import Purpose, noise, sample
from pilotfish.wire.protocols.exchange import Law

STREAM = "stream"
LOCAL = "local"


def choose(logits: Floats, law: Law, position: int, purpose: Purpose) -> int:
    """The token at ``position`` by one row of logits [V]."""
    if law.sampling.greedy:
        return int(logits.argmax())
    p = probabilities(logits[None], law.sampling)[0]
    return sample(p, noise(len(p), law.seed, purpose, position))
