"""dssd: split verification (dssd §3; docs/papers.md). The device resamples.

up:    ids [0 or 1 pending, then γ], q(xᵢ) in 24 bits [γ]
down:  all accepted: token; rejected at j: j and P̃ⱼ (`wire.codecs.counts`)
law:   exactly the target's

The device samples from q rounded to integers that sum to 2²⁴, and sends the integer of each drafted
token. The edge rounds p to P̃, integers that sum to 2¹⁶, with one keyed uniform number for each
position. That number is independent of the draft, so that E[P̃] = p. The edge accepts against P̃,
and at the first rejection sends P̃; the device samples from the residual norm(max(0, P̃ − q)). That
token is *pending*: the device sends it at the head of the next window, and the edge commits it
then.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pilotfish.base.errors import MalformedError
from pilotfish.speculation.candidates import residual
from pilotfish.speculation.distributions import Floats, Sampling, probabilities
from pilotfish.speculation.randomness import Purpose, uniforms
from pilotfish.speculation.rows import Row
from pilotfish.speculation.split import systematic
from pilotfish.speculation.tree import Expansion, Tree, Walk
from pilotfish.wire.codecs.counts import decode_counts, encode_counts
from pilotfish.wire.codecs.ids import encode_ids, id_bytes
from pilotfish.wire.messages import Buffer
from pilotfish.wire.protocols.draws import coins, sample_candidates, sample_next
from pilotfish.wire.protocols.protocol import (
    Decision,
    Draft,
    DrawKey,
    Ids,
    PairSizes,
    RoundBytes,
    SamplingParams,
    SpeculationProtocol,
    TokenCounts,
)
from pilotfish.wire.protocols.window_checks import (
    check_frame_count,
    count_window_ids,
    decode_window_ids,
)

P_BITS = 16  # precision of P̃; fewer bits save bytes and lower the acceptance, not the law
Q_BITS = 24
_P_BYTES = 2500  # typical bytes of P̃ at temperature 1


@dataclass(frozen=True, eq=False)
class SplitDraft(Draft):
    """A chain and its q as integers that sum to 2^Q_BITS.

    weights: i64 [γ], the drafted tokens' integers. rows: i64 [γ, V], all integers; None at the
    edge.
    """

    weights: NDArray[np.int64]
    rows: Sequence[NDArray[np.int64]] | None = None


class Dssd(SpeculationProtocol[SplitDraft]):
    """Protocol `dssd`: the device's half and the edge's half."""

    name = "dssd"
    frames = 2

    def estimate_bytes(
        self, expansion: Expansion, drafter: Sampling, acceptance: float, sizes: PairSizes
    ) -> RoundBytes:
        """Estimate ids, 24 bits for each, and P̃ with probability 1 − α^γ (dssd, equation 9)."""
        up, down = super().estimate_bytes(expansion, drafter, acceptance, sizes)
        rejected = 1.0 - acceptance ** len(expansion)
        return RoundBytes(
            up + rejected * id_bytes(sizes.vocabulary) + 3 * len(expansion),
            down + rejected * _P_BYTES,
        )

    def draw(
        self, logits: Floats, params: SamplingParams, key: DrawKey
    ) -> tuple[list[int], NDArray[np.int64]]:
        """Return a sample of the rounded q, and the rounded q."""
        q = systematic(probabilities(logits[None], params.sampling)[0], Q_BITS, 0.5)
        return sample_candidates(Row(q), params, key), q

    def make_draft(self, tree: Tree, rows: Sequence[NDArray[np.int64]]) -> SplitDraft:
        """Make a draft of ids and their weights; all weights stay on the device."""
        ids = tree.ids
        drawn = [row[token] for row, token in zip(rows, ids, strict=True)]
        return SplitDraft(ids, np.array(drawn, dtype=np.int64), rows)

    def encode_draft(self, draft: SplitDraft, pending: Ids, vocab_size: int) -> list[Buffer]:
        """Encode the pending token with the window's ids, and the window's weights."""
        ids = encode_ids(np.concatenate([pending, draft.ids]), vocab_size)
        # a drafted token weighs at least 1
        return [ids, encode_ids(draft.weights - 1, 2**Q_BITS)]

    def count_tokens(self, frames: Sequence[Buffer], vocab_size: int) -> TokenCounts:
        """Count the window's tokens by its weights; one more id is the pending token."""
        _, ids = super().count_tokens(frames, vocab_size)
        weights = count_window_ids(frames[1], 2**Q_BITS)
        if ids - weights not in (0, 1):
            raise MalformedError(f"{weights} weights do not fit {ids} ids.")
        return TokenCounts(ids - weights, weights)

    def decode_draft(self, frames: Sequence[Buffer], vocab_size: int) -> SplitDraft:
        """Decode ids and weights."""
        ids = decode_window_ids(frames[0], vocab_size)
        weights = decode_window_ids(frames[1], 2**Q_BITS).astype(np.int64) + 1
        pending = len(ids) - len(weights)
        return SplitDraft(ids[pending:], weights, pending=ids[:pending])

    def verify(
        self,
        draft: SplitDraft,
        logits: Floats,
        params: SamplingParams,
        *,
        round_start: int,
        hidden: Floats | None = None,
    ) -> Decision:
        """Accept against P̃; send P̃ at the first rejection, else the bonus from p."""
        gamma = len(draft.ids)
        accepts = coins(gamma, params, round_start)
        offsets = uniforms(gamma, params.seed, Purpose.DITHER, round_start, round_start=round_start)
        for index, token in enumerate(draft.ids.tolist()):
            p = probabilities(logits[index : index + 1], params.sampling)[0]
            rounded = systematic(p, P_BITS, float(offsets[index]))
            ratio = float(rounded[token]) * 2.0 ** (Q_BITS - P_BITS) / float(draft.weights[index])
            if not accepts(index, ratio):
                return Decision(index, None, [encode_counts(rounded, P_BITS)])
        walk = Walk(gamma, probabilities(logits[gamma:], params.sampling)[0], rejected=False)
        return Decision(gamma, sample_next(walk, params, DrawKey(round_start, gamma)))

    def finish_round(
        self,
        draft: SplitDraft,
        decision: Decision,
        params: SamplingParams,
        *,
        round_start: int,
        vocab_size: int,
    ) -> int:
        """Return the edge's bonus, or a sample from the residual of P̃ and q."""
        at = decision.accepted
        if decision.token is not None or at == len(draft.ids) or draft.rows is None:
            return super().finish_round(
                draft, decision, params, round_start=round_start, vocab_size=vocab_size
            )
        check_frame_count(decision.frames, 1)
        rounded = decode_counts(decision.frames[0], vocab_size, P_BITS)
        p = rounded / np.float64(2**P_BITS)
        rest = residual(p, Row(draft.rows[at]))
        walk = Walk(at, rest, rejected=True)
        return sample_next(walk, params, DrawKey(round_start, at))
