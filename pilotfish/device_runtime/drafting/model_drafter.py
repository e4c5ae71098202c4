"""The small model of a session, alone or with what the text has said before.

It reads its own tokens, which a bridge makes of the target's. A new sequence reuses the K/V of the
longest prefix that it shares with the last one.

With a `Recollection` beside it: in a chain a long match of the text takes the place of the model's
pass, and the model reads those tokens later, many in a pass. In a tree q is the even mixture of
both, so that branches are drawn of either.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pilotfish.base.errors import UnsupportedError
from pilotfish.device_runtime.bridge import Bridge, Prompt, TrivialBridge
from pilotfish.device_runtime.choice.acceptance import PRIOR_ACCEPTANCE
from pilotfish.device_runtime.drafting.drafter import Drafter, Ids, Level
from pilotfish.device_runtime.drafting.fair_lock import FairLock
from pilotfish.device_runtime.drafting.text_drafter import Recollection, rows
from pilotfish.device_runtime.drafting.text_folder import DEFAULT_OWNER, Owner
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.language_model import open_model
from pilotfish.engines.pass_times import pass_times
from pilotfish.engines.passes import Pass
from pilotfish.speculation.distributions import Floats, mix_logits
from pilotfish.speculation.recall import Echo
from pilotfish.speculation.tree import Expansion, Tree, nodes_at_most
from pilotfish.wire.committed_tokens import common_prefix
from pilotfish.wire.messages import MAX_WINDOW
from pilotfish.wire.protocols import SpeculationProtocol

if TYPE_CHECKING:
    from typing_extensions import Self

_WIDTHS = (1, 2, 4)
_SURE = 0.8  # odds by which the text takes the place of a pass
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
            artifact,
            slots=lanes,
            context=context,
            threads=threads,
            provider=provider,
            drafts=True,
        )
        self.pass_times = pass_times(self.decoder, _WIDTHS)
        self.lock = FairLock()
        self._free = list(range(lanes))
        self._lock = threading.Lock()

    def acquire_slot(self) -> int:
        """Empty and return the lowest free slot; `UnsupportedError` if all are taken."""
        with self._lock:
            if not self._free:
                raise UnsupportedError(
                    f"All {self.decoder.slots} lanes of this device are taken: close one, or open "
                    "the device with more."
                )
            slot = min(self._free)
            self._free.remove(slot)
        with self.lock:
            self.decoder.rollback(slot, 0)
        return slot

    def release_slot(self, slot: int) -> None:
        """Free a slot."""
        with self._lock:
            self._free.append(slot)


class ModelDrafter(Drafter):
    """The small model of one session: its K/V follow the committed tokens and the open window.

    text: what drafts where it has a long match. Drafters made `beside` it share the weights, and
    take turns at the model.
    """

    standalone, prior_acceptance = True, PRIOR_ACCEPTANCE

    def __init__(
        self,
        artifact: Artifact,
        *,
        provider: str,
        threads: int | None,
        context: int | None,
        lanes: int = 1,
        text: Recollection | None = None,
    ) -> None:
        super().__init__()
        self.manifest = manifest = artifact.manifest
        shared = SharedModel(
            artifact, provider=provider, threads=threads, context=context, lanes=lanes
        )
        self.name, self.origin = manifest.model, manifest.origin
        self.context = shared.decoder.context
        self.hidden_size = manifest.dimensions.hidden if manifest.hidden_states else 0
        self.no_tree_reason = manifest.why_chains_only or ""
        self.pass_times = shared.pass_times
        self.bridge: Bridge = TrivialBridge(manifest.vocab_size, artifact.head_tokens)
        self._text = text
        self._take(shared)

    def _take(self, lanes: SharedModel) -> None:
        self._window, self._forced = Tree(), []
        self._lanes = lanes
        self._decoder = lanes.decoder
        self.execution = lanes.decoder.execution
        self._slot = lanes.acquire_slot()
        self._released = False
        self._ids = np.empty(self.context, dtype=np.int64)  # i64 [n]: own tokens in the K/V cache
        self._chain_length = 0  # of these, read as a chain; nodes of a tree may follow
        self._trunk = 0  # of these, before the window
        self._context: NDArray[Any] = self._ids[:0]  # own tokens before the window
        # f32 [γ, d]: the hidden states at the tokens of the window that have been read
        self._states = np.empty((MAX_WINDOW, self._decoder.hidden_size), dtype=np.float32)
        self._tree: Tree | None = None  # the tree behind the chain

    def fork(self) -> Self:
        """Make a drafter for another session; `UnsupportedError` if no lane is free."""
        other = copy(self)
        other._take(self._lanes)
        other._text = self._text.fork() if self._text else None
        return other

    def release(self) -> None:
        """Free the lane; the drafter must not be used afterwards."""
        if not self._released:
            self._released = True
            self._lanes.release_slot(self._slot)
            if self._text is not None:
                self._text.release()

    def set_bridge(self, bridge: Bridge, vocabulary: str = "") -> None:
        """Use this bridge from now on, to the target's vocabulary of this fingerprint."""
        self.bridge, self._vocabulary = bridge, vocabulary

    def start(self, prompt: Prompt, owner: Owner = DEFAULT_OWNER, *, lossless: bool = True) -> None:
        """Begin a generation; keeps the K/V of the prompt's known prefix."""
        self.bridge.start(prompt)
        self._roll_back(prompt.draft_ids[:-1])
        if self._text is not None:
            self._text.start(self._vocabulary, self.bridge.vocab_size, owner, lossless=lossless)
            self._text.update(prompt.ids)

    def reset(self) -> None:
        """Drop the K/V, so that the next generation reads all of its prompt."""
        self._roll_back(self._ids[:0])

    def end(self, committed: Ids) -> None:
        """Note that an answer is complete: prompt and answer are u32 [n]."""
        if self._text is not None:
            self._text.end(committed)

    def remaining_context(self, committed: Ids) -> int:
        """Count the tokens that it can read after the committed ones; negative if not those."""
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

    def _append(self, draft_ids: NDArray[Any]) -> None:
        """Append tokens [n] that were read to the chain."""
        end = self._chain_length + len(draft_ids)
        self._ids[self._chain_length : end] = draft_ids
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
        with self._lanes.lock:
            self._decoder.keep_path(self._slot, known)
        self._chain_length = self._trunk
        self._append(self.bridge.to_draft_ids(tree.ids[known]))

    def prefill(self, committed: Ids, before_chunk: Callable[[], None] = lambda: None) -> None:
        """Read all committed tokens but the last, which the first draft reads.

        ``between`` is called before each part of a long text, and may raise. Reads nothing if the
        tokens exceed the context.
        """
        context = self.bridge.context(committed)
        if len(context) <= self.context:
            self._read(context, before_chunk)

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
            with self._lanes.lock:
                self._decoder.forward([Pass(slot=self._slot, tokens=part, rows=0)])
            self._append(part)

    def logits(self, committed: Ids) -> Floats:
        """Return the model's logits [V], over the target's tokens, after the committed ones."""
        return self._logits(self.bridge.context(committed))

    def _logits(self, context: NDArray[Any]) -> Floats:
        self._read(context, leave=_CHUNK)
        rest = context[self._chain_length :].astype(np.int64)  # in one pass, rather than in two
        logits: Floats = self._forward(Pass(slot=self._slot, tokens=rest, rows=1))[0]
        self._append(rest)
        return logits

    def catch_up(self, committed: Ids, drafts: Ids) -> bool:
        """Read a piece of these tokens if it is far behind their end; returns whether it was."""
        rest = self._unread(self._with(committed, drafts))
        if len(rest) <= _PIECE:
            return False
        with self._lanes.lock:
            piece = rest[:_PIECE]
            self._decoder.forward([Pass(slot=self._slot, tokens=piece, rows=0)])
        self._append(piece)
        return True

    def rows(self, draft_ids: NDArray[Any], count: int) -> Floats:
        """Return the logits [count, V] behind each of the last ``count`` of its own ids [n].

        These are read in one pass, and before them what the K/V cache lacks. They must fit into the
        drafter's context. The logits are valid until the next call.
        """
        self._read(draft_ids[: len(draft_ids) - count + 1])
        rest = draft_ids[len(draft_ids) - count :].astype(np.int64)
        logits = self._forward(Pass(slot=self._slot, tokens=rest, rows=count))
        self._append(rest)
        return logits

    def predict_next(self, committed: Ids, drafts: Ids) -> Level:
        """Return what may follow these tokens, after `read_events`."""
        if self._text is not None:
            self._text.update(committed)
            if (level := self._look_up_text(drafts.tolist())) is not None:
                return level
        rest = self._unread(self._with(committed, drafts))
        logits = self._forward(Pass(slot=self._slot, tokens=rest, rows=1))
        self._append(rest)
        return Level(logits)

    def _with(self, committed: Ids, drafts: Ids) -> NDArray[Any]:
        return np.concatenate([self.bridge.context(committed), self.bridge.to_draft_ids(drafts)])

    def _unread(self, context: NDArray[Any]) -> NDArray[np.int64]:
        """Return those of the drafter's ids that are to be read, the last one at least."""
        self._roll_back(context[:-1])
        return context[self._chain_length :].astype(np.int64)

    def _forward(self, passed: Pass, states: Floats | None = None) -> Floats:
        """Run a pass and return its logits; writes hidden states to ``states`` if given."""
        with self._lanes.lock:
            # copies: the next pass, perhaps of another lane, overwrites the decoder's buffers
            output = self._decoder.forward([passed])[0]
            if states is not None:
                states[:] = output.hidden
            return self.bridge.project(output.logits)

    # A window

    def _open(
        self, committed: Ids, expansion: Expansion, protocol: SpeculationProtocol[Any]
    ) -> Expansion:
        """Begin a window behind the committed tokens; returns how large it may be."""
        self._context = self.bridge.context(committed)
        while expansion and nodes_at_most(expansion) > self.context - len(self._context):
            expansion = expansion[:-1]
        self._trunk = len(self._context)
        self._heard = not protocol.requires
        if self._text is not None:
            self._text.update(committed)
        return expansion

    def _level(self, tree: Tree, *, unread: bool) -> Level:
        """Return what may follow the deepest level, by the text where it has a long match."""
        if unread:
            level = self._look_up_text(tree.ids.tolist())
            if level is None:
                draft_ids = self.bridge.to_draft_ids(tree.ids)
                level = Level(self._logits(np.concatenate([self._context, draft_ids]))[None])
            return level
        logits = self._read_level(tree) if len(tree) else self._logits(self._context)[None]
        if self._text is None or not self._heard:
            return Level(logits)
        paths = [tree.tokens(tree.path(node)) for node in tree.level]
        echoes = [self._shared(self._text.predict(path)) for path in paths]
        return Level(mix_logits(logits, rows(echoes, self.bridge.vocab_size)))

    def _look_up_text(self, path: Sequence[int]) -> Level | None:
        """Return what the text says behind a path, if its odds are good."""
        if self._text is None:
            return None
        echo = self._shared(self._text.predict(path))
        if echo is None or (odds := self._text.acceptance(echo)) < _SURE:
            return None
        return Level(rows([echo], self.bridge.vocab_size), [odds])

    def _shared(self, echo: Echo | None) -> Echo | None:
        """Return an echo if the model can read all its tokens, and so go on behind them."""
        if echo is None or not all(self.bridge.can_draft(token) for token in echo.tokens.tolist()):
            return None
        return echo

    def hidden_states(self, positions: NDArray[np.int64]) -> Floats:
        """Return the hidden states f32 [m, d] at tokens ``at`` [m] of the last window, a chain."""
        self.decode_last()
        found: Floats = self._states[positions]
        return found

    def decode_last(self) -> None:
        """Read the last token of the last window, a chain, which has only been drawn.

        Judged protocols always read it, so that the next window begins with passes of the same
        shape whether or not its state was needed: passes of other shapes round differently.
        """
        last = len(self._window) - 1
        if last >= 0 and self._chain_length == self._trunk + last:
            self._read_level(self._window)

    def _read_level(self, tree: Tree) -> Floats:
        """Read the deepest level of the tree and return its logits [nodes, V]."""
        nodes = tree.level
        alone = len(tree) == len(tree.candidates)  # one node a level: a chain
        tokens = self.bridge.to_draft_ids(tree.ids[nodes.start - 1 :]).astype(np.int64)
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
