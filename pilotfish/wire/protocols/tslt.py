"""tslt: truncated sparse logits transmission (tslt §3, corrected in docs/papers.md).

up:    ids [γ], truncated q̂ of each (`wire.codecs.sparse`)
down:  accepted count, token
law:   exactly the target's, for any truncation

Sparsify, then sample: the device truncates its distribution to the top K tokens or to the nucleus ρ
(``draft_top_k``, ``draft_top_p``), quantises it to q̂, samples from q̂, and sends q̂. The edge
accepts with min(1, p/q̂) and resamples norm(max(0, p − q̂)). Truncation lowers the acceptance by at
most the discarded mass and the quantisation error (Theorem 3.2). It never changes the law.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pilotfish.speculation.distributions import Floats, Sampling
from pilotfish.speculation.tree import Expansion, Tree, chain
from pilotfish.speculation.truncation import SparseRows
from pilotfish.wire.codecs.sparse import decode_sparse, encode_sparse, typical_bytes
from pilotfish.wire.messages import Buffer
from pilotfish.wire.protocols.draws import verify_window
from pilotfish.wire.protocols.protocol import (
    Decision,
    Draft,
    Ids,
    PairSizes,
    RoundBytes,
    SamplingParams,
)
from pilotfish.wire.protocols.truncated import TruncatedProtocol
from pilotfish.wire.protocols.window_checks import check_candidates, decode_window_ids


@dataclass(frozen=True, eq=False)
class SparseDraft(Draft):
    """A chain and its q̂."""

    q: SparseRows


class Tslt(TruncatedProtocol[SparseDraft]):
    """Protocol `tslt`: the device's half and the edge's half."""

    name = "tslt"
    frames = 2
    relative_acceptance = 0.97

    def estimate_bytes(
        self, expansion: Expansion, drafter: Sampling, acceptance: float, sizes: PairSizes
    ) -> RoundBytes:
        """Estimate the bytes of the ids, and of q̂ for each id."""
        up, down = super().estimate_bytes(expansion, drafter, acceptance, sizes)
        return RoundBytes(up + typical_bytes(len(expansion), drafter.top_k), down)

    def make_draft(self, tree: Tree, rows: Sequence[SparseRows]) -> SparseDraft:
        """Make a draft of ids and q̂."""
        return SparseDraft(tree.ids, SparseRows.join(rows))

    def encode_draft(self, draft: SparseDraft, pending: Ids, vocab_size: int) -> list[Buffer]:
        """Encode ids and q̂."""
        ids = super().encode_draft(draft, pending, vocab_size)
        return [*ids, encode_sparse(draft.q, vocab_size)]

    def decode_draft(self, frames: Sequence[Buffer], vocab_size: int) -> SparseDraft:
        """Decode ids and q̂; check that q̂ allows the drafted tokens."""
        ids = decode_window_ids(frames[0], vocab_size)
        draft = SparseDraft(ids, decode_sparse(frames[1], len(ids), vocab_size))
        check_candidates(draft.q, np.arange(len(ids)), ids)
        return draft

    def verify(
        self,
        draft: SparseDraft,
        logits: Floats,
        params: SamplingParams,
        *,
        round_start: int,
        hidden: Floats | None = None,
    ) -> Decision:
        """Accept by the ratio p/q̂; then sample the residual (at a rejection) or the bonus."""
        candidates = chain(len(draft.ids))
        return verify_window(
            draft, candidates, draft.q.row, logits, params, round_start=round_start
        )
