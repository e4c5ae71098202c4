"""The link during a run: samples of its quantities on one wall clock, outages, and pauses.

In: the rows of a run file. Out: a `LinkHistory`. All times are Unix seconds by that setting of the
device's wall clock which held longest (`field.run_clock`).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from pilotfish.lab.field.answer import Answer
from pilotfish.lab.field.link_rows import Outage, Probe
from pilotfish.lab.field.report.row_times import RowTimes
from pilotfish.lab.field.report.samples import Array, Samples, samples
from pilotfish.lab.field.run_clock import ClockStep
from pilotfish.lab.field.run_facts import Facts
from pilotfish.wire.link.state import READINGS, LinkState

Series: TypeAlias = tuple[Samples, Samples]  # measured values, and lower bounds

_PAUSE_S = 600.0  # time without a row (s) above which a run of `field measure` was interrupted
_MISSED = 2.5  # rounds of a watch without a row above which the watch was interrupted
# by name: the field of `LinkState`, the unit, and the unit's size
QUANTITIES = {kind.name: (field, kind.shown_unit, kind.size) for field, kind in READINGS.items()}


@dataclass(frozen=True, kw_only=True)
class Absence:
    """An outage by the wall clock. ended: False if the edge was still away at the file's end."""

    began_s: float
    ended_s: float
    ended: bool
    reason: str

    @property
    def lasted_s(self) -> float:
        """The seconds of the outage."""
        return self.ended_s - self.began_s


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes of the frames that ZeroMQ gets, up and down: of answers, of measuring the link."""

    answers: tuple[int, int]
    probes: tuple[int, int]

    @property
    def total(self) -> int:
        """All bytes, both ways."""
        return sum(self.answers) + sum(self.probes)


@dataclass(frozen=True, kw_only=True, eq=False)
class LinkHistory:
    """The link during a run, by the wall clock.

    began_s, ended_s: the run; a watch also covers the slot of its last round, unless it is known to
    have stopped or lost the edge since. rounds, slots: rounds of a watch, and those that its
    schedule had. rounds_s: begins of a watch's rounds, ascending. rtts: RTT samples in ms by their
    source, the best source first. lost: pings without a reply. estimates: the device's estimates by
    the names of `QUANTITIES`. goodput, bounds: probes' goodput in Mbit/s by direction, and those
    values that are only lower bounds. outages, pauses: times when the edge was away, and when
    nothing was measured; a time in which a watch was off is a pause, however short. longest_s:
    longest time without a row that is no pause. steps: settings of the wall clock. answers_s:
    begins of the counted answers, in their order.
    """

    began_s: float
    ended_s: float
    rounds: int
    slots: int
    rounds_s: Array
    rtts: dict[str, Samples]
    lost: int
    estimates: dict[str, Samples]
    goodput: dict[str, Samples]
    bounds: dict[str, Samples]
    outages: list[Absence]
    pauses: list[tuple[float, float]]
    longest_s: float
    steps: list[ClockStep]
    traffic: Traffic
    power_w: float | None
    answers_s: Array

    @property
    def observed_s(self) -> float:
        """The seconds in which the run was measuring, also while the edge was away."""
        return self.ended_s - self.began_s - sum(end - begin for begin, end in self.pauses)

    @property
    def away_s(self) -> float:
        """The seconds of all outages, without pauses; those of two at the same time count once."""
        total = last = 0.0
        for outage in self.outages:
            begin, end = max(outage.began_s, last), outage.ended_s
            if begin < end:
                total += end - begin - self._paused_s(begin, end)
                last = end
        return total

    def _paused_s(self, begin_s: float, end_s: float) -> float:
        """Return the seconds between two times in which nothing was measured."""
        return sum(max(0.0, min(end, end_s) - max(begin, begin_s)) for begin, end in self.pauses)

    @property
    def available(self) -> float | None:
        """The share of the observed time in which the edge was there; None without a watch."""
        return 1.0 - self.away_s / self.observed_s if self.observed_s > 0 and self.slots else None

    def series(self, name: str) -> Series | None:
        """Return the measured values and the lower bounds of a quantity; None if it has neither.

        A probe's transfer counts before the device's estimate.
        """
        nothing = samples([], [])
        values = self.goodput.get(name, nothing), self.bounds.get(name, nothing)
        if not any(map(len, values)):
            values = self.estimates.get(name, nothing), nothing
        return values if any(map(len, values)) else None

    @property
    def unmeasured(self) -> list[str]:
        """The names of the quantities that were never measured."""
        return [
            name
            for name in QUANTITIES
            if self.series(name) is None and not (name == "RTT" and self.rtts)
        ]

    @property
    def rtt(self) -> Samples:
        """The RTT samples of the best source; empty without any."""
        return next(iter(self.rtts.values()), samples([], []))


def history(
    facts: Facts,
    every: Sequence[Answer],
    counted: Sequence[Answer],
    probes: Sequence[Probe],
    outages: Sequence[Outage],
) -> LinkHistory:
    """Put the rows of a run on one wall clock. every: all answers. counted: those that count."""
    clock = RowTimes(every, probes, outages)
    began = {answer.id: float(at) for answer, at in zip(every, clock.answers, strict=True)}
    at_answers = np.array([began[answer.id] for answer in counted], np.float64)
    spans = np.array(
        [
            *((at, at + answer.total_s) for at, answer in zip(clock.answers, every, strict=True)),
            *((at, at + probe.took_s) for at, probe in zip(clock.probes, probes, strict=True)),
            *clock.outages,
        ]
    ).reshape(-1, 2)
    row_s = float(spans[:, 1].max()) if len(spans) else facts.starts[0].unix_s
    alive_s = clock.at(facts.alive_clock_s) if facts.alive_clock_s is not None else None
    last_s = row_s if alive_s is None else max(row_s, alive_s)
    absences = [
        Absence(
            began_s=float(begin),
            ended_s=float(end if outage.ended_clock_s is not None else max(begin, last_s)),
            ended=outage.ended_clock_s is not None,
            reason=outage.reason,
        )
        for (begin, end), outage in zip(clock.outages, outages, strict=True)
    ]
    spans = np.append(spans, [(a.began_s, a.ended_s) for a in absences]).reshape(-1, 2)
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    first_s = float(spans[0, 0]) if len(spans) else last_s
    rounds = len(probes) or len({(answer.prompt, answer.repeat) for answer in counted})
    watch = facts.watch
    longest_s = _PAUSE_S if watch is None else _MISSED * watch.every_s
    ended_s, slots = last_s, 0
    if watch is not None:
        next_s = max(clock.probes, default=0.0) + watch.every_s
        slots = max(1, round((max(last_s, next_s) - first_s) / watch.every_s))
        if _slot_is_whole(facts, clock, absences, row_s):
            until_s = np.inf if watch.for_s is None else first_s + watch.for_s
            ended_s = max(last_s, float(min(next_s, until_s)))
    return LinkHistory(
        began_s=first_s,
        ended_s=ended_s,
        rounds=rounds,
        slots=slots,
        rounds_s=np.sort(clock.probes),
        rtts=_rtts(counted, at_answers, probes, clock.probes),
        lost=sum(probe.lost for probe in probes),
        estimates=dict(_estimates(counted, at_answers, probes, clock.probes)),
        goodput=_goodput(probes, clock.probes, bound=False),
        bounds=_goodput(probes, clock.probes, bound=True),
        outages=sorted(absences, key=lambda absence: absence.began_s),
        pauses=_united([*_pauses(spans, longest_s), *_off(facts, clock, first_s, ended_s)]),
        longest_s=longest_s,
        steps=clock.steps,
        traffic=_traffic(counted, probes),
        power_w=_median([p.power_w for p in probes if p.power_w is not None]),
        answers_s=at_answers,
    )


def _slot_is_whole(
    facts: Facts, clock: RowTimes, absences: Sequence[Absence], row_s: float
) -> bool:
    """Return whether the slot of a watch's last round counts to its end: nothing shortens it.

    An outage without an end does, and a sign of life or a start since the last row, which ended at
    ``row_s``: then the watch has stopped, or was killed.
    """
    signs = (facts.alive_clock_s, facts.starts[-1].clock_s)
    later = [at for sign in signs if sign is not None and (at := clock.at(sign)) is not None]
    return max(later, default=0.0) < row_s and all(absence.ended for absence in absences)


def _pauses(spans: Array, longest_s: float) -> list[tuple[float, float]]:
    """Return the times that no row covers. spans: begins, ascending, and ends, [rows, 2]."""
    covered = np.maximum.accumulate(spans[:, 1]) if len(spans) else spans[:, 1]
    at = np.flatnonzero(spans[1:, 0] - covered[:-1] > longest_s)
    return [(float(covered[row]), float(spans[row + 1, 0])) for row in at]


def _off(
    facts: Facts, clock: RowTimes, first_s: float, last_s: float
) -> Iterator[tuple[float, float]]:
    """Yield the times between the first and the last row in which a watch was off."""
    for start in facts.starts:
        begin, end = clock.at(start.clock_s - start.off_s), clock.at(start.clock_s)
        if begin is not None and end is not None and start.off_s > 0:
            begin, end = max(begin, first_s), min(end, last_s)
            if begin < end:
                yield begin, end


def _united(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return spans that do not overlap, ascending."""
    united: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if united and begin <= united[-1][1]:
            united[-1] = united[-1][0], max(united[-1][1], end)
        else:
            united.append((begin, end))
    return united


def _rtts(
    counted: Sequence[Answer], at_answers: Array, probes: Sequence[Probe], at_probes: Array
) -> dict[str, Samples]:
    """Return the RTT samples in ms by source, the best source first; sources without are absent."""
    pings = np.repeat(at_probes, [len(probe.rtts_s) for probe in probes])
    rounds = np.repeat(at_answers, [len(answer.rtts) for answer in counted])
    within = [sample.at_s for answer in counted for sample in answer.rtts]
    sources = {
        "pings": samples(pings, [1e3 * rtt for probe in probes for rtt in probe.rtts_s]),
        "rounds of answers": samples(
            rounds + np.array(within, np.float64),
            [1e3 * sample.rtt_s for answer in counted for sample in answer.rtts],
        ),
    }
    values = {source: each for source, each in sources.items() if len(each)}
    if not values:
        estimates = dict(_estimates(counted, at_answers, probes, at_probes))
        if "RTT" in estimates:
            values["estimates at begins of answers"] = estimates["RTT"]
    return values


def _estimates(
    counted: Sequence[Answer], at_answers: Array, probes: Sequence[Probe], at_probes: Array
) -> Iterator[tuple[str, Samples]]:
    """Yield the name and the samples of each quantity of which there is an estimate.

    A probe's own signal counts, and otherwise that of its link's state.
    """
    states: list[tuple[float, LinkState | None]] = [
        *((float(at), each.link) for at, each in zip(at_answers, counted, strict=True)),
        *((float(at), each.link) for at, each in zip(at_probes, probes, strict=True)),
    ]
    for name, (field, _, si) in QUANTITIES.items():
        readings = [(at, getattr(state, field)) for at, state in states if state is not None]
        values = [(at, reading.value / si) for at, reading in readings if reading is not None]
        if name == "signal":
            values = _signals(probes, at_probes) or values
        if values:
            yield name, samples(*zip(*values, strict=True))


def _signals(probes: Sequence[Probe], at_probes: Array) -> list[tuple[float, float]]:
    """Return time and dBm of each probe of which the radio gave a signal."""
    readings = [
        (at, (probe.signal or {}).get("dbm")) for at, probe in zip(at_probes, probes, strict=True)
    ]
    return [(float(at), float(dbm)) for at, dbm in readings if isinstance(dbm, int | float)]


def _goodput(probes: Sequence[Probe], at_probes: Array, *, bound: bool) -> dict[str, Samples]:
    """Return the goodput of the probes in Mbit/s; bound: whether to return the bounds instead."""
    values = {}
    for name, way in (("goodput up", "up"), ("goodput down", "down")):
        readings = [
            (at, getattr(probe, f"{way}_bps") / 1e6)
            for at, probe in zip(at_probes, probes, strict=True)
            if getattr(probe, f"{way}_bps") is not None and getattr(probe, f"{way}_bound") == bound
        ]
        if readings:
            values[name] = samples(*zip(*readings, strict=True))
    return values


def _traffic(counted: Sequence[Answer], probes: Sequence[Probe]) -> Traffic:
    rounds = [round_ for answer in counted for round_ in answer.rounds]
    return Traffic(
        answers=(sum(r.uplink_bytes for r in rounds), sum(r.downlink_bytes for r in rounds)),
        probes=(
            sum(a.probe_uplink_bytes for a in counted) + sum(p.uplink_bytes for p in probes),
            sum(a.probe_downlink_bytes for a in counted) + sum(p.downlink_bytes for p in probes),
        ),
    )


def _median(values: Sequence[float]) -> float | None:
    return float(np.median(values)) if values else None
