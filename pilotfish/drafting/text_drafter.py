"""Draft without a model, by repeating the answer, its prompt, or the owner's earlier texts.

In:  committed tokens of the target's vocabulary. Out: windows and hints. A lookup takes
     microseconds; sampling takes as long as in any drafter.

q is the frequency of the tokens that followed the same words (`speculation.recall`). Drafts are
sampled from this q, and q is sent; so lossless protocols keep the target's output distribution.
Under a lossy protocol drafts can enter the answer, so they never come from other owners' texts,
even if the texts are shared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from pilotfish.bridge import Bridge, Prompt, TrivialBridge
from pilotfish.drafting.lookup import DEFAULT_OWNER, Owner, Recollection
from pilotfish.drafting.window import Drafter, Ids, Level
from pilotfish.speculation.distributions import Floats
from pilotfish.speculation.recall import Echo
from pilotfish.speculation.tree import Expansion, Tree, nodes_at_most
from pilotfish.wire.messages import MAX_WINDOW
from pilotfish.wire.protocols import SpeculationProtocol

if TYPE_CHECKING:
    from typing_extensions import Self

TEXT = "text"  # name of this drafter, given in place of an artifact's folder
_BOUNDLESS = 1 << 31
_NODE_S = 50e-6  # upper bound of a lookup's seconds; a test checks it


class TextDrafter(Drafter):
    """Drafts the tokens that followed the same words in earlier text (`Recollection`).

    Forks share the memory.
    """

    name, origin, no_tree_reason = TEXT, "", ""
    context, hidden_size = _BOUNDLESS, 0
    standalone, prior_acceptance = False, 0.2  # measured: 0.1 in chats, far more with repetitions
    pass_times: Mapping[int, float] = MappingProxyType(
        {nodes: nodes * _NODE_S for nodes in (1, 2, 4)}
    )

    def __init__(self, recall: Recollection) -> None:
        super().__init__()
        self._recall = recall
        self.set_bridge(TrivialBridge(1))

    def fork(self) -> Self:
        """Make a drafter for another session."""
        other = type(self)(self._recall.fork())
        other.set_bridge(self.bridge, self._vocabulary)
        return other

    def release(self) -> None:
        """Stop using the memory; the number of lanes is unlimited."""
        self._recall.release()

    def set_bridge(self, bridge: Bridge, vocabulary: str = "") -> None:
        """Use this bridge from now on; vocabulary: fingerprint of the target's vocabulary."""
        self.bridge, self._vocabulary = bridge, vocabulary
        self._row = np.full((1, bridge.vocab_size), -np.inf, np.float32)
        self._finite_ids: Ids = np.empty(0, np.uint32)  # tokens of `_row` with finite logits

    def start(self, prompt: Prompt, owner: Owner = DEFAULT_OWNER, *, lossless: bool = True) -> None:
        """Begin a generation, with the owner's earlier texts."""
        self._recall.start(self._vocabulary, self.bridge.vocab_size, owner, lossless=lossless)
        self._recall.update(prompt.ids)

    def prefill(self, committed: Ids, before_chunk: Callable[[], None] = lambda: None) -> None:
        """Add the committed tokens to the searched text."""
        self._recall.update(committed)

    def end(self, committed: Ids) -> None:
        """Store prompt and answer, u32 [n], for later answers."""
        self._recall.end(committed)

    def remaining_context(self, committed: Ids) -> int:
        """Return more than any window takes: the context is unlimited."""
        return _BOUNDLESS - len(committed)

    def catch_up(self, committed: Ids, drafts: Ids) -> bool:
        """Do nothing: reading takes no time."""
        return False

    def predict_next(self, committed: Ids, drafts: Ids, most: int = 1) -> Level | None:
        """Return the tokens that earlier followed these tokens; None without a match."""
        self._recall.update(committed)
        echo = self._recall.predict(drafts.tolist())
        return None if echo is None else self._chain(echo)

    def _open(
        self, committed: Ids, expansion: Expansion, protocol: SpeculationProtocol[Any]
    ) -> Expansion:
        self._recall.update(committed)
        while nodes_at_most(expansion) > MAX_WINDOW:
            expansion = expansion[:-1]
        return expansion

    def _level(self, tree: Tree, *, unread: bool) -> Level | None:
        """Return the tokens that earlier followed each node; None if a node has no match."""
        if unread:
            echo = self._recall.predict(tree.ids.tolist())
            return None if echo is None else self._chain(echo)
        echoes = [self._recall.predict(tree.tokens(tree.path(node))) for node in tree.level]
        known = [echo for echo in echoes if echo is not None]
        if len(known) < len(echoes):
            return None
        acceptance = [self._recall.acceptance(echo) for echo in known]
        return Level(rows(known, self.bridge.vocab_size), acceptance)

    def _chain(self, echo: Echo) -> Level:
        """Return a chain's level [1, V]; the next call overwrites it."""
        self._row[0, self._finite_ids] = -np.inf
        self._finite_ids = echo.tokens
        self._row[0, echo.tokens] = np.log(echo.weights)
        return Level(self._row, [self._recall.acceptance(echo)])


def rows(echoes: Sequence[Echo | None], vocab_size: int) -> Floats:
    """Return logits f32 [n, V] of echoes; a row without an echo is −∞."""
    logits = np.full((len(echoes), vocab_size), -np.inf, np.float32)
    for row, echo in zip(logits, echoes, strict=True):
        if echo is not None:
            row[echo.tokens] = np.log(echo.weights)
    return logits
