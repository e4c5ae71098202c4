"""Drafting a window with the small model: a chain, or a token tree level by level."""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.artifact import Artifact
from engines.decoder import Decoder, Pass
from engines.pace import pass_times
from engines.tokenizer import Tokenizer
from speculation.confidence import ENOUGH, predicted_acceptance
from speculation.distributions import Floats
from speculation.tree import Expansion, Tree
from wire.protocols import Draft, Exchange, Law, Place

Ids = NDArray[np.uint32]

_WIDTHS = (1, 2, 4)


class Drafter:
    """The small model of one session: its K/V follow the committed tokens and the open window."""

    def __init__(
        self, artifact: Artifact, *, provider: str, threads: int | None, context: int | None
    ) -> None:
        self.manifest = artifact.manifest
        self.tokenizer = Tokenizer(artifact)
        self._decoder = Decoder(
            artifact, slots=1, context=context, threads=threads, provider=provider
        )
        self.context = self._decoder.context
        self.pace = pass_times(self._decoder, _WIDTHS)  # seconds by nodes of a level

    def forget(self, keep: int) -> None:
        """Only the first ``keep`` tokens still hold; what was read after them is void."""
        self._decoder.rollback(0, min(keep, self._decoder.length(0)))

    def keep(self, start: int, path: Sequence[int]) -> None:
        """Of the window after ``start`` tokens, only the nodes on ``path`` still hold."""
        read = self._decoder.length(0) - start  # the deepest level was drawn, not read
        known = [node - 1 for node in path if node <= read]
        if known == list(range(len(known))):
            self.forget(start + len(known))
        else:
            self._decoder.keep(0, known)

    def read(self, committed: Ids) -> None:
        """Read all committed tokens but the last, whose logits the first draft needs."""
        held = self._decoder.length(0)
        if held < len(committed) - 1:
            self._decoder.prefill(0, committed[held:-1].astype(np.int64), rows=0)

    def logits(self, committed: Ids) -> Floats:
        """The drafter's logits [V] after the committed tokens; valid until the next call."""
        self.read(committed)
        tokens = committed[self._decoder.length(0) :].astype(np.int64)
        logits: Floats = self._decoder.forward([Pass(slot=0, tokens=tokens, rows=1)])[0].logits[0]
        return logits

    def draft(
        self,
        committed: Ids,
        expansion: Expansion,
        exchange: Exchange[Any],
        law: Law,
        ends: Collection[int],
        *,
        auto: bool = False,
    ) -> Draft:
        """A window after the committed tokens: at most the tree ``expansion``, level by level.

        It ends before that where every branch has come to an end token, or, if ``auto``, where
        none is likely to be accepted any more.
        """
        tree = Tree()
        rows: list[Any] = []
        hopes = [1.0]  # of each node of the level: that the target will come there
        for depth, count in enumerate(expansion):
            # [nodes of the level, V]
            logits = self._read_level(tree) if depth else self.logits(committed)[None]
            drawn = []
            for at, row in enumerate(logits):
                place = Place(len(committed), depth, range(at * count, (at + 1) * count))
                tokens, q = exchange.draw(row, law, place)
                drawn.append(tokens)
                rows.append(q)
                if auto:
                    hopes[at] *= predicted_acceptance(row, count)
            tree.grow(drawn)
            if all(token in ends for tokens in drawn for token in tokens):
                break
            if auto and max(hopes) < ENOUGH:
                break
            hopes = [hopes[at] for at, tokens in enumerate(drawn) for _ in set(tokens)]
        draft: Draft = exchange.pack(tree, rows)
        return draft

    def _read_level(self, tree: Tree) -> Floats:
        """Read the deepest level of the tree; its logits [nodes, V], valid until the next call."""
        nodes = tree.level
        alone = len(tree) == len(tree.candidates)  # one node a level: a chain
        passed = Pass(
            slot=0,
            tokens=tree.ids[nodes.start - 1 :].astype(np.int64),
            rows=len(nodes),
            parents=None if alone else tree.parents,
        )
        logits: Floats = self._decoder.forward([passed])[0].logits
        return logits
