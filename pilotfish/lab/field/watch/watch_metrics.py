"""`field watch --metrics`: what a watch found last, and its counts, for Prometheus.

In: the events of a watch, as one of its listeners. Out: metric families, which
`edge_runtime.metrics_server` serves. The names of protocols come from the settings of the watch, so
the number of series is bounded. A value that was not measured is absent, not zero. Times are ages
by the run's clock, since the wall clock of a device may differ from that of Prometheus.
"""

import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from pilotfish.base.metrics import Histogram, counter, gauge, histogram, metric, metric_families
from pilotfish.base.prose import one_line
from pilotfish.base.version import SOFTWARE
from pilotfish.lab.field.answer import Answer
from pilotfish.lab.field.link_rows import Outage, Probe
from pilotfish.lab.field.run_clock import RunClock
from pilotfish.lab.field.run_facts import Facts
from pilotfish.lab.field.token_speed import steady_token_s
from pilotfish.lab.field.watch.clock import Clock, Stamp
from pilotfish.lab.field.watch.listener import WatchListener, WatchRound
from pilotfish.wire.protocols import names

if TYPE_CHECKING:
    from prometheus_client import Metric

PREFIX: Final = "pilotfish_watch_"
_NAME_LETTERS: Final = 80  # longest name of a device in a label
_RTT_S: Final = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 5, 10),
)


@dataclass
class _Counts:
    """All counts since the start of the process, and the last values."""

    rounds: int = counter("rounds", "Rounds that have ended.")
    rtt_s: Histogram = histogram(
        "rtt_seconds", "Round-trip times of the pings of all probes.", _RTT_S
    )
    lost: int = counter("lost_pings", "Pings of probes without a reply.")
    answers: Counter[str] = counter("answers", "Finished answers, by protocol.", "protocol")
    failed: Counter[str] = counter(
        "failed_answers",
        "Answers that failed although the edge could be used, by protocol.",
        "protocol",
    )
    chosen: Counter[str] = counter("choices", "Protocols that auto chose.", "protocol")
    token_s: dict[str, float] = gauge(
        "token_seconds",
        "Seconds per token of the last answer after its first round, by protocol.",
        "protocol",
    )
    first_s: dict[str, float] = gauge(
        "first_token_seconds",
        "Seconds to the first token of the last answer, by protocol.",
        "protocol",
    )
    energy_j: dict[str, float] = counter(
        "answer_energy_joules", "Energy of the machine during answers, by protocol.", "protocol"
    )
    probe_bytes: Counter[str] = counter(
        "probe_bytes",
        "Bytes of the messages of probes, without the transport's overhead.",
        "direction",
    )
    outages: int = counter("outages", "Outages that have begun since the start of the watch.")
    clock_steps: int = counter("clock_steps", "Settings of the wall clock.")
    rows: int = counter("rows", "Rows that were written to the run file.")
    dropped: int = counter(
        "dropped_rows", "Rows that were lost because the disk did not take them for too long."
    )
    disk_errors: int = counter("disk_errors", "Failed writes of the run file.")
    disk_failing: bool = gauge("disk_failing", "1 while rows wait in memory for the disk.")


class WatchMetrics(WatchListener):
    """The metrics of a watch. Thread-safe.

    edge: the edge's address. facts: those of the run file. clock: the clocks of the watch.
    """

    def __init__(self, edge: str, facts: Facts, clock: Clock) -> None:
        assert facts.watch is not None
        protocols = facts.settings.protocols
        self._build = (SOFTWARE, one_line(facts.device, _NAME_LETTERS), edge)
        self._every_s = facts.watch.every_s
        self._file_bytes: int | None = None
        self._counts = _Counts()
        self._counts.answers.update(dict.fromkeys(protocols, 0))
        self._counts.failed.update(dict.fromkeys(protocols, 0))
        self._known = {*names(), *protocols}
        self._probe: Probe | None = None
        # times by the run's clock: of the newest row (at first the start, which is in the file), of
        # the newest one in the file, of the newest probe or answer, of the begin of an outage
        self._clock_s = RunClock(facts.starts[-1].moment, clock.boot_s)
        self._row_s = self._written_row_s = self._clock_s()
        self._success_s: float | None = None
        self._away_since_s: float | None = None
        self._away_before_s = 0.0
        self._lock = threading.Lock()

    def on_probe(self, probe: Probe) -> None:
        """Take a probe."""
        with self._lock:
            counts = self._counts
            self._probe = probe
            self._note_row()
            self._success_s = self._row_s
            for rtt_s in probe.rtts_s:
                counts.rtt_s.add(rtt_s)
            counts.lost += probe.lost
            counts.probe_bytes["up"] += probe.uplink_bytes
            counts.probe_bytes["down"] += probe.downlink_bytes

    def on_answer(self, answer: Answer) -> None:
        """Take a finished answer."""
        protocol = self._name(answer.protocol)
        with self._lock:
            counts = self._counts
            self._note_row()
            self._success_s = self._row_s
            counts.answers[protocol] += 1
            counts.token_s.pop(protocol, None)
            if (token_s := steady_token_s(answer)) is not None:
                counts.token_s[protocol] = token_s
            counts.first_s[protocol] = answer.first_token_s
            if answer.choice is not None:
                counts.chosen[self._name(answer.choice.protocol)] += 1
            if answer.energy_j is not None:
                counts.energy_j[protocol] += answer.energy_j

    def on_round(self, round_: WatchRound) -> None:
        """Take a round."""
        with self._lock:
            self._counts.rounds += 1
            for protocol in round_.failed:
                self._counts.failed[self._name(protocol)] += 1

    def on_outage(self, outage: Outage) -> None:
        """Take an outage when it begins, and again when it has ended."""
        with self._lock:
            self._note_row()
            if outage.ended_clock_s is None:
                self._counts.outages += 1
                self._away_since_s = outage.began_clock_s
            else:
                self._away_before_s += outage.ended_clock_s - outage.began_clock_s
                self._away_since_s = None

    def on_clock_step(self, stamp: Stamp, by_s: float) -> None:
        """Take a setting of the wall clock."""
        with self._lock:
            self._counts.clock_steps += 1

    def on_disk(self, stamp: Stamp, problem: str, waiting: int) -> None:
        """Take the first failure of the disk, or "" for its recovery."""
        with self._lock:
            self._counts.disk_failing = bool(problem)
            self._counts.disk_errors += bool(problem)
            if not problem:
                self._written_row_s = self._row_s

    def on_rows(self, written: int, failures: int, dropped: int, file_bytes: int) -> None:
        """Take the counts of rows."""
        with self._lock:
            counts = self._counts
            counts.rows, counts.dropped = written, dropped
            counts.disk_errors = max(counts.disk_errors, failures)
            self._file_bytes = file_bytes

    def families(self) -> list["Metric"]:
        """Return all metric families with their present values."""
        # a whole list, since a reader of an iterator could hold the lock, and so the watch
        with self._lock:
            return [*metric_families(self._counts, PREFIX), *self._state()]

    def _state(self) -> Iterator["Metric"]:
        """Yield the metrics that are no counts of events."""
        build = {self._build: 1}
        labels = ("version", "device", "edge")
        yield _gauge("build_info", "Always 1; the labels name the watch.", build, *labels)
        yield _gauge("interval_seconds", "Time from one round to the next.", self._every_s)
        now_s = self._clock_s()
        since_s = self._away_since_s
        yield _gauge("away", "1 while the edge cannot be used.", since_s is not None)
        away_s = self._away_before_s + (0.0 if since_s is None else now_s - since_s)
        yield _counter("away_seconds", "Time in which the edge could not be used.", away_s)
        text = "Age of the newest row in the run file; the start of the watch is a row, too."
        yield _gauge("last_row_age_seconds", text, now_s - self._written_row_s)
        if self._success_s is not None:
            age_s = now_s - self._success_s
            yield _gauge("last_success_age_seconds", "Age of the newest probe or answer.", age_s)
        if self._probe is not None:
            yield from _probe_metrics(self._probe)
        if self._file_bytes is not None:
            yield _gauge("file_bytes", "Size of the run file.", self._file_bytes)

    def _note_row(self) -> None:
        """Note that there is a new row. While the disk takes rows, it is in the file already."""
        self._row_s = self._clock_s()
        if not self._counts.disk_failing:
            self._written_row_s = self._row_s

    def _name(self, protocol: str) -> str:
        return protocol if protocol in self._known else "other"


def _probe_metrics(probe: Probe) -> Iterator["Metric"]:
    """Yield what the last probe measured."""
    if sent := len(probe.rtts_s) + probe.lost:
        text = "Share of the last probe's pings without a reply."
        yield _gauge("probe_lost_ratio", text, probe.lost / sent)
    if probe.rtts_s:
        for name, share in (("median", 0.5), ("p90", 0.9)):
            value = float(np.quantile(probe.rtts_s, share))
            text = f"The {name} of the last probe's round-trip times."
            yield _gauge(f"probe_rtt_{name}_seconds", text, value)
    for way, text, bps, bound in (
        ("up", "from the watch to the edge", probe.up_bps, probe.up_bound),
        ("down", "from the edge to the watch", probe.down_bps, probe.down_bound),
    ):
        if bps is not None:
            rate = f"Payload rate {text} in the last probe."
            yield _gauge(f"goodput_{way}_bytes_per_second", rate, bps / 8)
            lower = f"1 if the payload rate {text} is only a lower bound."
            yield _gauge(f"goodput_{way}_bound", lower, bound)
    if probe.signal is not None and isinstance(dbm := probe.signal.get("dbm"), int | float):
        yield _gauge("signal_dbm", "Signal strength of the radio in the last probe.", dbm)
    if probe.power_w is not None:
        yield _gauge("power_watts", "Mean power during the last probe.", probe.power_w)


_gauge, _counter = partial(metric, "gauge", PREFIX), partial(metric, "counter", PREFIX)
