"""The file of a sweep: a header, and each question's counts under every setting.

A setting is a window and a rule: a head with a link and a threshold, or τ of `adaptive`. A setting
without either is `greedy`. Only a head's rounds depend on the link.

A later run may add settings: it appends them to the header's, and then each question's counts under
them. So a question has counts for the first settings of the header, not always for all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pilotfish.base.errors import UnsupportedError
from pilotfish.lab.judge.baselines import Baseline
from pilotfish.lab.judge.relaxed_walks import RelaxedTrajectory
from pilotfish.lab.judge.trajectories import Trajectory
from pilotfish.lab.runs import LineFile, WriterLock, changes
from pilotfish.speculation.channel import Channel
from pilotfish.speculation.latency import Link


class LinkProfile(NamedTuple):
    """A simulated link without loss. mbps: rate in each direction, Mbit/s. rtt_ms: RTT, ms."""

    mbps: float
    rtt_ms: float

    def __str__(self) -> str:
        return f"{self.mbps:g} Mbit/s, {self.rtt_ms:g} ms"

    @property
    def link(self) -> Link:
        """The same link as `speculation.latency` describes it, in seconds and bit/s."""
        return Link(rtt_s=self.rtt_ms / 1e3, up_bps=self.mbps * 1e6, down_bps=self.mbps * 1e6)

    @property
    def channel(self) -> Channel:
        """The same link as a head's input."""
        link = self.link
        return Channel(rtt_s=link.rtt_s, up_bps=link.up_bps, down_bps=link.down_bps, loss=0.0)


class SweepSetting(NamedTuple):
    """A setting of a sweep. With neither a head's name nor τ, it is `greedy`.

    threshold, profile: of a head; without a profile, the head does not know the link. tau: τ of
    `adaptive`. baseline: the rule that decides instead of the head, and forgives as much as the
    head does with this threshold over this link (`judge.baselines`).
    """

    window: int
    head: str | None = None
    threshold: float | None = None
    profile: LinkProfile | None = None
    tau: float | None = None
    baseline: Baseline | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether the setting is `greedy`."""
        return self.head is None and self.tau is None


class RelaxedCounts(NamedTuple):
    """The counts of one answer of `adaptive`.

    verified, key: numbers of tokens. deviation: sum over the verified tokens. up, down: bytes of
    the rounds' messages.
    """

    verified: int
    key: int
    deviation: float
    up: int
    down: int


class QuestionCounts(NamedTuple):
    """The counts of one question under one setting.

    right: whether the answer is correct. tokens: number of the answer's tokens. accepted, forgiven,
    decided: sums over the rounds (`judge.trajectories.CourseRound`). state_requests: rounds with a
    mismatch; in these, `wisv-selective` requests states. after_rejection: drafted tokens after a
    rejection. checked_after_rejection: number of these tokens that were compared with the target.
    mismatched_after_rejection: number of these tokens that differ from the target's. drafted:
    number of rounds by window length. relaxed: under `adaptive`; the counts of mismatches are then
    0, since a sampled token is compared with no single choice.
    """

    right: bool
    tokens: int
    rounds: int
    accepted: int
    forgiven: int
    decided: int
    state_requests: int
    after_rejection: int
    checked_after_rejection: int
    mismatched_after_rejection: int
    drafted: dict[int, int]
    relaxed: RelaxedCounts | None = None

    @classmethod
    def from_relaxed(cls, trajectory: RelaxedTrajectory, right: bool) -> QuestionCounts:
        """Sum the counts over the rounds of an answer of `adaptive`."""
        rounds = trajectory.rounds
        return cls(
            right=right,
            tokens=len(trajectory.tokens),
            rounds=len(rounds),
            accepted=sum(round_.accepted for round_ in rounds),
            forgiven=0,
            decided=0,
            state_requests=0,
            after_rejection=0,
            checked_after_rejection=0,
            mismatched_after_rejection=0,
            drafted=dict(Counter(round_.drafted for round_ in rounds)),
            relaxed=RelaxedCounts(
                verified=sum(round_.verified for round_ in rounds),
                key=sum(round_.key for round_ in rounds),
                deviation=sum(round_.deviation for round_ in rounds),
                up=int(sum(round_.bytes.up for round_ in rounds)),
                down=int(sum(round_.bytes.down for round_ in rounds)),
            ),
        )

    @classmethod
    def from_trajectory(cls, trajectory: Trajectory, right: bool) -> QuestionCounts:
        """Sum the counts over an answer's rounds."""
        rounds = trajectory.rounds
        read_rounds = [
            (round_, round_.mismatched) for round_ in rounds if round_.mismatched is not None
        ]
        return cls(
            right=right,
            tokens=len(trajectory.tokens),
            rounds=len(rounds),
            accepted=sum(round_.accepted for round_ in rounds),
            forgiven=sum(round_.forgiven for round_ in rounds),
            decided=sum(round_.decided for round_ in rounds),
            state_requests=sum(round_.decided > 0 for round_ in rounds),
            after_rejection=sum(round_.after_rejection for round_ in rounds),
            checked_after_rejection=sum(round_.after_rejection for round_, _ in read_rounds),
            mismatched_after_rejection=sum(
                mismatched - round_.decided for round_, mismatched in read_rounds
            ),
            drafted=dict(Counter(round_.drafted for round_ in rounds)),
        )


@dataclass(frozen=True, kw_only=True)
class SweepHeader:
    """The header of a sweep's file: the options that all its lines share.

    most: maximum number of tokens in an answer. whole: number of questions with windows that are
    read to their ends. drafter, target: each model's name, origin, precision, hidden width and
    vocabulary size. heads: each head's digest and format of states, by name. links: links for
    the costs of settings without a link. sampling: sampling parameters and λ₁ to λ₃ of `adaptive`;
    None without it.
    """

    task: str
    instruction: str
    most: int
    whole: int
    drafter: dict[str, Any]
    target: dict[str, Any]
    heads: dict[str, dict[str, Any]]
    settings: list[SweepSetting]
    links: list[LinkProfile] = field(default_factory=list)
    sampling: dict[str, Any] | None = None

    @property
    def profiles(self) -> list[LinkProfile]:
        """The distinct links of the sweep and of its settings, in order."""
        judged = [setting.profile for setting in self.settings if setting.profile]
        return list(dict.fromkeys([*self.links, *judged]))

    @property
    def has_baselines(self) -> bool:
        """Whether the heads are compared with baselines."""
        return any(setting.baseline for setting in self.settings)

    @property
    def windows(self) -> list[int]:
        """The distinct windows of the settings, in order."""
        return list(dict.fromkeys(setting.window for setting in self.settings))

    def extended(self, other: SweepHeader) -> SweepHeader:
        """Return this header with the further settings, heads and links of another one.

        Two headers may differ in nothing else; a head of the same name must be the same head.
        """
        return replace(
            self,
            heads=other.heads | self.heads,
            sampling=self.sampling or other.sampling,
            settings=list(dict.fromkeys([*self.settings, *other.settings])),
            links=list(dict.fromkeys([*self.links, *other.links])),
        )


class _Line(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """A line of a sweep's file: a header, the models' pass times, or a question's counts.

    The last header holds. tallies: counts under the settings from number ``first`` on.
    """

    sweep: SweepHeader | None = None
    pace: dict[str, Any] | None = None
    question: str = ""
    first: int = 0
    tallies: list[QuestionCounts] = []


class SweepFile:
    """A sweep's file: a header line, then lines with questions or with the models' pass times.

    tallies: each question's counts under the first settings of the plan.

    Raises `UnsupportedError` if the file does not hold a sweep. Ignores an incomplete last line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.plan: SweepHeader | None = None
        self.tallies: dict[str, list[QuestionCounts]] = {}
        self.pace: dict[str, Any] | None = None
        self._lines = LineFile(path)
        self._read(repair=False)

    @contextmanager
    def writing(self, plan: SweepHeader) -> Iterator[None]:
        """Lock the file inside the ``with`` block; write the header if it has none or lacks a part.

        Raises `UnsupportedError` if the file was made with other options than the settings, and
        `RunFileError` if another process is writing it.
        """
        busy = f"Another process is writing {self.path}: wait until it ends."
        with closing(WriterLock(self.path, busy)):
            # read again: another process may have written to the file before it was locked
            self._read(repair=True)
            known = self.plan or plan
            whole = known.extended(plan)
            wanted = replace(plan, settings=whole.settings, links=whole.links)
            wanted = replace(wanted, heads=known.heads | plan.heads)
            wanted = replace(wanted, sampling=plan.sampling or known.sampling)
            if changed := changes(vars(whole), vars(wanted)):
                raise UnsupportedError(
                    f"{self.path} was made with other options "
                    f"({', '.join(change.name for change in changed)}): choose another --out, or "
                    f"give the same options."
                )
            if self.plan != whole:
                self.plan = whole
                self._lines.append(_Line(sweep=whole))
            yield

    def add(self, question: str, tallies: Sequence[QuestionCounts]) -> None:
        """Append a question's counts under the settings that follow those that it has."""
        known = self.tallies.setdefault(question, [])
        self._lines.append(_Line(question=question, first=len(known), tallies=[*tallies]))
        known += tallies

    def set_pace(self, pace: Mapping[str, Any]) -> None:
        """Append the models' pass times; they override earlier lines."""
        self.pace = {**pace}
        self._lines.append(_Line(pace=self.pace))

    def _read(self, *, repair: bool) -> None:
        decoder = msgspec.json.Decoder(_Line)
        lines = self._lines.read(
            lambda _, line: decoder.decode(line), self._damage_error, repair=repair
        )
        for line in lines:
            self.plan = line.sweep or self.plan
            self.pace = line.pace or self.pace
            if line.question:
                known = self.tallies.setdefault(line.question, [])
                known[line.first :] = line.tallies
        if lines and self.plan is None:
            raise self._damage_error(1, "it does not begin with a header")

    def _damage_error(self, number: int, problem: str) -> UnsupportedError:
        return UnsupportedError(f"{self.path} does not hold a sweep: {problem}.")
