"""Mines traces: which mismatches change what an answer comes to (wisv §V-B, stage 1; AutoJudge).

In:  a question. Out: its `Episode`. The target answers; then, from left to right, each token that
the drafter would have said otherwise is replaced by the drafter's, and the target goes on from
there to the end. If the outcome is another one, the mismatch is critical (y = 1) and the target's
token is put back; if not, it is harmless, and the new answer is what is looked at further on. (So a
label says: harmful, given that the harmless ones before it were forgiven.)

Ours: a mismatch *stalls* if forgiving it gains no round, and then its token is put back, too. That
often shows at once, and what it would change is not asked. Labelled harmless, as in the paper, such
ones teach a head to forgive line breaks for ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Annotated, NamedTuple

from pilotfish.base.settings import setting
from pilotfish.device_runtime.bridge import Pair
from pilotfish.judge.episodes import Episode, LabelledMismatch, MiningRecord
from pilotfish.judge.model_passes import Procedure, Readers
from pilotfish.judge.question_reader import Mismatch, PairSettings, QuestionReader
from pilotfish.judge.tasks import TASKS, Question, Task

# Forgiving saves about one round. About a third of all tokens are mismatches, some of which are
# forgiven, so four more tokens cost that round again.
SLACK = 4
_AHEAD = 8  # tokens of the answer that the drafter looks at in one pass


class _Found(NamedTuple):
    """A mismatch. prefix: the answer up to it, with the drafter's token.

    stalls_plainly: whether it shows without reading on that it stalls: the target wanted to end, or
    it wants the same token again right behind and the drafter errs there again.
    """

    mismatch: Mismatch
    prefix: list[int]
    stalls_plainly: bool


class MineSettings(PairSettings, frozen=True, kw_only=True):
    """What ``pilotfish judge mine`` is told."""

    questions: Annotated[Path, setting('JSON lines with "question" and "answer"', metavar="FILE")]
    out: Annotated[Path, setting("folder for a file a question", metavar="DIR")]
    task: Annotated[
        str,
        setting(
            "what an answer comes to: its last number, its words, or what --checker prints",
            choices=tuple(TASKS),
        ),
    ] = "gsm8k"
    checker: Annotated[
        tuple[str, ...],
        setting(
            "task command: reads a line of JSON with question, answer and text; prints what the "
            "text comes to; ends with 0 if that is right, with 1 if not",
            form="command",
            metavar="COMMAND",
        ),
    ] = ()
    max_tokens: Annotated[int, setting("of an answer", ge=1)] = 160
    slack: Annotated[
        int,
        setting(
            "tokens by which a mismatch may lengthen the answer before it stalls",
            ge=0,
            exclusive="slack",
        ),
    ] = SLACK
    outcome_only: Annotated[
        bool,
        setting("ablation: label by the outcome alone, as in the paper", exclusive="slack"),
    ] = False
    right_only: Annotated[
        bool,
        setting(
            "take no mismatches from answers that are wrong or do not end: they have nothing to "
            "lose"
        ),
    ] = False


def mine(
    readers: Readers, pair: Pair, task: Task, questions: Sequence[Question], mined: MiningRecord
) -> Iterator[Episode]:
    """Yield the episodes of these questions, each as soon as it is done."""

    def begin(question: Question) -> Procedure[Episode]:
        reader = QuestionReader(question, pair, mined.most)
        return episode(reader, task, mined.slack, right_only=mined.right_only)

    for _, found in readers.run([(one.key, partial(begin, one)) for one in questions]):
        yield found


def episode(
    reader: QuestionReader, task: Task, slack: int | None = SLACK, *, right_only: bool = False
) -> Procedure[Episode]:
    """Find one question's mismatches, and label each.

    slack: tokens by which a harmless mismatch may make the answer longer; None: by any, and none
    stalls, as in the paper. right_only: take no mismatches from answers that are wrong, or that did
    not come to their end: they have nothing to lose.
    """
    question = reader.question
    answer = yield from reader.finish([])
    original = list(answer)
    outcome = task.outcome(question, reader.text(answer))
    right = task.right(question, outcome)
    labelled: list[LabelledMismatch] = []
    if right_only and not (right and reader.ended(original)):
        return Episode.from_mismatches(
            question.key, labelled, answer=original, outcome=outcome, right=right
        )
    at = 0
    while (mismatch := (yield from _next_mismatch(reader, answer, at))) is not None:
        at = mismatch.mismatch.at + 1
        critical, stalling = False, mismatch.stalls_plainly and slack is not None
        if not stalling:
            alternative = yield from reader.finish(mismatch.prefix)
            critical = task.outcome(question, reader.text(alternative)) != outcome
            endless = reader.ended(answer) and not reader.ended(alternative)
            longer = slack is not None and (endless or len(alternative) > len(answer) + slack)
            stalling = longer and not critical
            if not critical and not stalling:
                answer = alternative
        labelled.append(LabelledMismatch(mismatch.mismatch, critical, stalling))
    return Episode.from_mismatches(
        question.key, labelled, answer=original, outcome=outcome, right=right
    )


def _next_mismatch(
    reader: QuestionReader, answer: Sequence[int], start: int
) -> Procedure[_Found | None]:
    """Find the first mismatch from ``start`` on."""
    window = reader.window(answer[:start])
    at = start
    while at < len(answer):
        ahead = list(takewhile(reader.can_draft, answer[at : at + _AHEAD]))
        reading = yield window.read(answer[start : at + len(ahead)], len(ahead) + 1)
        for offset, choice in enumerate(window.choices(reading).tolist()[: len(answer) - at]):
            if choice != answer[at + offset]:
                at += offset
                reading = yield window.read([*answer[start:at], choice])
                again, state = int(window.choices(reading)[0]), reading.hidden[0].copy()
                wanted, replaced = answer[at], [*answer[:at], choice]
                wants, hidden = yield from reader.target(replaced)
                put_off = choice not in reader.ends and wants[0] == wanted != again
                return _Found(
                    Mismatch(at, choice, wanted, state, hidden[0]),
                    replaced,
                    stalls_plainly=put_off or wanted in reader.ends,
                )
        at += len(ahead)
    return None
