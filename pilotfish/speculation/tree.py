"""Token trees: drafting with an expansion ⟨k₁…k_L⟩, verification, path search (tslt §4).

Node 0 of a tree is its root, the last token before the window. Nodes 1, 2, … are numbered breadth
first, in the order of their first draw. Each node of level l − 1 has k_l candidates, drawn
independently from the node's q. Equal candidates share a node, but each of them is verified, in
the order of the draws (docs/papers.md). A chain is the tree ⟨1, 1, …⟩.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count

import numpy as np
from numpy.typing import NDArray

from pilotfish.speculation.candidates import Coin, choose
from pilotfish.speculation.distributions import Floats
from pilotfish.speculation.rows import Row

Expansion = tuple[int, ...]
# function of a candidate's number (over the whole tree, in the order of draws) and a probability
NumberedCoin = Callable[[int, float], bool]


class Tree:
    """Growing token tree; ``len`` is the number of nodes without the root."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._parents: list[int] = []  # each node's parent, as a node number
        # nodes of each inner node's candidates, in the order of draws
        self.candidates: list[tuple[int, ...]] = []
        self._level = range(1)  # nodes of the deepest level
        self._id_array: NDArray[np.uint32] | None = None  # `_ids` as an array, once it was needed

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def ids(self) -> NDArray[np.uint32]:
        """Tokens of nodes 1…n, u32 [n]: the same array until the tree grows; do not change it."""
        if self._id_array is None:
            self._id_array = np.array(self._ids, dtype=np.uint32)
        return self._id_array

    @property
    def parents(self) -> NDArray[np.int64]:
        """Parents of nodes 1…n, i64 [n]: index in `ids`, or −1 for the root."""
        return np.array(self._parents, dtype=np.int64) - 1

    @property
    def level(self) -> range:
        """Nodes of the deepest level; in a new tree, the root."""
        return self._level

    @property
    def expansion(self) -> Expansion:
        """Expansion ⟨k₁…k_L⟩ of the tree."""
        counts = []
        node = 0
        while node < len(self.candidates):
            counts.append(len(self.candidates[node]))
            node = min(self.candidates[node])
        return tuple(counts)

    def tokens(self, nodes: Sequence[int]) -> list[int]:
        """Return the tokens of these nodes."""
        return [self._ids[node - 1] for node in nodes]

    def grow(self, drawn: Sequence[Sequence[int]]) -> None:
        """Add a level of nodes.

        drawn: for each node of the deepest level, the tokens drawn there, in order.
        """
        first = len(self._ids) + 1
        for parent, tokens in zip(self._level, drawn, strict=True):
            children: dict[int, int] = {}
            nodes = []
            for token in tokens:
                node = children.get(token)
                if node is None:
                    self._ids.append(token)
                    self._parents.append(parent)
                    node = children[token] = len(self._ids)
                nodes.append(node)
            self.candidates.append(tuple(nodes))
        self._level = range(first, len(self._ids) + 1)
        self._id_array = None

    def path(self, node: int) -> list[int]:
        """Return the nodes from the root's child down to ``node``; empty for the root."""
        nodes: list[int] = []
        while node:
            nodes.append(node)
            node = self._parents[node - 1]
        return nodes[::-1]


@dataclass(frozen=True, eq=False)
class Walk:
    """Result of a verification: the accepted path, and the distribution of the next token.

    node: the last accepted node, or 0. weights [V]: after a rejection, the residual at this node;
    otherwise p after this leaf.
    """

    node: int
    weights: Floats
    rejected: bool


def verify(
    candidates: Sequence[tuple[int, ...]],
    ids: Sequence[int] | NDArray[np.uint32],
    q: Callable[[int], Row],
    p: Callable[[int], Floats],
    coin: NumberedCoin,
) -> Walk:
    """Walk down from the root while candidates are accepted (tslt Algorithm 8).

    candidates: for each inner node, the nodes of its candidates. ids: tokens of nodes 1…n. q, p:
    functions from a node to a distribution; called only for nodes on the accepted path.
    """
    node = 0
    while node < len(candidates):
        first = sum(map(len, candidates[:node]))
        choice = choose(
            [int(ids[child - 1]) for child in candidates[node]],
            q(node),
            p(node),
            _numbered_from(coin, first),
        )
        if choice.accepted is None:
            assert choice.residual is not None
            return Walk(node, choice.residual, rejected=True)
        node = candidates[node][choice.accepted]
    return Walk(node, p(node), rejected=False)


def _numbered_from(coin: NumberedCoin, first: int) -> Coin:
    """Return a coin for one node's candidates; their numbers begin at ``first``."""
    numbers = count(first)
    return lambda probability: coin(next(numbers), probability)


@lru_cache(maxsize=256)
def nodes_at_most(expansion: Expansion) -> int:
    """Return the maximum number of nodes of a tree ⟨k₁…k_L⟩ without the root: Σ_l Π_{i≤l} kᵢ."""
    level = total = 1
    for children in expansion:
        level *= children
        total += level
    return total - 1


def branch(branching: Expansion, levels: int) -> Expansion:
    """Return ⟨k₁…k_L⟩ that begins with these levels; later levels have one candidate per node."""
    return (*branching, *(1,) * levels)[:levels]


def chain(length: int) -> list[tuple[int, ...]]:
    """Return the candidates' nodes of a chain of this length, in the form of `Tree.candidates`."""
    return [(node,) for node in range(1, length + 1)]
