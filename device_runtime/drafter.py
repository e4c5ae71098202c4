"""Draft windows with the small model: a chain, or a token tree level by level."""

import threading
from collections.abc import Callable, Collection, Sequence
from copy import copy
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pilotfish.device_runtime.bridge import Bridge, Prompt, TrivialBridge
from pilotfish.device_runtime.turns import Turns
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.language_model import open_model
from pilotfish.engines.pace import pass_times
from pilotfish.engines.passes import Pass
from pilotfish.speculation.confidence import ENOUGH, predicted_acceptance
from pilotfish.speculation.distributions import Floats
from pilotfish.speculation.shaping import Shaper
from pilotfish.speculation.tree import Expansion, Tree, nodes_at_most
from pilotfish.wire.committed import common_prefix
from pilotfish.wire.errors import UnsupportedError
from pilotfish.wire.messages import MAX_WINDOW
from pilotfish.wire.protocols import Draft, Exchange, Law, Place

Ids = NDArray[np.uint32]

_WIDTHS = (1, 2, 4)
_CHUNK = 128  # tokens of a prompt read in one pass
_PIECE = 32  # likewise, where the target's tokens wait for the pass


class SharedModel:
    """One model with a slot for each `Drafter`. Thread-safe.

    Drafters take turns, one pass each in order of request: a pass returns views that the next one
    overwrites, and a long prompt of one lane must not stall another.
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
        self.decoder = open_model(
            artifact, slots=lanes, context=context, threads=threads, provider=provider
        )
        self.pace = pass_times(self.decoder, _WIDTHS)
        self.turns = Turns()
        self._free = list(range(lanes))
        self._lock = threading.Lock()

    def take(self) -> int:
        """Empty and return the lowest free slot; `UnsupportedError` if all are taken."""
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
        """Free a slot."""
        with self._lock:
            self._free.append(slot)


class Drafter:
    """The small model of one session: its K/V follow the committed tokens and the open window.

    It reads its own tokens, which a bridge makes of the target's. A new sequence reuses the K/V of
    the longest prefix that it shares with the last one.

    One thread at a time; drafters made `beside` it may run in other threads. They share the
    weights, and take turns at the model.
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
        shared = SharedModel(
            artifact, provider=provider, threads=threads, context=context, lanes=lanes
        )
        self.context = shared.decoder.context
        self.trees = artifact.manifest.chained is None  # whether it drafts any
        self.pace = shared.pace  # seconds by nodes of a level
        self.bridge: Bridge = TrivialBridge(self.manifest.vocab_size)
        self._take(shared)

    def _take(self, lanes: SharedModel) -> None:
        self._lanes = lanes
        self._decoder = lanes.decoder
        self._slot = lanes.take()
        self._released = False
        self._ids = np.empty(self.context, dtype=np.int64)  # i64 [n]: own tokens in the K/V cache
        self._chain_length = 0  # of these, read as a chain; nodes of a tree may follow
        self._trunk = 0  # of these, before the window
        self._window = Tree()  # drafted last
        self._forced: list[int] = []  # its tokens that a grammar forced, numbered from 0
        # f32 [γ, d]: the hidden states at the tokens of that window that have been read
        self._states = np.empty((MAX_WINDOW, self._decoder.hidden_size), dtype=np.float32)
        self._tree: Tree | None = None  # the tree behind the chain

    def beside(self) -> "Drafter":
        """Make a drafter for another session; `UnsupportedError` if no lane is free."""
        other = copy(self)
        other._take(self._lanes)
        return other

    def release(self) -> None:
        """Free the lane; the drafter must not be used afterwards."""
        if not self._released:
            self._released = True
            self._lanes.give_back(self._slot)

    def cross(self, bridge: Bridge) -> None:
        """Use this bridge to the target from now on."""
        self.bridge = bridge

    def start(self, prompt: Prompt) -> None:
        """Begin a generation; keeps the K/V of the prompt's known prefix."""
        self.bridge.start(prompt)
        self._roll_back(prompt.own[:-1])

    def room(self, committed: Ids) -> int:
        """Count the tokens that fit into the drafter's context after the committed ones.

        Negative if the committed ones do not fit.
        """
        return self.context - len(self.bridge.context(committed))

    @property
    def _held(self) -> int:
        return self._decoder.length(self._slot)

    def _roll_back(self, wanted: NDArray[Any]) -> None:
        """Drop the K/V after the common prefix with ``wanted``, and any unsettled tree."""
        self._tree = None
        self._chain_length = common_prefix(self._ids[: self._chain_length], wanted)
        if self._chain_length < self._held:
            self._decoder.rollback(self._slot, self._chain_length)

    def _append(self, own: NDArray[Any]) -> None:
        """Append tokens [n] that were read to the chain."""
        end = self._chain_length + len(own)
        self._ids[self._chain_length : end] = own
        self._chain_length = end

    def keep_path(self, path: Sequence[int]) -> None:
        """Keep the K/V of the last drafted tree's nodes on ``path`` only.

        Does nothing for a chain: its rejected tokens are dropped by the next read.
        """
        if self._tree is None:
            return
        tree, self._tree = self._tree, None
        read = self._held - self._trunk  # the deepest level was drawn but not read
        known = [node - 1 for node in path if node <= read]
        with self._lanes.turns:
            self._decoder.keep_path(self._slot, known)
        self._chain_length = self._trunk
        self._append(self.bridge.own(tree.ids[known]))

    def read(self, committed: Ids, between: Callable[[], None] = lambda: None) -> None:
        """Read all committed tokens but the last, which the first draft reads.

        ``between`` is called before each part of a long text, and may raise. Reads nothing if the
        tokens exceed the context.
        """
        context = self.bridge.context(committed)
        if len(context) <= self.context:
            self._read(context, between)

    def _read(
        self,
        context: NDArray[Any],
        between: Callable[[], None] = lambda: None,
        *,
        leave: int = 1,
    ) -> None:
        """Read the drafter's ids ``context`` except the last 1 to ``leave``."""
        self._tree = None
        self._roll_back(context[:-1])
        while (held := self._chain_length) < len(context) - leave:
            between()
            part = context[held:-1][:_CHUNK].astype(np.int64)
            with self._lanes.turns:
                self._decoder.forward([Pass(slot=self._slot, tokens=part, rows=0)])
            self._append(part)

    def logits(self, committed: Ids) -> Floats:
        """Return the logits [V], over the target's tokens, after the committed ones."""
        return self._logits(self.bridge.context(committed))

    def _logits(self, context: NDArray[Any]) -> Floats:
        self._read(context, leave=_CHUNK)
        rest = context[self._chain_length :].astype(np.int64)  # in one pass, rather than in two
        logits: Floats = self._forward(Pass(slot=self._slot, tokens=rest, rows=1))[0]
        self._append(rest)
        return logits

    def rows(self, own: NDArray[Any], count: int) -> Floats:
        """Return the logits [count, V] behind each of the last ``count`` of its own ids [n].

        These are read in one pass, and before them what the K/V cache lacks. They must fit into the
        drafter's context. The logits are valid until the next call.
        """
        self._read(own[: len(own) - count + 1])
        rest = own[len(own) - count :].astype(np.int64)
        logits = self._forward(Pass(slot=self._slot, tokens=rest, rows=count))
        self._append(rest)
        return logits

    def advance(self, committed: Ids, drafts: Ids) -> Floats | None:
        """Read on towards the end of these tokens, in one pass; returns the logits [V] behind it.

        None: it is farther off than `_PIECE` tokens, and one such piece has been read. Both
        together must fit into the drafter's context.
        """
        context = np.concatenate([self.bridge.context(committed), self.bridge.own(drafts)])
        self._roll_back(context[:-1])
        rest = context[self._chain_length :].astype(np.int64)
        logits = None
        if len(rest) > _PIECE:
            rest = rest[:_PIECE]
            with self._lanes.turns:
                self._decoder.forward([Pass(slot=self._slot, tokens=rest, rows=0)])
        else:
            logits = self._forward(Pass(slot=self._slot, tokens=rest, rows=1))[0]
        self._append(rest)
        return logits

    def _forward(self, passed: Pass, states: Floats | None = None) -> Floats:
        """Run a pass and return its logits; writes hidden states to ``states`` if given."""
        with self._lanes.turns:
            # copies: the next pass, perhaps of another lane, overwrites the decoder's buffers
            output = self._decoder.forward([passed])[0]
            if states is not None:
                states[:] = output.hidden
            return self.bridge.project(output.logits)

    def draft(
        self,
        committed: Ids,
        expansion: Expansion,
        exchange: Exchange[Any],
        law: Law,
        ends: Collection[int],
        *,
        shaper: Shaper | None = None,
        auto: bool = False,
    ) -> Draft:
        """Draft a window after the committed tokens, level by level, at most ``expansion``.

        Stops early when every branch ends in an end token or, if ``auto``, when no further token is
        likely to be accepted. shaper: of logits over the target's tokens; in a chain, what a
        grammar forces is drafted without a pass.
        """
        tree = Tree()
        self._forced.clear()
        # states of all tokens are needed under protocols that judge by them
        chain = shaper is not None and not exchange.needs and {*expansion} == {1}
        rows: list[Any] = []
        context = self.bridge.context(committed)
        while expansion and nodes_at_most(expansion) > self.context - len(context):
            expansion = expansion[:-1]
        hopes = [1.0]  # of each node of the level, the predicted probability of its acceptance
        for depth, count in enumerate(expansion):
            # [nodes of the level, V]
            if shaper is not None and chain:
                found = self._constrained(shaper, committed, context, tree)
            else:
                found = self._read_level(tree) if depth else self._root(context)
                if shaper is not None:
                    paths = [tree.tokens(tree.path(node)) for node in tree.level]
                    found = _shaped(shaper, found, committed, paths)
            if found is None:
                break
            logits = found
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
        self._window = tree
        draft: Draft = exchange.carry(exchange.pack(tree, rows), self.states)
        return draft

    def _constrained(
        self, shaper: Shaper, committed: Ids, context: NDArray[Any], tree: Tree
    ) -> Floats | None:
        """Return shaped logits [1, V] behind a chain, of which any part may not be read yet.

        None where the grammar allows nothing that the drafter can say.
        """
        path = tree.ids.tolist()
        token = shaper.forced(committed, path)
        if token is not None and self.bridge.has(token):
            self._forced.append(len(path))
            logits: Floats = np.full((1, self.bridge.vocab_size), -np.inf, np.float32)
            logits[0, token] = 0.0
            return logits
        self._trunk = len(context)
        logits = self._logits(np.concatenate([context, self.bridge.own(tree.ids)]))[None]
        return _shaped(shaper, logits, committed, [path])

    def forced(self, accepted: int) -> tuple[int, ...]:
        """Which of the first ``accepted`` tokens of the last window a grammar forced, from 0."""
        return tuple(at for at in self._forced if at < accepted) if self._forced else ()

    def states(self, at: NDArray[np.int64]) -> Floats:
        """Return the hidden states f32 [m, d] at tokens ``at`` [m] of the last window, a chain."""
        self.read_last()
        found: Floats = self._states[at]
        return found

    def read_last(self) -> None:
        """Read the last token of the last window, a chain, which has only been drawn.

        Judged protocols always read it, so that the next window begins with passes of the same
        shape whether or not its state was needed: passes of other shapes round differently.
        """
        last = len(self._window) - 1
        if last >= 0 and self._chain_length == self._trunk + last:
            self._read_level(self._window)

    def _root(self, context: NDArray[Any]) -> Floats:
        logits = self._logits(context)[None]
        self._trunk = self._chain_length
        return logits

    def _read_level(self, tree: Tree) -> Floats:
        """Read the deepest level of the tree and return its logits [nodes, V]."""
        nodes = tree.level
        alone = len(tree) == len(tree.candidates)  # one node a level: a chain
        tokens = self.bridge.own(tree.ids[nodes.start - 1 :]).astype(np.int64)
        passed = Pass(
            slot=self._slot,
            tokens=tokens,
            rows=len(nodes),
            parents=None if alone else tree.parents,
        )
        first = nodes.start - 1
        logits = self._forward(passed, self._states[first : first + 1] if alone else None)
        if alone:
            self._append(tokens)
        else:
            self._tree = tree
        return logits


def _shaped(
    shaper: Shaper, logits: Floats, committed: Ids, paths: Sequence[Sequence[int]]
) -> Floats | None:
    """Shape the rows of a level [nodes, V]; None if one is left without a token."""
    dead = shaper.shape(logits, committed, paths)
    return None if dead or np.isneginf(logits.max(axis=1)).any() else logits
