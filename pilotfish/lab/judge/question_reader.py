"""Read one question with both models: the steps that `judge.mining` and `.trajectories` share.

The methods of a `QuestionReader` that read a model are procedures for `judge.model_passes.Readers`:
they yield read requests, and return the tokens and states that a device or an edge would compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pilotfish.base.settings import setting
from pilotfish.bridge import Bridge, Pair, Prompt
from pilotfish.edge_runtime.head_file import ModelIdentity
from pilotfish.engines.engine_settings import EngineSettings
from pilotfish.engines.manifest import Manifest
from pilotfish.lab.judge.model_passes import (
    DRAFTER,
    TARGET,
    Floats,
    Ids,
    Procedure,
    ReadRequest,
    ReadResult,
)
from pilotfish.lab.judge.tasks import Question
from pilotfish.lab.pairs import most_tokens


class PairSettings(EngineSettings, frozen=True, kw_only=True):
    """The options of a pair of models: artifacts, number of questions, slots and context."""

    draft: Annotated[Path, setting("the drafter, as for `device run`", metavar="MODEL")]
    target: Annotated[Path, setting("the target, as for `edge serve`", metavar="MODEL")]
    count: Annotated[int, setting("use only the first N questions (default: all)", ge=1)] | None = (
        None
    )
    slots: Annotated[int, setting("number of questions that run at a time", ge=1, le=256)] = 8
    context: Annotated[
        int,
        setting(
            "maximum tokens of a question and its answer together; longer questions are left out",
            ge=2,
        ),
    ] = 640


def model_card(manifest: Manifest) -> ModelIdentity:
    """Return a model's identity for a head's card."""
    return ModelIdentity(
        model=manifest.model,
        origin=manifest.origin,
        hidden=manifest.dimensions.hidden,
        precision=manifest.precision,
    )


def count_tokens(question: Question, pair: Pair, most: int) -> int:
    """Return an upper bound of the tokens of a question and an answer of ``most`` target tokens."""
    return most_tokens(pair.prompt(question.message), pair, most)


def select_fitting(
    questions: Sequence[Question], pair: Pair, most: int, context: int
) -> list[Question]:
    """Select the questions that fit the context with an answer of ``most`` tokens."""
    return [question for question in questions if count_tokens(question, pair, most) <= context]


class QuestionReader:
    """One question's prompt in both vocabularies. most: maximum number of tokens in an answer.

    An answer is a list of the target's token ids after the prompt. If it has ended, its last id is
    an end token. vocab_size: number of the target's tokens.
    """

    def __init__(self, question: Question, pair: Pair, most: int) -> None:
        self.question = question
        self.prompt: Prompt = pair.prompt(question.message)
        self.most = most
        self.ends = frozenset(pair.target.eos_ids)
        self._prompt_ids: Ids = self.prompt.ids.astype(np.int64)
        self._bridge: Bridge = pair.bridge()
        self._bridge.start(self.prompt)
        self.vocab_size = pair.target.vocab_size
        self._tokenizer = pair.target.tokenizer

    def text(self, answer: Sequence[int]) -> str:
        """Decode the answer; omit its end token."""
        tokens = answer[:-1] if self.has_ended(answer) else answer
        return self._tokenizer.decode(list(tokens))

    def has_ended(self, answer: Sequence[int]) -> bool:
        """Whether the answer ends with an end token."""
        return bool(answer) and answer[-1] in self.ends

    # The target

    def target_outputs(self, answer: Sequence[int], rows: int = 1) -> Procedure[ReadResult]:
        """Compute the target's logits, f32 [rows, V], and states, f32 [rows, d]."""
        ids = np.concatenate([self._prompt_ids, np.array(answer, dtype=np.int64)])
        result = yield ReadRequest(TARGET, ids, rows)
        return ReadResult(result.logits.copy(), result.hidden.copy())

    def target(self, answer: Sequence[int], rows: int = 1) -> Procedure[tuple[Ids, Floats]]:
        """Compute the target's argmax, [rows], and states, f32 [rows, d], at the last tokens."""
        ids = np.concatenate([self._prompt_ids, np.array(answer, dtype=np.int64)])
        result = yield ReadRequest(TARGET, ids, rows)
        return result.logits.argmax(1), result.hidden.copy()

    def logits(self, answer: Sequence[int]) -> Procedure[Floats]:
        """Compute the target's logits after the answer, f32 [V]."""
        ids = np.concatenate([self._prompt_ids, np.array(answer, dtype=np.int64)])
        result = yield ReadRequest(TARGET, ids)
        logits: Floats = result.logits[0].copy()
        return logits

    def finish(self, answer: Sequence[int]) -> Procedure[list[int]]:
        """Continue the answer with the target alone, to an end token or to ``most`` tokens."""
        tokens = list(answer)
        while len(tokens) < self.most and not self.has_ended(tokens):
            choices, _ = yield from self.target(tokens)
            tokens.append(int(choices[0]))
        return tokens

    # The drafter, in a window that starts after ``committed``

    def window(self, committed: Sequence[int]) -> DrafterWindow:
        """Begin the drafter's window after these committed tokens of the answer."""
        tokens = np.array([*self.prompt.ids.tolist(), *committed], dtype=np.uint32)
        return DrafterWindow(self._bridge, self._bridge.context(tokens).astype(np.int64))

    def can_draft(self, token: int) -> bool:
        """Whether the drafter can draft this token."""
        return self._bridge.can_draft(token)


class DrafterWindow:
    """The drafter's text in one window: the committed text in drafter ids, then the drafts.

    Each draft is one token in both vocabularies.
    """

    def __init__(self, bridge: Bridge, context: Ids) -> None:
        self._bridge = bridge
        self._context = context

    def read(self, drafted: Sequence[int], rows: int = 1) -> ReadRequest:
        """Make a request for the outputs at the last ``rows`` tokens of context and drafts."""
        ids = self._context
        if drafted:
            draft_ids = self._bridge.to_draft_ids(np.array(drafted, dtype=np.uint32))
            ids = np.concatenate([ids, draft_ids.astype(np.int64)])
        return ReadRequest(DRAFTER, ids, rows)

    def choices(self, result: ReadResult) -> Ids:
        """Compute the drafter's argmax after each row, as ids of the target's vocabulary."""
        ids: Ids = self.logits(result).argmax(1)
        return ids

    def logits(self, result: ReadResult) -> NDArray[np.floating]:
        """Project the drafter's logits onto the target's vocabulary, f32 [rows, V].

        The next call overwrites the array.
        """
        return self._bridge.project(result.logits)


class Mismatch(NamedTuple):
    """A position at which drafter and target choose different tokens after the same text.

    at: position in the answer. drafted: the drafter's token. wanted: the target's token. drafter,
    target: each model's last-layer state at the drafted token, f32 [d] (WISV, equation 23). gap:
    the target's logit of its own token minus that of the drafter's token.
    """

    at: int
    drafted: int
    wanted: int
    drafter: Floats
    target: Floats
    gap: float
