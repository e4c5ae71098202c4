"""tree: a token tree ⟨k₁…k_L⟩ with several candidates a position (tslt §4; docs/papers.md).

up:    candidate ids in the order drawn [Σ], expansion u8 [L], truncated q̂ of each inner node
down:  the last accepted node, token
law:   exactly the target's

The device draws k candidates at each node, independently and with replacement, from its truncated
q̂. Equal candidates share a node, so its subtree is drafted, sent and computed once. The
verification still takes every candidate in the order drawn. One target pass covers the tree. The
edge walks down while a candidate is accepted, and device and edge keep the K/V of that path.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import mul

import numpy as np
from numpy.typing import NDArray

from pilotfish.base.errors import MalformedError, TooLargeError
from pilotfish.speculation.distributions import Floats, Sampling
from pilotfish.speculation.tree import Expansion, Tree, branch
from pilotfish.speculation.truncation import SparseRows
from pilotfish.wire.codecs.ids import encode_ids, id_bytes
from pilotfish.wire.codecs.sparse import decode_sparse, encode_sparse, typical_bytes
from pilotfish.wire.messages import MAX_WINDOW, Buffer
from pilotfish.wire.protocols.draws import verify_window
from pilotfish.wire.protocols.protocol import (
    VERDICT_BYTES,
    WINDOW_BYTES,
    Decision,
    Draft,
    Ids,
    PairSizes,
    RoundBytes,
    SamplingParams,
    TokenCounts,
)
from pilotfish.wire.protocols.truncated import TruncatedProtocol
from pilotfish.wire.protocols.tslt import Tslt
from pilotfish.wire.protocols.window_checks import (
    check_candidates,
    check_frame_count,
    count_window_ids,
    decode_window_ids,
)

_MAX_CANDIDATES = MAX_WINDOW * MAX_WINDOW  # exceeds MAX_WINDOW: equal candidates share a node
_BRANCHING = (2, 2)  # the first levels of the default expansion
_BRANCHINGS = ((), (2,), (3,), (4,), (2, 2), (4, 2), (2, 2, 2))  # "auto" chooses among these


@dataclass(frozen=True, eq=False)
class TreeDraft(Draft):
    """A tree, and the q̂ of its inner nodes; ``ids``: the nodes' tokens."""

    tree: Tree
    q: SparseRows

    @cached_property
    def parents(self) -> NDArray[np.int64]:
        """Each node's parent, i64 [n], by index among the nodes; −1: the root."""
        return self.tree.parents

    @property
    def depth(self) -> int:
        """The number of levels, L."""
        return len(self.tree.expansion)

    def path(self, node: int) -> Sequence[int]:
        """Return the nodes from the root's child down to ``node``."""
        return self.tree.path(node)


class TokenTree(TruncatedProtocol[TreeDraft]):
    """Protocol `tree`: the device's half and the edge's half."""

    name = "tree"
    allows_trees = True
    frames = 3
    relative_acceptance = Tslt.relative_acceptance  # if a node has one candidate
    branchings = _BRANCHINGS

    def estimate_bytes(
        self, expansion: Expansion, drafter: Sampling, acceptance: float, sizes: PairSizes
    ) -> RoundBytes:
        """Estimate candidates, and q̂ of ≤ 1 + Σ_{l<L} Π_{i≤l} kᵢ inner nodes (tslt, eq. 27)."""
        widths = list(accumulate(expansion, mul))
        nodes = WINDOW_BYTES + id_bytes(sizes.vocabulary) * sum(widths) + len(expansion)
        rows = typical_bytes(1 + sum(widths[:-1]), drafter.top_k) if widths else 0.0
        return RoundBytes(nodes + rows, VERDICT_BYTES)

    def expansion(self, window: int) -> Expansion:
        """Return an expansion with 2 candidates per node in the first two levels, then 1."""
        return branch(_BRANCHING, window)

    def make_draft(self, tree: Tree, rows: Sequence[SparseRows]) -> TreeDraft:
        """Make a draft of the tree and its q̂."""
        return TreeDraft(tree.ids, tree, SparseRows.join(rows))

    def encode_draft(self, draft: TreeDraft, pending: Ids, vocab_size: int) -> list[Buffer]:
        """Encode candidates, expansion and q̂."""
        assert not len(pending)
        tree = draft.tree
        drawn = [token for nodes in tree.candidates for token in tree.tokens(nodes)]
        return [
            encode_ids(np.array(drawn, dtype=np.uint32), vocab_size),
            bytes(tree.expansion),
            encode_sparse(draft.q, vocab_size),
        ]

    def count_tokens(self, frames: Sequence[Buffer], vocab_size: int) -> TokenCounts:
        """Count one node per level, the minimum; only decoding shows how many nodes are shared."""
        check_frame_count(frames, self.frames)
        drawn = count_window_ids(frames[0], vocab_size, _MAX_CANDIDATES)
        levels = len(frames[1])
        if levels > MAX_WINDOW:
            raise MalformedError(
                f"An expansion has {levels} levels; at most {MAX_WINDOW} are allowed."
            )
        expansion = bytes(frames[1])
        # each level has at least one node, with the expansion's number of candidates
        if 0 in expansion or sum(expansion) > drawn:
            raise MalformedError(
                f"The expansion {list(expansion)} with {drawn} candidates does "
                "not make a token tree."
            )
        return TokenCounts(0, levels)

    def decode_draft(self, frames: Sequence[Buffer], vocab_size: int) -> TreeDraft:
        """Rebuild the tree; check that each q̂ allows its candidates."""
        drawn = decode_window_ids(frames[0], vocab_size, _MAX_CANDIDATES)
        tree = _rebuild(drawn.tolist(), tuple(bytes(frames[1])))
        q = decode_sparse(frames[2], len(tree.candidates), vocab_size)
        counts = [len(nodes) for nodes in tree.candidates]
        check_candidates(q, np.arange(len(counts)).repeat(counts), drawn)
        return TreeDraft(tree.ids, tree, q)

    def verify(
        self,
        draft: TreeDraft,
        logits: Floats,
        params: SamplingParams,
        *,
        round_start: int,
        hidden: Floats | None = None,
    ) -> Decision:
        """Walk down from the root while a candidate is accepted."""
        return verify_window(
            draft, draft.tree.candidates, draft.q.row, logits, params, round_start=round_start
        )


def _rebuild(drawn: list[int], expansion: Expansion) -> Tree:
    """Rebuild the tree from its candidates, which come level by level, node by node."""
    tree = Tree()
    begin = 0
    for count in expansion:
        end = begin + count * len(tree.level)
        if end > len(drawn):
            raise MalformedError(
                f"The tree {list(expansion)} has more than {len(drawn)} candidates."
            )
        level = drawn[begin:end]
        tree.grow([level[at : at + count] for at in range(0, len(level), count)])
        if len(tree) > MAX_WINDOW:
            raise TooLargeError(f"A tree has more than {MAX_WINDOW} nodes.")
        begin = end
    if begin != len(drawn):
        raise MalformedError(f"The tree {list(expansion)} has fewer than {len(drawn)} candidates.")
    return tree
