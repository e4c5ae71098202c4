"""wisv-selective: the edge forgives harmless mismatches; it requests the states (wisv §III-B).

up:    ids [γ]
down:  indices of the m mismatches; if m = 0, or at threshold 0 or 1: accepted count, token
up:    the drafter's last-layer states there [m, d]
down:  accepted count, token; note: number of forgiven tokens
law:   not the target's: forgiven tokens are the drafter's

A round has at most two exchanges, and one at thresholds 0 and 1, where no state matters. This suits
links on which an RTT costs less time than the states that are not needed. The protocol commits the
same tokens as `wisv-full`.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from pilotfish.base.errors import MalformedError
from pilotfish.speculation.distributions import Sampling
from pilotfish.speculation.tree import Expansion
from pilotfish.wire.codecs.hidden import hidden_bytes
from pilotfish.wire.messages import Buffer
from pilotfish.wire.protocols.decision_head import (
    MISMATCH_RATE,
    JudgedDraft,
    JudgedProtocol,
)
from pilotfish.wire.protocols.protocol import (
    STATES_REQUEST_BYTES,
    WINDOW_BYTES,
    Decision,
    Ids,
    PairSizes,
    RoundBytes,
    StatesNeeded,
)
from pilotfish.wire.protocols.window_checks import check_frame_count, decode_window_ids


class WisvSelective(JudgedProtocol):
    """Protocol `wisv-selective`: the device's half and the edge's half."""

    name = "wisv-selective"

    @property
    def requests_states(self) -> bool:
        """Whether the edge may ask for states: not if none can change the decision."""
        return self.needs_states

    def estimate_bytes(
        self, expansion: Expansion, drafter: Sampling, acceptance: float, sizes: PairSizes
    ) -> RoundBytes:
        """Estimate the bytes: ids; for a request m positions down, m states up (wisv (7)–(9))."""
        up, down = super().estimate_bytes(expansion, drafter, acceptance, sizes)
        again = self.estimate_round_trips(expansion, acceptance) - 1.0
        if not again:
            return RoundBytes(up, down)
        positions = MISMATCH_RATE * len(expansion)
        states = positions * hidden_bytes(sizes.hidden, self.form)
        return RoundBytes(
            up + again * WINDOW_BYTES + states, down + again * STATES_REQUEST_BYTES + positions
        )

    def estimate_round_trips(self, expansion: Expansion, acceptance: float) -> float:
        """Estimate two round trips if the edge asks for states, else one."""
        if not self.needs_states:
            return 1.0
        return 2.0 - (1.0 - MISMATCH_RATE) ** len(expansion)

    # The device's half

    def encode_draft(self, draft: JudgedDraft, pending: Ids, vocab_size: int) -> list[Buffer]:
        """Encode ids, and a new state of the link if there is one."""
        return [*super().encode_draft(draft, pending, vocab_size), *self.encode_channel(draft)]

    def encode_states(self, draft: JudgedDraft, frames: Sequence[Buffer]) -> list[Buffer]:
        """Encode the requested states; raises `MalformedError` for tokens outside the window."""
        check_frame_count(frames, 1)
        at: NDArray[np.int64] = np.frombuffer(frames[0], np.uint8).astype(np.int64)
        if not 0 < len(at) <= len(draft.ids) or at[-1] >= len(draft.ids) or (np.diff(at) < 1).any():
            raise MalformedError(
                "The edge asks for hidden states of tokens that the window does not have."
            )
        return [self.encode_hidden_frame(draft, at)]

    # The edge's half

    def decode_draft(self, frames: Sequence[Buffer], vocab_size: int) -> JudgedDraft:
        """Decode the ids."""
        ids = decode_window_ids(frames[0], vocab_size)
        return JudgedDraft(ids, channel=self.decode_channel(frames))

    def decide(self, draft: JudgedDraft, needed: StatesNeeded) -> Decision | StatesNeeded:
        """Request the states, with one byte for the index of each token."""
        return replace(needed, frames=[needed.at.astype(np.uint8).tobytes()])

    def verify_with_states(
        self, draft: JudgedDraft, needed: StatesNeeded, frames: Sequence[Buffer]
    ) -> Decision:
        """Decide by the received states, which must be exactly the requested states."""
        check_frame_count(frames, 1)
        return self.decide_by_states(
            draft, needed, self.decode_hidden_frame(frames[0], len(needed.at))
        )
