"""greedy: speculation at temperature 0, the papers' baseline.

up:    ids u32 [γ]
down:  accepted count, token
law:   the target's own greedy output, token for token

The device drafts its argmax; the edge accepts while the draft equals the target's argmax, and the
first argmax that differs, or the one after the window, follows.
"""

import numpy as np
from numpy.typing import NDArray

from speculation.chain import matching_prefix
from speculation.distributions import Floats, Sampling
from wire.errors import UnsupportedError
from wire.protocols.exchange import Draft, Exchange, Law, Ruling


class Greedy(Exchange):
    """Both halves of `greedy`."""

    name = "greedy"
    lossless = True

    def check(self, sampling: Sampling) -> None:
        """Only temperature 0 can be served."""
        if not sampling.greedy:
            raise UnsupportedError(
                f"Protocol greedy decodes at temperature 0, not {sampling.temperature}; "
                "use protocol dsd to sample."
            )

    def draw(
        self, logits: Floats, law: Law, *, round_start: int, position: int
    ) -> tuple[int, NDArray[np.float32] | None]:
        """The drafter's argmax; nothing else is sent."""
        return int(logits.argmax()), None

    def rule(self, draft: Draft, logits: Floats, law: Law, *, round_start: int) -> Ruling:
        """Accept while the window equals the target's choices."""
        # [γ+1]
        choices = logits.argmax(axis=1)
        accepted = matching_prefix(draft.ids, choices)
        return Ruling(accepted, int(choices[accepted]))
