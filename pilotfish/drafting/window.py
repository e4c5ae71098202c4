"""Draft windows: a chain, or a token tree level by level.

Each kind of drafter predicts the next token, by a model (`model_drafter`) or by the text itself
(`text_drafter`). All kinds draw from the predictions and end a window in the same way. If the
request predicts the answer's text, a chain's tokens come from this text where they are likely to be
accepted. Which source a token has depends on the text before it alone, so all laws stay.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pilotfish.bridge import Bridge, Prompt
from pilotfish.drafting.ahead import Proposal
from pilotfish.drafting.lookup import DEFAULT_OWNER, Owner
from pilotfish.drafting.prediction import PredictionHints
from pilotfish.engines.language_model import Execution
from pilotfish.speculation.acceptance import ENOUGH, predicted_acceptance
from pilotfish.speculation.cut_mass import cut_masses
from pilotfish.speculation.distributions import Floats, Sampling
from pilotfish.speculation.logits_options import LogitsProcessor
from pilotfish.speculation.tree import Expansion, Tree
from pilotfish.wire.protocols import Draft, DrawKey, SamplingParams, SpeculationProtocol

if TYPE_CHECKING:
    from typing_extensions import Self

Ids = NDArray[np.uint32]

_LEAST_ACCEPTANCE = 0.6  # least acceptance of a predicted token that is drafted
_NOTHING = Proposal((), ())


class Level(NamedTuple):
    """Predictions of the token after each node of a tree level.

    logits: [nodes, V], over the target's tokens; the caller may change them in place. acceptance:
    for each node, the probability that its likeliest next token is the target's; None: estimate it
    from the logits, which are a model's.
    """

    logits: Floats
    acceptance: Sequence[float] | None = None


class Drafter(ABC):
    """Drafts for one session; it follows the committed tokens and the open window.

    One thread at a time may use it; its forks may run in other threads.

    name: display name of the model. origin: origin of the weights; "" without weights. context:
    maximum number of tokens that the drafter reads. hidden_size: dimension of its hidden states; 0
    without any. no_tree_reason: reason why it drafts no trees; "" if it drafts trees. standalone:
    whether it can generate without a target. pass_times: seconds of a pass by number of nodes in a
    level. drafts_per_pass: maximum number of tokens of a chain that a pass predicts.
    prior_acceptance: α before any evidence. bridge: the bridge to the target's vocabulary.
    execution: how its model is executed; None without a model. places: by index in the last window,
    a chain: each token's place (from 0) in the pass of the model that predicted it.
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
    drafts_per_pass: int = 1

    def __init__(self) -> None:
        self._window = Tree()  # the last drafted window
        self._single = 0  # number of the window's first tokens that have a pass each
        self.places: dict[int, int] = {}
        self._forced: list[int] = []  # indices of the window's tokens that a grammar forced
        self._windows = 0  # number of windows so far
        # `cut_masses` of one row of the last window, and the node that it follows
        self._cut_masses: tuple[float, ...] = ()
        self._cut_node = 0
        self._prediction: PredictionHints | None = None
        self._followed = 0  # number of committed tokens that the prediction has followed
        self._proposal = _NOTHING  # the prediction's tokens after the committed ones

    # Implemented by each kind

    @abstractmethod
    def fork(self) -> Self:
        """Make a drafter for another session; `UnsupportedError` if no lane is free."""

    @abstractmethod
    def release(self) -> None:
        """Free the lane; the drafter must not be used afterwards."""

    @abstractmethod
    def set_bridge(self, bridge: Bridge, vocabulary: str = "") -> None:
        """Use this bridge from now on; vocabulary: fingerprint of the target's vocabulary."""

    @abstractmethod
    def start(self, prompt: Prompt, owner: Owner = DEFAULT_OWNER, *, lossless: bool = True) -> None:
        """Begin a generation. owner: the user; lossless: whether the protocol is lossless.

        Under a lossy protocol, drafts come from the model and the owner's texts only.
        """

    def reset(self) -> None:
        """Drop all read tokens: the next generation uses none of them."""
        return

    @abstractmethod
    def prefill(self, committed: Ids, before_chunk: Callable[[], None] = lambda: None) -> None:
        """Read the committed tokens before the next window, if reading takes time.

        before_chunk: called before each chunk of a long text; it may raise an error.
        """

    def end(self, committed: Ids) -> None:
        """Handle the end of an answer. committed: prompt and answer, u32 [n]."""
        return

    @abstractmethod
    def remaining_context(self, committed: Ids) -> int:
        """Count the tokens that still fit the context; negative if the committed ones exceed it."""

    @abstractmethod
    def catch_up(self, committed: Ids, drafts: Ids) -> bool:
        """Read one chunk of these tokens if many are unread; returns whether a chunk was read."""

    @abstractmethod
    def predict_next(self, committed: Ids, drafts: Ids, most: int = 1) -> Level | None:
        """Predict the token after committed tokens and drafts; None without a prediction.

        The tokens must fit the context. Call `catch_up` first, until it returns False. most:
        maximum number of rows; row i of the result predicts the token i places later, without
        knowing the tokens between.
        """

    def logits(self, committed: Ids) -> Floats:
        """Return logits [V] over the target's tokens, to generate without a target."""
        raise NotImplementedError(f"{self.name} cannot generate by itself")

    def hidden_states(self, positions: NDArray[np.int64]) -> Floats:
        """Return the hidden states f32 [m, d] at ``positions`` [m] of the last window, a chain."""
        raise NotImplementedError(f"{self.name} has no hidden states")

    def decode_last(self) -> None:
        """Read the last token of the last window (a chain); drafting drew this token unread."""
        return

    @abstractmethod
    def _open(
        self, committed: Ids, expansion: Expansion, protocol: SpeculationProtocol[Any]
    ) -> Expansion:
        """Begin a window after the committed tokens; returns the levels of it that fit."""

    @abstractmethod
    def _level(self, tree: Tree, *, unread: bool) -> Level | None:
        """Predict the tokens after the open window's deepest level; None without a prediction.

        unread: the window is a chain, and the drafter need not have read all of it.
        """

    # Common to all kinds

    def predict_answer(self, prediction: Ids, prompt_length: int) -> None:
        """Draft from this text u32 [n], too, in the generation that begins; empty: from none."""
        self._prediction = PredictionHints(prediction) if len(prediction) else None
        self._followed = prompt_length

    def count_predicted(self, committed: Ids, most: int) -> int:
        """Count the predicted tokens that a window should have, up to ``most``.

        They end before a token that `draft` would not take from the prediction, and where it is no
        longer likely that all of them are accepted.
        """
        self._propose(committed, most)
        acceptance = np.array(self._proposal.acceptance)
        likely = (acceptance >= _LEAST_ACCEPTANCE) & (np.cumprod(acceptance) >= ENOUGH)
        return len(likely) if likely.all() else int(likely.argmin())

    def _propose(self, committed: Ids, most: int) -> None:
        """Let the prediction follow the committed tokens, and take its next tokens."""
        if self._prediction is None:
            self._proposal = _NOTHING
            return
        self._prediction.record_tokens(committed[self._followed :].tolist())
        self._followed = len(committed)
        self._proposal = self._prediction.propose(most)

    def _predicted_level(self, path: Sequence[int]) -> Level | None:
        """Return the level [1, V] with the predicted token after a path of drafts.

        None if there is no such token, or if it is not likely to be accepted.
        """
        depth, (ids, acceptance) = len(path), self._proposal
        if depth >= len(ids) or acceptance[depth] < _LEAST_ACCEPTANCE:
            return None
        if [*path] != [*ids[:depth]] or not self.bridge.can_draft(ids[depth]):
            return None
        return self._single_level(ids[depth], acceptance[depth])

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
        single: int = 0,
    ) -> Draft:
        """Draft a window after the committed tokens, level by level, within ``expansion``.

        Stops early if every branch ends in an end token, if there is no prediction, or if the
        message would hold no further distribution. With ``auto``, it also stops if no further token
        is likely to be accepted. logits_processor: processes logits over the target's tokens; in a
        chain, it drafts tokens that a grammar forces, without a pass. single: number of first
        tokens of a chain that have a pass each; a pass for the others predicts as many as it can
        (`drafts_per_pass`).
        """
        self._window, self._single = Tree(), single
        tree = self._window
        self._forced.clear()
        self.places, self._cut_masses = {}, ()
        expansion = self._open(committed, expansion, protocol)
        self._propose(committed, len(expansion))
        measured_depth = self._windows % max(1, len(expansion))
        self._windows += 1
        # protocols that judge by hidden states need the states of all tokens, so all must be read
        unread = not protocol.requires and {*expansion} == {1}
        rows: list[Any] = []
        path_acceptance = [1.0]  # predicted acceptance of the path to each node of the level
        for depth, count in enumerate(expansion):
            level = self._processed_level(tree, logits_processor, committed, unread=unread)
            if level is None:
                break
            # σ(K) of processed logits differs, and would be taken for that of free text
            if depth == measured_depth and level.acceptance is None and logits_processor is None:
                self._measure_cut_masses(level, tree, sampling_params.sampling)
            drawn = []
            for at, row in enumerate(level.logits):
                draw_key = DrawKey(len(committed), depth, range(at * count, (at + 1) * count))
                tokens, q = protocol.draw(row, sampling_params, draw_key)
                drawn.append(tokens)
                rows.append(q)
                if auto:
                    known = level.acceptance
                    path_acceptance[at] *= known[at] if known else predicted_acceptance(row, count)
            # These tokens may be dropped: the rows' sizes follow from the text before them and not
            # from what was drawn, so the law stays.
            if not protocol.fits(rows):
                del rows[-len(drawn) :]
                self.places.pop(len(tree), None)
                break
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

    def _measure_cut_masses(self, level: Level, tree: Tree, sampling: Sampling) -> None:
        """Measure what each K cuts off the first row of a level; temperature 0 has no K."""
        if not sampling.greedy:
            self._cut_masses = tuple(cut_masses(level.logits[0], sampling).tolist())
            self._cut_node = tree.level[0]

    def verified_cut_masses(self, path: Sequence[int]) -> tuple[float, ...]:
        """Return `cut_masses` of one verified row of the last window; empty if none was measured.

        path: the accepted nodes. Windows measure each depth in turn, and only verified positions
        count: their mean is that of the positions whose drafts were accepted or rejected. The first
        drafts alone would cut off more, since a rejection often comes before them.
        """
        verified = self._cut_node == 0 or self._cut_node in path
        return self._cut_masses if verified else ()

    def _processed_level(
        self, tree: Tree, logits_processor: LogitsProcessor | None, committed: Ids, *, unread: bool
    ) -> Level | None:
        """Predict the next level and process its logits; None if no token remains."""
        if unread:
            path = tree.ids.tolist()
            token = None
            if logits_processor is not None:
                token = logits_processor.forced_token(committed, path)
            if token is not None and self.bridge.can_draft(token):
                self._forced.append(len(path))
                return self._single_level(token, 1.0)
            level = self._process(self._predicted_level(path), logits_processor, committed, tree)
            if level is not None:
                return level
        return self._process(self._level(tree, unread=unread), logits_processor, committed, tree)

    def _process(
        self,
        level: Level | None,
        logits_processor: LogitsProcessor | None,
        committed: Ids,
        tree: Tree,
    ) -> Level | None:
        """Process a level's logits; None if there is no level, or if no token remains."""
        if level is None or logits_processor is None:
            return level
        paths = [tree.tokens(tree.path(node)) for node in tree.level]
        dead = logits_processor.process(level.logits, committed, paths)
        nothing = dead or np.isneginf(level.logits.max(axis=1)).any()
        return None if nothing else level

    def _single_level(self, token: int, acceptance: float) -> Level:
        """Return a level [1, V] that allows only this token."""
        logits: Floats = np.full((1, self.bridge.vocab_size), -np.inf, np.float32)
        logits[0, token] = 0.0
        return Level(logits, [acceptance])

    def forced_positions(self, accepted: int) -> tuple[int, ...]:
        """Return the indices of forced tokens (by a grammar) among the first ``accepted`` ones."""
        return tuple(at for at in self._forced if at < accepted) if self._forced else ()
