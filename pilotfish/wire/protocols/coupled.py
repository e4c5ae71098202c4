"""coupled: device and edge share their randomness, so that no distribution crosses the link.

up:    ids [γ]
down:  accepted count, token
law:   the target's own seeded sample, token for token, as under `stream`

Device and edge derive the noise of each position t from (seed, t) alone. The device drafts the
token that wins under q with this noise. The edge chooses the token that wins under p with the same
noise, and accepts drafts while they equal its choices. The text consists of the target's choices
alone. So the drafter, its truncation, the window and retries cannot change it; they only change how
often the drafts agree.
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
    """Protocol `coupled`: the device's half and the edge's half."""

    name = "coupled"
    deterministic = True
    relative_acceptance = 0.94

    def draw(self, logits: Floats, params: SamplingParams, key: DrawKey) -> tuple[list[int], None]:
        """Return the token that wins under q with the position's noise; nothing else is sent."""
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
        """Accept while the window equals the target's choices; compute noise for these only."""
        return Decision(
            *count_agreed(
                draft.ids.tolist(),
                lambda index: choose(logits[index], params, round_start + index, Purpose.TARGET),
            )
        )
