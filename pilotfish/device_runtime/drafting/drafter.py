"""Draft windows: a chain, or a token tree level by level.

What the next token may be, a drafter of a kind says: a model (`model`), or the text itself
(`text`). What is drawn from that, and when a window ends, is the same for all, and stands here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pilotfish.device_runtime.bridge import Bridge, Prompt
from pilotfish.device_runtime.drafting.text_folder import DEFAULT_OWNER, Owner
from pilotfish.engines.language_model import Execution
from pilotfish.speculation.acceptance import ENOUGH, predicted_acceptance
from pilotfish.speculation.distributions import Floats
from pilotfish.speculation.logits_options import LogitsProcessor
from pilotfish.speculation.tree import Expansion, Tree
from pilotfish.wire.protocols import Draft, DrawKey, SamplingParams, SpeculationProtocol

if TYPE_CHECKING:
    from typing_extensions import Self

Ids = NDArray[np.uint32]


class Level(NamedTuple):
    """What may follow each node of a level.

    logits: [nodes, V], over the target's tokens, which may be changed in place. odds: of each node,
    that its likeliest token is the target's; None: the logits are a model's, and tell it.
    """

    logits: Floats
    acceptance: Sequence[float] | None = None


class Drafter(ABC):
    """Drafts for one session: it follows the committed tokens and the open window.

    One thread at a time; drafters made `beside` it may run in other threads.

    name: of the model, for people. origin: of its weights, "" without any. context: the most tokens
    that it reads. hidden_size: d of its states, 0 without any. unbranched: why it drafts no trees,
    "" if it does. alone: whether it can generate without a target. pace: seconds by the nodes of a
    level. hope: α on a target that has shown none yet. bridge: to the target's vocabulary.
    execution: how its model is run; None without one.
    """

    name: str
    origin: str
    context: int
    hidden_size: int
    no_tree_reason: str
    standalone: bool
    pass_times: Mapping[int, float]
    prior_acceptance: float
    bridge: Bridge
    execution: Execution | None = None

    def __init__(self) -> None:
        self._window = Tree()  # drafted last
        self._forced: list[int] = []  # its tokens that a grammar forced, numbered from 0

    # What each kind does in its own way

    @abstractmethod
    def fork(self) -> Self:
        """Make a drafter for another session; `UnsupportedError` if no lane is free."""

    @abstractmethod
    def release(self) -> None:
        """Free the lane; the drafter must not be used afterwards."""

    @abstractmethod
    def set_bridge(self, bridge: Bridge, vocabulary: str = "") -> None:
        """Use this bridge from now on, to the target's vocabulary of this fingerprint."""

    @abstractmethod
    def start(self, prompt: Prompt, owner: Owner = DEFAULT_OWNER, *, lossless: bool = True) -> None:
        """Begin a generation. owner: whose it is; lossless: its protocol is.

        Under a lossy protocol drafts are of the owner's own words, and the model's.
        """

    def reset(self) -> None:
        """Drop what was read: the next generation is another owner's."""
        return

    @abstractmethod
    def prefill(self, committed: Ids, before_chunk: Callable[[], None] = lambda: None) -> None:
        """Read ahead of the next window what is committed, as far as that takes time.

        ``between`` is called before each part of a long text, and may raise.
        """

    def end(self, committed: Ids) -> None:
        """Note that an answer is complete: prompt and answer are u32 [n]."""
        return

    @abstractmethod
    def remaining_context(self, committed: Ids) -> int:
        """Count the tokens that it can read after the committed ones; negative if not those."""

    @abstractmethod
    def catch_up(self, committed: Ids, drafts: Ids) -> bool:
        """Read a piece of these tokens if it is far behind their end; returns whether it was."""

    @abstractmethod
    def predict_next(self, committed: Ids, drafts: Ids) -> Level | None:
        """Return what may follow these tokens, after `read_events`; None if it knows nothing.

        Both together must leave `room`.
        """

    def logits(self, committed: Ids) -> Floats:
        """Return logits [V] over the target's tokens, to go on by without a target."""
        raise NotImplementedError(f"{self.name} says nothing by itself")

    def keep_path(self, path: Sequence[int]) -> None:
        """Note that of the last window's nodes only those on ``path`` were accepted."""
        return

    def hidden_states(self, positions: NDArray[np.int64]) -> Floats:
        """Return the hidden states f32 [m, d] at tokens ``at`` [m] of the last window, a chain."""
        raise NotImplementedError(f"{self.name} has no hidden states")

    def decode_last(self) -> None:
        """Read the last token of the last window, a chain, which has only been drawn."""
        return

    @abstractmethod
    def _open(
        self, committed: Ids, expansion: Expansion, protocol: SpeculationProtocol[Any]
    ) -> Expansion:
        """Begin a window behind the committed tokens; returns how large it may be."""

    @abstractmethod
    def _level(self, tree: Tree, *, unread: bool) -> Level | None:
        """Return what may follow the deepest level of the open window; None if nothing is known.

        unread: the window is a chain, of which any part may not be read yet.
        """

    # What all do alike

    def draft(
        self,
        committed: Ids,
        expansion: Expansion,
        protocol: SpeculationProtocol[Any],
        sampling_params: SamplingParams,
        ends: Collection[int],
        *,
        logits_processor: LogitsProcessor | None = None,
        auto: bool = False,
    ) -> Draft:
        """Draft a window after the committed tokens, level by level, at most ``expansion``.

        Stops early when every branch ends in an end token, when it knows of nothing that may follow
        or, if ``auto``, when no further token is likely to be accepted. shaper: of logits over the
        target's tokens; in a chain, what a grammar forces is drafted without a pass.
        """
        self._window = tree = Tree()
        self._forced.clear()
        expansion = self._open(committed, expansion, protocol)
        # states of all tokens are needed under protocols that judge by them
        unread = not protocol.requires and {*expansion} == {1}
        rows: list[Any] = []
        path_acceptance = [
            1.0
        ]  # of each node of the level, the predicted probability of its acceptance
        for depth, count in enumerate(expansion):
            level = self._shaped_level(tree, logits_processor, committed, unread=unread)
            if level is None:
                break
            drawn = []
            for at, row in enumerate(level.logits):
                draw_key = DrawKey(len(committed), depth, range(at * count, (at + 1) * count))
                tokens, q = protocol.draw(row, sampling_params, draw_key)
                drawn.append(tokens)
                rows.append(q)
                if auto:
                    known = level.acceptance
                    path_acceptance[at] *= known[at] if known else predicted_acceptance(row, count)
            tree.grow(drawn)
            if all(token in ends for tokens in drawn for token in tokens):
                break
            if auto and max(path_acceptance) < ENOUGH:
                break
            path_acceptance = [
                path_acceptance[at] for at, tokens in enumerate(drawn) for _ in set(tokens)
            ]
        draft: Draft = protocol.attach_states(protocol.make_draft(tree, rows), self.hidden_states)
        return draft

    def _shaped_level(
        self, tree: Tree, logits_processor: LogitsProcessor | None, committed: Ids, *, unread: bool
    ) -> Level | None:
        """Return the next level as a shaper leaves it; None where it leaves nothing."""
        if logits_processor is None:
            return self._level(tree, unread=unread)
        if unread:
            path = tree.ids.tolist()
            token = logits_processor.forced_token(committed, path)
            if token is not None and self.bridge.can_draft(token):
                self._forced.append(len(path))
                return self._certain(token)
        level = self._level(tree, unread=unread)
        if level is None:
            return None
        paths = [tree.tokens(tree.path(node)) for node in tree.level]
        dead = logits_processor.process(level.logits, committed, paths)
        nothing = dead or np.isneginf(level.logits.max(axis=1)).any()
        return None if nothing else level

    def _certain(self, token: int) -> Level:
        """Return a level [1, V] at which only this token can follow."""
        logits: Floats = np.full((1, self.bridge.vocab_size), -np.inf, np.float32)
        logits[0, token] = 0.0
        return Level(logits, [1.0])

    def forced_positions(self, accepted: int) -> tuple[int, ...]:
        """Which of the first ``accepted`` tokens of the last window a grammar forced, from 0."""
        return tuple(at for at in self._forced if at < accepted) if self._forced else ()
