"""A bridge: the drafter reads and predicts its own tokens, and what is committed are the target's.

Where both ends have the same vocabulary, whatever its padding, the bridge is trivial. Otherwise
the drafter's distribution is taken over the tokens that both have and renormalised there: that is
the q that is sampled and sent, so every protocol works as it does without a bridge (Timor et al.
2025, token-level intersection).
"""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pilotfish.device_runtime.bridge.context import Context
from pilotfish.device_runtime.bridge.prompt import Prompt
from pilotfish.device_runtime.bridge.shared import Projection, SharedTokens
from pilotfish.speculation.distributions import Floats

Ids = NDArray[np.uint32]


class Bridge(ABC):
    """One drafter's lane and one target.

    vocab_size: the target's, without padding. trivial: both have the same tokens, so that one
    context bounds both ends.
    """

    vocab_size: int
    trivial: bool

    @abstractmethod
    def start(self, prompt: Prompt) -> None:
        """A generation begins after this prompt."""

    @abstractmethod
    def context(self, committed: Ids) -> NDArray[Any]:
        """The drafter's ids [m], m ≥ 1, for the committed tokens [n], which begin with the prompt.

        They depend on these alone, and hold until the next call.
        """

    @abstractmethod
    def project(self, logits: Floats) -> Floats:
        """The drafter's logits [n, V of its own] as logits [n, V] of the target's tokens.

        They share no memory with ``logits``, and hold until the next call.
        """

    @abstractmethod
    def own(self, drafted: Ids) -> NDArray[Any]:
        """The drafter's ids [n] of tokens [n] that were drawn from projected logits."""


class TrivialBridge(Bridge):
    """Both have the same tokens."""

    trivial = True

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def start(self, prompt: Prompt) -> None:
        """There is nothing to prepare."""

    def context(self, committed: Ids) -> NDArray[Any]:
        """The committed tokens."""
        return committed

    def project(self, logits: Floats) -> Floats:
        """A copy."""
        copy: Floats = logits.copy()
        return copy

    def own(self, drafted: Ids) -> NDArray[Any]:
        """The drafted tokens."""
        return drafted


class SharedTokensBridge(Bridge):
    """The two vocabularies have some tokens in common.

    After the prompt, which the drafter reads as its own template wants it, its context is the
    answer's text in its own tokens.
    """

    trivial = False

    def __init__(self, shared: SharedTokens, context: Context) -> None:
        self.vocab_size = shared.target_size
        self._shared = shared
        self._projection = Projection(shared)
        self._answer = context
        self._after = 0  # so many committed tokens are the prompt's
        self._ids = np.empty(256, dtype=np.int64)  # the prompt's, then the answer's
        self._prompt = 0  # so many of them are the prompt's

    def start(self, prompt: Prompt) -> None:
        """The answer's text is empty again."""
        self._after, self._prompt = len(prompt.ids), len(prompt.own)
        self._reserve(self._prompt)
        self._ids[: self._prompt] = prompt.own
        self._answer.restart()

    def context(self, committed: Ids) -> NDArray[Any]:
        """The prompt's ids, then those of the answer's text."""
        answer = self._answer.of(committed[self._after :])
        length = self._prompt + len(answer)
        self._reserve(length)
        self._ids[self._prompt : length] = answer
        return self._ids[:length]

    def _reserve(self, length: int) -> None:
        if length > len(self._ids):
            more = np.empty(2 * length - len(self._ids), dtype=np.int64)
            self._ids = np.concatenate([self._ids, more])

    def project(self, logits: Floats) -> Floats:
        """−∞ where the drafter has no such token."""
        return self._projection(logits)

    def own(self, drafted: Ids) -> NDArray[Any]:
        """All of them are shared, for others had no probability."""
        return self._shared.to_own.take(drafted)
