"""wisv-full: the edge forgives harmless mismatches; all hidden states go up (wisv §III-B).

up:    ids [γ], the drafter's last-layer states at all of them [γ, d]
down:  accepted count, token; noted: how many were forgiven
law:   not the target's: what the edge's head forgives is the drafter's word

One exchange a round, whatever is in it: for links whose RTT costs more than the states.
"""

from collections.abc import Sequence

import numpy as np

from pilotfish.speculation.distributions import Sampling
from pilotfish.speculation.tree import Expansion
from pilotfish.wire.codecs.hidden import hidden_bytes
from pilotfish.wire.messages import Buffer
from pilotfish.wire.protocols.exchange import (
    Freight,
    Ids,
    Ruling,
    Sizes,
    States,
    Wanted,
    window_ids,
)
from pilotfish.wire.protocols.judged import Judged, JudgedDraft


class WisvFull(Judged):
    """Both halves of `wisv-full`."""

    name = "wisv-full"
    frames = 2
    reads_last = True

    def freight(
        self, expansion: Expansion, drafter: Sampling, acceptance: float, sizes: Sizes
    ) -> Freight:
        """Ids and states: L(b_tok + d·b_h) (wisv (5))."""
        up, down = super().freight(expansion, drafter, acceptance, sizes)
        return Freight(up + hidden_bytes(sizes.hidden, self.form) * len(expansion), down)

    def carry(self, draft: JudgedDraft, states: States) -> JudgedDraft:
        """The draft with all states: the last one's pass is a part of drafting."""
        found = states(np.arange(len(draft.ids)))
        return super().carry(draft, found.__getitem__)

    def propose(self, draft: JudgedDraft, pending: Ids, vocab_size: int) -> list[Buffer]:
        """Ids, and the states at all of them."""
        ids = super().propose(draft, pending, vocab_size)
        return [*ids, self.encode(draft, np.arange(len(draft.ids)))]

    def admit(self, frames: Sequence[Buffer], vocab_size: int) -> JudgedDraft:
        """As many states as ids."""
        ids = window_ids(frames[0], vocab_size)
        return JudgedDraft(ids, states=self.decode(frames[1], len(ids)).__getitem__)

    def decide(self, draft: JudgedDraft, wanted: Wanted) -> Ruling:
        """All states are there."""
        assert draft.states is not None
        return self.judged_by(draft, wanted, draft.states(wanted.at))
