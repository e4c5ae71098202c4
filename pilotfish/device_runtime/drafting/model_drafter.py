"""Draft with a small model, alone or together with repetitions of the text.

The model reads tokens of its own vocabulary; a bridge translates them. A new sequence reuses the
K/V of the longest prefix that it shares with the last sequence.

With a `Recollection`, a long match in the text replaces the model's pass in a chain. The model
reads these tokens later, many in one pass. In a tree, q is the even mixture of the model's and the
text's distributions, so that branches come from either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pilotfish.device_runtime.bridge import Bridge, Prompt, TrivialBridge
from pilotfish.device_runtime.choice.acceptance import PRIOR_ACCEPTANCE
from pilotfish.device_runtime.drafting.drafter import Drafter, Ids, Level
from pilotfish.device_runtime.drafting.shared_model import SharedModel
from pilotfish.device_runtime.drafting.text_drafter import Recollection, rows
from pilotfish.device_runtime.drafting.text_folder import DEFAULT_OWNER, Owner
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.passes import Pass
from pilotfish.speculation.distributions import Floats, mix_logits
from pilotfish.speculation.recall import Echo
from pilotfish.speculation.sequences import common_prefix
from pilotfish.speculation.tree import Expansion, Tree, nodes_at_most
from pilotfish.wire.messages import MAX_WINDOW
from pilotfish.wire.protocols import SpeculationProtocol

if TYPE_CHECKING:
    from typing_extensions import Self

_MIN_ACCEPTANCE = 0.8  # minimum acceptance of a match that replaces a pass
_CHUNK = 128  # maximum tokens of a prompt per pass
_SHORT_CHUNK = 32  # maximum while an arriving token of the target must wait for the pass


class ModelDrafter(Drafter):
    """The small model of one session: its K/V follow the committed tokens and the open window.

    shared: the model, which all forks use in turns. text: drafts where it finds a long match.
    """

    standalone, prior_acceptance = True, PRIOR_ACCEPTANCE

    def __init__(
        self, artifact: Artifact, shared: SharedModel, text: Recollection | None = None
    ) -> None:
        super().__init__()
        self.manifest = manifest = artifact.manifest
        self._artifact, self._shared_model, self._text = artifact, shared, text
        self._decoder = shared.decoder
        self.name, self.origin = manifest.model, manifest.origin
        self.context, self.execution = self._decoder.context, self._decoder.execution
        self.hidden_size = manifest.dimensions.hidden if manifest.hidden_states else 0
        self.no_tree_reason = manifest.why_chains_only or ""
        self.pass_times = shared.pass_times
        self.bridge: Bridge = TrivialBridge(manifest.vocab_size, artifact.head_tokens)
        self._vocabulary = ""
        self._slot = shared.acquire_slot()
        self._released = False
        self._ids = np.empty(self.context, dtype=np.int64)  # i64 [n]: ids in the K/V cache
        self._chain_length = 0  # number of ids read as a chain; a tree's nodes may follow
        self._trunk = 0  # number of ids before the window
        self._context: NDArray[Any] = self._ids[:0]  # drafter's ids before the window
        # f32 [γ, d]: hidden states of the window's tokens that have been read
        self._states = np.empty((MAX_WINDOW, self._decoder.hidden_size), dtype=np.float32)
        self._tree: Tree | None = None  # the tree after the chain
        self._mixes_text = False  # True: the text may draft in the open window

    @classmethod
    def open(
        cls,
        artifact: Artifact,
        *,
        provider: str,
        threads: int | None,
        context: int | None,
        lanes: int = 1,
        text: Recollection | None = None,
    ) -> Self:
        """Load the model for this number of lanes; returns the first lane's drafter."""
        shared = SharedModel(
            artifact, provider=provider, threads=threads, context=context, lanes=lanes
        )
        return cls(artifact, shared, text)

    def fork(self) -> Self:
        """Make a drafter for another session; `UnsupportedError` if no lane is free."""
        other = type(self)(self._artifact, self._shared_model)
        other._text = self._text.fork() if self._text else None
        other.set_bridge(self.bridge, self._vocabulary)
        return other

    def release(self) -> None:
        """Free the lane; the drafter must not be used afterwards."""
        if not self._released:
            self._released = True
            self._shared_model.release_slot(self._slot)
            if self._text is not None:
                self._text.release()

    def set_bridge(self, bridge: Bridge, vocabulary: str = "") -> None:
        """Use this bridge from now on; vocabulary: fingerprint of the target's vocabulary."""
        self.bridge, self._vocabulary = bridge, vocabulary

    def start(self, prompt: Prompt, owner: Owner = DEFAULT_OWNER, *, lossless: bool = True) -> None:
        """Begin a generation; keep the K/V of the prompt's cached prefix."""
        self.bridge.start(prompt)
        self._roll_back(prompt.draft_ids[:-1])
        if self._text is not None:
            self._text.start(self._vocabulary, self.bridge.vocab_size, owner, lossless=lossless)
            self._text.update(prompt.ids)

    def reset(self) -> None:
        """Drop the K/V, so that the next generation reads its whole prompt."""
        self._roll_back(self._ids[:0])

    def end(self, committed: Ids) -> None:
        """Keep prompt and answer, u32 [n], for later drafts by text."""
        if self._text is not None:
            self._text.end(committed)

    def remaining_context(self, committed: Ids) -> int:
        """Count the tokens that still fit the context; negative if the committed ones exceed it."""
        return self.context - len(self.bridge.context(committed))

    @property
    def _cache_length(self) -> int:
        return self._decoder.length(self._slot)

    def _roll_back(self, wanted: NDArray[Any]) -> None:
        """Drop the K/V after the common prefix with ``wanted``, and a tree without a verdict."""
        self._tree = None
        self._chain_length = common_prefix(self._ids[: self._chain_length], wanted)
        if self._chain_length < self._cache_length:
            self._decoder.rollback(self._slot, self._chain_length)

    def _append(self, draft_ids: NDArray[Any]) -> None:
        """Append read tokens [n] to the chain."""
        end = self._chain_length + len(draft_ids)
        self._ids[self._chain_length : end] = draft_ids
        self._chain_length = end

    def keep_path(self, path: Sequence[int]) -> None:
        """Keep only the K/V of the nodes on ``path`` of the last drafted tree.

        Does nothing for a chain: the next read drops the chain's rejected tokens.
        """
        if self._tree is None:
            return
        tree, self._tree = self._tree, None
        read = self._cache_length - self._trunk  # the deepest level was drawn but not read
        known = [node - 1 for node in path if node <= read]
        with self._shared_model.lock:
            self._decoder.keep_path(self._slot, known)
        self._chain_length = self._trunk
        self._append(self.bridge.to_draft_ids(tree.ids[known]))

    def prefill(self, committed: Ids, before_chunk: Callable[[], None] = lambda: None) -> None:
        """Read all committed tokens except the last; the first draft reads the last token.

        before_chunk: called before each chunk of a long text; it may raise an error. Reads nothing
        if the tokens exceed the context.
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
        """Read the drafter's ids ``context``, but leave the last 1 to ``leave`` ids unread."""
        self._tree = None
        self._roll_back(context[:-1])
        while (held := self._chain_length) < len(context) - leave:
            between()
            part = context[held:-1][:_CHUNK].astype(np.int64)
            with self._shared_model.lock:
                self._decoder.forward([Pass(slot=self._slot, tokens=part, rows=0)])
            self._append(part)

    def logits(self, committed: Ids) -> Floats:
        """Return the model's logits [V] over the target's tokens, after the committed tokens."""
        return self._logits(self.bridge.context(committed))

    def _logits(self, context: NDArray[Any]) -> Floats:
        self._read(context, leave=_CHUNK)
        rest = context[self._chain_length :].astype(np.int64)  # one pass, even for many ids
        logits: Floats = self._forward(Pass(slot=self._slot, tokens=rest, rows=1))[0]
        self._append(rest)
        return logits

    def catch_up(self, committed: Ids, drafts: Ids) -> bool:
        """Read one chunk of these tokens if many are unread; returns whether a chunk was read."""
        rest = self._unread(self._draft_context(committed, drafts))
        if len(rest) <= _SHORT_CHUNK:
            return False
        with self._shared_model.lock:
            piece = rest[:_SHORT_CHUNK]
            self._decoder.forward([Pass(slot=self._slot, tokens=piece, rows=0)])
        self._append(piece)
        return True

    def rows(self, draft_ids: NDArray[Any], count: int) -> Floats:
        """Return the logits [count, V] after each of the last ``count`` draft ids [n].

        Reads these ids in one pass, after it has read the earlier ids that the K/V cache lacks. All
        ids must fit the drafter's context. The logits are valid until the next call.
        """
        self._read(draft_ids[: len(draft_ids) - count + 1])
        rest = draft_ids[len(draft_ids) - count :].astype(np.int64)
        logits = self._forward(Pass(slot=self._slot, tokens=rest, rows=count))
        self._append(rest)
        return logits

    def predict_next(self, committed: Ids, drafts: Ids) -> Level:
        """Predict the token after committed tokens and drafts, by the text or by a pass."""
        if self._text is not None:
            self._text.update(committed)
            if (level := self._look_up_text(drafts.tolist())) is not None:
                return level
        rest = self._unread(self._draft_context(committed, drafts))
        logits = self._forward(Pass(slot=self._slot, tokens=rest, rows=1))
        self._append(rest)
        return Level(logits)

    def _draft_context(self, committed: Ids, drafts: Ids) -> NDArray[Any]:
        return np.concatenate([self.bridge.context(committed), self.bridge.to_draft_ids(drafts)])

    def _unread(self, context: NDArray[Any]) -> NDArray[np.int64]:
        """Return the unread ids of a context, which include at least the last id."""
        self._roll_back(context[:-1])
        return context[self._chain_length :].astype(np.int64)

    def _forward(self, passed: Pass, states: Floats | None = None) -> Floats:
        """Run a pass and return its logits; write its hidden states to ``states``, if given."""
        with self._shared_model.lock:
            # copy both: the next pass, perhaps another lane's, overwrites the decoder's buffers
            output = self._decoder.forward([passed])[0]
            if states is not None:
                states[:] = output.hidden
            return self.bridge.project(output.logits)

    # A window

    def _open(
        self, committed: Ids, expansion: Expansion, protocol: SpeculationProtocol[Any]
    ) -> Expansion:
        """Begin a window after the committed tokens; returns the levels of it that fit."""
        self._context = self.bridge.context(committed)
        while expansion and nodes_at_most(expansion) > self.context - len(self._context):
            expansion = expansion[:-1]
        self._trunk = len(self._context)
        self._mixes_text = not protocol.requires
        if self._text is not None:
            self._text.update(committed)
        return expansion

    def _level(self, tree: Tree, *, unread: bool) -> Level:
        """Predict the tokens after the deepest level; in a chain, by the text if possible."""
        if unread:
            level = self._look_up_text(tree.ids.tolist())
            if level is None:
                draft_ids = self.bridge.to_draft_ids(tree.ids)
                level = Level(self._logits(np.concatenate([self._context, draft_ids]))[None])
            return level
        logits = self._read_level(tree) if len(tree) else self._logits(self._context)[None]
        if self._text is None or not self._mixes_text:
            return Level(logits)
        paths = [tree.tokens(tree.path(node)) for node in tree.level]
        echoes = [self._readable(self._text.predict(path)) for path in paths]
        return Level(mix_logits(logits, rows(echoes, self.bridge.vocab_size)))

    def _look_up_text(self, path: Sequence[int]) -> Level | None:
        """Predict the token after a path by the text; None if its acceptance is unlikely."""
        if self._text is None:
            return None
        echo = self._readable(self._text.predict(path))
        if echo is None or (acceptance := self._text.acceptance(echo)) < _MIN_ACCEPTANCE:
            return None
        return Level(rows([echo], self.bridge.vocab_size), [acceptance])

    def _readable(self, echo: Echo | None) -> Echo | None:
        """Return the echo if the model can read all its tokens, and so can continue after them."""
        if echo is None or not all(self.bridge.can_draft(token) for token in echo.tokens.tolist()):
            return None
        return echo

    def hidden_states(self, positions: NDArray[np.int64]) -> Floats:
        """Return the hidden states f32 [m, d] at ``positions`` [m] of the last window, a chain."""
        self.decode_last()
        states: Floats = self._states[positions]
        return states

    def decode_last(self) -> None:
        """Read the last token of the last window (a chain); drafting drew this token unread.

        Protocols that judge by hidden states always read this token, even if its state is not
        needed. So the passes of the next window always have the same shape: other shapes round
        differently.
        """
        last = len(self._window) - 1
        if last >= 0 and self._chain_length == self._trunk + last:
            self._read_level(self._window)

    def _read_level(self, tree: Tree) -> Floats:
        """Read the deepest level of the tree and return its logits [nodes, V]."""
        nodes = tree.level
        alone = len(tree) == len(tree.candidates)  # one node per level: a chain
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
