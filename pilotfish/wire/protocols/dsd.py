"""dsd: distributed speculative decoding with the drafter's full distributions, the baseline.

up:    ids [γ], q f32 [γ, V]
down:  accepted count, token
law:   exactly the target's (Leviathan et al., 2023)

The device samples xᵢ from qᵢ and sends exactly the float32 numbers that it sampled from. The edge
accepts xᵢ with probability min(1, p(xᵢ)/q(xᵢ)). At the first rejection it samples from the
residual; if all are accepted, it samples the bonus token from p. Draft, accept, residual and bonus
use separate random streams.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pilotfish.base.errors import BadDraftError, MalformedError
from pilotfish.speculation.distributions import Floats, Sampling, probabilities
from pilotfish.speculation.rows import Row
from pilotfish.speculation.tree import Expansion, Tree, chain
from pilotfish.wire.messages import Buffer, as_frame
from pilotfish.wire.protocols.draws import sample_candidates, verify_window
from pilotfish.wire.protocols.protocol import (
    Decision,
    Draft,
    DrawKey,
    Ids,
    PairSizes,
    RoundBytes,
    SamplingParams,
    SpeculationProtocol,
)
from pilotfish.wire.protocols.window_checks import decode_window_ids

_SUM_TOLERANCE = 1e-3  # largest error of Σq; a softmax's float32 rounding stays far below it


@dataclass(frozen=True, eq=False)
class DenseDraft(Draft):
    """A chain and its q, f32 [γ, V]."""

    q: NDArray[np.float32]


class Dsd(SpeculationProtocol[DenseDraft]):
    """Protocol `dsd`: the device's half and the edge's half."""

    name = "dsd"
    frames = 2

    def estimate_bytes(
        self, expansion: Expansion, drafter: Sampling, acceptance: float, sizes: PairSizes
    ) -> RoundBytes:
        """Estimate the bytes: the ids, and V (vocabulary size) float32 numbers for each id."""
        up, down = super().estimate_bytes(expansion, drafter, acceptance, sizes)
        return RoundBytes(up + 4 * sizes.vocabulary * len(expansion), down)

    def draw(
        self, logits: Floats, params: SamplingParams, key: DrawKey
    ) -> tuple[list[int], NDArray[np.float32]]:
        """Return a sample of q, and q."""
        q = probabilities(logits[None], params.sampling)[0].astype(np.float32, copy=False)
        return sample_candidates(Row(q), params, key), q

    def make_draft(self, tree: Tree, rows: Sequence[NDArray[np.float32]]) -> DenseDraft:
        """Make a draft of ids and q."""
        return DenseDraft(tree.ids, np.stack(rows) if rows else np.empty((0, 0), np.float32))

    def encode_draft(self, draft: DenseDraft, pending: Ids, vocab_size: int) -> list[Buffer]:
        """Encode ids and q."""
        q = as_frame(np.asarray(draft.q, dtype="<f4"))
        return [*super().encode_draft(draft, pending, vocab_size), q]

    def decode_draft(self, frames: Sequence[Buffer], vocab_size: int) -> DenseDraft:
        """Decode ids and q; check that each q is a distribution that allows its token."""
        ids = decode_window_ids(frames[0], vocab_size)
        if len(frames[1]) != len(ids) * vocab_size * 4:
            raise MalformedError(
                f"The q frame has {len(frames[1])} bytes; {len(ids)} distributions over "
                f"{vocab_size} tokens have {len(ids) * vocab_size * 4}."
            )
        # [γ, V]
        q = np.frombuffer(frames[1], dtype="<f4").reshape(len(ids), vocab_size)
        check_distributions(ids, q)
        return DenseDraft(ids, q)

    def verify(
        self,
        draft: DenseDraft,
        logits: Floats,
        params: SamplingParams,
        *,
        round_start: int,
        hidden: Floats | None = None,
    ) -> Decision:
        """Accept by the ratio p/q; then sample the residual (at a rejection) or the bonus."""
        candidates = chain(len(draft.ids))
        return verify_window(
            draft,
            candidates,
            lambda node: Row(draft.q[node]),
            logits,
            params,
            round_start=round_start,
        )


def check_distributions(ids: Ids, q: NDArray[np.float32]) -> None:
    """Raise `BadDraftError` unless each row of q [γ, V] is a distribution that allows its token."""
    if not q.size:
        return
    # A NaN or an infinity makes the sum wrong, so checks of the sum and the minimum suffice.
    with np.errstate(invalid="ignore"):  # for ∞ − ∞
        sums = q.sum(axis=1, dtype=np.float64)
    if not np.all(np.abs(sums - 1.0) <= _SUM_TOLERANCE):
        raise BadDraftError("A drafter's distribution does not sum to 1, or holds a NaN.")
    if float(q.min()) < 0.0:
        raise BadDraftError("A drafter's distribution has a negative probability.")
    if not np.all(q[np.arange(len(ids)), ids] > 0.0):
        raise BadDraftError("A drafted token has probability 0 in the distribution sent with it.")
