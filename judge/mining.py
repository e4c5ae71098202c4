"""Mines traces: which mismatches change what an answer comes to (wisv §V-B, stage 1; AutoJudge).

In:  a question. Out: its `Episode`. The target answers; then, from left to right, each token that
the drafter would have said otherwise is replaced by the drafter's, and the target goes on from
there to the end. If the outcome is another one, the mismatch is critical (y = 1) and the target's
token is put back; if not, it is harmless, and the new answer is what is looked at further on. (So a
label says: harmful, given that the harmless ones before it were forgiven.)
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import partial
from itertools import takewhile

import numpy as np

from device_runtime.bridge import Pair
from judge.episodes import Episode
from judge.reading import Procedure, Readers
from judge.speakers import Mismatch, Speaker
from judge.tasks import Question, Task

_AHEAD = 8  # tokens of the answer that the drafter looks at in one pass


def mine(
    readers: Readers,
    pair: Pair,
    task: Task,
    asked: Sequence[Question],
    *,
    ends: Collection[int],
    most: int,
) -> Iterator[Episode]:
    """The episodes of these questions, each as soon as it is done; ``most`` tokens an answer."""
    procedures = [
        (question.key, partial(_begin, question, pair, task, ends, most)) for question in asked
    ]
    for _, episode in readers.run(procedures):
        yield episode


def _begin(
    question: Question, pair: Pair, task: Task, ends: Collection[int], most: int
) -> Procedure[Episode]:
    return episode(Speaker(question, pair, ends, most), task)


def episode(speaker: Speaker, task: Task) -> Procedure[Episode]:
    """One question's mismatches, each with its label."""
    question = speaker.question
    answer = yield from speaker.finish([])
    first = list(answer)
    outcome = task.outcome(question, speaker.text(answer))
    found: list[Mismatch] = []
    labels: list[bool] = []
    at = 0
    while (mismatch := (yield from _next_mismatch(speaker, answer, at))) is not None:
        replaced, one = mismatch
        other = yield from speaker.finish(replaced)
        critical = task.outcome(question, speaker.text(other)) != outcome
        found.append(one)
        labels.append(critical)
        if not critical:
            answer = other
        at = one.at + 1
    return Episode.of(
        question.key,
        found,
        np.array(labels, dtype=np.bool_),
        answer=first,
        outcome=outcome,
        right=task.right(question, outcome),
    )


def _next_mismatch(
    speaker: Speaker, answer: Sequence[int], start: int
) -> Procedure[tuple[list[int], Mismatch] | None]:
    """The first mismatch from ``start`` on, and the answer up to it with the drafter's token."""
    window = speaker.window(answer[:start])
    at = start
    while at < len(answer):
        ahead = list(takewhile(speaker.can_draft, answer[at : at + _AHEAD]))
        choices = yield from window.choices(answer[start : at + len(ahead)], len(ahead) + 1)
        for offset, choice in enumerate(choices.tolist()[: len(answer) - at]):
            if choice != answer[at + offset]:
                at += offset
                state = yield from window.state([*answer[start:at], choice])
                replaced = [*answer[:at], choice]
                _, hidden = yield from speaker.target(replaced)
                return replaced, Mismatch(at, choice, answer[at], state, hidden[0])
        at += len(ahead)
    return None
