"""Draft with a small model, alone or together with repetitions of the text.

The model reads tokens of its own vocabulary; a bridge translates them. Each prediction gives the
engine the whole sequence: the committed tokens, then the window. The engine computes what the
lane's slot lacks.

With a `Recollection`, a long match in the text replaces the model's pass in a chain. The model
reads these tokens later, many in one pass. In a tree, q is the even mixture of the model's and the
text's distributions, so that branches come from either.

A model with a mask token predicts several tokens in one pass (`SharedModel.masked`). Each of their
distributions depends only on the text before the pass, and is its draft's q like any other. In a
tree, a level's distribution is the q of all its nodes, whatever their paths. For a protocol that
needs hidden states, one more pass reads the whole window, since a mask has no state of its token.
`local` verifies nothing, so it generates token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pilotfish.bridge import Bridge, Prompt, TrivialBridge
from pilotfish.drafting.lookup import DEFAULT_OWNER, Owner, Recollection
from pilotfish.drafting.model import SharedModel
from pilotfish.drafting.text_drafter import rows
from pilotfish.drafting.window import Drafter, Ids, Level
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.engine import Work
from pilotfish.engines.language_model import Output
from pilotfish.speculation.acceptance import PRIOR_ACCEPTANCE
from pilotfish.speculation.distributions import Floats, mix_logits
from pilotfish.speculation.recall import Echo
from pilotfish.speculation.tree import Expansion, Tree, nodes_at_most
from pilotfish.wire.messages import MAX_WINDOW
from pilotfish.wire.protocols import SpeculationProtocol

if TYPE_CHECKING:
    from typing_extensions import Self

_MIN_ACCEPTANCE = 0.8  # minimum acceptance of a match that replaces a pass
_SHORT_CHUNK = 32  # maximum tokens per pass while an arriving token of the target must wait for it


class ModelDrafter(Drafter):
    """The small model of one session, with a slot of the engine.

    shared: the model, which all forks use in turns. text: drafts where it finds a long match.
    """

    standalone, prior_acceptance = True, PRIOR_ACCEPTANCE

    def __init__(self, shared: SharedModel, text: Recollection | None = None) -> None:
        super().__init__()
        self._shared_model, self._text = shared, text
        model = shared.engine.model
        self.manifest = manifest = model.artifact.manifest
        self.name, self.origin = manifest.model, manifest.origin
        self.context, self.execution = model.context, model.execution
        self.hidden_size = manifest.dimensions.hidden if manifest.hidden_states else 0
        self.no_tree_reason = manifest.why_chains_only or ""
        self.pass_times, self.drafts_per_pass = shared.pass_times, shared.drafts_per_pass
        self.bridge: Bridge = TrivialBridge(manifest.vocab_size, model.artifact.head_tokens)
        self._vocabulary = ""
        self._slot = shared.acquire_slot()
        self._released = False
        # The drafter's ids of the context and, after it, of the window as far as `_sequence` has
        # written them: one array for all passes of a window.
        self._window_ids: NDArray[Any] = np.empty(0, np.uint32)
        self._context_length = self._written = 0
        # f32 [γ, d]: hidden states of the window's first `_known_states` tokens, if it is a chain
        self._states = np.empty((MAX_WINDOW, model.hidden_size), dtype=np.float32)
        self._known_states = 0
        self._mixes_text = False  # True: the text may draft in the open window
        # The last pass over the open window, a chain: the number of tokens that it read, and its
        # predictions of the tokens after them, f32 [n, V].
        self._predicted_from, self._predicted = 0, np.empty((0, 0), np.float32)
        # number of levels of the open window, and whether none of them branches
        self._levels, self._is_chain = 0, True
        # what `catch_up` has found read: committed tokens, drafts, and their draft ids
        self._caught_up: tuple[Ids, Ids, NDArray[Any]] | None = None

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
        shared = SharedModel.open(
            artifact, slots=lanes, provider=provider, threads=threads, context=context
        )
        return cls(shared, text)

    def fork(self) -> Self:
        """Make a drafter for another session; `UnsupportedError` if no lane is free."""
        other = type(self)(self._shared_model)
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
        """Begin a generation; the K/V of the prompt's cached prefix are used again."""
        self.bridge.start(prompt)
        if self._text is not None:
            self._text.start(self._vocabulary, self.bridge.vocab_size, owner, lossless=lossless)
            self._text.update(prompt.ids)

    def reset(self) -> None:
        """Drop the K/V, so that the next generation reads its whole prompt."""
        self._shared_model.clear(self._slot)

    def end(self, committed: Ids) -> None:
        """Keep prompt and answer, u32 [n], for later drafts by text."""
        if self._text is not None:
            self._text.end(committed)

    def remaining_context(self, committed: Ids) -> int:
        """Count the tokens that still fit the context; negative if the committed ones exceed it."""
        return self.context - len(self.bridge.context(committed))

    def prefill(self, committed: Ids, before_chunk: Callable[[], None] = lambda: None) -> None:
        """Read all committed tokens except the last; the first draft reads the last token.

        before_chunk: called before each chunk of a long text; it may raise an error. Reads nothing
        if the tokens exceed the context.
        """
        context = self.bridge.context(committed)
        if len(context) > self.context:
            return
        unread, work = self._shared_model.next_work(self._slot, context, predicts=0)
        if unread > 0:
            self._run(work.tokens, rows=0, before_pass=before_chunk)

    def logits(self, committed: Ids) -> Floats:
        """Return the model's logits [V] over the target's tokens, after the committed tokens."""
        logits: Floats = self._run(self.bridge.context(committed))[0]
        return logits

    def catch_up(self, committed: Ids, drafts: Ids) -> bool:
        """Read one chunk of these tokens if many are unread; returns whether a chunk was read."""
        context = self._draft_context(committed, drafts)
        unread, work = self._shared_model.next_work(self._slot, context, _SHORT_CHUNK)
        if unread <= _SHORT_CHUNK:
            self._caught_up = committed, drafts, context
            return False
        self._run(work.tokens, rows=0)
        return True

    def rows(self, draft_ids: NDArray[Any], count: int) -> Floats:
        """Return the logits [count, V] after each of the last ``count`` draft ids [n].

        All ids must fit the drafter's context. The logits are valid until the next call.
        """
        return self._run(draft_ids, rows=count)

    def predict_next(self, committed: Ids, drafts: Ids, most: int = 1) -> Level:
        """Predict tokens after committed tokens and drafts, by the text or by a pass."""
        if self._text is not None:
            self._text.update(committed)
            if (level := self._look_up_text(drafts.tolist())) is not None:
                return level
        caught_up, self._caught_up = self._caught_up, None
        # the same array, so that the engine does not compare it with the slot again
        if caught_up is not None and caught_up[0] is committed and caught_up[1] is drafts:
            return Level(self._predict(caught_up[2], most))
        return Level(self._predict(self._draft_context(committed, drafts), most))

    def _draft_context(self, committed: Ids, drafts: Ids) -> NDArray[Any]:
        return np.concatenate([self.bridge.context(committed), self.bridge.to_draft_ids(drafts)])

    def _predict(self, ids: NDArray[Any], most: int) -> Floats:
        """Predict ``most`` tokens or fewer after these ids [n] in one pass: logits [rows, V]."""
        rows = max(1, min(most, self.drafts_per_pass, self.context - len(ids) + 1))
        return self._run(self._shared_model.masked(ids, rows), rows)

    def _run(
        self,
        ids: NDArray[Any],
        rows: int = 1,
        *,
        parents: NDArray[np.int64] | None = None,
        states: Floats | None = None,
        before_pass: Callable[[], None] = lambda: None,
    ) -> Floats:
        """Return the logits [rows, V] over the target's tokens after the last of the ids [n].

        parents: i64 [m], if the last m ids are a tree (`Work`). states: f32 [rows, d], gets the
        hidden states of the last ids.
        """

        def take(outputs: list[Output]) -> Floats:
            (output,) = outputs
            if states is not None:
                states[:] = output.hidden
            return self.bridge.project(output.logits)

        return self._shared_model.run([Work(self._slot, ids, rows, parents)], take, before_pass)

    # A window

    def _open(
        self, committed: Ids, expansion: Expansion, protocol: SpeculationProtocol[Any]
    ) -> Expansion:
        """Begin a window after the committed tokens; returns the levels of it that fit."""
        context = self.bridge.context(committed)
        self._context_length = self._written = length = len(context)
        while (nodes := nodes_at_most(expansion)) > max(0, self.context - length):
            expansion = expansion[:-1]
        self._window_ids = np.empty(length + nodes, context.dtype)
        self._window_ids[:length] = context
        self._known_states = self._predicted_from = 0
        self._predicted = self._predicted[:0]
        self._levels, self._is_chain = len(expansion), {*expansion} <= {1}
        self._mixes_text = not protocol.requires
        if self._text is not None:
            self._text.update(committed)
        return expansion

    def _level(self, tree: Tree, *, unread: bool) -> Level:
        """Predict the tokens after the deepest level; in a chain, by the text if possible."""
        if unread:
            level = None if self._text is None else self._look_up_text(tree.ids.tolist())
            return Level(self._predict_chain(tree)) if level is None else level
        if self.drafts_per_pass == 1:
            logits = self._read_level(tree)
        else:
            logits = self._predict_chain(tree) if self._is_chain else self._predict_level(tree)
        if self._text is None or not self._mixes_text:
            return Level(logits)
        paths = [tree.tokens(tree.path(node)) for node in tree.level]
        echoes = [self._readable(self._text.predict(path)) for path in paths]
        return Level(mix_logits(logits, rows(echoes, self.bridge.vocab_size)))

    def _predict_chain(self, tree: Tree) -> Floats:
        """Return the logits [1, V] after the window, a chain: the last pass may have them."""
        place = len(tree) - self._predicted_from
        if place >= len(self._predicted):
            self._predicted_from, place = len(tree), 0
            most = 1 if len(tree) < self._single else self._levels - len(tree)
            self._predicted = self._predict(self._sequence(tree), most)
        self.places[len(tree)] = place
        return self._predicted[place : place + 1]

    def _predict_level(self, tree: Tree) -> Floats:
        """Return the logits [nodes, V] after a tree's deepest level, from one pass over masks.

        The nodes of a level have the same prediction, since it knows none of the window's tokens. A
        tree that is deeper than a pass is read level by level from there on.
        """
        depth = len(tree.path(int(tree.level[0])))
        if not depth:
            self._predicted = self._predict(self._sequence(tree), self._levels)
        if depth >= len(self._predicted):
            return self._read_level(tree)
        logits: Floats = np.repeat(self._predicted[depth : depth + 1], len(tree.level), axis=0)
        return logits

    def _sequence(self, tree: Tree) -> NDArray[Any]:
        """Return the ids of the context and of the window `tree`, valid until the next window."""
        first, end = self._written, self._context_length + len(tree)
        if first < end:
            self._window_ids[first:end] = self.bridge.to_draft_ids(tree.ids[first - end :])
            self._written = end
        return self._window_ids[:end]

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
        """Read the tokens of the last window (a chain) that drafting drew unread.

        That is the last token, or all tokens if they were drafted over masks. Protocols that judge
        by hidden states read them in each window, even if the edge asks for no state of that
        window; only at thresholds 0 and 1 of the request they never do. So within an answer the
        passes always have the same shape: other shapes round differently.
        """
        first, end = self._known_states, len(self._window)
        if first < end:
            self._known_states = end
            ids = self._sequence(self._window)
            self._run(ids, end - first, states=self._states[first:end])

    def _read_level(self, tree: Tree) -> Floats:
        """Read the deepest level of the tree and return its logits [nodes, V]."""
        ids = self._sequence(tree)
        if len(tree) > len(tree.candidates):
            # the first levels, with one node each, are part of the chain before the tree
            parents = tree.parents
            first = int(np.argmax(parents[1:] == parents[:-1]))  # the first node with a sibling
            return self._run(ids, len(tree.level), parents=parents[first:] - first)
        states = None
        if len(tree):
            states = self._states[len(tree) - 1 : len(tree)]
            self._known_states = len(tree)
        return self._run(ids, states=states)
