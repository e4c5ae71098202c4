"""coupled: both ends share their randomness, so that no distribution crosses the link.

up:    ids [γ]
down:  accepted count, token
law:   the target's own seeded sample, token for token: that of `stream`

Both ends derive the noise of each position t from (seed, t) alone. The device drafts the winner of
the race under q; the edge chooses the winner under p, and accepts while they agree. Since the text
is the target's choice alone, the drafter, its truncation, the window and retries cannot change it;
they only change how often the two agree.
"""

from pilotfish.speculation.agreement import count_agreed
from pilotfish.speculation.distributions import Floats
from pilotfish.speculation.randomness import Purpose
from pilotfish.wire.protocols.baselines import choose
from pilotfish.wire.protocols.protocol import (
    Decision,
    Draft,
    DrawKey,
    IdsOnlyProtocol,
    SamplingParams,
)


class Coupled(IdsOnlyProtocol):
    """Both halves of `coupled`."""

    name = "coupled"
    deterministic = True
    relative_acceptance = 0.94

    def draw(self, logits: Floats, params: SamplingParams, key: DrawKey) -> tuple[list[int], None]:
        """Return the winner under q with the position's noise; nothing else is sent."""
        return [choose(logits, params, key.position, Purpose.TARGET)], None

    def verify(
        self,
        draft: Draft,
        logits: Floats,
        params: SamplingParams,
        *,
        round_start: int,
        hidden: Floats | None = None,
    ) -> Decision:
        """Accept while the window equals the target's choices; make noise for these only."""
        return Decision(
            *count_agreed(
                draft.ids.tolist(),
                lambda index: choose(logits[index], params, round_start + index, Purpose.TARGET),
            )
        )
