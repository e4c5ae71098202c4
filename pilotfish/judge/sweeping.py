"""Sweeps: what thresholds, windows and links make of a set of questions (wisv §VI).

In:  questions, heads with their thresholds, windows, links. Out: a file with a line a question, on
     which a later run goes on: for each setting a tally of the rounds that were walked.

A setting is a window and a judge, that is a head bound to a link and a threshold; without a head it
is `greedy`, which no link changes. Tokens and rounds are the real models'; what they would take is
left to `judge.costs`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pilotfish.device_runtime.bridge import Pair
from pilotfish.edge_runtime.head import DecisionHead, Score
from pilotfish.judge.reading import Procedure, Readers
from pilotfish.judge.speakers import Speaker
from pilotfish.judge.tasks import Question, Task
from pilotfish.judge.trajectories import Course, Trajectory, walks
from pilotfish.speculation.channel import Channel
from pilotfish.speculation.latency import Link
from pilotfish.wire.errors import UnsupportedError

_WHOLE = 12  # windows of one question


class LinkProfile(NamedTuple):
    """A link of a simulation: the same rate both ways in Mbit/s, the RTT in ms, no loss."""

    mbps: float
    rtt_ms: float

    def __str__(self) -> str:
        return f"{self.mbps:g} Mbit/s, {self.rtt_ms:g} ms"

    @property
    def link(self) -> Link:
        """For `speculation.latency`."""
        return Link(rtt_s=self.rtt_ms / 1e3, up_bps=self.mbps * 1e6, down_bps=self.mbps * 1e6)

    @property
    def channel(self) -> Channel:
        """What a head is told."""
        link = self.link
        return Channel(rtt_s=link.rtt_s, up_bps=link.up_bps, down_bps=link.down_bps, loss=0.0)


class SweepSetting(NamedTuple):
    """One way to answer. head, threshold, profile: None under `greedy`."""

    window: int
    head: str | None = None
    threshold: float | None = None
    profile: LinkProfile | None = None


class QuestionTally(NamedTuple):
    """One question under one setting.

    tokens: of the answer. accepted, forgiven, decided: sums over the rounds, see
    `judge.trajectories.Round`. asked: rounds with a mismatch, for which `wisv-selective` asks.
    behind: drafted tokens behind rejections. looked: of these, how many were looked at; missed:
    and were mismatches. drafted: how many rounds had windows of this many tokens.
    """

    right: bool
    tokens: int
    rounds: int
    accepted: int
    forgiven: int
    decided: int
    asked: int
    behind: int
    looked: int
    missed: int
    drafted: dict[int, int]

    @classmethod
    def of(cls, walk: Trajectory, right: bool) -> QuestionTally:
        """The sums over an answer's rounds."""
        rounds = walk.rounds
        seen = [(one, one.mismatched) for one in rounds if one.mismatched is not None]
        return cls(
            right=right,
            tokens=len(walk.tokens),
            rounds=len(rounds),
            accepted=sum(one.accepted for one in rounds),
            forgiven=sum(one.forgiven for one in rounds),
            decided=sum(one.decided for one in rounds),
            asked=sum(one.decided > 0 for one in rounds),
            behind=sum(one.behind for one in rounds),
            looked=sum(one.behind for one, _ in seen),
            missed=sum(mismatched - one.decided for one, mismatched in seen),
            drafted=dict(Counter(one.drafted for one in rounds)),
        )

    @classmethod
    def read(cls, line: Sequence[Any]) -> QuestionTally:
        """From JSON, whose keys are texts."""
        *numbers, drafted = line
        return cls._make([*numbers, {int(size): count for size, count in drafted.items()}])


@dataclass(frozen=True, kw_only=True)
class SweepHeader:
    """What a sweep's lines have in common: those of one file were made alike.

    drafter, target: model, origin, precision, hidden width and vocabulary of each end. heads: the
    digest and the format of states of each by its name. whole: of so many questions some windows
    are read to their ends.
    """

    task: str
    instruction: str
    most: int
    whole: int
    drafter: dict[str, Any]
    target: dict[str, Any]
    heads: dict[str, dict[str, Any]]
    settings: list[SweepSetting]

    @property
    def profiles(self) -> list[LinkProfile]:
        """The links, in their order."""
        return list(dict.fromkeys(one.profile for one in self.settings if one.profile))

    @property
    def windows(self) -> list[int]:
        """The windows, in their order."""
        return list(dict.fromkeys(one.window for one in self.settings))

    @classmethod
    def read(cls, told: Mapping[str, Any]) -> SweepHeader:
        """From JSON."""
        settings = [
            SweepSetting(window, head, threshold, LinkProfile(*profile) if profile else None)
            for window, head, threshold, profile in told["settings"]
        ]
        return cls(**{**told, "settings": settings})


def settings_of(
    windows: Sequence[int],
    thresholds: Mapping[str, Sequence[float]],
    profiles: Sequence[LinkProfile],
) -> list[SweepSetting]:
    """`greedy` and every head at its thresholds, under all windows and links."""
    judged = [
        SweepSetting(window, head, threshold, profile)
        for head, some in thresholds.items()
        for profile in profiles
        for threshold in some
        for window in windows
    ]
    return [*(SweepSetting(window) for window in windows), *judged]


def sweep(
    readers: Readers,
    pair: Pair,
    task: Task,
    asked: Sequence[Question],
    plan: SweepHeader,
    heads: Mapping[str, DecisionHead],
    *,
    ends: Collection[int],
    whole: Collection[str] = (),
) -> Iterator[tuple[Question, list[QuestionTally]]]:
    """The tallies of all settings, question by question as they are done.

    whole: the questions of which some windows are read to their ends.
    """
    courses = _courses(plan.settings, heads)

    def begin(question: Question) -> Procedure[list[QuestionTally]]:
        speaker = Speaker(question, pair, ends, plan.most)
        found = yield from walks(speaker, courses, whole=_WHOLE * (question.key in whole))
        return _judged(found, speaker, task)

    by_key = {one.key: one for one in asked}
    for key, tallies in readers.run([(one.key, partial(begin, one)) for one in asked]):
        yield by_key[key], tallies


def _judged(found: Sequence[Trajectory], speaker: Speaker, task: Task) -> list[QuestionTally]:
    """Look at every text once: many settings come to the same, and a checker may be slow."""
    known: dict[tuple[int, ...], bool] = {}
    for walk in found:
        if tuple(walk.tokens) not in known:
            outcome = task.outcome(speaker.question, speaker.text(walk.tokens))
            known[tuple(walk.tokens)] = task.right(speaker.question, outcome)
    return [QuestionTally.of(walk, known[tuple(walk.tokens)]) for walk in found]


def _courses(settings: Iterable[SweepSetting], heads: Mapping[str, DecisionHead]) -> list[Course]:
    scores: dict[tuple[str, LinkProfile], Score] = {}
    found = []
    for one in settings:
        if one.head is None or one.profile is None:
            found.append(Course(one.window))
            continue
        judge = heads[one.head].judge(one.profile.channel, one.threshold)
        score = scores.setdefault((one.head, one.profile), _Remembering(judge.score))
        found.append(Course(one.window, replace(judge, score=score)))
    return found


class _Remembering:
    """A head's score, which many thresholds ask for one after the other."""

    def __init__(self, score: Score) -> None:
        self._score = score
        self._asked: tuple[object, ...] = ()
        self._last = np.empty(0, np.float32)

    def __call__(
        self,
        drafter: NDArray[np.floating],
        target: NDArray[np.floating],
        tokens: NDArray[np.integer],
    ) -> NDArray[np.float32]:
        asked = (drafter, target, tokens)
        if len(self._asked) != 3 or any(
            a is not b for a, b in zip(self._asked, asked, strict=True)
        ):
            self._asked, self._last = asked, self._score(*asked)
        return self._last


class SweepFile:
    """The lines of a sweep: first its plan, then questions, and how fast the models are.

    Raises `UnsupportedError` for a file that is none; a line that is not whole does not count.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.plan: SweepHeader | None = None
        self.tallies: dict[str, list[QuestionTally]] = {}
        self.pace: dict[str, Any] | None = None
        self._whole, self._torn = 0, False  # bytes of whole lines; is there another one behind?
        if path.exists():
            self._read()

    def begin(self, plan: SweepHeader) -> None:
        """Write the plan; `UnsupportedError` if the file goes by another one.

        After that the file may be added to.
        """
        if self._torn:
            with self.path.open("rb+") as file:
                file.truncate(self._whole)
        if self.plan is None:
            self.plan = plan
            self._append({"sweep": asdict(plan)})
        elif self.plan != plan:
            names = [
                name for name, value in asdict(plan).items() if value != asdict(self.plan)[name]
            ]
            raise UnsupportedError(
                f"{self.path} was made otherwise ({', '.join(names)}): choose another --out, or "
                "give the same options."
            )

    def add(self, question: str, tallies: Sequence[QuestionTally]) -> None:
        """A question is done."""
        self.tallies[question] = list(tallies)
        self._append({"question": question, "tallies": tallies})

    def timed(self, pace: Mapping[str, Any]) -> None:
        """Keep how fast the models were; the last one counts."""
        self.pace = dict(pace)
        self._append({"pace": self.pace})

    def _append(self, line: Mapping[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")

    def _read(self) -> None:
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        try:
            for line in data[:whole].splitlines():
                told = json.loads(line)
                if "sweep" in told:
                    self.plan = SweepHeader.read(told["sweep"])
                elif "pace" in told:
                    self.pace = told["pace"]
                else:
                    self.tallies[told["question"]] = [
                        QuestionTally.read(one) for one in told["tallies"]
                    ]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UnsupportedError(f"{self.path} is no sweep: {error}.") from error
        if whole and self.plan is None:
            raise UnsupportedError(f"{self.path} is no sweep: it does not begin with a plan.")
        self._whole, self._torn = whole, whole < len(data)
