"""greedy: speculation at temperature 0, the papers' baseline.

up:    ids [γ]
down:  accepted count, token
law:   the target's own greedy output, token for token

The device drafts its argmax. The edge accepts while the draft equals the target's argmax. The next
token is the first argmax that differs, or the argmax after the window.
"""

from pilotfish.speculation.agreement import count_agreed
from pilotfish.speculation.distributions import Floats
from pilotfish.wire.protocols.protocol import (
    Decision,
    Draft,
    DrawKey,
    IdsOnlyProtocol,
    SamplingParams,
)


class Greedy(IdsOnlyProtocol):
    """Protocol `greedy`: the device's half and the edge's half."""

    name = "greedy"
    deterministic = True
    greedy_only = True

    def draw(self, logits: Floats, params: SamplingParams, key: DrawKey) -> tuple[list[int], None]:
        """Return the drafter's argmax; nothing else is sent."""
        return [int(logits.argmax())], None

    def verify(
        self,
        draft: Draft,
        logits: Floats,
        params: SamplingParams,
        *,
        round_start: int,
        hidden: Floats | None = None,
    ) -> Decision:
        """Accept while the window equals the target's argmax."""
        return Decision(
            *count_agreed(draft.ids.tolist(), lambda index: int(logits[index].argmax()))
        )
