"""Check that the values of a run file are possible.

In: rows with values of the right types. Out: nothing, or a `RunFileError`. After this check,
    statistics and plots can divide by values and take logarithms.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from pilotfish.base.errors import RunFileError
from pilotfish.base.prose import one_line
from pilotfish.device_runtime.record import STAGES, Round
from pilotfish.lab.field.link_rows import LARGEST, Outage, Probe
from pilotfish.lab.field.run import Answer, Facts
from pilotfish.wire.link.state import LinkState
from pilotfish.wire.protocols import counters

_Bounded: TypeAlias = tuple[str, float, float, float]  # name, value, lower and upper bound

_LONGEST_S = 1e7  # maximum time of a stage or answer (s): four months
_LATEST_UNIX_S = 4e9  # upper bound of a Unix time (s): the year 2096
_LARGEST = LARGEST  # upper bound of all other counts and measurements


def expect_plausible(path: Path, answers: Sequence[Answer]) -> None:
    """Raise `RunFileError` if an answer has an impossible value; the error names the first."""
    for answer in answers:
        _expect(path, f"answer {answer.id}", _values(answer))


def expect_plausible_link(
    path: Path, facts: Facts, probes: Sequence[Probe], outages: Sequence[Outage]
) -> None:
    """Do the same for the schedule of a watch, its probes and its outages."""
    if (watch := facts.watch) is not None:
        _expect(path, "the watch", [("interval", watch.every_s, 1e-3, _LONGEST_S)])
        _expect(path, "the watch", [("length", watch.for_s or 0.0, 0.0, _LATEST_UNIX_S)])
    for start in facts.starts:
        _expect(path, "the run", [("start", start.unix_s, 0.0, _LATEST_UNIX_S)])
    for probe in probes:
        _expect(path, f"probe {probe.id}", _probe_values(probe))
    for outage in outages:
        _expect(path, f"outage {outage.id}", _outage_values(outage))


def _expect(path: Path, row: str, values: Iterable[_Bounded]) -> None:
    for what, value, low, high in values:
        if not low <= value <= high:  # NaN fails both comparisons, and so is refused
            raise RunFileError(
                f"{path} is damaged: {row} has {value:g} as its {what}, which is impossible. "
                "Restore a copy of the file."
            )


def _probe_values(probe: Probe) -> Iterator[_Bounded]:
    yield "begin", probe.began_unix_s, 0.0, _LATEST_UNIX_S
    yield "time by the run's clock", probe.clock_s, 0.0, _LATEST_UNIX_S
    yield "duration", probe.took_s, 0.0, _LONGEST_S
    for rtt_s in probe.rtts_s:
        yield "RTT", rtt_s, 0.0, _LONGEST_S
    yield "lost pings", probe.lost, 0, _LARGEST
    for way in ("up", "down"):
        yield f"goodput {way}", getattr(probe, f"{way}_bps") or 0.0, 0.0, _LARGEST
        yield f"bytes {way}", getattr(probe, f"{way}link_bytes"), 0, _LARGEST
    yield "power", probe.power_w or 0.0, -_LARGEST, _LARGEST
    for values in (probe.signal or {}, probe.position or {}):
        for name, value in values.items():
            if isinstance(value, int | float):
                yield one_line(name, 40), value, -_LARGEST, _LARGEST
    if probe.link is not None:
        yield from _link_values(probe.link)


def _outage_values(outage: Outage) -> Iterator[_Bounded]:
    begin_s = outage.began_clock_s
    yield "begin", outage.began_unix_s, 0.0, _LATEST_UNIX_S
    yield "begin by the run's clock", begin_s, 0.0, _LATEST_UNIX_S
    if outage.ended_clock_s is not None or outage.ended_unix_s is not None:
        # an end by one clock only is no number, and so is refused
        for what, value, low in (
            ("end", outage.ended_unix_s, 0.0),
            ("end by the run's clock", outage.ended_clock_s, begin_s),
        ):
            yield what, math.nan if value is None else value, low, _LATEST_UNIX_S


def _values(answer: Answer) -> Iterator[_Bounded]:
    """Yield the name, the value, and the lower and upper bound of each of an answer's values."""
    yield "begin", answer.started_unix_s, 0.0, _LATEST_UNIX_S
    yield "time", answer.total_s, 0.0, _LONGEST_S
    yield "first token's time", answer.first_token_s, 0.0, _LONGEST_S
    yield "tokens", answer.tokens, 0, _LARGEST
    yield "energy", answer.energy_j or 0.0, -_LARGEST, _LARGEST
    if isinstance(answer.window, int):
        yield "window", answer.window, 0, _LARGEST
    for round_ in answer.rounds:
        yield from _round_values(round_)
    if answer.clock_s is not None:
        yield "begin by the run's clock", answer.clock_s, 0.0, _LATEST_UNIX_S
    for sample in answer.rtts:
        yield "time of an RTT", sample.at_s, 0.0, _LONGEST_S
        yield "RTT", sample.rtt_s, 0.0, _LONGEST_S
    yield "probes' bytes up", answer.probe_uplink_bytes, 0, _LARGEST
    yield "probes' bytes down", answer.probe_downlink_bytes, 0, _LARGEST
    if answer.link is not None:
        yield from _link_values(answer.link)
    if answer.choice is not None:
        yield "chosen window", answer.choice.window, 0, _LARGEST
        for forecast in answer.choice.forecasts:
            yield "forecast window", forecast.window, 0, _LARGEST
        times = [answer.choice.token_s or 0.0, *(f.token_s for f in answer.choice.forecasts)]
        yield "least forecast", min(times), 0.0, _LONGEST_S
        yield "largest forecast", max(times), 0.0, _LONGEST_S


def _link_values(link: LinkState) -> Iterator[_Bounded]:
    for name in ("rtt", "jitter", "up", "down", "retransmitted", "retransmitted_down"):
        reading = getattr(link, name)
        yield f"link's {name}", reading.value if reading else 0.0, 0.0, _LARGEST
    yield "link's signal", link.signal.value if link.signal else 0.0, -_LARGEST, _LARGEST


def _round_values(round_: Round) -> Iterator[_Bounded]:
    yield "window of a round", round_.window, 0, 1e4
    yield "accepted tokens of a round", round_.accepted, 0, round_.window
    for name, counter in counters().items():
        yield (
            f"{counter.metric.replace('_', ' ')} of a round",
            round_.notes.get(name, 0),
            0,
            counter.count_units([round_]),
        )
    yield "hidden states of a round", round_.inquired, 0, round_.window
    yield "bytes up of a round", round_.uplink_bytes, 0, _LARGEST
    yield "bytes down of a round", round_.downlink_bytes, 0, _LARGEST
    for stage in STAGES:
        yield f"{stage} time of a round", getattr(round_.timings, stage), 0.0, _LONGEST_S
