"""What an edge with a head commits, under many settings at once (wisv §III, §VI).

In:  a question, and its courses: a window γ and a judge each. Out: each course's tokens and rounds,
     as a device and an edge at temperature 0 would come to them, with the real models.

A round is a walk. After a prefix the drafter says d and the target t. Is d = t, it is accepted;
else the judge looks at both states at d, and either d stays (it is forgiven) or t is committed and
the round ends, as it does with t behind γ accepted tokens. So nothing behind a rejection is ever
read, and courses read what they share once: they walk together as long as they commit the same, and
where they part, one side waits until the other has come to its end. Where a window began matters to
the drafter alone, whose context is the committed text in its own tokens; it remembers what it said.
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
    """A window's size γ ≥ 1, and who decides on mismatches; without a judge all are rejected."""

    window: int
    judge: HeadJudge | None = None

    @property
    def strict(self) -> bool:
        """Whether every mismatch is rejected whatever the states: `greedy`, or threshold 0."""
        return self.judge is None or self.judge.bound == -math.inf


class CourseRound(NamedTuple):
    """One round of a course.

    drafted: the window's tokens; where it ends with a rejection, an end token that the drafter may
    have come to behind that is not known of. accepted: of these; forgiven: of the accepted.
    decided: mismatches up to the rejection, or in the window. mismatched: in the whole window, m;
    None where that was not looked at.
    """

    drafted: int = 0
    accepted: int = 0
    forgiven: int = 0
    decided: int = 0
    mismatched: int | None = None

    @property
    def behind(self) -> int:
        """Drafted tokens behind the rejected one: what is there was not decided on."""
        return max(0, self.drafted - self.accepted - 1)


@dataclass(frozen=True)
class Trajectory:
    """An answer: the target's ids, with the end token if there is one, and its rounds."""

    tokens: list[int]
    rounds: list[CourseRound]


def walks(
    reader: QuestionReader, courses: Sequence[WalkSettings], *, whole: int = 0
) -> Procedure[list[Trajectory]]:
    """Walk each of the courses to its end; return what they come to, in their order.

    whole: so many windows are also read to their ends, for `CourseRound.mismatched`; each costs γ
    tokens.
    """
    trajectories = yield from _Tree(reader, whole).walked(courses)
    return trajectories


@dataclass(eq=False)
class _Walker:
    """A course on its way. window: the open round's; None between two rounds."""

    course: WalkSettings
    rounds: list[CourseRound] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    window: DrafterWindow | None = None
    start: int = 0  # where the window begins in the answer
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
        """End the answer; with a round open it ended with a token of the drafter's."""
        self.tokens = answer
        if self.window is not None:
            self.round = self.round._replace(drafted=self.round.accepted)  # an end token is last
            self.close()


class _Mismatch:
    """A draft, the target's token, and the states f32 [d] at the draft, for any judge."""

    def __init__(self, draft: int, wanted: int, drafter: Floats, target: Floats) -> None:
        self._tokens = np.array([(draft, wanted)], dtype=np.int64)
        self._drafter, self._target = drafter[None], target[None]
        self._scored: dict[Score, Floats] = {}  # logits, which judges of many thresholds share

    def rejected(self, course: WalkSettings) -> bool:
        judge = course.judge
        if judge is None or course.strict:
            return True
        if judge.score not in self._scored:  # by the state that the edge has
            inputs = as_decoded(self._drafter, judge.form), self._target, self._tokens
            self._scored[judge.score] = judge.score(*inputs)
        scored_judge = replace(judge, score=lambda *_: self._scored[judge.score])
        return bool(scored_judge(self._drafter, self._target, self._tokens)[0])


class _ModelChoice(NamedTuple):
    """What a model says after a text, and its state f32 [d] at the text's last token."""

    choice: int
    state: Floats


class _Branch(NamedTuple):
    """Walkers that have committed or accepted the same tokens; and what the target says then."""

    answer: list[int]
    walkers: list[_Walker]
    said: _ModelChoice | None = None


class _Tree:
    """All texts that one question's courses come through, depth first: a slot holds one of them."""

    def __init__(self, speaker: QuestionReader, whole: int) -> None:
        self._speaker = speaker
        self._whole = whole  # windows that are still to be read to their ends
        self._drafts: dict[bytes, _ModelChoice] = {}  # by the drafter's own ids

    def walked(self, courses: Sequence[WalkSettings]) -> Procedure[list[Trajectory]]:
        walkers = [_Walker(course) for course in courses]
        branches = [_Branch([], walkers)]
        while branches:
            branch = branches.pop()
            if len(branch.answer) == self._speaker.most or self._speaker.ended(branch.answer):
                for walker in branch.walkers:
                    walker.end(branch.answer)
            else:
                branches += yield from self._step(branch)
        return [Trajectory(walker.tokens, walker.rounds) for walker in walkers]

    def _step(self, branch: _Branch) -> Procedure[list[_Branch]]:
        """Return the branches with one token more."""
        answer, walkers, known_choice = branch
        target_token = (known_choice or (yield from self._target(answer))).choice
        yield from self._open(answer, [walker for walker in walkers if walker.window is None])
        # in the order of reading, so that the slot holds what is gone on with
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
        """Send the walkers of one window on to its next token or to the target's.

        read: what the target says behind drafts that it has read.
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
            forgiven = judged and not mismatch.rejected(walker.course)
            walker.decide(
                accepted=draft == target_token or forgiven, mismatch=draft != target_token
            )
            token = target_token if walker.window is None else draft
            walkers_by_token.setdefault(token, []).append(walker)

    def _open(self, answer: list[int], walkers: Sequence[_Walker]) -> Procedure[None]:
        """Begin a round here; what may still come bounds its window, as on a device."""
        if not walkers:
            return
        window, start = self._speaker.window(answer), len(answer)
        room = self._speaker.most - start - 1
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
        """Find which tokens of the window the target would replace, given the draft's prefix."""
        drafted: list[int] = []
        while len(drafted) < room and not self._speaker.ended(drafted):
            drafted.append((yield from self._draft(window, drafted)).choice)
        choices, _ = yield from self._speaker.target([*answer, *drafted], len(drafted) + 1)
        return [token != choice for token, choice in zip(drafted, choices.tolist(), strict=False)]

    def _target(self, answer: Sequence[int]) -> Procedure[_ModelChoice]:
        choices, states = yield from self._speaker.target(answer)
        return _ModelChoice(int(choices[0]), states[0])

    def _draft(self, window: DrafterWindow, drafted: Sequence[int]) -> Procedure[_ModelChoice]:
        """Ask the drafter what it says there; other windows often read the same ids."""
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
