"""The file of a sweep: its header, and for each question a tally of every setting.

A setting is a window and a judge, that is a head bound to a link and a threshold; without a head it
is `greedy`, which no link changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pilotfish.base.errors import UnsupportedError
from pilotfish.base.reading import read_content, reading_file
from pilotfish.judge.trajectories import Trajectory
from pilotfish.speculation.channel import Channel
from pilotfish.speculation.latency import Link


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
    def from_walk(cls, walk: Trajectory, right: bool) -> QuestionTally:
        """Sum over an answer's rounds."""
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
        return list(dict.fromkeys(setting.profile for setting in self.settings if setting.profile))

    @property
    def windows(self) -> list[int]:
        """The windows, in their order."""
        return list(dict.fromkeys(setting.window for setting in self.settings))


class _Line(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """A line of a sweep's file: its header, or how fast the models are, or a question."""

    sweep: SweepHeader | None = None
    pace: dict[str, Any] | None = None
    question: str = ""
    tallies: list[QuestionTally] = []


class SweepFile:
    """The lines of a sweep: first its header, then questions, and how fast the models are.

    Raises `UnsupportedError` for a file that is not a sweep's; a line cut short does not count.
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
        """Write the header, so that questions can be added.

        Raises `UnsupportedError` if the file has another one.
        """
        if self._torn:
            with self.path.open("rb+") as file:
                file.truncate(self._whole)
        if self.plan is None:
            self.plan = plan
            self._append(_Line(sweep=plan))
        elif self.plan != plan:
            existing = vars(self.plan)
            names = [name for name, value in vars(plan).items() if value != existing[name]]
            raise UnsupportedError(
                f"{self.path} was made otherwise ({', '.join(names)}): choose another --out, or "
                "give the same options."
            )

    def add(self, question: str, tallies: Sequence[QuestionTally]) -> None:
        """Add a question that is done."""
        self.tallies[question] = [*tallies]
        self._append(_Line(question=question, tallies=self.tallies[question]))

    def set_pace(self, pace: Mapping[str, Any]) -> None:
        """Keep how fast the models were; the last one counts."""
        self.pace = {**pace}
        self._append(_Line(pace=self.pace))

    def _append(self, line: _Line) -> None:
        with self.path.open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")

    def _read(self) -> None:
        with reading_file(lambda problem: UnsupportedError(f"{self.path} is no sweep: {problem}.")):
            data = read_content(self.path)
            complete = data.rfind(b"\n") + 1
            for line in msgspec.json.Decoder(_Line).decode_lines(data[:complete]):
                self.plan = line.sweep or self.plan
                self.pace = line.pace or self.pace
                if line.question:
                    self.tallies[line.question] = line.tallies
        if complete and self.plan is None:
            raise UnsupportedError(f"{self.path} is no sweep: it does not begin with a plan.")
        self._whole, self._torn = complete, complete < len(data)
