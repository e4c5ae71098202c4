"""Map between the drafter's tokens and the target's tokens.

The bridge is trivial if both vocabularies are the same; their padding may differ. Otherwise it
renormalises the drafter's distribution over the shared tokens. In both cases, if the drafter's head
was cut, only the head's tokens remain. The result is the q that is sampled and sent, so every
protocol works as without a bridge (Timor et al. 2025, token-level intersection).
"""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pilotfish.bridge.context import ContextTranslator
from pilotfish.bridge.prompt import Prompt
from pilotfish.bridge.shared import SharedTokens
from pilotfish.speculation.distributions import Floats
from pilotfish.speculation.projection import Projection

Ids = NDArray[np.uint32]


class Bridge(ABC):
    """The bridge between one drafter's lane and one target.

    vocab_size: size of the target's vocabulary, without padding. trivial: whether both ends have
    the same tokens, so that the smaller context limits both.
    """

    vocab_size: int
    trivial: bool

    @abstractmethod
    def start(self, prompt: Prompt) -> None:
        """Begin a generation after this prompt."""

    @abstractmethod
    def context(self, committed: Ids) -> NDArray[Any]:
        """Return the drafter's ids [m], m ≥ 1, for the committed tokens [n], prompt included.

        The ids depend on the committed tokens alone, and are valid until the next call.
        """

    @abstractmethod
    def project(self, logits: Floats) -> Floats:
        """Map the drafter's logits [n, V_d], or [n, N] of a cut head, to logits [n, V] over
        the target's tokens.

        The result shares no memory with ``logits``, and is valid until the next call.
        """

    def can_draft(self, token: int) -> bool:
        """Whether the drafter can draft this target token."""
        return True

    @abstractmethod
    def to_draft_ids(self, drafted: Ids) -> NDArray[Any]:
        """Return the drafter's ids [n] of target tokens [n] drawn from projected logits."""


class TrivialBridge(Bridge):
    """Bridge between equal vocabularies.

    vocabulary_subset: i64 [N], the tokens that the drafter's head was cut to; None for a whole
    head.
    """

    trivial = True

    def __init__(self, vocab_size: int, vocabulary_subset: NDArray[np.int64] | None = None) -> None:
        self.vocab_size = vocab_size
        self._projection = Projection(vocabulary_subset, vocab_size)

    def start(self, prompt: Prompt) -> None:
        """Do nothing."""

    def context(self, committed: Ids) -> NDArray[Any]:
        """Return the committed tokens."""
        return committed

    def project(self, logits: Floats) -> Floats:
        """Return a copy of the logits, with −∞ for the tokens that a cut head lacks."""
        return self._projection(logits)

    def can_draft(self, token: int) -> bool:
        """Whether the drafter's head has this token."""
        return self._projection.reaches(token)

    def to_draft_ids(self, drafted: Ids) -> NDArray[Any]:
        """Return the drafted tokens."""
        return drafted


class SharedTokensBridge(Bridge):
    """Bridge between vocabularies with some tokens in common.

    The drafter's context is the prompt, rendered by the drafter's own template, then the answer's
    text in the drafter's tokens.

    vocabulary_subset: i64 [N], the drafter's tokens that its head was cut to; None for a whole
    head.
    """

    trivial = False

    def __init__(
        self,
        shared: SharedTokens,
        translator: ContextTranslator,
        vocabulary_subset: NDArray[np.int64] | None = None,
    ) -> None:
        self.vocab_size = shared.target_size
        self._shared = shared
        self._projection = Projection(shared.to_target_ids(vocabulary_subset), shared.target_size)
        self._translator = translator
        self._target_prompt_tokens = 0  # number of the prompt's target tokens
        self._ids = np.empty(256, dtype=np.int64)  # drafter's ids of prompt and answer
        self._draft_prompt_tokens = 0  # number of the prompt's drafter tokens

    def start(self, prompt: Prompt) -> None:
        """Begin a generation with an empty answer."""
        self._target_prompt_tokens, self._draft_prompt_tokens = (
            len(prompt.ids),
            len(prompt.draft_ids),
        )
        self._reserve(self._draft_prompt_tokens)
        self._ids[: self._draft_prompt_tokens] = prompt.draft_ids
        self._translator.restart()

    def context(self, committed: Ids) -> NDArray[Any]:
        """Return the prompt's ids, then the ids of the answer's text."""
        answer = self._translator.translate(committed[self._target_prompt_tokens :])
        length = self._draft_prompt_tokens + len(answer)
        self._reserve(length)
        self._ids[self._draft_prompt_tokens : length] = answer
        return self._ids[:length]

    def _reserve(self, length: int) -> None:
        if length > len(self._ids):
            more = np.empty(2 * length - len(self._ids), dtype=np.int64)
            self._ids = np.concatenate([self._ids, more])

    def project(self, logits: Floats) -> Floats:
        """Map the logits to the shared tokens; all other tokens get −∞."""
        return self._projection(logits)

    def can_draft(self, token: int) -> bool:
        """Whether the token is shared, and the drafter's head has it."""
        return self._projection.reaches(token)

    def to_draft_ids(self, drafted: Ids) -> NDArray[Any]:
        """Return the drafter's ids; all tokens are shared, since others had no probability."""
        return self._shared.to_draft_ids.take(drafted)
