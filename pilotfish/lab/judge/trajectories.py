"""Compute the tokens that an edge with a head commits, for many settings at once (WISV §III, §VI).

In:  a question and its courses; a course is a window γ and a judge. Out: each course's tokens and
rounds, exactly as a device and an edge with these models would commit them at temperature 0.

A round is walked token by token. After a text the drafter chooses token d, the target token t. If
d = t, d is accepted. Otherwise the judge reads both models' states at d. It either accepts d (the
mismatch is forgiven) or rejects it; then t is committed and the round ends. A round also ends with
t after γ accepted tokens. So usually no token after a rejection is read.

Courses that have committed the same tokens share their passes. Where courses diverge, they become
branches; one branch waits until the other has ended. The start of a window affects the drafter
alone, because its context is the committed text in drafter tokens. Its choices are cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from pilotfish.edge_runtime.head import HeadJudge, Score
from pilotfish.lab.judge.baselines import Baseline, draw_uniform
from pilotfish.lab.judge.instances import as_decoded
from pilotfish.lab.judge.model_passes import Floats, Procedure
from pilotfish.lab.judge.question_reader import DrafterWindow, QuestionReader


@dataclass(frozen=True, eq=False)
class WalkSettings:
    """How rounds walk along an answer.

    window: draft tokens per round, γ ≥ 1. judge: accepts or rejects each mismatch; None rejects
    every mismatch. baseline: rule in place of a judge.
    """

    window: int
    judge: HeadJudge | None = None
    baseline: Baseline | None = None

    @property
    def strict(self) -> bool:
        """Whether the course rejects every mismatch: `greedy`, or threshold 0."""
        if self.baseline is not None:
            return False
        return self.judge is None or self.judge.outcome is True


class CourseRound(NamedTuple):
    """One round of a course.

    drafted: number of draft tokens in the window. (An end token after a rejection would shorten the
    window; unless the window was read to its end, this is ignored.) accepted: accepted tokens.
    forgiven: accepted mismatches. decided: mismatches that were forgiven or rejected. mismatched:
    mismatches in the whole window; None if the window was not read to its end.
    """

    drafted: int = 0
    accepted: int = 0
    forgiven: int = 0
    decided: int = 0
    mismatched: int | None = None

    @property
    def after_rejection(self) -> int:
        """The number of drafted tokens after the rejected token; no judge decides on them."""
        return max(0, self.drafted - self.accepted - 1)


@dataclass(frozen=True)
class Trajectory:
    """A course's answer and rounds. tokens: target ids, including the end token if there is one."""

    tokens: list[int]
    rounds: list[CourseRound]


def walks(
    reader: QuestionReader, courses: Sequence[WalkSettings], *, whole: int = 0
) -> Procedure[list[Trajectory]]:
    """Walk each course to its end; return the trajectories in the order of the courses.

    whole: number of windows that are read to their ends, for `CourseRound.mismatched`. Each of them
    costs about γ more tokens.
    """
    trajectories = yield from _Tree(reader, whole).walk(courses)
    return trajectories


@dataclass(eq=False)
class _Walker:
    """The state of one course. window: the current round's window; None between rounds."""

    course: WalkSettings
    rounds: list[CourseRound] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    window: DrafterWindow | None = None
    start: int = 0  # position in the answer at which the window begins
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
        """Record whether the next draft token is accepted; a rejected token ends the round."""
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
        """Store the answer; end the current round, if an accepted token ended the answer."""
        self.tokens = answer
        if self.window is not None:
            # the last accepted token ended the answer, so the device drafted none after it
            self.round = self.round._replace(drafted=self.round.accepted)
            self.close()


class _Mismatch:
    """A mismatch, with a cache of its scores.

    draft, wanted: the drafter's and the target's token. drafter, target: each model's state at the
    drafted token, f32 [d]. gap, uniform: see `judge.baselines.Baseline.rejects`.
    """

    def __init__(
        self,
        draft: int,
        wanted: int,
        drafter: Floats,
        target: Floats,
        *,
        gap: float,
        uniform: float,
    ) -> None:
        self._gap, self._uniform = gap, uniform
        self._tokens = np.array([(draft, wanted)], dtype=np.int64)
        self._drafter, self._target = drafter[None], target[None]
        # logits by score function; judges that differ only in their thresholds share them
        self._scored: dict[Score, Floats] = {}

    def rejected_by(self, course: WalkSettings) -> bool:
        if course.baseline is not None:
            return course.baseline.rejects(self._gap, self._uniform)
        judge = course.judge
        if judge is None or course.strict:
            return True
        # The score is computed from the drafter's state as the edge decodes it.
        if judge.score not in self._scored:
            inputs = as_decoded(self._drafter, judge.form), self._target, self._tokens
            self._scored[judge.score] = judge.score(*inputs)
        scored_judge = replace(judge, score=lambda *_: self._scored[judge.score])
        return bool(scored_judge(self._drafter, self._target, self._tokens)[0])


class _ModelChoice(NamedTuple):
    """A model's argmax after a text, and its state f32 [d] at the text's last token.

    logits: f32 [V]; kept of the target alone.
    """

    choice: int
    state: Floats
    logits: Floats | None = None

    def gap(self, token: int) -> float:
        """Return the logit of the model's choice minus that of another token."""
        assert self.logits is not None
        return float(self.logits[self.choice] - self.logits[token])


class _Branch(NamedTuple):
    """The walkers with the same answer so far.

    target_choice: the target's choice after this answer; None if it has not been computed yet.
    """

    answer: list[int]
    walkers: list[_Walker]
    target_choice: _ModelChoice | None = None


class _Tree:
    """The texts of one question's courses, as a tree.

    The tree is visited depth first, because a slot caches only one text.
    """

    def __init__(self, reader: QuestionReader, whole: int) -> None:
        self._reader = reader
        self._whole = whole  # number of windows that are still to be read to their ends
        self._drafts: dict[bytes, _ModelChoice] = {}  # drafter's choices, by the text's ids (bytes)

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
        """Advance a branch by one token; return one branch for each different next token."""
        answer, walkers, known_choice = branch
        wanted = known_choice or (yield from self._target(answer))
        target_token = wanted.choice
        yield from self._open(answer, [walker for walker in walkers if walker.window is None])
        # The order matters: `walk` continues with the last branch. Its token was read last, so the
        # slot's cache has its text.
        walkers_by_token: dict[int, list[_Walker]] = {target_token: []}
        choices_by_token: dict[int, _ModelChoice] = {}
        for window, drafting in _by_window(walkers).items():
            for walker in drafting:
                if walker.full:  # all drafts are accepted: the target's token ends the round
                    walker.close()
                    walkers_by_token[target_token].append(walker)
            rest = [walker for walker in drafting if walker.window is not None]
            if rest:
                yield from self._verify(
                    answer, window, rest, wanted, walkers_by_token, choices_by_token
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
        wanted: _ModelChoice,
        walkers_by_token: dict[int, list[_Walker]],
        choices_by_token: dict[int, _ModelChoice],
    ) -> Procedure[None]:
        """Decide on one draft; add each walker to the list of its next token.

        walkers: walkers with this window. wanted: the target's choice. walkers_by_token: walkers by
        next token, changed in place. choices_by_token: the target's choice after a draft, by draft,
        changed in place.
        """
        drafted, target_token = answer[walkers[0].start :], wanted.choice
        draft = (yield from self._draft(window, drafted)).choice
        judged = draft != target_token and not all(walker.course.strict for walker in walkers)
        if judged:
            draft_state = (yield from self._draft(window, [*drafted, draft])).state
            if draft not in choices_by_token:
                choices_by_token[draft] = yield from self._target([*answer, draft])
            mismatch = _Mismatch(
                draft,
                target_token,
                draft_state,
                choices_by_token[draft].state,
                gap=wanted.gap(draft),
                uniform=draw_uniform(self._reader.question.key, answer, draft),
            )
        for walker in walkers:
            forgiven = judged and not mismatch.rejected_by(walker.course)
            walker.decide(
                accepted=draft == target_token or forgiven, mismatch=draft != target_token
            )
            token = target_token if walker.window is None else draft
            walkers_by_token.setdefault(token, []).append(walker)

    def _open(self, answer: list[int], walkers: Sequence[_Walker]) -> Procedure[None]:
        """Begin a round. Its window leaves room for the target's token in the answer's limit."""
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
        """Compute whether each draft of a whole window is a mismatch, given the drafts before it.

        room: maximum number of drafts.
        """
        drafted: list[int] = []
        while len(drafted) < room and not self._reader.has_ended(drafted):
            drafted.append((yield from self._draft(window, drafted)).choice)
        choices, _ = yield from self._reader.target([*answer, *drafted], len(drafted) + 1)
        return [token != choice for token, choice in zip(drafted, choices.tolist(), strict=False)]

    def _target(self, answer: Sequence[int]) -> Procedure[_ModelChoice]:
        outputs = yield from self._reader.target_outputs(answer)
        logits = outputs.logits[0]
        return _ModelChoice(int(logits.argmax()), outputs.hidden[0], logits)

    def _draft(self, window: DrafterWindow, drafted: Sequence[int]) -> Procedure[_ModelChoice]:
        """Return the drafter's choice, cached: other windows often read the same text."""
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
