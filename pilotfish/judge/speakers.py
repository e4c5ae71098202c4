"""What a question's text says to both models: the steps that mining and trajectories share.

A `Speaker` stands for one question. Its methods are procedures for `judge.reading.Readers`: they
yield what they want read, and return what a device and an edge would find at these places.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pilotfish.device_runtime.bridge import Bridge, Pair, Prompt
from pilotfish.judge.reading import DRAFTER, TARGET, Floats, Ids, Look, Procedure, Sight
from pilotfish.judge.tasks import Question

_OWN_TOKENS = 2  # a drafter's for one of the target's, at most, in ordinary text


def length(question: Question, pair: Pair, most: int) -> int:
    """Tokens of a question and an answer of ``most``, in the vocabulary that takes more."""
    prompt = pair.prompt(question.asked)
    own = most if pair.trivial else _OWN_TOKENS * most
    return max(len(prompt.ids) + most, len(prompt.own) + own)


class Speaker:
    """One question's prompt in both vocabularies. most: tokens of an answer.

    An answer is a list of the target's ids behind the prompt. An end token ends it and is its last.
    """

    def __init__(self, question: Question, pair: Pair, ends: Collection[int], most: int) -> None:
        self.question = question
        self.prompt: Prompt = pair.prompt(question.asked)
        self.most = most
        self.ends = frozenset(ends)
        self._told: Ids = self.prompt.ids.astype(np.int64)
        self._bridge: Bridge = pair.bridge()
        self._bridge.start(self.prompt)
        self._tokenizer = pair.target.tokenizer
        self._shared = pair.shared

    def text(self, answer: Sequence[int]) -> str:
        """The answer in words, without its end token."""
        said = answer[:-1] if self.ended(answer) else answer
        return self._tokenizer.decode(list(said))

    def ended(self, answer: Sequence[int]) -> bool:
        """Whether it ends with an end token."""
        return bool(answer) and answer[-1] in self.ends

    # The target

    def target(self, answer: Sequence[int], rows: int = 1) -> Procedure[tuple[Ids, Floats]]:
        """Its argmax [rows] after each of the last ``rows`` tokens; its states f32 [rows, d]."""
        ids = np.concatenate([self._told, np.array(answer, dtype=np.int64)])
        seen = yield Look(TARGET, ids, rows)
        return seen.logits.argmax(1), seen.hidden.copy()

    def logits(self, answer: Sequence[int]) -> Procedure[Floats]:
        """The target's after the answer, f32 [V]."""
        ids = np.concatenate([self._told, np.array(answer, dtype=np.int64)])
        seen = yield Look(TARGET, ids)
        found: Floats = seen.logits[0].copy()
        return found

    def finish(self, answer: Sequence[int]) -> Procedure[list[int]]:
        """The answer as the target alone goes on with it."""
        whole = list(answer)
        while len(whole) < self.most and not self.ended(whole):
            choices, _ = yield from self.target(whole)
            whole.append(int(choices[0]))
        return whole

    # The drafter, in a window that starts after ``committed``

    def window(self, committed: Sequence[int]) -> DrafterWindow:
        """A window after these tokens of the answer."""
        told = np.array([*self.prompt.ids.tolist(), *committed], dtype=np.uint32)
        return DrafterWindow(self._bridge, self._bridge.context(told).astype(np.int64))

    def can_draft(self, token: int) -> bool:
        """Whether the drafter has this token."""
        return self._shared is None or bool(self._shared.to_own[token] >= 0)


class DrafterWindow:
    """What the drafter reads of one window: its context, and then drafted tokens one for one."""

    def __init__(self, bridge: Bridge, context: Ids) -> None:
        self._bridge = bridge
        self._context = context

    def look(self, drafted: Sequence[int], rows: int = 1) -> Look:
        """At the last ``rows`` of context and drafted tokens."""
        ids = self._context
        if drafted:
            own = self._bridge.own(np.array(drafted, dtype=np.uint32))
            ids = np.concatenate([ids, own.astype(np.int64)])
        return Look(DRAFTER, ids, rows)

    def choices(self, seen: Sight) -> Ids:
        """The drafter's argmax, in the target's ids, after each token that was looked at."""
        found: Ids = self.logits(seen).argmax(1)
        return found

    def logits(self, seen: Sight) -> NDArray[np.floating]:
        """The drafter's, over the target's ids; f32 [rows, V], until the next call."""
        return self._bridge.project(seen.logits)


class Mismatch(NamedTuple):
    """A place where the drafter says another token than the target, given the same text.

    at: the position in the answer. drafted, wanted: the two tokens. drafter, target: f32 [d] each,
    the last layers' states at the drafted token (wisv (23)).
    """

    at: int
    drafted: int
    wanted: int
    drafter: Floats
    target: Floats
