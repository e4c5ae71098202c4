"""Base of the protocols that send truncated distributions q̂: `tslt`, `adaptive`, `tree`.

A row has as many tokens as the request asks for, up to the whole vocabulary. A frame has at most
`MAX_TOKENS` tokens (`wire.codecs.sparse`), so the rows' sizes limit the window, and never the
reverse: no row is cut to make a window fit. Edges have always accepted any rows within this limit.
"""

from collections.abc import Sequence
from typing import TypeVar

from pilotfish.speculation.distributions import Floats, Sampling
from pilotfish.speculation.truncation import SparseRows, truncate
from pilotfish.wire.codecs.sparse import MAX_TOKENS
from pilotfish.wire.protocols.draws import sample_candidates
from pilotfish.wire.protocols.protocol import Draft, DrawKey, SamplingParams, SpeculationProtocol

D = TypeVar("D", bound=Draft)


class TruncatedProtocol(SpeculationProtocol[D]):
    """The part of the device's half that `tslt` and `tree` share."""

    default_top_k = 64
    top_ks = (16, 32, 64, 256, 1024)

    def max_rows(self, drafter: Sampling, vocab_size: int) -> int | None:
        """Return how many rows of K tokens a frame holds; None: a row's size is not known."""
        if drafter.greedy or drafter.top_p < 1.0 or drafter.min_p:
            return None
        return MAX_TOKENS // min(drafter.top_k or vocab_size, vocab_size)

    def fits(self, rows: Sequence[SparseRows]) -> bool:
        """Return whether a frame holds these rows."""
        return sum(len(row.ids) for row in rows) <= MAX_TOKENS

    def draw(
        self, logits: Floats, params: SamplingParams, key: DrawKey
    ) -> tuple[list[int], SparseRows]:
        """Return independent samples of q̂, one for each candidate, and q̂."""
        q = truncate(logits, params.sampling)
        return sample_candidates(q.row(0), params, key), q
