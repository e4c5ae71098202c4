"""coupled: both ends share their randomness, so that no distribution crosses the link.

up:    ids [γ]
down:  accepted count, token
law:   the target's own seeded sample, token for token: that of `stream` (DESIGN §5, §6.11)

Both ends derive the same noise of every position t from (seed, t) alone. The device drafts the
winner of the race under q, the edge chooses the winner under p and accepts while they agree. Only
the target's choice decides, so drafter, its truncation, window and retries cannot change the text;
they change how often the two agree.
"""

from collections.abc import Sequence

from speculation.chain import agreed
from speculation.distributions import Floats
from speculation.randomness import Purpose
from speculation.tree import Tree
from wire.messages import Buffer
from wire.protocols.baselines import choose
from wire.protocols.exchange import Draft, Exchange, Law, Ruling, admit_ids


class Coupled(Exchange[Draft]):
    """Both halves of `coupled`."""

    name = "coupled"

    def draw(
        self,
        logits: Floats,
        law: Law,
        *,
        round_start: int,
        depth: int,
        candidates: range = range(1),
    ) -> tuple[list[int], None]:
        """The winner under q and the position's noise; nothing else is sent."""
        return [choose(logits, law, round_start + depth, Purpose.TARGET)], None

    def pack(self, tree: Tree, rows: Sequence[None]) -> Draft:
        """Ids alone."""
        return Draft(tree.ids)

    def admit(self, frames: Sequence[Buffer], vocab_size: int) -> Draft:
        """Any ids will do."""
        return admit_ids(frames, vocab_size)

    def rule(self, draft: Draft, logits: Floats, law: Law, *, round_start: int) -> Ruling:
        """Accept while the window equals the target's choices; noise is made for these only."""
        return Ruling(
            *agreed(
                draft.ids.tolist(),
                lambda index: choose(logits[index], law, round_start + index, Purpose.TARGET),
            )
        )
