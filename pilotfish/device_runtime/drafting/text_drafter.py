"""A drafter without a model: the text repeats itself, its prompt, or what its owner said before.

In:  committed tokens of the target's own vocabulary. Out: windows and hints. What may follow is
     found in microseconds; to sample of it takes longer, as of any drafter's row.

q is the frequency of what followed the same words (`speculation.recall`), and is shipped as it is
sampled from, so the law is the target's under every lossless protocol. Under a lossy one its words
enter the answer: there it never draws from what others said, even where that is shared.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from pilotfish.device_runtime.bridge import Bridge, Prompt, TrivialBridge
from pilotfish.device_runtime.drafting.drafter import Drafter, Ids, Level
from pilotfish.device_runtime.drafting.text_folder import DEFAULT_OWNER, Owner
from pilotfish.device_runtime.drafting.text_memory import MAX_OWNERS, TextMemory
from pilotfish.device_runtime.drafting.text_store import TextStore
from pilotfish.speculation.acceptance import REPEAT_PRIOR, AcceptanceEstimator
from pilotfish.speculation.corpus import EMPTY_SNAPSHOT
from pilotfish.speculation.distributions import Floats
from pilotfish.speculation.recall import Echo, Recall
from pilotfish.speculation.tree import Expansion, Tree, nodes_at_most
from pilotfish.wire.committed_tokens import common_prefix
from pilotfish.wire.messages import MAX_WINDOW
from pilotfish.wire.protocols import SpeculationProtocol

if TYPE_CHECKING:
    from typing_extensions import Self

TEXT = "text"  # the name of this drafter where an artifact's folder is expected
_BOUNDLESS = 1 << 31
_NODE_S = 50e-6  # to find what may follow: a bound that is tested; no model has to be measured
_OVERLAP_TOKENS = 2  # tokens of a continued conversation that are kept again, to find the rest by


class Recollection(Recall):
    """A lane's `Recall`, which knows the owner's earlier texts and adds to them."""

    def __init__(self, memory: TextMemory) -> None:
        super().__init__()
        self._memory = memory
        self._texts: list[TextStore] = []  # to which the conversation is added
        self._vocabulary = ""
        self._owner: Owner = DEFAULT_OWNER
        # by owner: how often a repetition was right tells of the texts that were repeated
        self._estimators: OrderedDict[Owner, AcceptanceEstimator] = OrderedDict(
            {DEFAULT_OWNER: self._odds}
        )
        self._saved: Ids = np.empty(0, np.uint32)  # the conversation as it was kept last
        self._released = False
        memory.acquire()

    def fork(self) -> Recollection:
        """Make one for another lane."""
        return Recollection(self._memory)

    def release(self) -> None:
        """Use the memory no longer."""
        if not self._released:
            self._released = True
            self._memory.release()

    def start(
        self,
        vocabulary: str,
        vocab_size: int,
        owner: Owner = DEFAULT_OWNER,
        *,
        lossless: bool = True,
    ) -> None:
        """Begin a generation of this owner in this vocabulary: search the texts that there are now.

        lossless: the answer's protocol is, so that others' texts may be among them.
        """
        # if these cannot be had, nothing is searched and nothing is kept
        self._texts = []
        self.set_corpus(EMPTY_SNAPSHOT)
        if owner != self._owner:
            self._forget(0)  # what the lane followed last is another's
        if (vocabulary, owner) != (self._vocabulary, self._owner):  # ids of another are other words
            self._vocabulary, self._owner = vocabulary, owner
            self._saved = np.empty(0, np.uint32)
            self.set_estimator(
                self._estimators.setdefault(owner, AcceptanceEstimator(REPEAT_PRIOR))
            )
            self._estimators.move_to_end(owner)
            if len(self._estimators) > MAX_OWNERS:
                self._estimators.popitem(last=False)
        own_texts = self._memory.texts(vocabulary, vocab_size, owner)
        shared_texts = self._memory.shared_texts(vocabulary, vocab_size)
        self._texts = [own_texts] if shared_texts is None else [own_texts, shared_texts]
        self.set_corpus(
            (own_texts if shared_texts is None or not lossless else shared_texts).snapshot()
        )

    def end(self, committed: Ids) -> None:
        """Keep what the conversation u32 [n] has gained since it was kept last."""
        known = common_prefix(self._saved, committed)
        if known == len(committed) or not self._texts:
            return
        self._saved = committed.copy()
        for texts in self._texts:
            texts.add(committed[max(0, known - _OVERLAP_TOKENS) :])
        self._memory.trim()


class TextDrafter(Drafter):
    """Drafts what followed before; see `Recall`. Drafters made `beside` it share their memory."""

    name, origin, no_tree_reason = TEXT, "", ""
    context, hidden_size = _BOUNDLESS, 0
    standalone, prior_acceptance = False, 0.2  # chats: 0.1; where an answer repeats, far more
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
        """Leave the memory; there is room for any number of lanes."""
        self._recall.release()

    def set_bridge(self, bridge: Bridge, vocabulary: str = "") -> None:
        """Use this bridge from now on, to the target's vocabulary of this fingerprint."""
        self.bridge, self._vocabulary = bridge, vocabulary
        self._row = np.full((1, bridge.vocab_size), -np.inf, np.float32)
        self._finite_ids: Ids = np.empty(0, np.uint32)  # the finite ones of it

    def start(self, prompt: Prompt, owner: Owner = DEFAULT_OWNER, *, lossless: bool = True) -> None:
        """Begin a generation, with all that its owner said before it."""
        self._recall.start(self._vocabulary, self.bridge.vocab_size, owner, lossless=lossless)
        self._recall.update(prompt.ids)

    def prefill(self, committed: Ids, before_chunk: Callable[[], None] = lambda: None) -> None:
        """Take in the committed tokens."""
        self._recall.update(committed)

    def end(self, committed: Ids) -> None:
        """Keep prompt and answer, u32 [n], for later ones."""
        self._recall.end(committed)

    def remaining_context(self, committed: Ids) -> int:
        """Return more than any window takes: it has no context of its own."""
        return _BOUNDLESS - len(committed)

    def catch_up(self, committed: Ids, drafts: Ids) -> bool:
        """Do nothing: nothing takes long."""
        return False

    def predict_next(self, committed: Ids, drafts: Ids) -> Level | None:
        """Return what followed these tokens before; None if they did not stand anywhere."""
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
        """Return what followed each node before; None if one stands nowhere."""
        if unread:
            echo = self._recall.predict(tree.ids.tolist())
            return None if echo is None else self._chain(echo)
        echoes = [self._recall.predict(tree.tokens(tree.path(node))) for node in tree.level]
        known = [echo for echo in echoes if echo is not None]
        if len(known) < len(echoes):
            return None
        odds = [self._recall.acceptance(echo) for echo in known]
        return Level(rows(known, self.bridge.vocab_size), odds)

    def _chain(self, echo: Echo) -> Level:
        """Write the only row [1, V] of a chain's level; the next one overwrites it."""
        self._row[0, self._finite_ids] = -np.inf
        self._finite_ids = echo.tokens
        self._row[0, echo.tokens] = np.log(echo.weights)
        return Level(self._row, [self._recall.acceptance(echo)])


def rows(echoes: Sequence[Echo | None], vocab_size: int) -> Floats:
    """Return logits f32 [n, V] of echoes; of none all are −∞."""
    logits = np.full((len(echoes), vocab_size), -np.inf, np.float32)
    for row, echo in zip(logits, echoes, strict=True):
        if echo is not None:
            row[echo.tokens] = np.log(echo.weights)
    return logits
