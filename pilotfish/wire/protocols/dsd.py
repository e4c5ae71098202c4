"""dsd: distributed speculative decoding with the drafter's full distributions, the baseline.

up:    ids [γ], q f16 or f32 [γ, V]
down:  accepted count, token
law:   exactly the target's (Leviathan et al., 2023)

The device rounds qᵢ to the format's numbers, samples xᵢ from them, and sends the same numbers. The
edge accepts xᵢ with probability min(1, p(xᵢ)/q(xᵢ)). At the first rejection it samples from the
residual; if all are accepted, it samples the bonus token from p. Draft, accept, residual and bonus
use separate random streams. Rounded numbers sum to 1 only roughly: both ends divide them by their
float64 sum (`speculation.rows`), so the format changes the acceptance, never the law.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final, Literal

import numpy as np
from numpy.typing import NDArray

from pilotfish.base.errors import BadDraftError, MalformedError
from pilotfish.base.settings import setting
from pilotfish.speculation.distributions import Floats, Sampling, probabilities
from pilotfish.speculation.rows import Row
from pilotfish.speculation.tree import Expansion, Tree, chain
from pilotfish.wire.codecs.halves import HALF_ERROR, LARGEST_HALF, from_halves, halves
from pilotfish.wire.messages import Buffer, as_frame
from pilotfish.wire.protocols.draws import sample_candidates, verify_window
from pilotfish.wire.protocols.options import ProtocolOptions
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

Distributions = NDArray[np.uint16 | np.float32]

# largest error of Σq: a softmax's float32 rounding, in fp16 `HALF_ERROR`, and 2⁻²⁵ for each token
_SUM_TOLERANCE: Final = 1e-3
_ROUNDED_TO_0: Final = 2.0**-25


class DsdOptions(ProtocolOptions, frozen=True):
    """The format of the distributions."""

    format: Annotated[
        Literal["fp16", "fp32"], setting("dsd: format of the distributions that the device sends")
    ] = "fp16"


@dataclass(frozen=True, eq=False)
class DenseDraft(Draft):
    """A chain and its q [γ, V]: the bits of halves (`codecs.halves`) u16, or f32."""

    q: Distributions

    def row(self, node: int) -> Row:
        """Return the distribution of the draft after ``node``."""
        return Row(_values(self.q[node]))


class Dsd(SpeculationProtocol[DenseDraft]):
    """Protocol `dsd`: the device's half and the edge's half."""

    name = "dsd"
    Options = DsdOptions
    frames = 2

    @property
    def halved(self) -> bool:
        """Whether the device sends fp16."""
        assert isinstance(self.options, DsdOptions)
        return self.options.format == "fp16"

    def estimate_bytes(
        self, expansion: Expansion, drafter: Sampling, acceptance: float, sizes: PairSizes
    ) -> RoundBytes:
        """Estimate the bytes: the ids, and V (vocabulary size) numbers for each id."""
        up, down = super().estimate_bytes(expansion, drafter, acceptance, sizes)
        width = 2 if self.halved else 4
        return RoundBytes(up + width * sizes.vocabulary * len(expansion), down)

    def draw(
        self, logits: Floats, params: SamplingParams, key: DrawKey
    ) -> tuple[list[int], Distributions]:
        """Return a sample of the rounded q, and the rounded q [V]."""
        values = probabilities(logits[None], params.sampling)[0].astype(np.float32, copy=False)
        q = halves(values) if self.halved else values
        return sample_candidates(Row(_values(q)), params, key), q

    def make_draft(self, tree: Tree, rows: Sequence[Distributions]) -> DenseDraft:
        """Make a draft of ids and q."""
        return DenseDraft(tree.ids, np.stack(rows) if rows else np.empty((0, 0), np.float32))

    def encode_draft(self, draft: DenseDraft, pending: Ids, vocab_size: int) -> list[Buffer]:
        """Encode ids and q."""
        q = as_frame(draft.q.astype(draft.q.dtype.newbyteorder("<"), copy=False))
        return [*super().encode_draft(draft, pending, vocab_size), q]

    def decode_draft(self, frames: Sequence[Buffer], vocab_size: int) -> DenseDraft:
        """Decode ids and q; check that each q is a distribution that allows its token.

        The frame's length tells the format.
        """
        ids = decode_window_ids(frames[0], vocab_size)
        count = len(ids) * vocab_size
        if len(frames[1]) not in (2 * count, 4 * count):
            raise MalformedError(
                f"The q frame has {len(frames[1])} bytes; {len(ids)} distributions over "
                f"{vocab_size} tokens have {2 * count} in fp16 and {4 * count} in fp32."
            )
        form = "<u2" if len(frames[1]) == 2 * count else "<f4"
        # [γ, V]
        q: Distributions = np.frombuffer(frames[1], dtype=form).reshape(len(ids), vocab_size)
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
            draft.row,
            logits,
            params,
            round_start=round_start,
        )


def _values(q: Distributions) -> NDArray[np.float32]:
    """Return the numbers of a row [V]."""
    return from_halves(q.view(np.uint16)) if q.dtype == np.uint16 else q.view(np.float32)


def check_distributions(ids: Ids, q: Distributions) -> None:
    """Raise `BadDraftError` unless each row of q [γ, V] is a distribution that allows its token."""
    tolerance = _SUM_TOLERANCE
    if q.dtype == np.uint16:
        tolerance += HALF_ERROR + _ROUNDED_TO_0 * q.shape[1]
        if q.max(initial=0) > LARGEST_HALF:
            raise BadDraftError("A drafter's distribution has a negative or an infinite number.")
    for token, row in zip(ids, q, strict=True):
        values = _values(row)
        # A NaN or an infinity makes the sum wrong, so checks of the sum and the minimum suffice.
        with np.errstate(invalid="ignore"):  # for ∞ − ∞
            total = values.sum(dtype=np.float64)
        if not abs(total - 1.0) <= tolerance:
            raise BadDraftError("A drafter's distribution does not sum to 1, or holds a NaN.")
        if float(values.min()) < 0.0:
            raise BadDraftError("A drafter's distribution has a negative probability.")
        if not values[token] > 0.0:
            raise BadDraftError("A drafted token has probability 0 in the distribution of its row.")
