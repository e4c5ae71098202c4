"""Compute the tokens that an edge with a head commits, for many settings at once (wisv §III, §VI).

In:  a question and its courses, each a window γ and a judge. Out: each course's tokens and rounds,
     as a device and an edge at temperature 0 would commit them with the real models.

A round is walked token by token. After a prefix the drafter chooses d and the target t. If d = t,
it is accepted. Else the judge reads both states at d: either d stays (it is forgiven), or t is
committed and the round ends. A round also ends with t after γ accepted tokens. So no token after a
rejection is read. Courses that have committed the same tokens share their passes; where they
diverge, one branch waits until the other has ended. The start of a window matters only to the
drafter, whose context is the committed text in its own tokens; its choices are cached.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from pilotfish.edge_runtime.head import HeadJudge, Score
from pilotfish.judge.instances import as_decoded
from pilotfish.judge.model_passes import Floats, Procedure
from pilotfish.judge.question_reader import DrafterWindow, QuestionReader


@dataclass(frozen=True, eq=False)
class WalkSettings:
    """A course: window γ ≥ 1 and the judge of mismatches. judge: None rejects every mismatch."""

    window: int
    judge: HeadJudge | None = None

    @property
    def strict(self) -> bool:
        """Whether the course rejects every mismatch: `greedy`, or threshold 0."""
        return self.judge is None or self.judge.bound == -math.inf


class CourseRound(NamedTuple):
    """One round of a course.

    drafted: tokens of the window; after a rejection it ignores an end token that the drafter may
    have drafted later. accepted: accepted tokens. forgiven: accepted mismatches. decided:
    mismatches up to the rejection, or in the window. mismatched: mismatches in the whole window, m;
    None if the window was not read to its end.
    """

    drafted: int = 0
    accepted: int = 0
    forgiven: int = 0
    decided: int = 0
    mismatched: int | None = None

    @property
    def after_rejection(self) -> int:
        """Drafted tokens after the rejected one; no judge decides on them."""
        return max(0, self.drafted - self.accepted - 1)


@dataclass(frozen=True)
class Trajectory:
    """An answer. tokens: the target's ids, with an end token if there is one."""

    tokens: list[int]
    rounds: list[CourseRound]


def walks(
    reader: QuestionReader, courses: Sequence[WalkSettings], *, whole: int = 0
) -> Procedure[list[Trajectory]]:
    """Walk each course to its end; return their trajectories in order.

    whole: number of windows to read to their ends, for `CourseRound.mismatched`; each costs γ
    tokens.
    """
    trajectories = yield from _Tree(reader, whole).walk(courses)
    return trajectories


@dataclass(eq=False)
class _Walker:
    """State of a course. window: the open round's window; None between rounds."""

    course: WalkSettings
    rounds: list[CourseRound] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    window: DrafterWindow | None = None
    start: int = 0  # position of the window's begin in the answer
    round: CourseRound = field(default_factory=CourseRound)

    @property
    def full(self) -> bool:
        return self.round.accepted == self.round.drafted

    def begin(
        self, window: DrafterWindow, start: int, drafted: int, mismatched: int | None
    ) -> None:
        self.window, self.start = window, start
        self.round = CourseRound(drafted, 0, 0, 0, mismatched)

    def decide(self, *, accepted: bool, mismatch: bool) -> None:
        """Count the next draft token; a rejected one ends the round."""
        drafted, before, forgiven, decided, mismatched = self.round
        forgiven += accepted and mismatch
        self.round = CourseRound(
            drafted, before + accepted, forgiven, decided + mismatch, mismatched
        )
        if not accepted:
            self.close()

    def close(self) -> None:
        """End the round."""
        if self.round.mismatched is not None:
            mismatched = max(self.round.mismatched, self.round.decided)
            self.round = self.round._replace(mismatched=mismatched)
        self.rounds.append(self.round)
        self.window = None

    def end(self, answer: list[int]) -> None:
        """End the answer; an open round ended with a drafted token."""
        self.tokens = answer
        if self.window is not None:
            self.round = self.round._replace(drafted=self.round.accepted)  # an end token is last
            self.close()


class _Mismatch:
    """A mismatch: both tokens, and the states f32 [d] at the drafted one. Caches scores."""

    def __init__(self, draft: int, wanted: int, drafter: Floats, target: Floats) -> None:
        self._tokens = np.array([(draft, wanted)], dtype=np.int64)
        self._drafter, self._target = drafter[None], target[None]
        self._scored: dict[Score, Floats] = {}  # logits, shared by judges of different thresholds

    def rejected_by(self, course: WalkSettings) -> bool:
        judge = course.judge
        if judge is None or course.strict:
            return True
        if judge.score not in self._scored:  # a judge reads the state as decoded by the edge
            inputs = as_decoded(self._drafter, judge.form), self._target, self._tokens
            self._scored[judge.score] = judge.score(*inputs)
        scored_judge = replace(judge, score=lambda *_: self._scored[judge.score])
        return bool(scored_judge(self._drafter, self._target, self._tokens)[0])


class _ModelChoice(NamedTuple):
    """A model's argmax after a text, and its state f32 [d] at the text's last token."""

    choice: int
    state: Floats


class _Branch(NamedTuple):
    """Walkers with the same answer so far. target_choice: the target's next choice, if known."""

    answer: list[int]
    walkers: list[_Walker]
    target_choice: _ModelChoice | None = None


class _Tree:
    """The texts of one question's courses, visited depth first, since a slot caches one text."""

    def __init__(self, reader: QuestionReader, whole: int) -> None:
        self._reader = reader
        self._whole = whole  # windows left to read to their ends
        self._drafts: dict[bytes, _ModelChoice] = {}  # choices by the drafter's ids, as bytes

    def walk(self, courses: Sequence[WalkSettings]) -> Procedure[list[Trajectory]]:
        walkers = [_Walker(course) for course in courses]
        branches = [_Branch([], walkers)]
        while branches:
            branch = branches.pop()
            if len(branch.answer) == self._reader.most or self._reader.has_ended(branch.answer):
                for walker in branch.walkers:
                    walker.end(branch.answer)
            else:
                branches += yield from self._step(branch)
        return [Trajectory(walker.tokens, walker.rounds) for walker in walkers]

    def _step(self, branch: _Branch) -> Procedure[list[_Branch]]:
        """Advance a branch by one token; return the branches that follow."""
        answer, walkers, known_choice = branch
        target_token = (known_choice or (yield from self._target(answer))).choice
        yield from self._open(answer, [walker for walker in walkers if walker.window is None])
        # ordered by reading: the branch popped next continues the slot's cached text
        walkers_by_token: dict[int, list[_Walker]] = {target_token: []}
        choices_by_token: dict[int, _ModelChoice] = {}
        for window, drafting in _by_window(walkers).items():
            for walker in drafting:
                if walker.full:  # the target's token is the bonus
                    walker.close()
                    walkers_by_token[target_token].append(walker)
            rest = [walker for walker in drafting if walker.window is not None]
            if rest:
                yield from self._verify(
                    answer, window, rest, target_token, walkers_by_token, choices_by_token
                )
        return [
            _Branch([*answer, token], group, choices_by_token.get(token))
            for token, group in walkers_by_token.items()
            if group
        ]

    def _verify(
        self,
        answer: list[int],
        window: DrafterWindow,
        walkers: Sequence[_Walker],
        target_token: int,
        walkers_by_token: dict[int, list[_Walker]],
        choices_by_token: dict[int, _ModelChoice],
    ) -> Procedure[None]:
        """Assign each walker of one window to its next token, the draft or the target's.

        choices_by_token: the target's choices after drafts that it has read.
        """
        drafted = answer[walkers[0].start :]
        draft = (yield from self._draft(window, drafted)).choice
        judged = draft != target_token and not all(walker.course.strict for walker in walkers)
        if judged:
            draft_state = (yield from self._draft(window, [*drafted, draft])).state
            if draft not in choices_by_token:
                choices_by_token[draft] = yield from self._target([*answer, draft])
            mismatch = _Mismatch(draft, target_token, draft_state, choices_by_token[draft].state)
        for walker in walkers:
            forgiven = judged and not mismatch.rejected_by(walker.course)
            walker.decide(
                accepted=draft == target_token or forgiven, mismatch=draft != target_token
            )
            token = target_token if walker.window is None else draft
            walkers_by_token.setdefault(token, []).append(walker)

    def _open(self, answer: list[int], walkers: Sequence[_Walker]) -> Procedure[None]:
        """Begin a round; the tokens left in the answer bound its window, as on a device."""
        if not walkers:
            return
        window, start = self._reader.window(answer), len(answer)
        room = self._reader.most - start - 1
        rooms = [min(walker.course.window, room) for walker in walkers]
        mismatches: list[bool] | None = None
        if self._whole > 0:
            self._whole -= 1
            mismatches = yield from self._read_whole(window, answer, max(rooms))
        for walker, drafted in zip(walkers, rooms, strict=True):
            if mismatches is None:
                walker.begin(window, start, drafted, None)
            else:
                walker.begin(
                    window, start, min(drafted, len(mismatches)), sum(mismatches[:drafted])
                )

    def _read_whole(
        self, window: DrafterWindow, answer: list[int], room: int
    ) -> Procedure[list[bool]]:
        """Find the mismatches of a whole window, each after the drafted tokens before it."""
        drafted: list[int] = []
        while len(drafted) < room and not self._reader.has_ended(drafted):
            drafted.append((yield from self._draft(window, drafted)).choice)
        choices, _ = yield from self._reader.target([*answer, *drafted], len(drafted) + 1)
        return [token != choice for token, choice in zip(drafted, choices.tolist(), strict=False)]

    def _target(self, answer: Sequence[int]) -> Procedure[_ModelChoice]:
        choices, states = yield from self._reader.target(answer)
        return _ModelChoice(int(choices[0]), states[0])

    def _draft(self, window: DrafterWindow, drafted: Sequence[int]) -> Procedure[_ModelChoice]:
        """Get the drafter's choice; cache it, since other windows often read the same ids."""
        request = window.read(drafted)
        key = request.ids.tobytes()
        if key not in self._drafts:
            result = yield request
            self._drafts[key] = _ModelChoice(
                int(window.choices(result)[0]), result.hidden[0].copy()
            )
        return self._drafts[key]


def _by_window(walkers: Sequence[_Walker]) -> dict[DrafterWindow, list[_Walker]]:
    groups: dict[DrafterWindow, list[_Walker]] = {}
    for walker in walkers:
        assert walker.window is not None
        groups.setdefault(walker.window, []).append(walker)
    return groups
