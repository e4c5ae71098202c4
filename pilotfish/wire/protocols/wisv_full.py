"""wisv-full: the edge forgives harmless mismatches; all hidden states go up (wisv §III-B).

up:    ids [γ], the drafter's last-layer states at all of them [γ, d]; at threshold 0 or 1 of the
       request: ids [γ], an empty frame
down:  accepted count, token; note: number of forgiven tokens
law:   not the target's: forgiven tokens are the drafter's

Every round is one exchange. This suits links on which an RTT takes more time than sending the
states. At thresholds 0 and 1 no state matters. The device sends none if the request names such a
threshold; if the threshold is the edge's own value, the device does not know it, and sends them.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pilotfish.speculation.distributions import Sampling
from pilotfish.speculation.tree import Expansion
from pilotfish.wire.codecs.hidden import hidden_bytes
from pilotfish.wire.messages import Buffer
from pilotfish.wire.protocols.decision_head import JudgedDraft, JudgedProtocol
from pilotfish.wire.protocols.protocol import (
    Decision,
    Ids,
    PairSizes,
    RoundBytes,
    StatesNeeded,
    StatesReader,
)
from pilotfish.wire.protocols.window_checks import decode_window_ids


class WisvFull(JudgedProtocol):
    """Protocol `wisv-full`: the device's half and the edge's half."""

    name = "wisv-full"
    frames = 2

    @property
    def reads_last_token(self) -> bool:
        """Whether the drafter also runs over the last token: if the states are sent."""
        return self.needs_states

    def estimate_bytes(
        self, expansion: Expansion, drafter: Sampling, acceptance: float, sizes: PairSizes
    ) -> RoundBytes:
        """Estimate the bytes of ids and states: L(b_tok + d·b_h) (wisv, equation 5)."""
        up, down = super().estimate_bytes(expansion, drafter, acceptance, sizes)
        if not self.needs_states:
            return RoundBytes(up, down)
        return RoundBytes(up + hidden_bytes(sizes.hidden, self.form) * len(expansion), down)

    def attach_states(self, draft: JudgedDraft, states: StatesReader) -> JudgedDraft:
        """Read all states now, if they are sent: drafting includes the pass for the last one."""
        if not self.needs_states:
            return draft
        return replace(draft, states=states(np.arange(len(draft.ids))))

    def encode_draft(self, draft: JudgedDraft, pending: Ids, vocab_size: int) -> list[Buffer]:
        """Encode ids, the states if they matter, and a new state of the link if there is one."""
        ids = super().encode_draft(draft, pending, vocab_size)
        at = np.arange(len(draft.ids))
        states = self.encode_hidden_frame(draft, at) if self.needs_states else b""
        return [*ids, states, *self.encode_channel(draft)]

    def decode_draft(self, frames: Sequence[Buffer], vocab_size: int) -> JudgedDraft:
        """Decode ids, and one state for each; the states may be missing where none matters."""
        ids = decode_window_ids(frames[0], vocab_size)
        assert self.head is not None
        omitted = self.head.outcome is not None and not len(frames[1])
        states = None if omitted else self.decode_hidden_frame(frames[1], len(ids))
        return JudgedDraft(ids, states=states, channel=self.decode_channel(frames))

    def decide(self, draft: JudgedDraft, needed: StatesNeeded) -> Decision:
        """Decide at once: the window has brought all states."""
        return self.decide_by_states(draft, needed, draft.read_states(needed.at))
