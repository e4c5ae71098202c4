"""stream and local: the honest baselines, in which nobody speculates.

stream   up: nothing      down: the target's tokens as they come
local    up: nothing      down: nothing; the drafter alone
law      the model's own: argmax at temperature 0, else its sample under the noise of
         (seed, position). `stream`'s noise is the one that `coupled` shares.
"""

import math

from pilotfish.speculation.distributions import Floats, probabilities
from pilotfish.speculation.randomness import Purpose, noise, race, sample
from pilotfish.wire.protocols.exchange import Law

STREAM = "stream"
LOCAL = "local"


def choose(logits: Floats, law: Law, position: int, purpose: Purpose) -> int:
    """The token at ``position`` by one row of logits [V]."""
    if law.sampling.greedy:
        return int(logits.argmax())
    p = probabilities(logits[None], law.sampling)[0]
    return sample(p, noise(len(p), law.seed, purpose, position))


def lead(logits: Floats, law: Law, position: int, purpose: Purpose) -> tuple[int, float]:
    """The token that `choose` takes, and by how many logits it leads the next one (`Odds`).

    Under noise both have theirs added, scaled by the temperature: the lead says how far another
    model's logits must differ to make another choice, whatever the temperature.
    """
    if law.sampling.greedy:
        token = int(logits.argmax())
        rest = (logits[:token].max(initial=-math.inf), logits[token + 1 :].max(initial=-math.inf))
        return token, float(logits[token] - max(rest))
    p = probabilities(logits[None], law.sampling)[0]
    token, ahead = race(p, noise(len(p), law.seed, purpose, position))
    return token, law.sampling.temperature * ahead
