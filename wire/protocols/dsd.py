"""dsd: distributed speculative decoding with the drafter's full distributions, the baseline.

up:    ids u32 [γ], q f32 [γ, V]
down:  accepted count, token
law:   exactly the target's (Leviathan et al.; DESIGN §6.1)

The device samples xᵢ from qᵢ and ships the very float32 numbers it sampled from. The edge accepts
xᵢ with probability min(1, p(xᵢ)/q(xᵢ)); it samples the residual at the first rejection, or the
bonus from p after the window. Draft, accept, residual and bonus are separate streams.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from speculation.chain import acceptance, accepted_count, residual
from speculation.distributions import Floats, probabilities
from speculation.randomness import Purpose, race, sample, uniforms
from wire.errors import BadDraftError, MalformedError
from wire.messages import Buffer, frame, ids_frame, read_ids
from wire.protocols.exchange import Draft, Exchange, Ids, Law, Ruling, expect_frames

_SUM_TOLERANCE = 1e-3  # float32 rounding of a softmax over any vocabulary stays far below it


class Dsd(Exchange):
    """Both halves of `dsd`."""

    name = "dsd"
    lossless = True

    def draw(
        self, logits: Floats, law: Law, *, round_start: int, position: int
    ) -> tuple[int, NDArray[np.float32] | None]:
        """A sample of q and q itself."""
        q = probabilities(logits[None], law.sampling)[0].astype(np.float32, copy=False)
        noise = race(len(q), law.seed, Purpose.DRAFT, position, round_start=round_start)
        return sample(q, noise), q

    def propose(self, draft: Draft) -> list[Buffer]:
        """Ids and q."""
        assert draft.q is not None
        return [ids_frame(draft.ids), frame(np.asarray(draft.q, dtype="<f4"))]

    def admit(self, frames: Sequence[Buffer], vocab_size: int) -> Draft:
        """Check that q could have been sampled from, and that it allows the drafted tokens."""
        expect_frames(frames, 2)
        ids = read_ids(frames[0], vocab_size)
        if len(frames[1]) != len(ids) * vocab_size * 4:
            raise MalformedError(
                f"The q frame has {len(frames[1])} bytes where {len(ids)} distributions over "
                f"{vocab_size} tokens have {len(ids) * vocab_size * 4}."
            )
        # [γ, V]
        q = np.frombuffer(frames[1], dtype="<f4").reshape(len(ids), vocab_size)
        check_distributions(ids, q)
        return Draft(ids, q)

    def rule(self, draft: Draft, logits: Floats, law: Law, *, round_start: int) -> Ruling:
        """Accept by the ratio; residual at the first rejection, bonus after the last token."""
        assert draft.q is not None
        gamma = len(draft.ids)
        # [γ+1, V]
        p = probabilities(logits, law.sampling)
        draws = uniforms(gamma, law.seed, Purpose.ACCEPT, round_start, round_start=round_start)
        accepted = accepted_count(draws < acceptance(draft.ids, draft.q, p))
        rejected = accepted < gamma
        weights = residual(p[accepted], draft.q[accepted]) if rejected else p[accepted]
        noise = race(
            logits.shape[1],
            law.seed,
            Purpose.RESIDUAL if rejected else Purpose.BONUS,
            round_start + accepted,
            round_start=round_start,
        )
        return Ruling(accepted, sample(weights, noise))


def check_distributions(ids: Ids, q: NDArray[np.float32]) -> None:
    """Raise `BadDraftError` unless each row of q [γ, V] is a distribution that allows its token."""
    if not q.size:
        return
    # One pass each: NaN and infinities spoil the sum, so a finite good sum and min ≥ 0 suffice.
    sums = q.sum(axis=1, dtype=np.float64)
    if not np.all(np.abs(sums - 1.0) <= _SUM_TOLERANCE):
        raise BadDraftError("A drafter's distribution does not sum to 1, or holds a NaN.")
    if float(q.min()) < 0.0:
        raise BadDraftError("A drafter's distribution has a negative probability.")
    if not np.all(q[np.arange(len(ids)), ids] > 0.0):
        raise BadDraftError("A drafted token has probability 0 in the distribution sent with it.")
