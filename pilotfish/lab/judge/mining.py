"""Mine mismatches: label those that change an answer's outcome (WISV §V-B, stage 1; AutoJudge).

In:  a question. Out: its `Episode`.

The target answers the question. Then mining walks along the answer from left to right. At each
mismatch, the drafter's token replaces the target's, and the target continues from there. If the
outcome changes, the mismatch is critical (y = 1), and the target's token is restored. Otherwise the
mismatch is harmless, and mining continues along the new answer. So a label presumes that all
harmless mismatches before it were forgiven.

Not in the paper: a mismatch *stalls* if forgiving it saves no round. Then, too, the target's token
is restored. If the stall is evident without a continuation, the outcome is not computed. The paper
labels these mismatches harmless, which teaches a head to forgive line breaks endlessly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Annotated, NamedTuple

from pilotfish.base.settings import setting
from pilotfish.bridge import Pair
from pilotfish.lab.judge.episodes import Episode, LabelledMismatch, MiningRecord
from pilotfish.lab.judge.model_passes import Procedure, Readers
from pilotfish.lab.judge.question_reader import Mismatch, PairSettings, QuestionReader
from pilotfish.lab.judge.tasks import TASKS, Question, Task

# Default of --slack (tokens). To forgive a mismatch saves about one round. Four more tokens cost
# about one round, because about a third of all tokens are mismatches and some are forgiven.
SLACK = 4
_AHEAD = 8  # number of the answer's tokens that the drafter reads in one pass


class _Candidate(NamedTuple):
    """A mismatch to be labelled.

    prefix: the answer up to the mismatch, then the drafter's token. evidently_stalls: whether the
    mismatch stalls, as far as the prefix alone shows: the target chose an end token, or the target
    chooses the same token again right after the drafter's token, and the drafter differs again.
    """

    mismatch: Mismatch
    prefix: list[int]
    evidently_stalls: bool


class MineSettings(PairSettings, frozen=True, kw_only=True):
    """Options of ``pilotfish judge mine``."""

    questions: Annotated[Path, setting('JSON lines with "question" and "answer"', metavar="FILE")]
    out: Annotated[
        Path, setting("output folder for the episodes, one file per question", metavar="DIR")
    ]
    task: Annotated[
        str,
        setting(
            "what counts as the outcome of an answer: its last number, its words, which of the "
            "given facts it contains, or the output of --checker",
            choices=tuple(TASKS),
        ),
    ] = "gsm8k"
    checker: Annotated[
        tuple[str, ...],
        setting(
            "program for task command: reads a line of JSON with question, answer and text; "
            "prints the text's outcome; exits with 0 if the outcome is right, with 1 if it is "
            "wrong",
            form="command",
            metavar="COMMAND",
        ),
    ] = ()
    max_tokens: Annotated[int, setting("maximum number of tokens in an answer", ge=1)] = 160
    slack: Annotated[
        int,
        setting(
            "number of tokens by which a forgiven mismatch may lengthen the answer; a mismatch "
            "that lengthens it more stalls",
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
            "take mismatches only from answers that are right and complete, since other answers "
            "cannot become worse"
        ),
    ] = False


def mine(
    readers: Readers, pair: Pair, task: Task, questions: Sequence[Question], mined: MiningRecord
) -> Iterator[Episode]:
    """Yield each question's episode as soon as it is mined; the order may differ."""

    def begin(question: Question) -> Procedure[Episode]:
        reader = QuestionReader(question, pair, mined.most)
        return episode(reader, task, mined.slack, right_only=mined.right_only)

    for _, mined_episode in readers.run(
        [(question.key, partial(begin, question)) for question in questions]
    ):
        yield mined_episode


def episode(
    reader: QuestionReader, task: Task, slack: int | None = SLACK, *, right_only: bool = False
) -> Procedure[Episode]:
    """Find one question's mismatches, and label each.

    slack: number of tokens by which a mismatch may lengthen the answer before it stalls; with None
    no mismatch stalls, as in the paper. right_only: skip an answer that is wrong or has no end,
    because no mismatch can make it worse.
    """
    question = reader.question
    answer = yield from reader.finish([])
    original = list(answer)
    outcome = task.outcome(question, reader.text(answer))
    right = task.right(question, outcome)
    labelled: list[LabelledMismatch] = []
    if right_only and not (right and reader.has_ended(original)):
        return Episode.from_mismatches(
            question.key, labelled, answer=original, outcome=outcome, right=right
        )
    position = 0
    while (mismatch := (yield from _next_mismatch(reader, answer, position))) is not None:
        position = mismatch.mismatch.at + 1
        critical, stalling = False, mismatch.evidently_stalls and slack is not None
        if not stalling:
            alternative = yield from reader.finish(mismatch.prefix)
            critical = task.outcome(question, reader.text(alternative)) != outcome
            endless = reader.has_ended(answer) and not reader.has_ended(alternative)
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
) -> Procedure[_Candidate | None]:
    """Find the first mismatch at or after the position ``start``; None if there is none."""
    window = reader.window(answer[:start])
    position = start
    while position < len(answer):
        ahead = list(takewhile(reader.can_draft, answer[position : position + _AHEAD]))
        reading = yield window.read(answer[start : position + len(ahead)], len(ahead) + 1)
        for offset, choice in enumerate(window.choices(reading).tolist()[: len(answer) - position]):
            if choice != answer[position + offset]:
                position += offset
                reading = yield window.read([*answer[start:position], choice])
                again, state = int(window.choices(reading)[0]), reading.hidden[0].copy()
                wanted, replaced = answer[position], [*answer[:position], choice]
                outputs = yield from reader.target_outputs(replaced, rows=2)
                wants = int(outputs.logits[1].argmax())
                gap = float(outputs.logits[0].max() - outputs.logits[0, choice])
                put_off = choice not in reader.ends and wants == wanted != again
                return _Candidate(
                    Mismatch(position, choice, wanted, state, outputs.hidden[1], gap),
                    replaced,
                    evidently_stalls=put_off or wanted in reader.ends,
                )
        position += len(ahead)
    return None
