"""coupled: both ends share their randomness, so that no distribution crosses the link.

up:    ids [γ]
down:  accepted count, token
law:   the target's own seeded sample, token for token: that of `stream`

Both ends derive the same noise of every position t from (seed, t) alone. The device drafts the
winner of the race under q, the edge chooses the winner under p and accepts while they agree. Only
the target's choice decides, so drafter, its truncation, window and retries cannot change the text;
they change how often the two agree.
"""

from pilotfish.speculation.coupling import agreed
from pilotfish.speculation.distributions import Floats
from pilotfish.speculation.randomness import Purpose
from pilotfish.wire.protocols.baselines import choose
from pilotfish.wire.protocols.exchange import Draft, IdsAlone, Law, Place, Ruling


class Coupled(IdsAlone):
    """Both halves of `coupled`."""

    name = "coupled"
    determined = True
    agreement = 0.94

    def draw(self, logits: Floats, law: Law, place: Place) -> tuple[list[int], None]:
        """The winner under q and the position's noise; nothing else is sent."""
        return [choose(logits, law, place.position, Purpose.TARGET)], None

    def rule(
        self,
        draft: Draft,
        logits: Floats,
        law: Law,
        *,
        round_start: int,
        hidden: Floats | None = None,
    ) -> Ruling:
        """Accept while the window equals the target's choices; noise is made for these only."""
        return Ruling(
            *agreed(
                draft.ids.tolist(),
                lambda index: choose(logits[index], law, round_start + index, Purpose.TARGET),
            )
        )
