"""Drafting a window with the small model: a chain, or a token tree level by level."""

import threading
from collections.abc import Callable, Collection, Sequence
from copy import copy
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_runtime.turns import Turns
from engines.artifact import Artifact
from engines.decoder import Decoder, Pass
from engines.pace import pass_times
from engines.tokenizer import Tokenizer
from speculation.confidence import ENOUGH, predicted_acceptance
from speculation.distributions import Floats
from speculation.tree import Expansion, Tree
from wire.errors import UnsupportedError
from wire.protocols import Draft, Exchange, Law, Place

Ids = NDArray[np.uint32]

_WIDTHS = (1, 2, 4)
_CHUNK = 128  # tokens of a prompt that are read in one turn


class Lanes:
    """One model and its slots, of which each `Drafter` has one. Thread-safe.

    A pass has the decoder to itself, in the order in which they were asked for: what it gives out
    are views that the next pass overwrites, and a long prompt of one lane must not stall another.
    """

    def __init__(
        self,
        artifact: Artifact,
        *,
        provider: str,
        threads: int | None,
        context: int | None,
        lanes: int,
    ) -> None:
        self.decoder = Decoder(
            artifact, slots=lanes, context=context, threads=threads, provider=provider
        )
        self.pace = pass_times(self.decoder, _WIDTHS)
        self.turns = Turns()
        self._free = list(range(lanes))
        self._lock = threading.Lock()

    def take(self) -> int:
        """The lowest free slot, empty; `UnsupportedError` if all are taken."""
        with self._lock:
            if not self._free:
                raise UnsupportedError(
                    f"All {self.decoder.slots} lanes of this device are taken: close one, or open "
                    "the device with more."
                )
            slot = min(self._free)
            self._free.remove(slot)
        with self.turns:
            self.decoder.rollback(slot, 0)
        return slot

    def give_back(self, slot: int) -> None:
        """The slot may be taken again."""
        with self._lock:
            self._free.append(slot)


class Drafter:
    """The small model of one session: its K/V follow the committed tokens and the open window.

    One thread may use it, and another one each that was made `beside` it; they share the weights,
    and take turns at the model.
    """

    def __init__(
        self,
        artifact: Artifact,
        *,
        provider: str,
        threads: int | None,
        context: int | None,
        lanes: int = 1,
    ) -> None:
        self.artifact = artifact
        self.manifest = artifact.manifest
        self.tokenizer = Tokenizer(artifact)
        shared = Lanes(artifact, provider=provider, threads=threads, context=context, lanes=lanes)
        self.context = shared.decoder.context
        self.pace = shared.pace  # seconds by nodes of a level
        self._take(shared)

    def _take(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._decoder = lanes.decoder
        self._slot = lanes.take()
        self._released = False

    def beside(self) -> "Drafter":
        """Another session's drafter; `UnsupportedError` if no lane is free."""
        other = copy(self)
        other._take(self._lanes)
        return other

    def release(self) -> None:
        """Give the lane back; the drafter is of no use any more."""
        if not self._released:
            self._released = True
            self._lanes.give_back(self._slot)

    def forget(self, keep: int) -> None:
        """Only the first ``keep`` tokens still hold; what was read after them is void."""
        self._decoder.rollback(self._slot, min(keep, self._held))

    @property
    def _held(self) -> int:
        return self._decoder.length(self._slot)

    def keep(self, start: int, path: Sequence[int]) -> None:
        """Of the window after ``start`` tokens, only the nodes on ``path`` still hold."""
        read = self._held - start  # the deepest level was drawn, not read
        known = [node - 1 for node in path if node <= read]
        if known == list(range(len(known))):
            self.forget(start + len(known))
            return
        with self._lanes.turns:
            self._decoder.keep(self._slot, known)

    def read(self, committed: Ids, between: Callable[[], None] = lambda: None) -> None:
        """Read all committed tokens but the last, whose logits the first draft needs.

        ``between`` is called before each part of a long text, and may raise.
        """
        while (held := self._held) < len(committed) - 1:
            between()
            part = committed[held:-1][:_CHUNK].astype(np.int64)
            with self._lanes.turns:
                self._decoder.forward([Pass(slot=self._slot, tokens=part, rows=0)])

    def logits(self, committed: Ids) -> Floats:
        """The drafter's logits [V] after the committed tokens."""
        self.read(committed)
        tokens = committed[self._held :].astype(np.int64)
        logits: Floats = self._forward(Pass(slot=self._slot, tokens=tokens, rows=1))[0]
        return logits

    def _forward(self, passed: Pass) -> Floats:
        with self._lanes.turns:
            # a copy: the next pass, maybe another lane's, overwrites the decoder's own
            logits: Floats = self._decoder.forward([passed])[0].logits.copy()
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
        """Read the deepest level of the tree; its logits [nodes, V]."""
        nodes = tree.level
        alone = len(tree) == len(tree.candidates)  # one node a level: a chain
        passed = Pass(
            slot=self._slot,
            tokens=tree.ids[nodes.start - 1 :].astype(np.int64),
            rows=len(nodes),
            parents=None if alone else tree.parents,
        )
        return self._forward(passed)
